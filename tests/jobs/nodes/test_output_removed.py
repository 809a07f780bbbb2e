"""What becomes of a job of several nodes when an output_dir is removed or replaced in mid-run.

Run: pytest tests/jobs/nodes/test_output_removed.py
"""

import shutil
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own

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


def remove(directory: Path) -> None:
    """Removes it at one moment: a rank that creates a file meanwhile would leave a directory that
    is not empty.
    """
    shutil.rmtree(directory.rename(directory.with_name("removed")))


def rescued(directory: Path) -> Path:
    """The directory beside a lost one."""
    (path,) = directory.parent.glob(f"{directory.name}-rescued-*")
    return Path(path)


@pytest.mark.parametrize("apart", [False, True], ids=["one disk", "two disks"])
def test_the_last_step_is_saved_beside_a_removed_directory_of_the_head(
    networks: Namespaces, pair: Job, *, apart: bool
) -> None:
    del networks
    fronts, (out, _) = train(pair, apart=apart)
    remove(out)
    assert together(fronts) == [6, 6], pair.transcript()
    for front in fronts:
        assert front.verdicts[-1].cause == "output_removed", pair.transcript()
        assert front.verdicts[-1].hosts == (fronts[0].host,)
        assert f"{out} was removed after step" in front.verdicts[-1].summary
    (checkpoint,) = (rescued(out) / "checkpoints").iterdir()
    assert fronts[0].result["checkpoint"] == str(checkpoint)
    assert not out.exists(), "it is not made again"
    pair.wait_gone()


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_removed_directory_of_a_member_ends_all_and_the_head_saves_a_step(
    networks: Namespaces, pair: Job, strategy: str
) -> None:
    del networks
    fronts, (out, own) = train(pair, apart=True, strategy=strategy)
    remove(own)
    assert together(fronts) == [6, 6], pair.transcript()
    for front in fronts:
        assert front.verdicts[-1].cause == "output_removed", pair.transcript()
        assert f"on {fronts[1].host}: {out} was removed" in front.verdicts[-1].summary
        assert front.verdicts[-1].hosts == (fronts[1].host,)
    step = fronts[0].result["step"]
    assert fronts[0].result["checkpoint"] == str(out / "checkpoints" / f"step-{step:08d}")
    assert pair.read("verdict.json")["cause"] == "output_removed"
    assert not own.exists(), "it is not made again"
    pair.wait_gone()


def test_replaced_directory_of_a_member_ends_all_nodes_and_stays_untouched(
    networks: Namespaces, pair: Job
) -> None:
    del networks
    fronts, (_, own) = train(pair, apart=True)
    own.rename(own.with_name("elsewhere"))
    own.mkdir()
    (own / "mine").write_text("not the run's")
    assert together(fronts) == [6, 6], pair.transcript()
    assert {front.verdicts[-1].cause for front in fronts} == {"output_removed"}
    assert [path.name for path in own.iterdir()] == ["mine"]
    pair.wait_gone()


def test_replaced_directory_of_the_head_ends_all_nodes_and_stays_untouched(
    pair: Job,
) -> None:
    fronts, (out, _) = train(pair, apart=False, strategy="ddp")
    out.rename(out.with_name("elsewhere"))
    out.mkdir()
    (out / "mine").write_text("not the run's")
    assert together(fronts) == [6, 6], pair.transcript()
    assert {front.verdicts[-1].cause for front in fronts} == {"output_removed"}
    assert [path.name for path in out.iterdir()] == ["mine"]
    assert Path(fronts[0].result["checkpoint"]).parent.parent == rescued(out)
    pair.wait_gone()
