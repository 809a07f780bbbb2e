"""Reachability of other nodes: dials their ports, and sends messages of growing size that their
echo service must return.

Distinguishes refused, timed out, unreachable, a different program, and "small messages pass, large
ones do not". The echo service has three ports on the chosen address, for the duration of the check.

    dialler → listener   CALLS, nonce
    listener → dialler   ANSWERS, nonce, MAC by key over both nonces
    dialler → listener   MAC by key over both nonces
    either way           length (4 bytes) | MAC | body
                         MAC by the session's key over direction, sequence, body

A peer that cannot prove the job's key receives 57 bytes at most, so this is not an open echo
service.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Self, TypeVar

from unisono.base.text import one_line
from unisono.guard.control.protocol import derive

SIZES = (1, 1_400, 9_000, 1 << 16, 1 << 20)
"""Bytes: smaller than any packet, just below and above what one packet carries, and two that fill
buffers.
"""
MAX_PEERS = 16
_BRIEF = 3  # so many of the sizes for a peer that everybody dials
_ROUND_TRIPS = 3
_AT_ONCE = 64
_LARGE_AT_ONCE = 4
_LOST_AFTER = 2
_MAX_PORTS = 8

Result = TypeVar("Result")
DialOutcome = Literal["ok", "refused", "timed_out", "unreachable", "stranger", "stalled"]
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
        expected = hmac.digest(self.key, self.receives + self._received.to_bytes(8, "big") + body, "sha256")
        if not hmac.compare_digest(mac, expected):
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
        """Accepts one caller. asyncio's server is not used: closing it while it accepts leaves the
        caller's socket open.
        """
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
            entry = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            sock = socket.socket(entry[0], socket.SOCK_STREAM)
            made.append(sock)
            sock.bind(entry[4])
            sock.listen(_MAX_CONNECTIONS)
            sock.setblocking(False)
    except BaseException:  # none stays open; raised again
        for sock in made:
            sock.close()
        raise
    yield from made


@dataclass(frozen=True)
class Peer:
    """A node to dial, and its address.

    Attributes:
        ports: those of its `EchoListener`.
        brief: only small messages, since every node dials it.
    """

    node_rank: int
    host: str
    address: str
    ports: tuple[int, ...]
    brief: bool = False

    def to_json(self) -> list[Any]:
        """For the message `dial`."""
        return [self.node_rank, self.host, self.address, list(self.ports), self.brief]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Reads one of the message `dial`.

        Raises:
            ValueError: if it is invalid.
        """
        match value:
            case [int(rank), str(host), str(address), [*ports], *optional] if len(
                optional
            ) <= 1 and _are_ports(ports):
                return cls(
                    rank, one_line(host, limit=255), address, tuple(ports), bool(optional and optional[0])
                )
        raise ValueError("not a peer; a peer is [node_rank, host, address, ports, brief]")


@dataclass(frozen=True)
class DialResult:
    """Result of dialing one port of a peer.

    Attributes:
        outcome: stranger: a different program or job responded; stalled: a message was not echoed,
            smaller ones were.
        tried_bytes: all sizes up to the first failure.
        rtt_s: shortest round-trip time of one byte.
        note: the system's error, or the response.
    """

    source: int
    target: int
    address: str
    port: int
    outcome: DialOutcome
    largest_bytes: int
    tried_bytes: list[int]
    rtt_s: float | None
    note: str = ""


@dataclass(frozen=True)
class DialLimits:
    """Time limits in seconds: for a connection, for each echo, and for a slow peer.

    A machine under load responds late, and a link that loses packets never. The kernel knows which:
    after `message_s` the connection is given up if its packets are repeatedly unacknowledged, else
    after `patient_s`.
    """

    connect_s: float = 3.0
    message_s: float = 3.0
    patient_s: float = 15.0


def choose_peers(nodes: Sequence[Peer], node_rank: int, *, most: int = MAX_PEERS) -> list[Peer]:
    """The peers that a node dials: all others if they are few, else neighbors in a ring, one, two,
    four, … places away as far as half the ring, then the nearest ones left, and the head.

    So every node is dialled from both sides by `most` others, whatever the number of nodes. The
    head is dialled by all nodes, since all need it; by those that are not its neighbors with one
    port and small messages.

    Args:
        nodes: all of them, this one among them.
        most: maximum number of neighbors.
    """
    ordered = sorted(nodes, key=lambda peer: peer.node_rank)
    others = [peer for peer in ordered if peer.node_rank != node_rank]
    if len(others) <= most:
        return others
    own_place = next(index for index, peer in enumerate(ordered) if peer.node_rank == node_rank)
    half = len(ordered) // 2
    distances = dict.fromkeys([*(1 << power for power in range(half.bit_length())), *range(1, half + 1)])
    steps = dict.fromkeys(way * distance % len(ordered) for distance in distances for way in (1, -1))
    chosen = [ordered[(own_place + step) % len(ordered)] for step in islice(steps, most)]
    head = ordered[0]
    if head.node_rank != node_rank and head not in chosen:
        chosen.append(Peer(head.node_rank, head.host, head.address, head.ports[:1], brief=True))
    return chosen


def dial_all(
    peers: Sequence[Peer], key: bytes, *, source: int, limits: DialLimits | None = None
) -> list[DialResult]:
    """Dials every port of every peer concurrently; one result for each, in order.

    It blocks for three seconds where connections or packets are lost, for about twenty where a peer
    hardly moves. Large messages go to the first port of a peer alone: a firewall knows ports, the
    size of packets belongs to the way.

    The head calls `choose_peers` for each node, so that a job of a thousand nodes does not make a
    million connections.

    Args:
        key: of `reach_key`.
        source: this node's number, for the results.
        limits: time limits.
    """
    return asyncio.run(_dial_all(peers, key, source, limits or DialLimits()))


async def _dial_all(peers: Sequence[Peer], key: bytes, source: int, limits: DialLimits) -> list[DialResult]:
    room, large = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_LARGE_AT_ONCE)

    async def one(peer: Peer, port: int) -> DialResult:
        async with room:
            return await _Dial(peer, port, source, limits, large).run(key)

    return await asyncio.gather(*(one(peer, port) for peer in peers for port in peer.ports))


@dataclass
class _Dial:
    """One connection to one port, and its progress."""

    peer: Peer
    port: int
    source: int
    limits: DialLimits
    large: asyncio.Semaphore
    largest: int = 0
    rtt_s: float | None = None

    async def run(self, key: bytes) -> DialResult:
        limits = self.limits
        try:
            async with asyncio.timeout(limits.connect_s):
                sock = await _connect(self.peer.address, self.port)
        except ConnectionRefusedError:
            return self._ended("refused", "nothing listens there, or a firewall rejects it")
        except TimeoutError:
            return self._ended("timed_out", f"no answer for {limits.connect_s:g} s")
        except OSError as error:
            return self._ended("unreachable", error.strerror or str(error))
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            return await self._run_session(reader, writer, key, sock)
        finally:
            writer.transport.abort()
            await asyncio.sleep(0)  # lets the transport close its socket

    async def _run_session(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, sock: socket.socket
    ) -> DialResult:
        try:
            session = await _within_limits(prove_as_dialer(reader, writer, key), sock, self.limits)
        except ForeignPeer as foreign:
            return self._ended("stranger", str(foreign))
        except TimeoutError:
            return self._ended("timed_out", "the connection was accepted, but no data arrived")
        except (OSError, EOFError):
            return self._ended("stranger", "the connection was accepted and closed without our answer")
        return await self._exchange(session, sock)

    async def _exchange(self, session: EchoSession, sock: socket.socket) -> DialResult:
        brief = self.peer.brief or self.port != self.peer.ports[0]
        tried: list[int] = []
        for size in SIZES[:_BRIEF] if brief else SIZES:
            tried.append(size)
            try:
                for _ in range(_ROUND_TRIPS if size == SIZES[0] else 1):
                    async with self.large if size > SIZES[_BRIEF - 1] else contextlib.nullcontext():
                        await _within_limits(self._echo(session, size), sock, self.limits)
            except TimeoutError:
                return self._ended("stalled", f"{size:,} bytes did not come back", tried)
            except (OSError, EOFError, ForeignPeer) as error:
                return self._ended("stalled", f"{size:,} bytes: {_error_text(error)}", tried)
            self.largest = size
        return self._ended("ok", "", tried)

    async def _echo(self, session: EchoSession, size: int) -> None:
        body = secrets.token_bytes(size)
        began = time.perf_counter()
        await session.send(body)
        if await session.body(*await session.length()) != body:
            raise ForeignPeer("different bytes came back")
        if size == SIZES[0]:
            taken = time.perf_counter() - began
            self.rtt_s = taken if self.rtt_s is None else min(taken, self.rtt_s)

    def _ended(self, outcome: DialOutcome, note: str, tried: Sequence[int] = ()) -> DialResult:
        return DialResult(
            source=self.source,
            target=self.peer.node_rank,
            address=self.peer.address,
            port=self.port,
            outcome=outcome,
            largest_bytes=self.largest,
            tried_bytes=list(tried),
            rtt_s=self.rtt_s,
            note=one_line(note, limit=200),
        )


async def _within_limits(
    work: Coroutine[Any, Any, Result], sock: socket.socket, limits: DialLimits
) -> Result:
    """The result of `work` on this connection.

    Raises:
        TimeoutError: if packets are lost, or it exceeds all limits.
    """
    task = asyncio.ensure_future(work)
    ended = time.monotonic() + limits.patient_s
    wait_s = limits.message_s
    while not (await asyncio.wait({task}, timeout=wait_s))[0]:
        wait_s = min(1.0, limits.message_s)
        if _loses_packets(sock) or time.monotonic() >= ended:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, EOFError, ForeignPeer):
                await task
            raise TimeoutError
    return task.result()


def _loses_packets(sock: socket.socket) -> bool:
    """Whether the same packet was retransmitted at least twice (tcpi_retransmits of tcp(7)); true
    if unknown.
    """
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] >= _LOST_AFTER
    except (OSError, AttributeError):
        return True


async def _connect(address: str, port: int) -> socket.socket:
    """A connected socket.

    Raises:
        OSError: also if the address is not literal.
    """
    entry = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    sock = socket.socket(entry[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, entry[4])
    except BaseException:  # a timeout must not leave a socket either; raised again
        sock.close()
        raise
    return sock


def _error_text(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the peer closed the connection"
    return getattr(error, "strerror", None) or str(error)


def _are_ports(ports: list[Any]) -> bool:
    return len(ports) <= _MAX_PORTS and all(isinstance(port, int) and 0 < port < 1 << 16 for port in ports)
