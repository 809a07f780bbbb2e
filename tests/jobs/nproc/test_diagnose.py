"""What `unisono diagnose RUN` says of our own runs after real ends.

Run: pytest tests/jobs/nproc/test_diagnose.py
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.jobs.nodes.injected.sitecustomize as injected
from tests import front_server
from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

INJECTED = {"PYTHONPATH": str(Path(injected.__file__).parent)}


def diagnosed(run: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "unisono", "diagnose", "--json", str(run), *words]
    done = front_server.run(command, timeout=60)
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def training(job: Job, env: dict[str, str] | None = None) -> Front:
    job.config(duration="5000 steps", restarts=0, checkpoint={"every": "3 steps"})
    front = job.start(0, "--nproc", "2", topology=False, env=env, answers=PACED)
    job.waits_for_step(4)
    return front


def test_killed_front_is_told_from_events_of_ranks_with_how_to_continue(
    solo: Job,
) -> None:
    front = training(solo)
    run = solo.out
    assert diagnosed(run)["cause"] == "healthy", "it is going on"
    front.kill()
    solo.wait_gone(limit_s=20)
    assert not (run / "result.json").exists()
    found = diagnosed(run, "--timeline")
    assert (found["cause"], found["ranks"]) == ("undetermined", [])
    assert "its front was killed" in found["summary"]
    assert found["step"] >= 4
    assert {item["where"].partition(":")[0] for item in found["evidence"]} == {
        "events/rank-00000.jsonl",
        "events/rank-00001.jsonl",
    }
    assert "unisono train " in found["fix"][-1]
    assert "--nproc 2: resumes from step" in found["fix"][-1]
    assert any("rank 1" in line for line in found["timeline"])


@pytest.mark.long
def test_the_verdict_that_the_run_left_is_given_as_it_is(solo: Job) -> None:
    front = training(solo)
    solo.ranks()[1].send_signal(signal.SIGKILL)
    front.wait(limit_s=60)
    run = solo.out
    stored, found = json.loads((run / "verdict.json").read_text()), diagnosed(run)
    assert found["cause"] == stored["cause"] == "rank_killed"
    assert {name: found[name] for name in ("summary", "ranks", "hosts", "phase", "step", "when")} == {
        name: stored[name] for name in ("summary", "ranks", "hosts", "phase", "step", "when")
    }
    assert found["fix"][: len(stored["fix"])] == stored["fix"]


@pytest.mark.long
def test_exception_is_found_in_events_if_the_front_left_no_verdict(solo: Job) -> None:
    front = training(solo, INJECTED)
    solo.ranks()[1].send_signal(injected.RAISE)
    front.wait(limit_s=60)
    run = solo.out
    for name in ("verdict.json", "result.json"):  # as if the front had been killed before it wrote them
        (run / name).unlink()
    found = diagnosed(run)
    assert (found["cause"], found["ranks"]) == ("user_code_error", [1])
