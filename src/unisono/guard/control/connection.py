"""Events of the control channel, the inbox in which a front receives them, the channel's thread;
and a connection in it, common to both ends: frames, heartbeats, silence, end.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from unisono.base.text import one_line
from unisono.guard.control.protocol import Body, FrameParser, Malformed, RejectedKind, Seal, encode


@dataclass(frozen=True, slots=True)
class Joined:
    """A node has authenticated and joined. `address` is its remote address."""

    node_rank: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message of a node, or for nodes of the head (0).

    Its texts are unfiltered: see unisono.base.text.
    """

    node_rank: int
    message: dict[str, object]


@dataclass(frozen=True, slots=True)
class Left:
    """The connection to a node, or to the head, has ended.

    Attributes:
        why: one line for messages.
        clean: it said goodbye, or has the last message.
        silent_s: seconds since the last received byte if long, else 0.
        is_cut: it was silent, and sent data was not acknowledged either: the network or either end
            may be down. False if the connection was closed, or the other machine responds and only
            its process is silent.
        gave_up: the other side ended it, since it received nothing from this one. `why`, `silent_s`
            and `is_cut` are its observations.
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
    label: dict[str, object]
    path: Path | None
    bytes: int
    xxh3_128: str
    seconds: float
    error: str = ""


ChannelEvent = Joined | NodeMessage | Left | Rejected | FileReceived


Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A thread-safe queue.

    `take` empties it; `fileno` can be used in select() together with pipes of ranks.
    """

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
    """An asyncio loop in a daemon thread.

    It starts with the first user and ends with the last one.
    """

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
        """Runs a function in the thread later, in the order of posting.

        Does nothing after the end of the thread.
        """
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


# ---- a connection

BEAT_S = 0.5
"""A side that has sent nothing for this long sends a ping."""
SUSPECT_S = 3.0
"""Silence of the other side that is suspicious."""
SILENCE_S = 8.0
"""Silence of the other side that ends the connection."""
MAX_UNREAD_BYTES = 64 << 20
"""A peer that leaves more than this unread is dropped."""

PING = encode({"t": "ping"})
BYE = encode({"t": "bye"})
_READ_BYTES = 1 << 18
_ACKNOWLEDGED_S = 2.0  # a ping is sent every 0.5 s
_LAST_ACK_RECV_AT = 56  # in struct tcp_info of linux/tcp.h, in milliseconds


@dataclass(frozen=True, slots=True)
class Silence:
    """Why a connection was ended: the other side was silent.

    Attributes:
        why: one line for messages.
        silent_s: since the last byte.
        is_cut: whether sent data was not acknowledged either.
    """

    why: str
    silent_s: float
    is_cut: bool

    def to_body(self) -> Body:
        """The last frame to the other side, which reads it if it was only stopped and continues."""
        return {"t": "bye", "why": self.why, "silent_s": self.silent_s, "is_cut": self.is_cut}

    @classmethod
    def from_body(cls, body: Body) -> "Silence | None":
        """The silence that the other side reports; None if its goodbye has no such reason."""
        match body:
            case {"why": str(why), "silent_s": float(silent_s), "is_cut": bool(is_cut)}:
                return cls(one_line(why, limit=200), silent_s, is_cut)
            case _:
                return None


class Connection(asyncio.Protocol, ABC):
    """One end of a connection. A subclass handles frames (`arrived`) and the end (`over`)."""

    def __init__(self, parser: FrameParser) -> None:
        self.parser = parser
        self.seal: Seal | None = None
        self.transport: asyncio.Transport | None = None
        self.last_received = self.last_sent = time.monotonic()
        self.address = ""
        self.silence: Silence | None = None
        """Why the connection was ended, by this side or (`gave_up`) by the other one."""
        self.gave_up = False
        self._why = ""
        self._ending = False

    @abstractmethod
    def arrived(self, frame: tuple[bytes, bytes]) -> None:
        """A complete frame has arrived."""

    @abstractmethod
    def over(self, why: str) -> None:
        """The connection has ended, for this reason; empty: the other side closed it."""

    def malformed(self, error: Malformed) -> None:
        """The received bytes are not valid."""
        self.abort(str(error))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self.transport = cast("asyncio.Transport", transport)
        self.address = address_text(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._ending:
            return
        self.last_received = time.monotonic()
        try:
            self.parser.feed(data)
            while (frame := self.parser.take()) is not None:
                self.arrived(frame)
                if self._ending:
                    return
        except Malformed as error:
            self.malformed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        if isinstance(exc, OSError) and not self._ending:
            self._read_the_rest()
            self._why = self._why or one_line(exc.strerror or str(exc)).lower()
        self._ending = True
        self.over(self._why)

    def _read_the_rest(self) -> None:
        """Reads what the other side sent before it closed: a process that was stopped may fail to
        write before it has read that.
        """
        sock: Any = self.transport.get_extra_info("socket") if self.transport is not None else None
        try:
            while sock is not None and not self._ending and (data := os.read(sock.fileno(), _READ_BYTES)):
                self.data_received(data)
        except OSError:  # nothing more
            return

    @property
    def quiet_s(self) -> float:
        """Seconds since the last received byte if suspiciously long, else 0."""
        if self.silence is not None:
            return self.silence.silent_s
        passed = time.monotonic() - self.last_received
        return passed if passed > SUSPECT_S else 0.0

    def write(self, body: bytes) -> None:
        """Sends one body with its MAC."""
        if self._ending or self.transport is None or self.seal is None:
            return
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.abort(f"it left {MAX_UNREAD_BYTES >> 20} MiB unread")
            return
        self.last_sent = time.monotonic()
        self.transport.write(self.seal.close(body))

    def beat(self, now: float) -> None:
        """Sends a ping if nothing was sent for a while; ends the connection if the other side is
        silent for too long.
        """
        if now - self.last_received > SILENCE_S:
            self._give_up(now - self.last_received)
        elif now - self.last_sent >= BEAT_S * 0.9:
            self.write(PING)

    def _give_up(self, silent_s: float) -> None:
        """Ends a silent connection, with the reason in a last frame that the other side reads if it
        was only stopped.
        """
        answers = self.transport is not None and acknowledges(self.transport.get_extra_info("socket"))
        why = f"silent for {silent_s:.0f} s"
        if answers:
            why += ", but its machine responds: the unisono process there is stopped, or gets no CPU time"
        self.silence = Silence(why, round(silent_s, 3), is_cut=not answers)
        self.write(encode(self.silence.to_body()))
        if self.transport is not None and self.transport.get_write_buffer_size() == 0:
            self.end(why)
        else:
            self.abort(why)  # to wait until it is sent would be to wait for the silent one

    def other_gave_up(self, body: Body) -> None:
        """Keeps the reason of a goodbye by which the other side gave this one up."""
        silence = Silence.from_body(body)
        if silence is not None:
            self.silence, self.gave_up = silence, True

    def end(self, why: str = "") -> None:
        """Flushes, then closes."""
        self._why = self._why or why
        self._ending = True
        if self.transport is not None:
            self.transport.close()

    def abort(self, why: str) -> None:
        """Closes immediately."""
        self._why = self._why or why
        self._ending = True
        if self.transport is not None:
            self.transport.abort()


ConnectionList = Callable[[], Collection[Connection]]


class Heartbeats:
    """Calls `beat` of every connection every BEAT_S, in the running loop."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None
        self._last = time.monotonic()

    def start(self, present: ConnectionList) -> None:
        """Starts. `present` gives a copy of the connections, since `beat` can end some."""
        self._last = time.monotonic()
        self._again(present)

    def stop(self) -> None:
        """Stops."""
        if self._handle is not None:
            self._handle.cancel()

    def _again(self, present: ConnectionList) -> None:
        self._handle = asyncio.get_running_loop().call_later(BEAT_S, self._tick, present)

    def _tick(self, present: ConnectionList) -> None:
        now = time.monotonic()
        pause_s = now - self._last - BEAT_S
        self._last = now
        for connection in present():
            if pause_s > BEAT_S:
                # This process was stopped or starved: that is not the peer's silence.
                connection.last_received = min(now, connection.last_received + pause_s)
            connection.beat(now)
        self._again(present)


def acknowledges(sock: Any) -> bool:
    """Whether the other machine has acknowledged data in the last 2 s: then the network works, and
    only its process is silent.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECV_AT + 4)
    except (OSError, AttributeError):  # no TCP, or closed already
        return False
    if len(info) < _LAST_ACK_RECV_AT + 4:
        return False
    (passed_ms,) = struct.unpack_from("=I", info, _LAST_ACK_RECV_AT)
    return bool(passed_ms < _ACKNOWLEDGED_S * 1000)


def address_text(name: object) -> str:
    """A socket's address as text: `IP:port`."""
    if not isinstance(name, tuple) or len(name) < 2:
        return "?"
    return f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"


def without_delay(sock: socket.socket) -> None:
    """Disables Nagle's algorithm, so that small frames are sent at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
