"""Signals to the front: finish the step, save, go; a second Ctrl-C goes at once.

Run: pytest tests/jobs/runs/test_signals.py
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.jobs.runs.conftest import tasks_of
from unisono.guard.facts.processes import living_ranks

Until = Callable[[Callable[[], bool]], None]
Started = Callable[..., "subprocess.Popen[str]"]


def worker_of(process: "subprocess.Popen[str]") -> psutil.Process:
    """The rank that a front has started, whoever is its parent."""
    (pid,) = living_ranks(process.pid)
    return psutil.Process(pid)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("number", "outcome", "code"),
    [
        (signal.SIGTERM, "preempted", 75),
        (signal.SIGUSR1, "preempted", 75),
        (signal.SIGHUP, "preempted", 75),
        (signal.SIGINT, "interrupted", 130),
    ],
)
def test_signal_ends_with_a_checkpoint_and_the_same_command_continues(
    front: Any, started: Started, until: Until, number: signal.Signals, outcome: str, code: int
) -> None:
    process = started(faults={"wait": 5})
    until(front.waits_before(5))
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "saving" in stderr
    result = front.read("result.json")
    assert (result["outcome"], result["step"], result["verdict"]) == (outcome, 5, None)
    assert result["checkpoint"].endswith("step-00000005")
    assert "same command" in stdout
    again = front.run()
    assert again.returncode == 0, again.stderr
    assert "from step 5" in again.stderr
    assert front.steps() == list(range(1, 11))


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.long),
    ],
)
def test_a_second_signal_leaves_at_once_and_the_last_checkpoint_stays(
    front: Any, started: Started, until: Until, number: signal.Signals, code: int
) -> None:
    process = started(faults={"wait": 5, "deaf": True})
    until(front.waits_before(5))
    rank = worker_of(process)
    first = time.monotonic()
    while process.poll() is None:  # only the one that comes a second after the first is another wish
        process.send_signal(number)
        assert time.monotonic() - first < 20
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert 1.0 <= time.monotonic() - first < 20
    _, stderr = process.communicate()
    assert process.returncode == code
    assert is_gone(rank)
    newest = str(front.out / "checkpoints" / "step-00000003")
    assert f"a second signal: ending the ranks; the newest checkpoint is {newest}" in stderr
    assert "1 step after it is not in it" in stderr
    assert front.read("result.json")["checkpoint"] == newest


def test_what_reaches_front_and_rank_at_once_is_one_stop_request(
    front: Any, started: Started, until: Until
) -> None:
    """A scheduler signals the whole group; the front passes on what it got, so the rank gets it
    twice.
    """
    process = started(faults={"wait": 5})
    until(front.waits_before(5))
    for target in (worker_of(process), process, worker_of(process), process):
        target.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert front.read("result.json")["checkpoint"].endswith("step-00000005")


def test_rank_that_exceeds_the_grace_time_is_ended_and_the_loss_reported(
    front: Any, started: Started, until: Until
) -> None:
    front.config(train="rows", grace="1 seconds")
    process = started(faults={"wait": 5, "deaf": True})
    until(front.waits_before(5))
    rank = worker_of(process)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75
    assert time.monotonic() - sent < 20, "it does not wait for the rank, which is deaf"
    assert is_gone(rank)
    assert "(grace period: 1.0 s): ending the ranks" in stderr
    assert "1 step after it is not in it" in stderr
    assert front.read("result.json")["checkpoint"].endswith("step-00000003")


def test_rank_signalled_while_python_starts_is_preempted_and_not_dead(
    front: Any, started: Started, until: Until
) -> None:
    """Nobody listens yet, and the signal kills it."""
    process = started(faults={"wait": 5, "unready": True})
    until(front.waits_before(5))
    worker_of(process).send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    result = front.read("result.json")
    assert (result["outcome"], result["verdict"], result["restarts"]) == ("preempted", None, [])


def test_while_the_rank_starts_a_signal_ends_both_at_once(front: Any, started: Started, until: Until) -> None:
    process = started(faults={"wait": 0})
    until(front.waits_before(0))
    rank = worker_of(process)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert is_gone(rank)
    assert "no checkpoint yet" in stdout
    assert not front.out.exists()


def test_while_the_data_are_prepared_a_signal_ends_both_at_once(
    front: Any, started: Started, until: Until
) -> None:
    front.config(train="wait")
    process = started()
    assert process.stderr is not None
    for line in process.stderr:
        if "tokenising" in line:
            break
    (task,) = tasks_of(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert is_gone(task)
    assert not front.out.exists()


def test_an_interrupted_start_leaves_the_earlier_result(front: Any, started: Started, until: Until) -> None:
    front.run("duration=4 steps")
    before = (front.out / "result.json").read_bytes()
    process = started("--resume", "duration=8 steps", faults={"wait": 0})
    until(front.waits_before(0))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert (front.out / "result.json").read_bytes() == before


def test_a_front_that_is_killed_takes_its_rank_with_it(front: Any, started: Started, until: Until) -> None:
    process = started(faults={"wait": 5})
    until(front.waits_before(5))
    rank = worker_of(process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    until(lambda: is_gone(rank))
    again = front.run()
    assert again.returncode == 0, again.stderr
    assert front.steps() == list(range(1, 11))


def test_a_second_start_is_refused_while_the_first_one_runs(
    front: Any, started: Started, until: Until
) -> None:
    process = started(faults={"wait": 5})
    until(front.waits_before(5))
    second = front.run()
    assert second.returncode == 2
    assert str(process.pid) in second.stderr
    fresh = front.run("--fresh")
    assert fresh.returncode == 2
    assert front.out.exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75


@pytest.mark.parametrize("flag", ["--json", "--quiet"])
def test_a_reader_that_leaves_does_not_end_the_run(front: Any, flag: str) -> None:
    words = front.arguments(flag)
    script = (
        f"{subprocess.list2cmdline(words[:2])} '{{}}' train c.yaml {flag} | head -1 >/dev/null; exit"
        " ${PIPESTATUS[0]}"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=front.folder,
        env=front.script_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert all(line.startswith("warning: this run has only") for line in done.stderr.splitlines()), (
        done.stderr
    )
    assert front.read("result.json")["outcome"] == "completed"
