"""Measures latency and bandwidth between two nodes, over a connection on which both have proven the job's key.

Ports, proof and messages are `control.echo`'s. The stream itself is zeros without any proof: nothing in it is used but its length.
"""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass

from unisono.control.echo import EchoListener, EchoSession, ForeignPeer, prove_as_dialer
from unisono.files import parse_json
from unisono.text import one_line

STREAM_S = 0.3
_PINGS = 10
_CHUNK = bytes(256 << 10)
_MOST_S = 5.0
_WHOLE_S = 15.0
_PING, _UP, _DOWN = b"ping", b"up", b"down"
_END = bytes(4)


@dataclass(frozen=True, slots=True)
class Measured:
    """Between two nodes.

    Attributes:
        rtt_s: the shortest time of a few bytes, there and back; None: nothing came back.
        up: bytes per second from the one that dialled.
        down: to it.
        trouble: why it could not be measured; empty: it could.
    """

    rtt_s: float | None = None
    up: float = 0.0
    down: float = 0.0
    trouble: str = ""

    @property
    def speed(self) -> float:
        """Of the slower direction."""
        return min(self.up, self.down)


def stream_listener(address: str, key: bytes) -> EchoListener:
    """Answers measurements on a port of this address, until it is closed.

    Raises:
        OSError: if the address is not this machine's.
    """
    return EchoListener(address, key, ports=1, talk=_answer)


def measure(address: str, port: int, key: bytes) -> Measured:
    """Pings a peer, and streams to it and from it; a few tenths of a second each. Never raises for what a network does."""
    try:
        return asyncio.run(_measure(address, port, key))
    except TimeoutError:
        return Measured(trouble=f"nothing came of it within {_WHOLE_S:g} s")
    except (OSError, EOFError, ForeignPeer, ValueError) as error:
        return Measured(trouble=one_line(str(error) or type(error).__name__, limit=200))


async def _measure(address: str, port: int, key: bytes) -> Measured:
    async with asyncio.timeout(_WHOLE_S):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            session = await prove_as_dialer(reader, writer, key)
            rtt_s = min([await _ping(session) for _ in range(_PINGS)])
            await session.send(_UP)
            await _send_stream(writer)
            up = float(parse_json(await _message(session))["bytes_per_second"])
            await session.send(_DOWN)
            down = await _count_stream(reader)
            return Measured(rtt_s, up, down)
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)  # lets the transport close its socket


async def _ping(session: EchoSession) -> float:
    began = time.perf_counter()
    await session.send(_PING)
    await _message(session)
    return time.perf_counter() - began


async def _message(session: EchoSession) -> bytes:
    return await session.body(*await session.length())


async def _answer(session: EchoSession) -> None:
    """The listener's side: until the caller hangs up."""
    with contextlib.suppress(EOFError):
        while True:
            match await _message(session):
                case b"ping":
                    await session.send(_PING)
                case b"up":
                    speed = await _count_stream(session.reader)
                    await session.send(json.dumps({"bytes_per_second": speed}).encode())
                case b"down":
                    await _send_stream(session.writer)
                case _:
                    raise ForeignPeer("an unknown question")


async def _send_stream(writer: asyncio.StreamWriter) -> None:
    until = time.monotonic() + STREAM_S
    head = len(_CHUNK).to_bytes(4, "big")
    while time.monotonic() < until:
        writer.write(head + _CHUNK)
        await writer.drain()
    writer.write(_END)
    await writer.drain()


async def _count_stream(reader: asyncio.StreamReader) -> float:
    """Bytes per second from the first byte on."""
    head = await reader.readexactly(4)
    began, total = time.monotonic(), 0
    while head != _END:
        length = int.from_bytes(head, "big")
        if length > len(_CHUNK) or time.monotonic() - began > _MOST_S + STREAM_S:
            raise ForeignPeer("a stream that does not end")
        await reader.readexactly(length)
        total += length
        head = await reader.readexactly(4)
    return total / max(time.monotonic() - began, 1e-6)
