"""Signals to one process of a job of one node, or to all.

Run: pytest tests/jobs/nproc/test_preemption.py
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nodes.network_namespaces import Loopback

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 40
Strike = Callable[[Job, Front], None]


def to_front(job: Job, front: Front) -> None:
    del job
    front.signal(signal.SIGTERM)


def to_rank(rank: int, number: signal.Signals) -> Strike:
    def strike(job: Job, front: Front) -> None:
        del front
        job.ranks()[rank].send_signal(number)

    return strike


def to_all(number: signal.Signals) -> Strike:
    """As a scheduler signals a group, whose members pass on what they get; twice, as wrappers
    do.
    """

    def strike(job: Job, front: Front) -> None:
        ranks = list(job.ranks().values())
        for _ in range(2):
            for rank in ranks:
                rank.send_signal(number)
            front.signal(number)

    return strike


def configure(job: Job, **sections: object) -> Job:
    job.config(duration=f"{STEPS} steps", restarts=0, checkpoint={"every": "5 steps"}, **sections)
    return job


def start(job: Job, *words: str, paced: bool = False) -> Front:
    answers = PACED if paced else None
    return job.start(0, "--nproc", "2", *words, topology=False, json=False, answers=answers)


def losses(job: Job) -> list[float]:
    return [line["loss"] for line in job.metrics()]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, rows_file: Path, caches: Path
) -> Iterator[list[float]]:
    """The losses of the run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = configure(Job(Loopback(), folder, model=model_dir, rows=rows_file, caches=caches, nodes=1))
    try:
        front = start(job)
        assert front.wait() == 0, front.text()
        yield losses(job)
    finally:
        job.close()


def preempted(job: Job, front: Front, *, within_s: float) -> int:
    """Asserts that the job has ended well and in time; gives the step after which it did."""
    sent = time.monotonic()
    assert front.wait(limit_s=60) == 75, front.text()
    assert time.monotonic() - sent < within_s
    job.wait_gone(limit_s=5)
    result = job.read("result.json")
    assert (result["outcome"], result["exit_code"], result["verdict"]) == ("preempted", 75, None)
    step = int(result["step"])
    assert result["checkpoint"].endswith(f"step-{step:08d}"), front.text()
    assert job.metrics()[-1]["step"] == step
    return step


@pytest.mark.fault("SIGTERM or SIGUSR1 to one process or to all, one node")
@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(to_front, id="the front", marks=pytest.mark.long),
        pytest.param(to_rank(0, signal.SIGTERM), id="rank 0", marks=pytest.mark.long),
        pytest.param(to_rank(1, signal.SIGUSR1), id="rank 1", marks=pytest.mark.long),
        pytest.param(to_all(signal.SIGTERM), id="all at once"),
        pytest.param(to_all(signal.SIGUSR1), id="SIGUSR1 to all at once", marks=pytest.mark.long),
    ],
)
def test_whoever_gets_the_signal_all_save_one_step_and_continue_bit_equal(
    solo: Job, undisturbed: list[float], strike: Strike
) -> None:
    front = start(configure(solo), paced=True)
    solo.waits_for_step(random.SystemRandom().randint(1, 10))
    strike(solo, front)
    step = preempted(solo, front, within_s=25)
    assert step < STEPS
    again = start(solo)
    assert again.wait() == 0, again.text()
    assert losses(solo) == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("turn", range(4))
def test_a_signal_while_much_else_is_running_loses_nothing(solo: Job, strategy: str, turn: int) -> None:
    """Evaluations, samples and saves take most of the time here."""
    del turn
    configure(
        solo, parallel={"strategy": strategy}, data={"eval": 0.2}, eval={"every": "2 steps", "samples": 3, "exact_match": True}
    )  # fmt: skip
    solo.config(checkpoint={"every": "2 steps"}, duration="30 steps")
    front = start(solo)
    draw = random.SystemRandom()
    solo.waits_for_step(draw.randint(1, 12))
    limit = time.monotonic() + draw.random() * 0.5
    while time.monotonic() < limit:  # a moment of its own, not that of a step's line
        os.sched_yield()
    to_rank(draw.randint(0, 1), signal.SIGTERM)(solo, front)
    preempted(solo, front, within_s=25)
    again = start(solo)
    assert again.wait() == 0, again.text()
    assert [line["step"] for line in solo.metrics()] == list(range(1, 31))


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long), None]
)
def test_while_the_ranks_start_a_signal_ends_them_and_nothing_has_changed(
    solo: Job, rank: int | None
) -> None:
    front = start(configure(solo), paced=True)
    solo.until(lambda: len(solo.ranks()) == 2, what="two ranks")
    sent = time.monotonic()
    strike = to_front if rank is None else to_rank(rank, signal.SIGTERM)
    strike(solo, front)
    assert front.wait(limit_s=60) == 75, front.text()
    assert time.monotonic() - sent < 10
    solo.wait_gone(limit_s=5)
    assert not solo.out.exists()


def leaves_without_saving(job: Job, *, again: bool) -> None:
    """Asks ranks to stop that cannot: rank 1 is stopped, so that no step is ever finished again,
    not even an agreement to stop.

    Of whole weights no rank keeps more. The front leaves at its deadline, or on another signal.
    """
    # Of so short a grace the ranks have less than the 3 s after which the watch names one that is
    # stopped.
    configure(job, adapter=None, grace="20 seconds" if again else "1 second")
    front = start(job, paced=True)
    job.waits_for_step(11)  # that of step 10 is not begun before that of step 5 is there
    job.ranks()[1].send_signal(signal.SIGSTOP)
    sent = time.monotonic()
    front.signal(signal.SIGTERM)
    while again and front.exit_code is None:
        assert time.monotonic() - sent < 15, front.text()
        front.signal(signal.SIGTERM)
        job.until(lambda: front.exit_code is not None or time.monotonic() % 0.5 < 0.1, what="half a second")
    assert front.wait(limit_s=30) == 75, front.text()
    assert time.monotonic() - sent < 10
    job.wait_gone(limit_s=5)
    result = job.read("result.json")
    assert result["outcome"] == "preempted"
    why = "a second signal" if again else r"\(grace period: \d+(?:\.\d+)? s\)"
    note = re.search(rf"{why}: ending the ranks; the newest checkpoint is (\S+), ", front.text("err"))
    assert note is not None, front.text()
    assert note[1][:-8] == result["checkpoint"][:-8]
    assert note[1] <= result["checkpoint"], "a save that was begun may be published after the note"
    lost = int(result["step"]) - int(note[1][-8:])
    steps = "1 step after it is" if lost == 1 else f"{lost} steps after it are"
    assert (f"{steps} lost" if lost else "nothing after it is lost") in front.text("err")


@pytest.mark.parametrize("again", [False, True], ids=["the deadline", "a second signal"])
def test_ranks_that_cannot_save_are_ended_by_deadline_or_second_signal(solo: Job, *, again: bool) -> None:
    leaves_without_saving(solo, again=again)


@pytest.mark.long  # that a run goes on whose ranks were killed, is in tests/resume
@pytest.mark.parametrize("again", [False, True], ids=["the deadline", "a second signal"])
def test_after_ranks_that_could_not_save_the_same_command_continues(solo: Job, *, again: bool) -> None:
    leaves_without_saving(solo, again=again)
    more = start(solo, "restarts=0")
    assert more.wait() == 0, more.text()
    assert [line["step"] for line in solo.metrics()] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_signal_between_two_starts_of_the_ranks_ends_the_run(solo: Job) -> None:
    configure(solo)
    front = start(solo, "restarts=2", paced=True)
    solo.waits_for_step(8)
    solo.ranks()[1].kill()
    front.wait_for("restart 1 of 2")
    front.signal(signal.SIGTERM)
    assert front.wait(limit_s=60) == 75, front.text()
    solo.wait_gone(limit_s=5)
    result = solo.read("result.json")
    assert (result["outcome"], result["verdict"]) == ("preempted", None)
    assert result["checkpoint"]
    again = start(solo)
    assert again.wait() == 0, again.text()
    assert [line["step"] for line in solo.metrics()] == list(range(1, STEPS + 1))
