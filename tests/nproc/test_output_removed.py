"""What becomes of several ranks when their output_dir is removed or replaced in mid-run.

Run: pytest tests/nproc/test_output_removed.py
"""

import shutil
from pathlib import Path

import pytest

from tests.nodes.fronts import Front
from tests.nodes.harness import PACED, Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 40


def train(solo: Job, **sections: object) -> Front:
    """Two ranks with shards, in mid-run."""
    solo.config(
        duration=f"{STEPS} steps", batch={"global": 4, "micro": 2}, data={"packing": False}, parallel={"strategy": "fsdp"},
        **{"checkpoint": {"every": "10 steps"}, **sections},
    )  # fmt: skip
    front = solo.start(0, "--nproc", "2", json=True, topology=False, answers=PACED)
    solo.waits_for_step(4)
    return front


def test_a_removed_directory_of_shards_is_made_again_with_all_that_grows_in_it(solo: Job) -> None:
    front = train(solo, track=["tensorboard"])
    before = {path.relative_to(solo.out): path.read_bytes() for path in grown(solo.out)}
    assert any("tensorboard" in str(path) for path in before), before
    shutil.rmtree(solo.out)
    assert front.wait() == 0, solo.transcript()
    assert [line["step"] for line in solo.metrics()] == list(range(1, STEPS + 1))
    assert Path(front.result["checkpoint"]).is_dir()
    for path, content in before.items():
        assert (solo.out / path).read_bytes().startswith(content), path
    assert (solo.out / "events" / "rank-00001.jsonl").stat().st_size > len(
        before[Path("events") / "rank-00001.jsonl"]
    )
    (points,) = (solo.out / "tensorboard").iterdir()
    assert points.stat().st_size >= len(before[points.relative_to(solo.out)]), (
        "more, unless a point came in the gap"
    )
    (warning,) = [one for one in front.messages("warning") if one["code"] == "output_removed"]
    assert "logs and events of these ranks are complete again when they end" in warning["text"]


def grown(folder: Path) -> list[Path]:
    return [path for name in ("logs", "events", "tensorboard") for path in (folder / name).iterdir()]


@pytest.mark.parametrize("known", [True, False], ids=["renamed", "removed"])
def test_a_run_that_ends_because_its_directory_is_replaced_reports_what_becomes_of_its_newest_step(
    solo: Job, *, known: bool
) -> None:
    front = train(solo, checkpoint={"every": "1000 steps"})
    elsewhere = solo.out.with_name("elsewhere")
    new = solo.out.with_name("new")
    new.mkdir()
    (new / "mine").touch()
    solo.out.rename(elsewhere) if known else shutil.rmtree(solo.out)
    new.rename(solo.out)
    assert front.wait() == 6, solo.transcript()
    assert [path.name for path in solo.out.iterdir()] == ["mine"]
    assert front.result["checkpoint"] is None
    if not known:
        assert "which the ranks kept in memory, is lost with the run's directory" in front.text()
        return
    (checkpoint,) = (elsewhere / "checkpoints").glob("step-????????")
    assert int(checkpoint.name.removeprefix("step-")) >= 4
    assert f"run the same command with output_dir={elsewhere}" in front.text()
    again = solo.start(0, "--nproc", "2", f"output_dir={elsewhere}", json=True, topology=False)
    assert again.wait() == 0, solo.transcript()
    assert again.messages("plan")[0]["resume"]["step"] == int(checkpoint.name.removeprefix("step-"))
    assert again.result["step"] == STEPS
