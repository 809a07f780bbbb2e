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
"""token: the MAC does not match. duplicate: its rank is taken. stale: of a different start of the job. malformed: invalid
bytes, or too slow. late: it connected after the end of the run. misfit: it expects a different number of nodes.
left_out: the job continues without its node."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A node has authenticated and joined. `address` is its remote address."""

    node_rank: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message of a node, or for nodes of the head (0). Its texts are unfiltered: see unisono.text."""

    node_rank: int
    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    """The connection to a node, or to the head, has ended.

    Attributes:
        why: one line for messages.
        clean: it said goodbye, or has the last message.
        silent_s: seconds since the last received byte if long, else 0.
        is_cut: it was silent, and sent data was not acknowledged either: the network or either end may be down. False
            if the connection was closed, or the other machine responds and only its process is silent.
        gave_up: the other side ended it, since it received nothing from this one. `why`, `silent_s` and `is_cut` are its observations.
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
    """A caller was rejected; this changes nothing else.

    Attributes:
        address: of the caller, `IP:port`.
        why: one line for messages.
        kind: see RejectedKind.
        claims: the node rank that it claims; unauthenticated for kinds token and malformed.
        holder: the node with that rank, for kind duplicate; else empty.
    """

    address: str
    why: str
    kind: RejectedKind
    claims: int | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class FileReceived:
    """The end of a file transfer: the file is complete on the head's disk, or it failed.

    Attributes:
        path: of the file; None if it failed.
        xxh3_128: digest in hex, computed by the head.
        error: why it failed, for messages; empty if it did not.
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
    """A thread-safe queue. `take` empties it; `fileno` can be used in select() together with pipes of ranks."""

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
        """All items, in order; waits up to `timeout_s` for the first, then gives an empty list."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed, timeout=max(0.0, timeout_s))
            items = list(self._items)
            if items and not self._closed:
                os.read(self._readable, 1)
            self._items.clear()
            return items

    def fileno(self) -> int:
        """The descriptor. Only `take` reads from it."""
        return self._readable

    def close(self) -> None:
        """Closes the descriptors; waiting items can still be taken."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for fd in (self._readable, self._writable):
                    with contextlib.suppress(OSError):
                        os.close(fd)
            self._changed.notify_all()


Result = TypeVar("Result")


class LoopThread:
    """An asyncio loop in a daemon thread. It starts with the first user and ends with the last one."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """Adds a user."""
        with self._lock:
            self._users += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="unisono.control", daemon=True
                )
                self._thread.start()

    def leave(self) -> None:
        """Removes a user. The last one waits for the end of the thread."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the thread, waits, and gives its result."""
        assert self._loop is not None, "enter first"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def post(self, work: Callable[..., object], *args: object) -> None:
        """Runs a function in the thread later, in the order of posting. Does nothing after the end of the thread."""
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
