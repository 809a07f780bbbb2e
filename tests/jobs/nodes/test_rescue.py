"""A death on one of several nodes costs an adapter's run no step.

Run: pytest tests/jobs/nodes/test_rescue.py
"""

import signal

import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import PACED, Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 30


@pytest.mark.parametrize(("strategy", "rank"), [("fsdp", 1), pytest.param("ddp", 0, marks=pytest.mark.long)])
def test_the_run_continues_from_the_last_step_that_was_seen(pair: Job, strategy: str, rank: int) -> None:
    pair.config(
        duration=f"{STEPS} steps", batch={"global": 8, "micro": 2}, checkpoint={"every": "1000 steps"}, restarts=1,
        adapter={"rank": 2, "alpha": 4}, data={"packing": False}, parallel={"strategy": strategy},
    )  # fmt: skip
    fronts = pair.start_all("--no-first-checkpoint", json=True, answers=PACED)
    pair.waits_for_step(4)
    pair.ranks()[rank].send_signal(signal.SIGKILL)
    assert together(fronts) == [0, 0], pair.transcript()
    head = fronts[0]
    plan = head.messages("plan")[-1]
    seen = [message["step"] for message in head.messages("step") if message["time"] < plan["time"]]
    assert plan["resume"]["step"] == max(seen) >= 4, pair.transcript()
    assert [line["step"] for line in pair.metrics()] == [*range(1, STEPS + 1)]
    assert not list((pair.out / "checkpoints").glob("*.tmp-*"))
