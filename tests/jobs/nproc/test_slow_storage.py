"""Storage that is slow, and moves, is waited for as long as it takes.

Run: pytest tests/jobs/nproc/test_slow_storage.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

import tests.jobs.nodes.hurried.sitecustomize as hurried
from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.long]


LIMIT_S = 500.0


def start(job: Job, limits: dict[str, float], pause: dict[str, Any]) -> Front:
    """Two ranks whose limits are shortened, and one of whose saves takes its time, while it
    moves.
    """
    env = {"PYTHONPATH": str(Path(hurried.__file__).parent), "HURRIED": json.dumps(limits)}
    faults = {"pause": [{"how": "save", **pause}]}
    return job.start(0, "--nproc", "2", topology=False, env=env, answers={"faults": faults})


def saved(front: Front) -> dict[int, float]:
    """Seconds of each checkpoint, by step."""
    return {message["step"]: message["seconds"] for message in front.messages("checkpoint")}


@pytest.mark.fault("a save without memory for copies takes longer than the process group is patient")
def test_save_that_reads_live_weights_is_waited_for_in_turns_by_all_ranks(solo: Job) -> None:
    """Thirty minutes of patience and a save of hours; here twenty seconds, and fifty."""
    solo.config(duration="4 steps", restarts=0, checkpoint={"every": "2 steps"}, parallel={"strategy": "ddp"})
    limits = {
        "unisono.trainer.training.process_group._PATIENCE": 20.0, "unisono.trainer.training.rank0_work.TURN_S": 2.0,
        "unisono.trainer.training.saver._SHARE": 0.0,  # of the free memory, for copies
    }  # fmt: skip
    front = start(solo, limits, {"seconds": 50.0, "steps": [2], "ranks": [0]})
    assert front.wait(limit_s=LIMIT_S) == 0, front.text()
    assert saved(front)[2] > 50.0
    assert sorted(saved(front)) == [2, 4]
    assert [line["step"] for line in solo.metrics()] == [1, 2, 3, 4]


@pytest.mark.fault("a rank's part of a checkpoint takes longer than the others are patient")
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_part_of_one_rank_is_waited_for_by_the_other(solo: Job, slow: int) -> None:
    """Rank 0 waits for the parts of the others, and they for the directory that rank 0 makes."""
    solo.config(
        duration="3 steps", restarts=0, checkpoint={"every": "2 steps"}, parallel={"strategy": "fsdp"}, grace="5 seconds"
    )  # fmt: skip
    limits = {
        "unisono.trainer.training.saver.OTHERS_S": 6.0, "unisono.trainer.training.saver.STUCK_S": 6.0,
        "unisono.trainer.training.rank0_work._DIRECTORY_S": 6.0,
    }  # fmt: skip
    pause = {"how": "sync"} if slow == 0 else {}
    front = start(solo, limits, {"seconds": 30.0, "steps": [2], "ranks": [slow], **pause})
    assert front.wait(limit_s=LIMIT_S) == 0, front.text()
    assert sorted(saved(front)) == [2, 3]
    assert saved(front)[2] > 30.0
    assert not [message for message in front.messages("warning") if "checkpoint" in message["code"]], (
        front.text()
    )
