"""What is said of the speeds between nodes. Pure."""

from collections.abc import Mapping, Sequence

from unisono.agree.display import name_node
from unisono.agree.reports import NodeReport
from unisono.doctor.check import Check, Finding, found
from unisono.doctor.network.pairs import Pair, Slow, tell_apart
from unisono.doctor.network.stream import Measured

SPEED = Check(
    "peers.speed", "Speed between the nodes",
    "one slow link or one slow node sets the pace of every step of all nodes",
    "Nodes measure in pairs, each with another partner in each round: the shortest of ten pings, and a stream of 0.3 s each way over a connection on which both have"
    " proven the job's secret. FAIL: two cannot be measured. WARN: a pair is slower than half of what is usual here, or answers five times later. A node that is"
    " slow with all partners is slow itself; a pair whose ends are quick with others has a slow link.",
    ("address_unreachable", "straggler"),
)  # fmt: skip
_LATE_S = 2e-3  # below that a difference is a matter of scheduling
_LATE = 5.0
_MOST_EXPECTED = 20e6  # of a stream that Python writes, on a machine that is busy
_SHARE = 0.3  # of what an interface calls its speed
_SHOWN = 12


def judge_speed(measured: Mapping[Pair, Measured], reports: Sequence[NodeReport]) -> Finding:
    """Who is slow, with the table of all pairs.

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
        text = f"{_pair(lost[0], hosts)}: {measured[lost[0]].trouble}"
        fix = [
            "`ping -M do -s 1472 ADDRESS` and `sudo iptables -S INPUT` on both; then the switch between them"
        ]
        return found(SPEED, "fail", text, *rows, fix=fix)
    usual = _expected(reports) if len(hosts) == 2 else None
    slow = tell_apart({pair: one.speed for pair, one in measured.items()}, usual=usual)
    if slow:
        return found(SPEED, "warn", _words(slow, measured, hosts), *rows, fix=_fixes(slow, hosts))
    late = _late(measured)
    if late:
        return found(SPEED, "warn", f"late answers: {_who(late, hosts)}", *rows, fix=_fixes(late, hosts))
    least = min(measured.values(), key=lambda one: one.speed, default=Measured())
    return found(SPEED, "pass", f"{len(measured)} pairs, the slowest {least.speed / 1e6:,.0f} MB/s", *rows)


def _late(measured: Mapping[Pair, Measured]) -> Slow | None:
    times = {pair: one.rtt_s for pair, one in measured.items() if one.rtt_s}
    if len(times) < 3 or max(times.values()) < _LATE_S:
        return None
    return tell_apart({pair: 1 / seconds for pair, seconds in times.items()}, factor=_LATE) or None


def _expected(reports: Sequence[NodeReport]) -> float | None:
    """Bytes per second that two nodes should have at the least, by what their interfaces say of themselves."""
    speeds = [
        one.speed_mbit * 125_000
        for report in reports
        for one in report.interfaces
        if one.speed_mbit and report.address in one.addresses
    ]
    return min(_SHARE * min(speeds), _MOST_EXPECTED) if len(speeds) == len(reports) else None


def _words(slow: Slow, measured: Mapping[Pair, Measured], hosts: Mapping[int, str]) -> str:
    involved = [
        one.speed
        for pair, one in measured.items()
        if pair in (*slow.links, *slow.undetermined) or set(pair) & set(slow.nodes)
    ]
    return (
        f"{_who(slow, hosts)}: {min(involved) / 1e6:,.1f} MB/s where {slow.usual / 1e6:,.0f} MB/s are usual"
    )


def _who(slow: Slow, hosts: Mapping[int, str]) -> str:
    parts = [f"{name_node(node, hosts.get(node, '?'))} is slow with every partner" for node in slow.nodes]
    parts += [
        f"the link between {_pair(pair, hosts)} is slow, both are quick with others" for pair in slow.links
    ]
    parts += [
        f"{_pair(pair, hosts)}: which of them, or the link, cannot be told" for pair in slow.undetermined[:4]
    ]
    return "; ".join(parts)


def _fixes(slow: Slow, hosts: Mapping[int, str]) -> list[str]:
    fixes = [
        f"on {name_node(node, hosts.get(node, '?'))}: its port, cable and load: `ethtool IFACE`, `ip -s link`, `top`"
        for node in slow.nodes[:2]
    ]
    if slow.links or slow.undetermined:
        fixes.append("the switches between them: another port or cable, and `ip -s link` for errors on both")
    return fixes


def _pair(pair: Pair, hosts: Mapping[int, str]) -> str:
    return " and ".join(name_node(node, hosts.get(node, "?")) for node in pair)


def _row(pair: Pair, one: Measured, hosts: Mapping[int, str]) -> str:
    if one.trouble:
        return f"{_pair(pair, hosts)}: {one.trouble}"
    rtt = f", {one.rtt_s * 1000:.2f} ms there and back" if one.rtt_s is not None else ""
    return f"{_pair(pair, hosts)}: {one.up / 1e6:,.0f} MB/s there, {one.down / 1e6:,.0f} MB/s back{rtt}"
