"""What becomes of a job of several nodes when an output_dir is removed or replaced in mid-run.

Run: pytest tests/nodes/test_output_removed.py
"""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.nodes.fronts import Front, together
from tests.nodes.harness import PACED, Job
from tests.nodes.network_namespaces import Namespaces, Own

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 30


def train(pair: Job, *, apart: bool, strategy: str = "fsdp") -> tuple[list[Front], list[Path]]:
    """Both nodes in mid-run, and each one's output_dir as this test sees it."""
    own_disk, place = pair.home(1) / "disk", pair.folder / "disk"
    for folder in (own_disk, place):
        folder.mkdir()
    pair.out = place / "out"
    pair.config(
        duration=f"{STEPS} steps", batch={"global": 4, "micro": 2}, checkpoint={"every": "10 steps"}, data={"packing": False},
        parallel={"strategy": strategy}, output_dir=str(pair.out),
    )  # fmt: skip
    owns = [Own(), Own(binds=[(own_disk, place)]) if apart else Own()]
    fronts = [pair.start(node, own=owns[node], json=True, answers=PACED) for node in (0, 1)]
    pair.waits_for_step(4)
    return fronts, [pair.out, (own_disk if apart else place) / "out"]


def log_of(folder: Path, rank: int) -> str:
    return next((folder / "logs").glob(f"*-rank-{rank:05d}.log")).read_text()


def events_of(folder: Path, rank: int) -> str:
    return (folder / "events" / f"rank-{rank:05d}.jsonl").read_text()


def remove(directory: Path) -> None:
    """Removes it at one moment: a rank that creates a file meanwhile would leave a directory that
    is not empty.
    """
    shutil.rmtree(directory.rename(directory.with_name("removed")))


def test_a_removed_directory_of_the_head_is_made_again_with_the_logs_of_all_nodes(pair: Job) -> None:
    fronts, (out, _) = train(pair, apart=False)
    before = [(log_of(out, rank), events_of(out, rank)) for rank in (0, 1)]
    remove(out)
    assert together(fronts) == [0, 0], pair.transcript()
    assert "was removed after step" in fronts[0].text()
    assert "it is created again, and training continues" in fronts[0].text()
    assert [line["step"] for line in pair.metrics()] == list(range(1, STEPS + 1))
    assert Path(fronts[0].result["checkpoint"]).is_dir()
    assert pair.read("plan.json")["run_id"] == fronts[0].result["run_id"]
    for rank in (0, 1):
        assert log_of(out, rank).startswith(before[rank][0])
        assert events_of(out, rank).startswith(before[rank][1])
        assert len(events_of(out, rank)) > len(before[rank][1]), "its rank has written on"
    pair.wait_gone()


def test_a_removed_directory_of_a_member_is_made_again_and_its_parts_still_come(
    networks: Namespaces, pair: Job
) -> None:
    del networks
    fronts, (out, own) = train(pair, apart=True)
    remove(own)
    pair.until((own / "run.lock").exists, what="the directory again")
    assert together(fronts) == [0, 0], pair.transcript()
    for front in fronts:
        (warning,) = [one for one in front.messages("warning") if one["code"] == "output_removed"]
        assert f"on {fronts[1].host}: {out} was removed, while its run is active" in warning["text"]
    assert json.loads((own / "result.json").read_text())["outcome"] == "completed"
    assert "result" in events_of(own, 1)
    assert (own / "logs").is_dir()
    assert len(list((out / "checkpoints").iterdir())) >= 2
    assert not (own / "run.lock").exists()
    pair.wait_gone()


def test_a_member_whose_directory_is_replaced_ends_the_run_on_all_nodes_and_writes_nothing_there(
    networks: Namespaces, pair: Job
) -> None:
    del networks
    fronts, (out, own) = train(pair, apart=True)
    own.rename(own.with_name("elsewhere"))
    own.mkdir()
    (own / "mine").write_text("not the run's")
    assert together(fronts) == [6, 6], pair.transcript()
    for front in fronts:
        assert front.verdicts[-1].cause == "output_removed", pair.transcript()
        assert f"a different directory replaced {out}" in front.verdicts[-1].summary
        assert front.verdicts[-1].hosts == (fronts[1].host,)
    assert [path.name for path in own.iterdir()] == ["mine"]
    assert pair.read("verdict.json")["cause"] == "output_removed"
    pair.wait_gone()


def test_a_head_whose_directory_is_replaced_ends_the_run_on_all_nodes_and_no_node_writes_there(
    pair: Job,
) -> None:
    fronts, (out, _) = train(pair, apart=False, strategy="ddp")
    out.rename(out.with_name("elsewhere"))
    out.mkdir()
    (out / "mine").write_text("not the run's")
    assert together(fronts) == [6, 6], pair.transcript()
    assert {front.verdicts[-1].cause for front in fronts} == {"output_removed"}
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert fronts[0].result["checkpoint"] is None
    pair.wait_gone()


def test_a_stop_after_the_heads_directory_was_removed_can_be_resumed(pair: Job) -> None:
    fronts, (out, _) = train(pair, apart=False)
    remove(out)
    pair.until((out / "plan.json").exists, what="the directory again")
    fronts[1].signal(signal.SIGTERM)
    assert together(fronts) == [75, 75], pair.transcript()
    assert Path(fronts[0].result["checkpoint"]).is_dir()
    again = pair.start_all(json=True)
    assert together(again) == [0, 0], pair.transcript()
    assert [line["step"] for line in pair.metrics()] == list(range(1, STEPS + 1))
