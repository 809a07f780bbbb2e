"""Addresses, host names, MTU and network interfaces of the nodes."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.base.causes import Evidence
from unisono.base.text import nearest, one_line
from unisono.guard.agree.agreement import (
    NODES,
    Agreement,
    ValueGroup,
    Wording,
    evidence_of,
    judge_keys,
    odd_first,
    odd_out,
    partition,
    remedy_for,
    violation,
)
from unisono.guard.agree.membership import Members
from unisono.guard.agree.reports import (
    Interface,
    Member,
    NodeReport,
    count,
    enumerate_words,
    name_all,
    settings_of,
)
from unisono.guard.agree.rules import NODE_RULES

_BRIDGES = ("docker", "virbr", "br-", "podman", "cni", "lxcbr", "lxdbr", "veth", "flannel")


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.strip().lower() in ("localhost", "ip6-localhost")


def is_bridge(interface: Interface) -> bool:
    """Whether the interface is a bridge for containers or virtual machines, which has the same
    address on many hosts.
    """
    return interface.name.startswith(_BRIDGES)


def interface_of(report: NodeReport) -> Interface | None:
    """The interface with the node's address."""
    return next((one for one in report.interfaces if report.address in one.addresses), None)


def judge_addresses(members: Members) -> Agreement:
    """No two machines have the same address, as with every machine's docker0."""
    rule = NODE_RULES["address"]
    if len(members) == 1:
        return Agreement()
    real = [(who, report) for who, report in members if not is_loopback(report.address)]
    at_one = partition((who, report.address) for who, report in real)
    shared = [group for group in at_one if len({who.host for who in group.members}) > 1]
    if not shared:
        return Agreement.noted(
            rule.id,
            "pass",
            f"{count(len({r.address for _, r in members}), 'address', 'addresses')}, each on one machine",
        )
    reports = dict(members)
    group = shared[0]
    bridged = sorted(
        {one.name for who in group.members if (one := interface_of(reports[who])) and is_bridge(one)}
    )
    people = sorted(who for group in shared for who in group.members)
    summary = f"{name_all(group.members)} have the same address {one_line(str(group.value))}"
    if not bridged:
        # One machine with two names is possible and works: whether nodes reach each other is tested
        # next.
        fix = [f"on {name_all(people)}: `ip -br addr`; two machines need different addresses"]
        return violation(
            replace(rule, violated="warn"),
            f"{summary}, which two machines cannot share",
            people=people,
            fix=fix,
        )
    summary += f" ({enumerate_words(bridged)}, which every machine with containers has)"
    evidence = [
        Evidence(where=name_all([who]), text=_interfaces_text(reports[who])) for who in group.members[:6]
    ]
    fix = [
        f"on {name_all(people)}: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the common"
        " network, and --head to its address"
    ]
    return violation(rule, summary, people=people, evidence=evidence, fix=fix)


def _interfaces_text(report: NodeReport) -> str:
    shown = [
        f"{one_line(one.name)} {', '.join(map(one_line, one.addresses))}"
        for one in report.interfaces
        if one.addresses
    ]
    return enumerate_words(shown, at_most=6) or "no interfaces listed"


def judge_names(members: Members) -> Agreement:
    """Host names resolve to addresses that other nodes can use; 127.0.1.1 is the usual wrong
    one.
    """
    rule = NODE_RULES["names"]
    if len(members) == 1:
        return Agreement()
    groups = partition((who, is_loopback(report.address)) for who, report in members)
    if len(groups) == 1 and groups[0].value:
        return Agreement.noted(rule.id, "pass", "all nodes use this machine's loopback address")
    reports = dict(members)
    if len(groups) > 1:
        return _loopback_address(
            members, odd_out(groups, suspect=lambda who: is_loopback(reports[who].address))
        )
    head_host = next((report.host for _, report in members if report.node_rank == 0), None)
    astray = [
        who
        for who, report in members
        if _only_loopback(report.head_addresses) and report.node_rank != 0 and report.host != head_host
    ]
    if astray and 2 * len(astray) <= len(members):
        return _head_astray(members, astray)
    return _own_names(members)


def _only_loopback(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(map(is_loopback, addresses))


def _loopback_address(members: Members, odd: Sequence[Member]) -> Agreement:
    rule = NODE_RULES["names"]
    groups = odd_first(partition((who, one_line(report.address)) for who, report in members), odd)
    inside = [who for who, report in members if is_loopback(report.address)]
    outside = [who for who, report in members if not is_loopback(report.address)]
    at = _listed(sorted({report.address for who, report in members if who in inside}))
    summary = (
        f"{name_all(inside)} {'is' if len(inside) == 1 else 'are'} at a loopback address ({at}), which other"
        f" machines cannot reach; {name_all(outside)} {'is' if len(outside) == 1 else 'are'} not"
    )
    return violation(
        rule,
        summary,
        people=odd,
        evidence=[
            *evidence_of(groups, NODES, lambda value: f"address {value}"),
            *_names_evidence(members, inside),
        ],
        fix=remedy_for(rule, inside),
        where=inside,
    )


def _names_evidence(members: Members, people: Sequence[Member]) -> list[Evidence]:
    chosen = set(people)
    return [
        Evidence(
            where=name_all([who]),
            text=(
                f"its own name resolves to {_listed(report.host_addresses)}, the head's to"
                f" {_listed(report.head_addresses)}"
            ),
        )
        for who, report in members
        if who in chosen
    ][:6]


def _listed(addresses: Sequence[str]) -> str:
    return enumerate_words([one_line(address) for address in addresses], at_most=4) or "nothing"


def _head_astray(members: Members, astray: Sequence[Member]) -> Agreement:
    rule = NODE_RULES["names"]
    reports = dict(members)
    summary = (
        f"on {name_all(astray)} the head's name resolves to its own address"
        f" {_listed(reports[astray[0]].head_addresses)}"
    )
    return violation(
        rule,
        summary,
        people=astray,
        evidence=_names_evidence(members, [who for who, _ in members][:6]),
        fix=remedy_for(rule, astray),
    )


def _own_names(members: Members) -> Agreement:
    """Own names that resolve to loopback: a warning, since ranks get their interface by name, and
    addresses are numeric.
    """
    rule = NODE_RULES["names"]
    inside = [who for who, report in members if _only_loopback(report.host_addresses)]
    without_addresses = [who for who, report in members if not report.host_addresses]
    agreement = Agreement.noted(rule.id, "pass", "host names resolve to addresses that others can use")
    if inside:
        reports = dict(members)
        summary = (
            f"the host name of {name_all(inside)} resolves to {_listed(reports[inside[0]].host_addresses)}:"
            " unisono sets the interface of its ranks, other programs may fail"
        )
        fix = [
            f"on {name_all(inside)}: fix the line of /etc/hosts; `getent hosts $(hostname)` must return a"
            " non-loopback address"
        ]
        agreement = violation(replace(rule, violated="warn"), summary, people=inside, fix=fix)
    if without_addresses:
        text = f"the host name of {name_all(without_addresses)} does not resolve"
        agreement = agreement.merged(
            Agreement.noted(rule.id, "unknown", text, where=name_all(without_addresses))
        )
    return agreement


def judge_mtu(members: Members) -> Agreement:
    """The interfaces between the nodes have the same MTU."""
    rule = NODE_RULES["mtu"]
    if len(members) == 1:
        return Agreement()
    interfaces = [
        (who, one) for who, report in members if (one := interface_of(report)) and one.mtu is not None
    ]
    unknown = sorted({who for who, _ in members}.difference(who for who, _ in interfaces))
    missing = Agreement()
    if unknown:
        text = f"the interface with the address of {name_all(unknown)} was not found"
        missing = Agreement.noted(rule.id, "unknown", text, where=name_all(unknown))
    outside = [(who, {"MTU": one.mtu}) for who, one in interfaces if not one.loopback]
    if len(interfaces) < 2:
        return missing
    return judge_keys(rule, outside, Wording(good="one MTU")).merged(missing)


LITERAL = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
PATTERNS = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")


@dataclass(frozen=True)
class InterfaceProblem:
    """A problem with one variable on one node."""

    variable: str
    value: str
    text: str
    fatal: bool
    fix: str


def judge_interfaces(members: Members) -> Agreement:
    """Each interface that a variable names exists, is up, and connects to the other nodes."""
    rule = NODE_RULES["interfaces"]
    if sum(report.nproc for _, report in members) < 2:
        return Agreement()
    # Several "nodes" may be on one machine.
    together = all(is_loopback(report.address) for _, report in members)
    named = [
        (who, r) for who, r in members if any(settings_of(r).get(name) for name in (*LITERAL, *PATTERNS))
    ]
    without_interfaces = [who for who, report in named if not report.interfaces]
    problems = [
        (who, problem)
        for who, report in named
        if report.interfaces
        for problem in _interface_problems(report, several=len(members) > 1 and not together)
    ]
    agreement = Agreement()
    for group in sorted(partition(problems), key=lambda group: (not group.value.fatal, group.members)):
        agreement = agreement.merged(_found_problem(group, members))
    if without_interfaces:
        text = f"the interfaces of {name_all(without_interfaces)} could not be listed"
        agreement = agreement.merged(
            Agreement.noted(rule.id, "unknown", text, where=name_all(without_interfaces))
        )
    if not problems and not without_interfaces:
        names = f"the interfaces set on {name_all(who for who, _ in named)} exist" if named else "none is set"
        return Agreement.noted(rule.id, "pass", names)
    return agreement


def _found_problem(group: ValueGroup[InterfaceProblem], members: Members) -> Agreement:
    problem = group.value
    cause = "nccl_socket_iface" if problem.variable in PATTERNS else "address_unreachable"
    rule = replace(NODE_RULES["interfaces"], cause=cause, violated="fail" if problem.fatal else "warn")
    reports = dict(members)
    there = partition((who, _listed_interfaces(reports[who].interfaces)) for who in group.members)
    return violation(
        rule,
        f"{problem.variable}={problem.value} on {name_all(group.members)}: {problem.text}",
        people=group.members,
        evidence=[
            Evidence(where=name_all(one.members), text=f"its interfaces: {one.value}") for one in there[:6]
        ],
        fix=[problem.fix.replace("{who}", name_all(group.members))],
    )


def _listed_interfaces(interfaces: Sequence[Interface]) -> str:
    words = [
        f"{one_line(one.name)} {'up' if one.up else 'down'}"
        f" {', '.join(map(one_line, one.addresses[:3])) or 'without address'}"
        for one in interfaces
    ]
    return enumerate_words(words, at_most=8)


def _interface_problems(report: NodeReport, *, several: bool) -> list[InterfaceProblem]:
    settings = settings_of(report)
    problems = [
        _literal(name, settings[name], report, several=several) for name in LITERAL if settings.get(name)
    ]
    problems += [
        _pattern(name, settings[name], report, several=several) for name in PATTERNS if settings.get(name)
    ]
    return [problem for problem in problems if problem is not None]


def _literal(variable: str, value: str, report: NodeReport, *, several: bool) -> InterfaceProblem | None:
    """The problem with a value for gloo, a comma-separated list of exact names."""
    setting = one_line(value, limit=60)
    if any(sign in value for sign in "^="):
        text = "^ and = are NCCL syntax; gloo accepts exact names only and fails"
        return InterfaceProblem(
            variable, setting, text, variable == "GLOO_SOCKET_IFNAME", _set_to(variable, report)
        )
    interfaces = {one.name: one for one in report.interfaces}
    words = [word.strip() for word in value.split(",") if word.strip()]
    absent = [word for word in words if word not in interfaces]
    if absent:
        close = nearest(absent[0], list(interfaces))
        text = f"interface {one_line(absent[0])} does not exist" + (
            f"; did you mean {close}?" if close else ""
        )
        return InterfaceProblem(
            variable, setting, text, variable == "GLOO_SOCKET_IFNAME", _set_to(variable, report)
        )
    chosen = [interfaces[word] for word in words]
    return _unusable(
        variable, setting, chosen, report, fatal=variable == "GLOO_SOCKET_IFNAME", several=several
    )


def _pattern(variable: str, value: str, report: NodeReport, *, several: bool) -> InterfaceProblem | None:
    """The problem with a value for NCCL: `eth` and `eth0,ib` are prefixes, `=eth0` is exact,
    `^docker,lo` excludes.
    """
    setting = one_line(value, limit=60)
    chosen = matching(value, report.interfaces)
    fatal = report.device_kind == "cuda"  # with gloo on CPU the variable has no effect
    if not chosen:
        text = "no interface matches"
        return InterfaceProblem(variable, setting, text, fatal, _set_to(variable, report))
    return _unusable(variable, setting, chosen, report, fatal=fatal, several=several)


def matching(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL selects for this value."""
    text = value.strip()
    excluding = text.startswith("^")
    exact = text.lstrip("^").startswith("=")
    words = [word.strip() for word in text.lstrip("^=").split(",") if word.strip()]

    def named(one: Interface) -> bool:
        # A port may follow the name: eth0:1234.
        return any(
            one.name == w.partition(":")[0] if exact else one.name.startswith(w.partition(":")[0])
            for w in words
        )

    return [one for one in interfaces if named(one) != excluding]


def _unusable(
    variable: str,
    setting: str,
    chosen: Sequence[Interface],
    report: NodeReport,
    *,
    fatal: bool,
    several: bool,
) -> InterfaceProblem | None:
    """The problem with the interfaces that would be used, or None."""
    names = enumerate_words([one_line(one.name) for one in chosen], at_most=4)
    up = [one for one in chosen if one.up]
    if not up:
        return InterfaceProblem(variable, setting, f"{names} is down", fatal, _set_to(variable, report))
    if not several:
        return None
    if all(one.loopback for one in up):
        text = f"{names} does not connect to other nodes"
        return InterfaceProblem(variable, setting, text, fatal, _set_to(variable, report))
    addresses = [address for one in up if not one.loopback for address in one.addresses]
    if report.address in addresses:
        return None
    if all(is_bridge(one) or one.loopback for one in up):
        text = f"{names} is a bridge for this machine's containers, and does not connect to other nodes"
        return InterfaceProblem(variable, setting, text, fatal, _set_to(variable, report))
    text = (
        f"{names} has {enumerate_words([one_line(a) for a in addresses], at_most=3) or 'no address'}, but the"
        f" nodes reach each other on {one_line(report.address)}"
    )
    return InterfaceProblem(variable, setting, text, fatal=False, fix=_set_to(variable, report))


def _set_to(variable: str, report: NodeReport) -> str:
    good = next((one.name for one in report.interfaces if report.address in one.addresses), None)
    if good is None:
        return f"on {{who}}: `unset {variable}`"
    return f"on {{who}}: `export {variable}={one_line(good)}`, or `unset {variable}`"
