"""A node that is not the head reads what the head sends.

Run: pytest tests/jobs/runs/test_member_supervisor.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.base.causes import Verdict
from unisono.guard.facts.storage import RunsDisk
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import read_result
from unisono.guard.supervise.node_messages import JobEnded, VerdictReached, encode
from unisono.jobs.runs.member_supervisor import Serving, keep_end


def serving(shown: list[Any]) -> Serving:
    """A node whose ranks and connection are not needed to read a message."""
    nothing: Any = None
    return Serving(nothing, nothing, nothing, shown.append, plan=nothing, disk=nothing)


def test_verdict_of_the_head_is_shown() -> None:
    shown: list[Any] = []
    verdict = Verdict(cause="node_missing", when="before", summary="node 1 is missing")
    assert serving(shown).obey(encode(VerdictReached(verdict))) is None
    assert [(message["kind"], message["summary"]) for message in shown] == [("verdict", "node 1 is missing")]


def test_verdict_of_a_newer_head_is_left_to_its_last_word() -> None:
    shown: list[Any] = []
    assert serving(shown).obey({"kind": "verdict", "verdict": {"schema": 2, "what": "x"}}) is None
    assert shown == []


@pytest.mark.parametrize(
    "message", [{"kind": "stop"}, {"kind": "go", "store": []}, {"kind": "look", "ranks": 0}]
)
def test_unreadable_request_is_not_ignored(message: dict[str, object]) -> None:
    """Its ranks would wait for what never comes."""
    with pytest.raises(ValueError, match=r"validation error"):
        serving([]).obey(message)


def test_a_job_that_ends_without_a_result_leaves_one_here(tmp_path: Path) -> None:
    """The head failed while ranks ran: it has no result to send, and its directory is not here."""
    verdict = Verdict(cause="node_missing", when="during", summary="node 1 is missing")
    run, shown = RunDir(tmp_path), list[Any]()
    disk = RunsDisk(run.root, shown.append)
    last = JobEnded(3, (verdict,), ({"what": "the head failed"},))
    kept = keep_end(run, last, head="ada", shared=False, show=shown.append, disk=disk)
    assert (kept.outcome, kept.exit_code, kept.held_by) == ("disagreed", 3, "node 0 (ada)")
    assert read_result(run) == kept.model_copy(update={"held_by": ""})
    assert json.loads(run.verdict.read_text())["summary"] == verdict.summary
    assert [message["kind"] for message in shown] == ["refused"]
