"""Reachability of other nodes: dials their ports, and sends messages of growing size that must be echoed.

Distinguishes refused, timed out, unreachable, a different program, and "small messages pass, large ones do not".
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from unisono.control.echo import EchoSession, ForeignPeer, prove_as_dialer
from unisono.text import one_line

SIZES = (1, 1_400, 9_000, 1 << 16, 1 << 20)
"""Bytes: smaller than any packet, just below and above what one packet carries, and two that fill buffers."""
MAX_PEERS = 16
_BRIEF = 3  # so many of the sizes for a peer that everybody dials
_ROUND_TRIPS = 3
_AT_ONCE = 64
_LARGE_AT_ONCE = 4
_LOST_AFTER = 2
_MAX_PORTS = 8

Result = TypeVar("Result")
DialOutcome = Literal["ok", "refused", "timed_out", "unreachable", "stranger", "stalled"]


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
            case [int(rank), str(host), str(address), [*ports], *rest] if len(rest) <= 1 and _are_ports(
                ports
            ):
                return cls(rank, one_line(host, limit=255), address, tuple(ports), bool(rest and rest[0]))
        raise ValueError("no peer: [node_rank, host, address, ports, brief] is one")


@dataclass(frozen=True)
class DialResult:
    """Result of dialing one port of a peer.

    Attributes:
        outcome: stranger: a different program or job responded; stalled: a message was not echoed, smaller ones were.
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

    A machine under load responds late, and a link that loses packets never. The kernel knows which: after `message_s` the
    connection is given up if its packets are repeatedly unacknowledged, else after `patient_s`.
    """

    connect_s: float = 3.0
    message_s: float = 3.0
    patient_s: float = 15.0


def choose_peers(nodes: Sequence[Peer], node_rank: int, *, most: int = MAX_PEERS) -> list[Peer]:
    """The peers that a node dials: all others if they are few, else neighbors in a ring, one, two, four, … places away, and the head.

    So every node is dialled from both sides by `most` others, whatever the number of nodes. The head is dialled by
    all nodes, since all need it; by those that are not its neighbors with one port and small messages.

    Args:
        nodes: all of them, this one among them.
        most: maximum number of neighbors.
    """
    ordered = sorted(nodes, key=lambda peer: peer.node_rank)
    others = [peer for peer in ordered if peer.node_rank != node_rank]
    if len(others) <= most:
        return others
    own_place = next(place for place, peer in enumerate(ordered) if peer.node_rank == node_rank)
    steps = [way * (1 << power) for power in range((most + 1) // 2) for way in (1, -1)][:most]
    places = dict.fromkeys((own_place + step) % len(ordered) for step in steps)
    chosen = [ordered[place] for place in places if place != own_place]
    head = ordered[0]
    if head.node_rank != node_rank and head not in chosen:
        chosen.append(Peer(head.node_rank, head.host, head.address, head.ports[:1], brief=True))
    return chosen


def dial_all(
    peers: Sequence[Peer], key: bytes, *, source: int, limits: DialLimits | None = None
) -> list[DialResult]:
    """Dials every port of every peer concurrently; one result for each, in order.

    It blocks for three seconds where connections or packets are lost, for about twenty where a peer hardly moves. Large messages
    go to the first port of a peer alone: a firewall knows ports, the size of packets belongs to the way.

    The head calls `choose_peers` for each node, so that a job of a thousand nodes does not make a million connections.

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
    """Whether the same packet was retransmitted at least twice (tcpi_retransmits of tcp(7)); true if unknown."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] >= _LOST_AFTER
    except (OSError, AttributeError):
        return True


async def _connect(address: str, port: int) -> socket.socket:
    """A connected socket.

    Raises:
        OSError: also if the address is not literal.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    sock = socket.socket(found[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, found[4])
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
