"""Whether every node can reach every other on the ports and with the sizes that training uses:
judged from the dial matrix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.base.causes import Evidence
from unisono.base.text import one_line
from unisono.guard.agree.agreement import Agreement, Stage, violation
from unisono.guard.agree.reports import (
    DialReport,
    Member,
    NodeReport,
    count,
    enumerate_words,
    name_all,
    name_node,
    show_bytes,
)
from unisono.guard.agree.rules import NETWORK_RULES

_STAGE = Stage("agree.network")
_SHOWN_LINKS = 10
# If only one node reports that it cannot reach another, the fault may be on either side.
_UNCERTAIN = 0.8

_OUTCOMES: dict[str, str] = {
    "refused": "connection refused: nothing listens there, or a firewall rejects it",
    "timed_out": "timed out: a firewall drops the packets",
    "unreachable": "no route to host",
    "stranger": "a different program answers there",
    "stalled": "small messages pass, large ones are lost",
}


@dataclass(frozen=True)
class Link:
    """Results of all connection attempts from one node to another."""

    source: int
    target: int
    dials: tuple[DialReport, ...]

    @property
    def bad(self) -> list[DialReport]:
        """The attempts that did not connect to the other node."""
        return [dial for dial in self.dials if dial.outcome not in ("ok", "stalled")]

    @property
    def stalled(self) -> list[DialReport]:
        """The attempts on which large messages were lost."""
        return [dial for dial in self.dials if dial.outcome == "stalled"]


def compare_network(reached: Sequence[DialReport], reports: Sequence[NodeReport]) -> Agreement:
    """The checks of connections between nodes: which are blocked, and where only small messages
    pass.

    Args:
        reached: results of each node's connection attempts, on one or more ports of each other
            node.
        reports: of all nodes.
    """
    nodes = {
        report.node_rank: report
        for report in sorted(reports, key=lambda report: (report.node_rank, report.host))
    }
    if len(nodes) < 2:
        return Agreement()
    links = _links(dial for dial in reached if dial.source in nodes and dial.target in nodes)
    return _judge_dials(links, nodes).merged(_judge_sizes(links, nodes), _judge_silence(links, nodes))


def _links(reached: Iterable[DialReport]) -> list[Link]:
    dials: dict[tuple[int, int], list[DialReport]] = {}
    for dial in reached:
        if dial.source != dial.target:
            dials.setdefault((dial.source, dial.target), []).append(dial)
    return [
        Link(
            source,
            target,
            tuple(sorted(reports, key=lambda dial: (dial.port, dial.outcome, dial.largest_bytes, dial.note))),
        )
        for (source, target), reports in sorted(dials.items())
    ]


def _judge_silence(links: Sequence[Link], nodes: Mapping[int, NodeReport]) -> Agreement:
    """A node without any attempt from or to it is unknown, which differs from unreachable."""
    dialled = {link.source for link in links} & {link.target for link in links}
    silent = _people([rank for rank in nodes if rank not in dialled], nodes)
    if not silent:
        return Agreement()
    where = name_all(silent)
    return Agreement.noted(
        "network.dial", "unknown", f"connections to or from {where} were not tested", where=where
    )


def _judge_dials(links: Sequence[Link], nodes: Mapping[int, NodeReport]) -> Agreement:
    rule = NETWORK_RULES["network.dial"]
    cut = [link for link in links if link.bad]
    if not cut:
        return Agreement.noted(rule.id, "pass", _good(links)) if links else Agreement()
    culprits, is_certain = _find_culprits(cut, links)
    people = _people(culprits, nodes)
    return violation(
        rule,
        _summary(cut, links, people, nodes),
        stage=_STAGE,
        people=people,
        evidence=_evidence(cut, links, nodes),
        fix=_fixes(cut, nodes),
        confidence=1.0 if is_certain else _UNCERTAIN,
    )


def _good(links: Sequence[Link]) -> str:
    dials = [dial for link in links for dial in link.dials]
    ports = count(len({(dial.target, dial.port) for dial in dials}), "port")
    times = [dial.rtt_s for dial in dials if dial.rtt_s is not None]
    slowest = f", at most {max(times) * 1000:.1f} ms round trip" if times else ""
    return f"{count(len(links), 'connection')} tested on {ports}, all open{slowest}"


def _find_culprits(cut: Sequence[Link], links: Sequence[Link]) -> tuple[list[int], bool]:
    """The nodes that no other reaches, else those that reach no other, else none: then it is the
    link between two.

    And whether that is certain.
    """
    broken = {(link.source, link.target) for link in cut}
    sources: dict[int, list[bool]] = {}
    targets: dict[int, list[bool]] = {}
    for link in links:
        failed = (link.source, link.target) in broken
        sources.setdefault(link.source, []).append(failed)
        targets.setdefault(link.target, []).append(failed)
    all_ranks = set(sources) | set(targets)
    for side in (targets, sources):
        lost = sorted(node for node, failed in side.items() if all(failed))
        if lost and len(lost) < len(all_ranks):
            return lost, any(len(side[node]) > 1 for node in lost)
        if lost:
            return [], True
    return [], True


def _people(ranks: Iterable[int], nodes: Mapping[int, NodeReport]) -> list[Member]:
    return [Member(rank, -1, nodes[rank].host) for rank in sorted(set(ranks))]


def _name(rank: int, nodes: Mapping[int, NodeReport]) -> str:
    return name_node(rank, nodes[rank].host)


def _summary(
    cut: Sequence[Link], links: Sequence[Link], people: Sequence[Member], nodes: Mapping[int, NodeReport]
) -> str:
    """One line: which node cannot reach which, and how attempts fail."""
    first = cut[0].bad[0]
    how = _OUTCOMES[first.outcome] + _ports(cut[0])
    unreached = _unreached(cut, links)
    blamed = {who.node_rank for who in people}
    if blamed and blamed <= unreached and len(links) > 2:
        also = (
            ", and it reaches no other node" if blamed == _reaching_nobody(links) and len(blamed) == 1 else ""
        )
        return f"no node reaches {name_all(people)} at {_address(cut, blamed)}{also}: {how}"
    if people and not blamed & unreached:
        return f"{name_all(people)} reach{'es' if len(people) == 1 else ''} no other node: {how}"
    if len(cut) == len(links) == 2:
        both = _people([first.source, first.target], nodes)
        return f"{name_all(both)} cannot reach each other ({_endpoint(first)}): {how}"
    if len(cut) == len(links) and len(links) > 2:
        return f"no node reaches any other ({count(len(cut), 'connection')} tested): {how}"
    text = (
        f"{_name(first.source, nodes)} cannot reach {_name(first.target, nodes)} at {_endpoint(first)}: {how}"
    )
    if len(cut) > 1:
        return f"{text}; and {count(len(cut) - 1, 'more connection')}"
    back = any((link.source, link.target) == (first.target, first.source) for link in links)
    return f"{text}; the other direction works" if back else text


def _unreached(cut: Sequence[Link], links: Sequence[Link]) -> set[int]:
    open_links = {link.target for link in links if not link.bad}
    return {link.target for link in cut} - open_links


def _reaching_nobody(links: Sequence[Link]) -> set[int]:
    return {link.source for link in links} - {link.source for link in links if not link.bad}


def _address(cut: Sequence[Link], targets: set[int]) -> str:
    addresses = dict.fromkeys(
        one_line(dial.address) for link in cut for dial in link.bad if link.target in targets
    )
    return enumerate_words(list(addresses), at_most=3)


def _endpoint(dial: DialReport) -> str:
    return f"{one_line(dial.address)} port {dial.port}"


def _ports(link: Link) -> str:
    """Which ports are open and which are not, if that differs, as with a firewall's port range."""
    bad = sorted({dial.port for dial in link.bad})
    good = sorted({dial.port for dial in link.dials}.difference(bad))
    if not good or not bad:
        return ""
    return (
        f" (port {enumerate_words([str(p) for p in bad], at_most=3)}; open:"
        f" {enumerate_words([str(p) for p in good], at_most=3)})"
    )


def _evidence(cut: Sequence[Link], links: Sequence[Link], nodes: Mapping[int, NodeReport]) -> list[Evidence]:
    evidence = [
        Evidence(
            where=f"{_name(link.source, nodes)} → {_name(link.target, nodes)}",
            text=(
                f"{_endpoint(link.bad[0])}:"
                f" {_OUTCOMES[link.bad[0].outcome]}{_ports(link)}{_note(link.bad[0])}"
            ),
        )
        for link in cut[:_SHOWN_LINKS]
    ]
    if len(cut) > _SHOWN_LINKS:
        evidence.append(
            Evidence(where="the network", text=f"{len(cut) - _SHOWN_LINKS:,} more connections are blocked")
        )
    evidence.append(
        Evidence(
            where="the network",
            text=f"{len(links) - len(cut):,} of {count(len(links), 'connection')} are open",
        )
    )
    return evidence


def _note(dial: DialReport) -> str:
    return f" ({one_line(dial.note, limit=120)})" if dial.note else ""


def _fixes(cut: Sequence[Link], nodes: Mapping[int, NodeReport]) -> list[str]:
    """Commands for the observed failures; ports are chosen at run time, so opening single ones does
    not help.
    """
    outcomes = {dial.outcome for link in cut for dial in link.bad}
    first = cut[0]
    source, target = nodes[first.source], nodes[first.target]
    callers = ",".join(
        one_line(nodes[link.source].address) for link in cut[:_SHOWN_LINKS] if link.target == first.target
    )
    fixes = []
    if "stranger" in outcomes:
        fixes.append(
            f"on {name_node(first.target, target.host)}: its address {one_line(target.address)} belongs to a"
            " different machine; choose the common network: `ip -br addr`, then set --head and"
            " GLOO_SOCKET_IFNAME"
        )
    if outcomes & {"timed_out", "refused"}:
        fixes.append(
            f"on {name_node(first.target, target.host)}: `sudo iptables -I INPUT -p tcp -s {callers} -j"
            " ACCEPT`; open all ports above 1023 between the nodes, in both directions"
        )
    if "unreachable" in outcomes:
        fixes.append(
            f"on {name_node(first.source, source.host)}: `ip route get {one_line(target.address)}` must"
            " return a route"
        )
    if len(outcomes & {"timed_out", "refused"}) and _has_other_address(target):
        fixes.append(
            "or use a different network that both share: `ip -br addr` on each, then set --head and"
            " GLOO_SOCKET_IFNAME"
        )
    return fixes


def _has_other_address(report: NodeReport) -> bool:
    return any(
        address != report.address
        for one in report.interfaces
        if not one.loopback
        for address in one.addresses
    )


def _passes(n_bytes: int) -> str:
    return "1 byte passes" if n_bytes == 1 else f"{n_bytes:,} bytes pass"


def _judge_sizes(links: Sequence[Link], nodes: Mapping[int, NodeReport]) -> Agreement:
    rule = NETWORK_RULES["network.size"]
    stalled = [link for link in links if link.stalled]
    if not stalled:
        whole = [[dial.largest_bytes for dial in link.dials if dial.outcome == "ok"] for link in links]
        # The largest goes to one port of a peer only.
        largest = [max(sizes) for sizes in whole if sizes]
        return (
            Agreement.noted(rule.id, "pass", f"up to {show_bytes(min(largest))} returned complete")
            if largest
            else Agreement()
        )
    first = stalled[0].stalled[0]
    lost = min((size for size in first.tried_bytes if size > first.largest_bytes), default=0)
    people = _people(_always_there(stalled, links), nodes)
    summary = (
        f"{_passes(first.largest_bytes)} from {_name(first.source, nodes)} to {_name(first.target, nodes)},"
        f" {lost:,} do not: packets are larger than the path MTU and are dropped silently"
    )
    if len(stalled) > 1:
        summary += f"; and {count(len(stalled) - 1, 'more connection')}"
    ends = _people({rank for link in stalled for rank in (link.source, link.target)}, nodes)
    evidence = [
        Evidence(
            where=f"{_name(link.source, nodes)} → {_name(link.target, nodes)}",
            text=(
                f"{_endpoint(link.stalled[0])}: the largest that returned has"
                f" {link.stalled[0].largest_bytes:,} bytes"
            ),
        )
        for link in stalled[:_SHOWN_LINKS]
    ] + [Evidence(where=name_all([who]), text=_mtu_text(nodes[who.node_rank])) for who in ends[:_SHOWN_LINKS]]
    device = next((name for who in ends if (name := _interface(nodes[who.node_rank])[0])), "IFACE")
    fix = [
        (
            f"workaround on {name_all(ends)}: `sudo ip link set dev {device} mtu 1400`; then find the switch"
            " or tunnel with the smaller MTU"
        ),
        (
            f"to reproduce: `ping -M do -s 1472 {one_line(first.address)}` fails while `ping"
            f" {one_line(first.address)}` works"
        ),
    ]
    return violation(rule, summary, stage=_STAGE, people=people, evidence=evidence, fix=fix, where=ends)


def _always_there(stalled: Sequence[Link], links: Sequence[Link]) -> list[int]:
    """The node that is in every stalled link, if several partners report it; a single link blames
    no node.
    """
    partners: dict[int, set[int]] = {}
    for link in stalled:
        partners.setdefault(link.source, set()).add(link.target)
        partners.setdefault(link.target, set()).add(link.source)
    always = [
        node
        for node, others in partners.items()
        if len(others) > 1 and all(node in (w.source, w.target) for w in stalled)
    ]
    all_ranks = {rank for link in links for rank in (link.source, link.target)}
    return always if len(always) == 1 and len(all_ranks) > 2 else []


def _interface(report: NodeReport) -> tuple[str, int | None]:
    one = next((one for one in report.interfaces if report.address in one.addresses), None)
    return (one_line(one.name), one.mtu) if one else ("", None)


def _mtu_text(report: NodeReport) -> str:
    name, mtu = _interface(report)
    return (
        f"{name} has MTU {mtu if mtu is not None else 'unknown'}"
        if name
        else "the interface of its address is unknown"
    )
