"""Heads and nodes on loopback: real sockets, in this process or in another."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

from tests import front_server
from unisono.guard.control.channel_ends import HeadServer, NodeLink

if TYPE_CHECKING:
    from unisono.guard.control.connection import ChannelEvent

TOKEN = b"the secret of this job, 32 bytes"
LIMIT_S = 20.0
_PROGRAM = Path(__file__).parent / "standins" / "one_end.py"

Kind = TypeVar("Kind")


class Room:
    """One head, and the nodes that call it.

    All that was opened is closed at the end of the test.
    """

    def __init__(self) -> None:
        self.token = TOKEN
        self._heads: list[HeadServer] = []
        self._links: list[NodeLink] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._events: dict[HeadServer | NodeLink, list[ChannelEvent]] = {}

    def head(self, nodes: int = 3, **options: Any) -> HeadServer:
        """A head on a free port of 127.0.0.1."""
        known = {
            "host": "127.0.0.1",
            "port": 0,
            "token": TOKEN,
            "welcome": {"head": "a"},
            "run_nonce": "run1",
        }
        self._heads.append(HeadServer(nodes=nodes, **{**known, **options}))
        return self._heads[-1]

    def node(self, head: HeadServer | tuple[str, int], node_rank: int = 1, **options: Any) -> NodeLink:
        """A node that has joined."""
        host, port = head if isinstance(head, tuple) else head.address
        known: dict[str, Any] = {"host": host, "port": port, "token": TOKEN, "node_host": f"host{node_rank}"}
        self._links.append(
            NodeLink.connect(node_rank=node_rank, **{**known, "timeout_s": LIMIT_S, **options})
        )
        return self._links[-1]

    def process(self, *arguments: object) -> subprocess.Popen[str]:
        """One end in a process of its own; see standins/one_end.py. It speaks lines on stdout."""
        command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
        self._processes.append(front_server.start(command, stdout=subprocess.PIPE, text=True))
        return self._processes[-1]

    def hears(
        self, end: HeadServer | NodeLink, what: type[Kind], count: int = 1, **fields: Any
    ) -> list[Kind]:
        """The first `count` events of a kind with these fields, waited for.

        Others are kept for the next question.
        """
        until = time.monotonic() + LIMIT_S
        events = self._events.setdefault(end, [])
        while True:
            events += end.receive(0.0)
            known = (e for e in events if isinstance(e, what) and _fits(e, fields))
            found = cast("list[Kind]", list(itertools.islice(known, count)))
            if len(found) == count:
                events[:] = [e for e in events if not any(e is one for one in found)]
                return found
            assert time.monotonic() < until, f"no {count} {what.__name__} {fields} in {LIMIT_S} s: {events}"
            events += end.receive(0.5)

    def unasked(self, end: HeadServer | NodeLink, what: type[Kind]) -> list[Kind]:
        """Events of a kind that came and were not asked for."""
        self._events.setdefault(end, []).extend(end.receive(0.0))
        return [event for event in self._events[end] if isinstance(event, what)]

    def clear(self) -> None:
        """Closes everything."""
        for link in self._links:
            link.close()
        for head in self._heads:
            head.close(patience_s=0.0)
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _fits(event: object, fields: dict[str, Any]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.clear()


@pytest.fixture
def line_of() -> Callable[[subprocess.Popen[str]], str]:
    """The next line that a process says."""

    def read(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    return read
