"""A node that is not the head takes part in a guarded program.

Run: pytest tests/guard/programs/test_member_program.py
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.base.messages import Message
from unisono.guard.control.connection import Left, NodeMessage
from unisono.guard.programs import member_program, program_meeting
from unisono.guard.programs.launcher_facts import read_command
from unisono.guard.programs.program_request import RunRequest
from unisono.guard.supervise.node_messages import HeadRequest, NodeNews


class Channel:
    """Stands for the channel to the head: what it has for this node comes all at once, as on a busy
    machine.
    """

    def __init__(self, *events: NodeMessage | Left) -> None:
        self._events = list(events)
        self.party = SimpleNamespace(host="b")
        self.welcome = {"head_host": "a"}

    def fileno(self) -> int:
        return 0

    def send(self, message: Message) -> None:
        del message

    def receive(self, timeout_s: float) -> list[NodeMessage | Left]:
        del timeout_s
        events, self._events = self._events, []
        return events


class Ended:
    """Stands for this node, where the program has ended."""

    ranks = None
    program = None
    has_ended = True

    def new_messages(self, timeout_s: float, *, also: Sequence[int]) -> list[NodeNews]:
        del timeout_s, also
        return []

    def handle(self, request: HeadRequest) -> None:
        del request


class Silent:
    """Stands for what tells the head of ranks."""

    def __init__(self, *_: object) -> None: ...

    def send(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("code", [0, 4])
def test_a_goodbye_after_the_last_message_is_not_a_loss(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(member_program, "MonitorReports", Silent)
    last: dict[str, Any] = {"kind": "ended", "exit_code": code, "verdicts": [], "result": {}}
    channel: Any = Channel(NodeMessage(0, last), Left(0, "a", "it closed the connection", clean=True))
    shown: list[Message] = []
    here: Any = Ended()
    attending = member_program.MemberProgram(channel, here, 1, shown.append, lambda: None)
    attending.run()
    assert attending.exit_code(0) == code
    assert shown == []
    assert attending.verdict is None


def test_secrets_that_only_their_name_gives_away_do_not_leave_the_node() -> None:
    words = (
        "torchrun",
        "train.py",
        "--hub_token",
        "abcdef0123456789",
        "--wandb-api-key",
        "0123456789abcdef",
        "--max_tokens",
        "1024",
    )
    shape: Any = SimpleNamespace(command=read_command(words))
    found = program_meeting._words(RunRequest(words), shape)
    assert "abcdef0123456789" not in str(found)
    assert "0123456789abcdef" not in str(found)
    assert "1024" in str(found)
