"""Events of the control channel, the inbox in which a front receives them, and the channel's thread."""

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

RejectedKind = Literal["token", "duplicate", "stale", "malformed", "late", "misfit", "left_out"]
"""token: the proof does not fit. duplicate: its rank is taken. stale: of another start of the job. malformed: not our
protocol, or too slow. late: it came after the last word, and was told it. misfit: it means another number of nodes.
left_out: the job goes on without its node."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A node has proven itself and is here. `address` is the one it calls from."""

    node_rank: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A node, or for others the head (0), has sent a message. Its texts are as the sender wrote them: see unisono.text."""

    node_rank: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    """The connection to a node, or to the head, is over.

    Attributes:
        node_rank: of the other side.
        host: of the other side.
        why: one line for people.
        clean: it said goodbye, or has had the last word.
        silent_s: seconds since the last sign of life, where that is long; else 0.
        is_cut: it was silent, and nothing that was sent was acknowledged either: the line, or either end of it, may be cut. False
            where the connection was closed, and where the other machine answers and only its process is silent.
        gave_up: the other side has ended it, since it heard nothing of this one. `why`, `silent_s` and `is_cut` are what it saw.
    """

    node_rank: int
    host: str
    why: str
    clean: bool
    silent_s: float = 0.0
    is_cut: bool = False
    gave_up: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """Somebody called and is not let in; it changes nothing.

    Attributes:
        address: from where, `IP:port`.
        why: one line for people.
        kind: see RejectedKind.
        claims: the node rank that it says it has; for kinds token and malformed this is unproven.
        holder: who has that rank, where that is why; else empty.
    """

    address: str
    why: str
    kind: RejectedKind
    claims: int | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class FileReceived:
    """A file that a node sent is whole and on disk at the head, or it is not.

    Attributes:
        node_rank: who sent it.
        label: what it is, as the sender said.
        path: where it is; None if it did not arrive.
        bytes: its size.
        xxh3_128: its digest in hex, computed here over what arrived.
        seconds: from the offer to the end.
        error: why it did not arrive, for people; empty if it did.
    """

    node_rank: int
    label: dict[str, Any]
    path: Path | None
    bytes: int
    xxh3_128: str
    seconds: float
    error: str = ""


Event = Joined | NodeMessage | Left | Rejected | FileReceived


Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Thread-safe. `take` empties it; `fileno` can be selected on together with pipes of ranks."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._readable, self._writable = os.pipe()
        self._closed = False

    def put(self, item: Item) -> None:
        """Adds an item; the descriptor becomes readable."""
        with self._changed:
            if not self._items and not self._closed:
                os.write(self._writable, b"!")
            self._items.append(item)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[Item]:
        """All that waits, in order; waits for the first until `timeout_s` is over, then gives an empty list."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout=max(0.0, timeout_s))
            items = list(self._items)
            if items and not self._closed:
                os.read(self._readable, 1)
            self._items.clear()
            return items

    def fileno(self) -> int:
        """The descriptor. Nobody but `take` reads from it."""
        return self._readable

    def close(self) -> None:
        """Gives the descriptors back; what waits can still be taken."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for fd in (self._readable, self._writable):
                    with contextlib.suppress(OSError):
                        os.close(fd)
            self._changed.notify_all()


Result = TypeVar("Result")


class LoopThread:
    """An asyncio loop in a daemon thread. It starts with its first user and ends with its last."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="unisono.control", daemon=True
                )
                self._thread.start()

    def leave(self) -> None:
        """One user less. The last one waits until the thread is over."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, run there and waited for here."""
        assert self._loop is not None, "enter first"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def post(self, work: Callable[..., object], *args: object) -> None:
        """Runs a function there, later, in the order of posting. Does nothing once the thread is over."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work, *args)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


CHANNEL_THREAD = LoopThread()
