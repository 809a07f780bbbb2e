"""Copies of what two ranks save, and a run that goes on from them elsewhere.

Run: pytest tests/jobs/nproc/test_storage.py
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest

pytestmark = [pytest.mark.ranks, pytest.mark.long]

STEPS = 40


def start(job: Job, *words: str) -> Front:
    return job.start(0, "--nproc", "2", *words, topology=False, json=False)


def test_two_ranks_continue_elsewhere_from_copies_as_if_undisturbed(
    solo_of: Callable[[], Job], tmp_path: Path
) -> None:
    """Preempted after step 7; the next job has the config, the rows, the model and the key, but
    another disk.
    """
    whole, first, second = solo_of(), solo_of(), solo_of()
    for job in (whole, first, second):
        job.config(
            duration=f"{STEPS} steps",
            parallel={"strategy": "ddp"},
            checkpoint={"every": "5 steps", "keep": 2},
            restarts=0,
        )
    assert start(whole).wait() == 0, whole.transcript()

    copies = tmp_path / "copies"
    for job in (first, second):
        job.config(checkpoint={"storage": f"file://{copies}"})
    front = start(first)
    first.waits_for_step(7)
    front.signal(signal.SIGTERM)
    assert front.wait() == 75, front.text()
    run_id, stopped = first.read("plan.json")["run_id"], first.read("result.json")["step"]
    assert stopped < STEPS
    there = sorted((copies / "out" / run_id).glob(f"step-*/{MANIFEST}"))
    assert there[-1].parent.name == f"step-{stopped:08d}"
    assert Manifest.from_bytes(there[-1].read_bytes()).run_id == run_id

    front = start(second, "--resume")
    assert front.wait() == 0, front.text()
    assert f"step {stopped} of run {run_id} is downloaded from file://{copies}/out" in front.text()
    plan = second.read("plan.json")
    assert (plan["run_id"], plan["resume"]["step"], plan["world_size"]) == (run_id, stopped, 2)
    assert [line["step"] for line in second.metrics()] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in second.metrics()] == [line["loss"] for line in whole.metrics()]

    left = sorted(path.parent.name for path in (copies / "out" / run_id).glob(f"step-*/{MANIFEST}"))
    assert left[-1] == f"step-{STEPS:08d}"
    assert len(left) <= 2 + len(list((second.out / "checkpoints").glob("step-*")))
    for job in (first, second):
        job.wait_gone(limit_s=5)
