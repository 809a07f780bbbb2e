"""Latency and bandwidth between nodes: who measures with whom, the measurement, and what the
figures say.

A node that is slow with every partner is slow itself; a slow pair whose nodes are both fast with
others has a slow link. Two rounds with different partners tell these apart; up to eight nodes
measure all pairs. Ports, authentication and messages are those of `control.reachability`. The
stream itself is unauthenticated zeros: only its length is used.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from unisono.base.files import parse_json
from unisono.base.text import one_line
from unisono.front.checks.check import DoctorCheck, Finding, found
from unisono.guard.agree.reports import NodeReport, name_node
from unisono.guard.control.reachability import EchoListener, EchoSession, ForeignPeer, prove_as_dialer

Pair = tuple[int, int]
"""Two nodes, the lower first."""

ALL_PAIRS_UP_TO = 8
"""Nodes; above that there are two rounds, or three for an odd number, so that each node has at
least two partners.
"""


@dataclass(frozen=True, slots=True)
class SlowParts:
    """Slow nodes and links.

    Attributes:
        links: slow pairs of nodes that are fast with others.
        undetermined: slow pairs for which this is unknown.
    """

    nodes: tuple[int, ...] = ()
    links: tuple[Pair, ...] = ()
    undetermined: tuple[Pair, ...] = ()
    usual: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.nodes or self.links or self.undetermined)


def rounds(nodes: Iterable[int]) -> list[list[Pair]]:
    """Pairs that measure in each round: a node has at most one partner per round, so that pairs do
    not disturb each other.
    """
    places: list[int | None] = [*sorted(nodes)]
    if len(places) < 2:
        return []
    few = len(places) <= ALL_PAIRS_UP_TO
    odd = len(places) % 2
    if odd:
        places.append(None)
    count = len(places) - 1 if few else 2 + odd
    pairings = []
    for _ in range(count):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        pairings.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]  # the first stays, the others go round
    return pairings


def find_slow(speeds: Mapping[Pair, float], *, factor: float = 2.0, usual: float | None = None) -> SlowParts:
    """Slow nodes and slow links.

    Args:
        speeds: of each measured pair; more is better, 0: no connection.
        factor: slow is this many times below normal.
        usual: the expected speed; None: the upper quartile of the measurements, since with three
            nodes one slow node makes two of three pairs slow, and with them the median.
    """
    if not speeds:
        return SlowParts()
    ordered = sorted(speeds.values())
    reference = ordered[ceil(0.75 * len(ordered)) - 1] if usual is None else usual
    slow = {pair for pair, speed in speeds.items() if speed * factor < reference}
    partners: dict[int, list[Pair]] = {}
    for pair in speeds:
        for node in pair:
            partners.setdefault(node, []).append(pair)
    nodes = _slow_nodes(partners, slow)
    isolated = sorted(pair for pair in slow if not nodes.intersection(pair))
    quick = {node for node, pairs in partners.items() if any(pair not in slow for pair in pairs)}
    links = tuple(pair for pair in isolated if quick.issuperset(pair))
    return SlowParts(
        tuple(sorted(nodes)), links, tuple(pair for pair in isolated if pair not in links), reference
    )


def _slow_nodes(partners: Mapping[int, list[Pair]], slow: set[Pair]) -> set[int]:
    """Nodes slow with each of two or more partners, at least one of which is not: otherwise the
    whole network may be slow.
    """
    always = {node for node, pairs in partners.items() if len(pairs) > 1 and slow.issuperset(pairs)}
    return {
        node
        for node in always
        if any(other not in always for pair in partners[node] for other in pair if other != node)
    }


STREAM_S = 0.3
_ROUND_TRIPS = 10
_CHUNK = bytes(256 << 10)
_MAX_STREAM_S = 5.0
_TOTAL_S = 15.0
_PING, _UP, _DOWN = b"ping", b"up", b"down"
_END = bytes(4)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed between two nodes.

    Attributes:
        rtt_s: shortest round-trip time of a few bytes; None: no reply.
        up: bytes per second from the dialling node.
        trouble: why it could not be measured; empty: measured.
    """

    rtt_s: float | None = None
    up: float = 0.0
    down: float = 0.0
    trouble: str = ""

    @property
    def speed(self) -> float:
        """The speed of the slower direction."""
        return min(self.up, self.down)


def stream_listener(address: str, key: bytes) -> EchoListener:
    """Listens on a port of this address and answers measurements, until it is closed.

    Raises:
        OSError: if the address is not this machine's.
    """
    return EchoListener(address, key, ports=1, handler=_answer)


def measure(address: str, port: int, key: bytes) -> LinkSpeed:
    """Pings a peer, and streams to it and from it; a few tenths of a second each.

    Network errors are in the result.
    """
    try:
        return asyncio.run(_measure(address, port, key))
    except TimeoutError:
        return LinkSpeed(trouble=f"no result within {_TOTAL_S:g} s")
    except (OSError, EOFError, ForeignPeer, ValueError) as error:
        return LinkSpeed(trouble=one_line(str(error) or type(error).__name__, limit=200))


async def _measure(address: str, port: int, key: bytes) -> LinkSpeed:
    async with asyncio.timeout(_TOTAL_S):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            session = await prove_as_dialer(reader, writer, key)
            rtt_s = min([await _ping(session) for _ in range(_ROUND_TRIPS)])
            await session.send(_UP)
            await _send_stream(writer)
            up = float(parse_json(await _message(session))["bytes_per_second"])
            await session.send(_DOWN)
            down = await _count_stream(reader)
            return LinkSpeed(rtt_s, up, down)
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
    """The listener's side, until the caller disconnects."""
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
                    raise ForeignPeer("an unknown request")


async def _send_stream(writer: asyncio.StreamWriter) -> None:
    until = time.monotonic() + STREAM_S
    head = len(_CHUNK).to_bytes(4, "big")
    while time.monotonic() < until:
        writer.write(head + _CHUNK)
        await writer.drain()
    writer.write(_END)
    await writer.drain()


async def _count_stream(reader: asyncio.StreamReader) -> float:
    """Bytes per second, measured from the first byte."""
    head = await reader.readexactly(4)
    began, total = time.monotonic(), 0
    while head != _END:
        length = int.from_bytes(head, "big")
        if length > len(_CHUNK) or time.monotonic() - began > _MAX_STREAM_S + STREAM_S:
            raise ForeignPeer("a stream that does not end")
        await reader.readexactly(length)
        total += length
        head = await reader.readexactly(4)
    return total / max(time.monotonic() - began, 1e-6)


SPEED = DoctorCheck(
    "peers.speed",
    "speed between the nodes",
    "one slow link or node slows down every step of all nodes",
    "Nodes measure in pairs, with a different partner in each round: the shortest of ten pings, and a stream"
    " of 0.3 s each way over a connection on which both have proven the job's token. FAIL: a pair cannot be"
    " measured. WARN: a pair has less than half of the normal bandwidth, or five times the latency. A node"
    " that is slow with all partners is slow itself; a pair whose nodes are fast with others has a slow"
    " link.",
    ("address_unreachable", "straggler"),
)
_LATE_S = 2e-3  # below that a difference is a matter of scheduling
_LATE = 5.0
_MAX_EXPECTED = 20e6  # of a stream that Python writes, on a machine that is busy
_SHARE = 0.3  # of what an interface calls its speed
_SHOWN = 12


def judge_speed(measured: Mapping[Pair, LinkSpeed], reports: Sequence[NodeReport]) -> Finding:
    """The finding on speed, with the slowest pairs.

    Args:
        measured: of each pair.
        reports: of all nodes.
    """
    hosts = {report.node_rank: report.host for report in reports}
    rows = [
        _row(pair, one, hosts)
        for pair, one in sorted(measured.items(), key=lambda item: item[1].speed)[:_SHOWN]
    ]
    lost = [pair for pair, one in sorted(measured.items()) if one.trouble]
    if lost:
        text = f"{_pair_text(lost[0], hosts)}: {measured[lost[0]].trouble}"
        fix = [
            "`ping -M do -s 1472 ADDRESS` and `sudo iptables -S INPUT` on both; then check the switch between"
            " them"
        ]
        return found(SPEED, "fail", text, *rows, fix=fix)
    usual = _expected(reports) if len(hosts) == 2 else None
    slow = find_slow({pair: one.speed for pair, one in measured.items()}, usual=usual)
    if slow:
        return found(SPEED, "warn", _slow_text(slow, measured, hosts), *rows, fix=_fixes(slow, hosts))
    late = _late(measured)
    if late:
        return found(SPEED, "warn", f"high latency: {_culprits(late, hosts)}", *rows, fix=_fixes(late, hosts))
    least = min(measured.values(), key=lambda one: one.speed, default=LinkSpeed())
    return found(
        SPEED, "pass", f"{len(measured)} pairs, the slowest with {least.speed / 1e6:,.0f} MB/s", *rows
    )


def _late(measured: Mapping[Pair, LinkSpeed]) -> SlowParts | None:
    times = {pair: one.rtt_s for pair, one in measured.items() if one.rtt_s}
    if len(times) < 3 or max(times.values()) < _LATE_S:
        return None
    return find_slow({pair: 1 / seconds for pair, seconds in times.items()}, factor=_LATE) or None


def _expected(reports: Sequence[NodeReport]) -> float | None:
    """Minimum bytes per second between two nodes, from the nominal speed of their interfaces."""
    speeds = [
        one.speed_mbit * 125_000
        for report in reports
        for one in report.interfaces
        if one.speed_mbit and report.address in one.addresses
    ]
    return min(_SHARE * min(speeds), _MAX_EXPECTED) if len(speeds) == len(reports) else None


def _slow_text(slow: SlowParts, measured: Mapping[Pair, LinkSpeed], hosts: Mapping[int, str]) -> str:
    involved = [
        one.speed
        for pair, one in measured.items()
        if pair in (*slow.links, *slow.undetermined) or set(pair) & set(slow.nodes)
    ]
    return (
        f"{_culprits(slow, hosts)}: {min(involved) / 1e6:,.1f} MB/s, normal is {slow.usual / 1e6:,.0f} MB/s"
    )


def _culprits(slow: SlowParts, hosts: Mapping[int, str]) -> str:
    parts = [f"{name_node(node, hosts.get(node, '?'))} is slow with every partner" for node in slow.nodes]
    parts += [
        f"the link between {_pair_text(pair, hosts)} is slow, both nodes are fast with others"
        for pair in slow.links
    ]
    parts += [
        f"{_pair_text(pair, hosts)}: unknown whether one of the nodes or the link is slow"
        for pair in slow.undetermined[:4]
    ]
    return "; ".join(parts)


def _fixes(slow: SlowParts, hosts: Mapping[int, str]) -> list[str]:
    fixes = [
        f"on {name_node(node, hosts.get(node, '?'))}: check port, cable and load: `ethtool IFACE`, `ip -s"
        " link`, `top`"
        for node in slow.nodes[:2]
    ]
    if slow.links or slow.undetermined:
        fixes.append(
            "check the switches between them: try a different port or cable, and see `ip -s link` for errors"
            " on both"
        )
    return fixes


def _pair_text(pair: Pair, hosts: Mapping[int, str]) -> str:
    return " and ".join(name_node(node, hosts.get(node, "?")) for node in pair)


def _row(pair: Pair, one: LinkSpeed, hosts: Mapping[int, str]) -> str:
    if one.trouble:
        return f"{_pair_text(pair, hosts)}: {one.trouble}"
    rtt = f", {one.rtt_s * 1000:.2f} ms round trip" if one.rtt_s is not None else ""
    return f"{_pair_text(pair, hosts)}: {one.up / 1e6:,.0f} MB/s there, {one.down / 1e6:,.0f} MB/s back{rtt}"
