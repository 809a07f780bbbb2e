"""A node that is not the head reads what the head sends.

Run: pytest tests/jobs/runs/test_member_supervisor.py
"""

from typing import Any

import pytest

from unisono.base.causes import Verdict
from unisono.base.events import Message
from unisono.guard.supervise.node_messages import VerdictReached, encode
from unisono.jobs.runs.member_supervisor import Serving


def serving(shown: list[Message]) -> Serving:
    """A node whose ranks and connection are not needed to read a message."""
    nothing: Any = None
    return Serving(nothing, nothing, nothing, shown.append, plan=nothing, disk=nothing)


def test_verdict_of_the_head_is_shown() -> None:
    shown: list[Message] = []
    verdict = Verdict(cause="node_missing", when="before", summary="node 1 is missing")
    assert serving(shown).obey(encode(VerdictReached(verdict))) is None
    assert [(message["kind"], message["summary"]) for message in shown] == [("verdict", "node 1 is missing")]


def test_verdict_of_a_newer_head_is_left_to_its_last_word() -> None:
    shown: list[Message] = []
    assert serving(shown).obey({"kind": "verdict", "verdict": {"schema": 2, "what": "x"}}) is None
    assert shown == []


@pytest.mark.parametrize(
    "message", [{"kind": "stop"}, {"kind": "go", "store": []}, {"kind": "look", "ranks": 0}]
)
def test_unreadable_request_is_not_ignored(message: Message) -> None:
    """Its ranks would wait for what never comes."""
    with pytest.raises(ValueError, match=r"validation error"):
        serving([]).obey(message)
