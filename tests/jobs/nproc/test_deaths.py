"""One of two ranks ends: the other is ended, and not blamed.

Run: pytest tests/jobs/nproc/test_deaths.py
"""

import signal
import time
from pathlib import Path

import pytest

import tests.jobs.nodes.injected.sitecustomize as injected
from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nodes.verdict_checks import named

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

INJECTED = {"PYTHONPATH": str(Path(injected.__file__).parent)}


def training(job: Job, *, restarts: int = 0, nproc: int = 2, env: dict[str, str] | None = None) -> Front:
    """A run without a near end, that has begun."""
    job.config(duration="5000 steps", restarts=restarts, checkpoint={"every": "3 steps"})
    front = job.start(0, "--nproc", str(nproc), topology=False, env=env, answers=PACED)
    job.waits_for_step(3)
    return front


@pytest.mark.fault("one of two ranks ends, one node")
@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [
        (signal.SIGKILL, 5, "rank_killed"),
        (injected.RAISE, 5, "user_code_error"),
        pytest.param(injected.LEAVE, 5, None, marks=pytest.mark.long),
        pytest.param(injected.REFUSE, None, None, marks=pytest.mark.long),
    ],
    ids=["kill -9", "an exception", "exit status 0", "a refusal"],
)
def test_the_rank_that_ended_is_named_and_the_other_does_not_outlive_it(
    solo: Job, number: int, code: int | None, cause: str | None
) -> None:
    front = training(solo, env=None if number == signal.SIGKILL else INJECTED)
    sent = time.monotonic()
    solo.ranks()[1].send_signal(number)
    assert front.wait(limit_s=60) in ([code] if code else [2, 3, 5]), front.text()
    assert time.monotonic() - sent < 15
    solo.wait_gone(limit_s=5)
    assert "rank 0" not in front.text() or "rank 1" in front.text()
    if cause is not None:
        verdict = named([front], since=sent).verdict
        assert (verdict.cause, verdict.ranks) == (cause, (1,))
        assert "rank 1" in verdict.summary
    if number == injected.REFUSE:
        assert "a row that nobody wants" in front.text()


@pytest.mark.long
def test_rank_0_that_leaves_a_step_early_does_not_complete_the_run(solo: Job) -> None:
    solo.config(duration="40 steps", restarts=0)
    answers = {"faults": {"one_step_less": [0]}}
    front = solo.start(0, "--nproc", "2", topology=False, answers=answers)
    assert front.wait(limit_s=120) == 4, front.text()
    solo.wait_gone(limit_s=5)
    verdict = front.verdicts[-1]
    assert (verdict.cause, verdict.ranks) == ("unequal_steps", (0,))
    result = solo.read("result.json")
    assert (result["outcome"], result["verdict"]["cause"]) == ("stalled", "unequal_steps")


@pytest.mark.long
def test_rank_zero_is_named_like_any_other(solo: Job) -> None:
    front = training(solo)
    solo.ranks()[0].kill()
    assert front.wait(limit_s=60) == 5, front.text()
    assert [verdict.ranks for verdict in front.verdicts] == [(0,)]
    solo.wait_gone(limit_s=5)


@pytest.mark.long  # tests/jobs/resume kills fronts, and waits until nothing of theirs is left
def test_no_rank_outlives_a_front_that_is_killed(solo: Job) -> None:
    front = training(solo)
    assert len(solo.ranks()) == 2
    front.signal(signal.SIGKILL)
    solo.wait_gone(limit_s=15)


@pytest.mark.long  # test_preemption has it with a signal to all
def test_a_signal_ends_all_ranks_after_the_same_step_and_the_run_continues(solo: Job) -> None:
    front = training(solo)
    front.signal(signal.SIGTERM)
    assert front.wait(limit_s=60) == 75, front.text()
    step = solo.read("result.json")["step"]
    again = solo.start(0, "--nproc", "2", f"duration={step + 2} steps", topology=False)
    assert again.wait() == 0, again.text()
    assert [line["step"] for line in solo.metrics()] == list(range(1, step + 3))


@pytest.mark.long
def test_a_death_is_fixed_by_a_restart(solo: Job) -> None:
    solo.config(duration="300 steps", restarts=1, checkpoint={"every": "3 steps"})
    front = solo.start(0, "--nproc", "2", topology=False)
    solo.waits_for_step(8)
    solo.ranks()[1].kill()
    assert front.wait() == 0, front.text()
    (restart,) = solo.read("result.json")["restarts"]
    assert restart["verdict"]["ranks"] == [1]
    assert solo.read("plan.json")["epoch"] == 1
    assert [line["step"] for line in solo.metrics()] == list(range(1, 301))
