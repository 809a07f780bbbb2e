"""What becomes of several ranks when their output_dir is removed or replaced in mid-run.

Run: pytest tests/jobs/nproc/test_output_removed.py
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 40


def train(solo: Job, **sections: object) -> Front:
    """Two ranks, in mid-run; with shards unless `sections` say otherwise."""
    solo.config(
        duration=f"{STEPS} steps", batch={"global": 4, "micro": 2}, data={"packing": False},
        **{"checkpoint": {"every": "10 steps"}, "parallel": {"strategy": "fsdp"}, **sections},
    )  # fmt: skip
    front = solo.start(0, "--nproc", "2", json=True, topology=False, answers=PACED)
    solo.waits_for_step(4)
    return front


def rescued(solo: Job) -> Path:
    """The directory beside the lost one."""
    (path,) = solo.out.parent.glob(f"{solo.out.name}-rescued-*")
    return Path(path)


@pytest.mark.parametrize("adapter", [{"rank": 2}, None], ids=["adapter", "all weights"])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_ranks_save_their_last_step_beside_a_removed_directory(
    solo: Job, strategy: str, adapter: dict[str, int] | None
) -> None:
    front = train(solo, adapter=adapter, parallel={"strategy": strategy})
    shutil.rmtree(solo.out.rename(solo.out.with_name("removed")))
    assert front.wait() == 6, solo.transcript()
    beside = rescued(solo)
    (checkpoint,) = (beside / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 4
    assert front.verdicts[-1].cause == "output_removed"
    assert f"{solo.out} was removed after step {step}" in front.verdicts[-1].summary
    assert front.result["checkpoint"] == str(checkpoint)
    assert not solo.out.exists(), "it is not made again"
    again = solo.start(0, "--nproc", "2", f"output_dir={beside}", json=True, topology=False)
    assert again.wait() == 0, solo.transcript()
    assert again.messages("plan")[0]["resume"]["step"] == step
    assert again.result["step"] == STEPS
    lines = (beside / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_two_ranks_write_nothing_into_a_directory_in_place_of_theirs(solo: Job) -> None:
    front = train(solo, checkpoint={"every": "1000 steps"})
    elsewhere = solo.out.with_name("elsewhere")
    new = solo.out.with_name("new")
    new.mkdir()
    (new / "mine").touch()
    solo.out.rename(elsewhere)
    new.rename(solo.out)
    assert front.wait() == 6, solo.transcript()
    assert [path.name for path in solo.out.iterdir()] == ["mine"]
    assert f"{solo.out} was renamed to {elsewhere}" in front.verdicts[-1].summary
    assert len(list((rescued(solo) / "checkpoints").iterdir())) == 1
