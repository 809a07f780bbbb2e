"""Echo service for the network check between nodes: three ports on the chosen address, for the duration of the check.

    dialler → listener   CALLS, nonce
    listener → dialler   ANSWERS, nonce, MAC by key over both nonces
    dialler → listener   MAC by key over both nonces
    either way           length (4 bytes) | MAC by the session's key over direction, sequence, body | body

A peer that cannot prove the job's key receives 57 bytes at most, so this is not an open echo service.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Self

from unisono.control.protocol import derive

PORTS = 3
CALLS = b"unisono?\x01"
ANSWERS = b"unisono!\x01"
NONCE_BYTES = 16
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 20
"""Maximum message size."""
_MAX_MESSAGES = 32
_PROOF_S = 10.0
_IDLE_S = 20.0
_TOTAL_S = 90.0
_HANG_UP_S = 2.0
_MAX_CONNECTIONS = 1024
_MAX_UNPROVEN = 512
_LARGE_BYTES = 1 << 16
_MAX_LARGE = 16  # bodies above 64 KiB that are in memory at a time

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


class ForeignPeer(Exception):  # noqa: N818 - named for what the peer is
    """The peer is a different program, or of a different job."""


def reach_key(token: bytes, run_nonce: str) -> bytes:
    """The key of the network check, from the job's token and the nonce of this start."""
    return derive(token, "reach", run_nonce)


@dataclass
class EchoSession:
    """One side of an authenticated connection: writes and checks messages."""

    key: bytes
    reader: Reader
    writer: Writer
    sends: bytes
    receives: bytes
    _sent: int = 0
    _received: int = 0

    async def send(self, body: bytes) -> None:
        """Sends one message."""
        mac = hmac.digest(self.key, self.sends + self._sent.to_bytes(8, "big") + body, "sha256")
        self._sent += 1
        self.writer.write(len(body).to_bytes(4, "big") + mac + body)
        await self.writer.drain()

    async def length(self) -> tuple[int, bytes]:
        """Length and MAC of the next message; call `body` next.

        Raises:
            NotOurs: if it is too long.
        """
        head = await self.reader.readexactly(4 + MAC_BYTES)
        length = int.from_bytes(head[:4], "big")
        if length > MAX_MESSAGE_BYTES:
            raise ForeignPeer(f"a message of {length} bytes")
        return length, head[4:]

    async def body(self, length: int, mac: bytes) -> bytes:
        """The message, after the MAC check.

        Raises:
            NotOurs: if it does not fit.
        """
        body = await self.reader.readexactly(length)
        wanted = hmac.digest(self.key, self.receives + self._received.to_bytes(8, "big") + body, "sha256")
        if not hmac.compare_digest(mac, wanted):
            raise ForeignPeer("a message with a wrong authentication code")
        self._received += 1
        return body


SessionHandler = Callable[[EchoSession], Awaitable[None]]


async def prove_as_dialer(reader: Reader, writer: Writer, key: bytes) -> EchoSession:
    """The dialing side of the authentication.

    Raises:
        NotOurs: if the other side is a different program, or of a different job.
        asyncio.IncompleteReadError: if it closes.
    """
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(CALLS + own_nonce)
    await writer.drain()
    answer = await reader.readexactly(len(ANSWERS))
    if answer != ANSWERS:
        raise ForeignPeer(f"a different program: it begins with `{repr(answer)[2:-1]}`")
    peer_nonce = await reader.readexactly(NONCE_BYTES)
    if not hmac.compare_digest(await reader.readexactly(MAC_BYTES), _proof(key, b"<", own_nonce, peer_nonce)):
        raise ForeignPeer("unisono with a different job or token")
    writer.write(_proof(key, b">", own_nonce, peer_nonce))
    await writer.drain()
    return EchoSession(_proof(key, b"=", own_nonce, peer_nonce), reader, writer, b">", b"<")


async def prove_as_listener(reader: Reader, writer: Writer, key: bytes) -> EchoSession:
    """The listening side of the authentication.

    Raises:
        NotOurs: if the other side sends a wrong preamble, or cannot prove the key.
        asyncio.IncompleteReadError: if it closes.
    """
    if await reader.readexactly(len(CALLS)) != CALLS:
        raise ForeignPeer("a different program")
    peer_nonce = await reader.readexactly(NONCE_BYTES)
    own_nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(ANSWERS + own_nonce + _proof(key, b"<", peer_nonce, own_nonce))
    await writer.drain()
    if not hmac.compare_digest(await reader.readexactly(MAC_BYTES), _proof(key, b">", peer_nonce, own_nonce)):
        raise ForeignPeer("no proof")
    return EchoSession(_proof(key, b"=", peer_nonce, own_nonce), reader, writer, b"<", b">")


def _proof(key: bytes, side: bytes, called: bytes, answered: bytes) -> bytes:
    return hmac.digest(key, side + called + answered, "sha256")


class EchoListener:
    """Listens from construction to `close`, in its own thread.

    Attributes:
        ports: assigned by the system.
    """

    def __init__(
        self, address: str, key: bytes, *, ports: int = PORTS, handler: "SessionHandler | None" = None
    ) -> None:
        """Binds.

        Args:
            address: literal, one of this machine's; never 0.0.0.0.
            key: of `reach_key`.
            ports: how many.
            handler: handles an authenticated caller; None: messages are echoed.

        Raises:
            OSError: if the address is not this machine's.
        """
        self.address = address
        self._key = key
        self._handler = handler
        self._sockets = list(_bound(address, ports))
        self.ports = [sock.getsockname()[1] for sock in self._sockets]
        self._handlers: set[asyncio.Task[None]] = set()
        self._unproven = 0
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._large = asyncio.Semaphore(_MAX_LARGE)
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the ports and all connections; idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(5.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.add_reader(sock, self._accept, sock)
        await self._end.wait()
        for sock in self._sockets:
            loop.remove_reader(sock)
            sock.close()
        if self._handlers:
            for task in self._handlers:
                task.cancel()
            await asyncio.wait(self._handlers, timeout=_HANG_UP_S)
        await asyncio.sleep(0)  # lets the last transport close

    def _accept(self, listening: socket.socket) -> None:
        """Accepts one caller. asyncio's server is not used: closing it while it accepts leaves the caller's socket open."""
        try:
            caller, _ = listening.accept()
        except OSError:  # it has gone already, or this process has no file left
            return
        if len(self._handlers) >= _MAX_CONNECTIONS or self._unproven >= _MAX_UNPROVEN:
            caller.close()
            return
        caller.setblocking(False)
        task = self._loop.create_task(self._answer(caller))
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        task.add_done_callback(lambda _task: caller.close())

    async def _answer(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ForeignPeer, asyncio.CancelledError):
            reader, writer = await asyncio.open_connection(sock=caller)
            try:
                async with asyncio.timeout(_TOTAL_S):
                    await self._echo(reader, writer)
            finally:
                writer.transport.abort()

    async def _echo(self, reader: Reader, writer: Writer) -> None:
        self._unproven += 1
        try:
            async with asyncio.timeout(_PROOF_S):
                session = await prove_as_listener(reader, writer, self._key)
        finally:
            self._unproven -= 1
        if self._handler is not None:
            await self._handler(session)
            return
        for _ in range(_MAX_MESSAGES):
            async with asyncio.timeout(_IDLE_S):
                length, mac = await session.length()
            async with self._large if length > _LARGE_BYTES else contextlib.nullcontext():
                async with asyncio.timeout(_IDLE_S):
                    await session.send(await session.body(length, mac))


def _bound(address: str, count: int) -> Iterator[socket.socket]:
    """Listening sockets on free ports of an address."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            sock = socket.socket(found[0], socket.SOCK_STREAM)
            made.append(sock)
            sock.bind(found[4])
            sock.listen(_MAX_CONNECTIONS)
            sock.setblocking(False)
    except BaseException:  # none stays open; raised again
        for sock in made:
            sock.close()
        raise
    yield from made
