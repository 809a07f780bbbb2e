"""What both ends of a connection do alike, in the channel's thread: take frames, beat, notice silence, end."""

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import cast

from unisono.control.frames import FrameParser, Malformed, Seal, encode
from unisono.text import one_line

BEAT_S = 0.5
"""Who has said nothing for so long sends a ping."""
SUSPECT_S = 3.0
"""Silence of the other side from which on it is suspicious."""
SILENCE_S = 8.0
"""Silence of the other side that ends the connection."""
UNREAD_BYTES = 64 << 20
"""Whoever lets so much wait unread is dropped."""

PING = encode({"t": "ping"})
BYE = encode({"t": "bye"})


class Connection(asyncio.Protocol, ABC):
    """One end of a connection. A subclass says what frames mean (`arrived`) and what an end means (`over`)."""

    def __init__(self, parser: FrameParser) -> None:
        self.parser = parser
        self.seal: Seal | None = None
        self.transport: asyncio.Transport | None = None
        self.heard = self.spoke = time.monotonic()
        self.address = ""
        self._why = ""
        self._ending = False

    @abstractmethod
    def arrived(self, frame: tuple[bytes, bytes]) -> None:
        """A whole frame is here."""

    @abstractmethod
    def over(self, why: str) -> None:
        """The connection is over, for this reason; empty: the other side closed it."""

    def malformed(self, error: Malformed) -> None:
        """What came is not our protocol."""
        self.abort(str(error))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio has connected us."""
        self.transport = cast("asyncio.Transport", transport)
        self.address = written(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        """Asyncio has bytes for us."""
        if self._ending:
            return
        self.heard = time.monotonic()
        try:
            self.parser.feed(data)
            while (frame := self.parser.take()) is not None:
                self.arrived(frame)
                if self._ending:
                    return
        except Malformed as error:
            self.malformed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio says that it is over."""
        if not self._why and isinstance(exc, OSError):
            self._why = one_line(exc.strerror or str(exc)).lower()
        self._ending = True
        self.over(self._why)

    def write(self, body: bytes) -> None:
        """Sends one body, sealed."""
        if self._ending or self.transport is None or self.seal is None:
            return
        if self.transport.get_write_buffer_size() > UNREAD_BYTES:
            self.abort(f"it has not read {UNREAD_BYTES >> 20} MiB that were sent")
            return
        self.spoke = time.monotonic()
        self.transport.write(self.seal.close(body))

    def beat(self, now: float) -> None:
        """Pings where nothing was said for a while; ends the connection if the other side is silent for too long."""
        if now - self.heard > SILENCE_S:
            self.abort(f"silent for {now - self.heard:.0f} s")
        elif now - self.spoke >= BEAT_S * 0.9:
            self.write(PING)

    def end(self, why: str = "") -> None:
        """Sends what is left to send, then closes."""
        self._why = self._why or why
        self._ending = True
        if self.transport is not None:
            self.transport.close()

    def abort(self, why: str) -> None:
        """Closes at once."""
        self._why = self._why or why
        self._ending = True
        if self.transport is not None:
            self.transport.abort()


Present = Callable[[], Collection[Connection]]


class Pulse:
    """Lets every connection beat, every BEAT_S, in the running loop."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None
        self._last = time.monotonic()

    def start(self, present: Present) -> None:
        """Begins. `present` gives the connections; it must be a copy, since beating can end some."""
        self._last = time.monotonic()
        self._again(present)

    def stop(self) -> None:
        """Ends."""
        if self._handle is not None:
            self._handle.cancel()

    def _again(self, present: Present) -> None:
        self._handle = asyncio.get_running_loop().call_later(BEAT_S, self._tick, present)

    def _tick(self, present: Present) -> None:
        now = time.monotonic()
        pause_s = now - self._last - BEAT_S
        self._last = now
        for connection in present():
            if pause_s > BEAT_S:
                # This process was stopped or starved: that is not the peer's silence.
                connection.heard = min(now, connection.heard + pause_s)
            connection.beat(now)
        self._again(present)


def written(name: object) -> str:
    """A socket's address for people: `IP:port`."""
    if not isinstance(name, tuple) or len(name) < 2:
        return "?"
    return f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"


def without_delay(sock: socket.socket) -> None:
    """Small frames go out at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
