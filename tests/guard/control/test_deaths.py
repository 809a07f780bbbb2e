"""One end is killed or stopped: the other says so.

Real processes. Run: pytest tests/guard/control/test_deaths.py
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from unisono.guard.control.connection import SILENCE_S, SUSPECT_S, Connection, Heartbeats, Left, NodeMessage
from unisono.guard.control.protocol import FrameParser

if TYPE_CHECKING:
    from subprocess import Popen

    from tests.guard.control.conftest import Room

pytestmark = pytest.mark.ranks
LineOf = Callable[["Popen[str]"], str]


def test_a_killed_node_is_seen_by_the_head_at_once(room: "Room", line_of: LineOf) -> None:
    head = room.head()
    node = room.process("node", head.address[1], 2)
    assert line_of(node) == "here"
    node.kill()
    killed = time.monotonic()
    [left] = room.hears(head, Left)
    assert time.monotonic() - killed < SILENCE_S, "no silence is waited for"
    assert (left.node_rank, left.host, left.clean) == (2, "host2", False)


def test_a_killed_head_is_seen_by_every_node_at_once(room: "Room", line_of: LineOf) -> None:
    head = room.process("head", 3)
    address = ("127.0.0.1", int(line_of(head)))
    nodes = [room.node(address, node_rank=rank) for rank in (1, 2)]
    head.kill()
    killed = time.monotonic()
    for node in nodes:
        [left] = room.hears(node, Left)
        assert (left.node_rank, left.clean) == (0, False)
    assert time.monotonic() - killed < SILENCE_S, "no silence is waited for"


def test_a_head_that_is_killed_after_its_last_message_has_left_cleanly(room: "Room") -> None:
    head = room.head()
    node = room.node(head)
    head.send_last({"kind": "ended"})
    assert room.hears(node, NodeMessage)
    head.close(patience_s=0)
    assert room.hears(node, Left)[0].clean


def test_node_that_never_acknowledges_costs_the_head_only_its_patience(room: "Room", line_of: LineOf) -> None:
    head = room.head()
    node = room.process("node", head.address[1], 1)
    assert line_of(node) == "here"
    os.kill(node.pid, signal.SIGSTOP)
    head.send_last({"kind": "ended"})
    began = time.monotonic()
    head.close(patience_s=1.0)
    assert 0.9 < time.monotonic() - began < 5
    assert not room.hears(head, Left)[0].clean


@pytest.mark.slow
def test_silence_is_suspected_and_then_ends_the_connection_on_both_sides(
    room: "Room", line_of: LineOf
) -> None:
    """A stopped process holds its connections open, as a cut cable does."""
    head, far_head = room.head(), room.process("head", 2)
    stopped = room.process("node", head.address[1], 1)
    assert line_of(stopped) == "here"
    lively = room.node(head, node_rank=2)
    node = room.node(("127.0.0.1", int(line_of(far_head))))
    assert line_of(far_head).startswith("Joined")
    for process in (stopped, far_head):
        os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    while 1 not in head.silences():
        assert time.monotonic() - began < SILENCE_S
        lively.send({"kind": "note"})
        room.hears(head, NodeMessage)
    left, lost = room.hears(head, Left)[0], room.hears(node, Left)[0]
    assert SILENCE_S - 1 < time.monotonic() - began < 2 * SILENCE_S + 5
    assert (left.node_rank, left.clean, lost.node_rank, lost.clean) == (1, False, 0, False)
    assert left.why.startswith("silent for ")
    assert lost.why.startswith("silent for ")
    assert left.silent_s > SILENCE_S - 1
    assert not left.is_cut, "its system acknowledges what is sent to it"
    for process, other_why, rank in ((far_head, lost.why, 1), (stopped, left.why, 0)):
        os.kill(process.pid, signal.SIGCONT)
        printed = line_of(process)
        assert printed.startswith(f"Left(node_rank={rank}")
        assert f"why='{other_why}'" in printed, "who was stopped hears why it was given up"
        assert "gave_up=True" in printed


def test_who_was_stopped_itself_does_not_blame_the_others() -> None:
    """A machine that slept for a minute has heard nobody for a minute: that is its own silence."""

    class Other(Connection):
        """A node that was as lively as could be until our sleep."""

        def abort(self, why: str) -> None:
            raise AssertionError(why)

        def arrived(self, frame: tuple[bytes, bytes]) -> None:
            raise AssertionError(frame)

        def over(self, why: str) -> None:
            raise AssertionError(why)

    async def wake() -> None:
        pulse, other = Heartbeats(), Other(FrameParser())
        pulse._last = time.monotonic() - 60
        other.last_received = pulse._last - 1
        pulse._tick(lambda: [other])
        pulse.stop()
        assert time.monotonic() - other.last_received < SUSPECT_S

    asyncio.run(wake())
