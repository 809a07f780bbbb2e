"""The addresses of the nodes: reachable ones, one machine each, names that do not lead back to the asker."""

import ipaddress
from collections.abc import Sequence
from dataclasses import replace

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import NODES, evidence_of, finding, remedy_for
from unisono.agree.groups import odd_out, partition, told
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.naming import Who, count, enumerate_words, name_all
from unisono.agree.report import Interface, NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.causes import Evidence
from unisono.text import one_line

_BRIDGES = ("docker", "virbr", "br-", "podman", "cni", "lxcbr", "lxdbr", "veth", "flannel")


def is_loopback(address: str) -> bool:
    """Whether the address leads to the machine that uses it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address.strip().lower() in ("localhost", "ip6-localhost")


def is_bridge(interface: Interface) -> bool:
    """Whether the interface belongs to containers or virtual machines of its own host: the same on many hosts."""
    return interface.name.startswith(_BRIDGES)


def interface_of(report: NodeReport) -> Interface | None:
    """The interface that has the node's address."""
    return next((one for one in report.interfaces if report.address in one.addresses), None)


def judge_addresses(members: Members) -> Agreement:
    """No two machines have the same address, as every machine's docker0 has; and each address is one that others can dial."""
    rule = NODE_RULES["address"]
    if len(members) == 1:
        return Agreement()
    real = [(who, report) for who, report in members if not is_loopback(report.address)]
    at_one = partition((who, report.address) for who, report in real)
    shared = [group for group in at_one if len({who.host for who in group.members}) > 1]
    if not shared:
        return Agreement.noted(rule.id, "pass", f"{count(len({r.address for _, r in members}), 'address', 'addresses')}, none on two machines")  # fmt: skip
    reports = dict(members)
    group = shared[0]
    bridged = sorted(
        {one.name for who in group.members if (one := interface_of(reports[who])) and is_bridge(one)}
    )
    people = sorted(who for group in shared for who in group.members)
    summary = f"{name_all(group.members)} have the same address {one_line(str(group.value))}"
    if not bridged:
        # One machine under two names is possible, and works: whether each reaches the other is tried next.
        fix = [f"on {name_all(people)}: `ip -br addr`; two machines need two addresses"]
        return finding(
            replace(rule, violated="warn"),
            f"{summary}, which two machines cannot have",
            people=people,
            fix=fix,
        )
    summary += f" ({enumerate_words(bridged)}, which every machine with containers has)"
    evidence = [
        Evidence(where=name_all([who]), text=_interfaces_text(reports[who])) for who in group.members[:6]
    ]
    fix = [
        f"on {name_all(people)}: name the interface of the common network: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; and give --head its address"
    ]
    return finding(rule, summary, people=people, evidence=evidence, fix=fix)


def _interfaces_text(report: NodeReport) -> str:
    shown = [
        f"{one_line(one.name)} {', '.join(map(one_line, one.addresses))}"
        for one in report.interfaces
        if one.addresses
    ]
    return enumerate_words(shown, at_most=6) or "no interfaces were listed"


def judge_names(members: Members) -> Agreement:
    """The names of nodes lead to addresses that others can use; 127.0.1.1 is the usual wrong one."""
    rule = NODE_RULES["names"]
    if len(members) == 1:
        return Agreement()
    groups = partition((who, is_loopback(report.address)) for who, report in members)
    if len(groups) == 1 and groups[0].value:
        return Agreement.noted(rule.id, "pass", "all nodes are on this machine's loopback address")
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


def _loopback_address(members: Members, odd: Sequence[Who]) -> Agreement:
    rule = NODE_RULES["names"]
    groups = told(partition((who, one_line(report.address)) for who, report in members), odd)
    inside = [who for who, report in members if is_loopback(report.address)]
    outside = [who for who, report in members if not is_loopback(report.address)]
    at = _listed(sorted({report.address for who, report in members if who in inside}))
    summary = (
        f"{name_all(inside)} {'is' if len(inside) == 1 else 'are'} at a loopback address ({at}), which no other machine reaches;"
        f" {name_all(outside)} {'is' if len(outside) == 1 else 'are'} not"
    )
    return finding(
        rule, summary, people=odd,
        evidence=[*evidence_of(groups, NODES, lambda value: f"address {value}"), *_names_evidence(members, inside)],
        fix=remedy_for(rule, inside), where=inside,
    )  # fmt: skip


def _names_evidence(members: Members, people: Sequence[Who]) -> list[Evidence]:
    chosen = set(people)
    return [
        Evidence(
            where=name_all([who]),
            text=f"its own name leads to {_listed(report.host_addresses)}, the head's to {_listed(report.head_addresses)}",
        )
        for who, report in members
        if who in chosen
    ][:6]


def _listed(addresses: Sequence[str]) -> str:
    return enumerate_words([one_line(address) for address in addresses], at_most=4) or "nothing"


def _head_astray(members: Members, astray: Sequence[Who]) -> Agreement:
    rule = NODE_RULES["names"]
    reports = dict(members)
    summary = f"on {name_all(astray)} the head's name leads to {_listed(reports[astray[0]].head_addresses)}: to itself"
    return finding(
        rule, summary, people=astray, evidence=_names_evidence(members, [who for who, _ in members][:6]),
        fix=remedy_for(rule, astray),
    )  # fmt: skip


def _own_names(members: Members) -> Agreement:
    """A node whose own name leads to itself is harmless here: ranks are told their interface by its name, and addresses are numbers."""
    rule = NODE_RULES["names"]
    inside = [who for who, report in members if _only_loopback(report.host_addresses)]
    nameless = [who for who, report in members if not report.host_addresses]
    found = Agreement.noted(rule.id, "pass", "host names lead to addresses that others can use")
    if inside:
        reports = dict(members)
        summary = (
            f"the own name of {name_all(inside)} leads to {_listed(reports[inside[0]].host_addresses)}: these ranks are told their"
            " interface, other programs may go astray"
        )
        fix = [
            f"on {name_all(inside)}: mend the line of /etc/hosts; `getent hosts $(hostname)` must give a real address"
        ]
        found = finding(replace(rule, violated="warn"), summary, people=inside, fix=fix)
    if nameless:
        text = f"the own name of {name_all(nameless)} leads nowhere"
        found = found.merged(Agreement.noted(rule.id, "unknown", text, where=name_all(nameless)))
    return found


def judge_mtu(members: Members) -> Agreement:
    """The interfaces on which nodes reach each other carry packets of one size."""
    rule = NODE_RULES["mtu"]
    if len(members) == 1:
        return Agreement()
    found = [(who, one) for who, report in members if (one := interface_of(report)) and one.mtu is not None]
    unknown = sorted({who for who, _ in members}.difference(who for who, _ in found))
    missing = Agreement()
    if unknown:
        text = f"the interface that has the address of {name_all(unknown)} was not found"
        missing = Agreement.noted(rule.id, "unknown", text, where=name_all(unknown))
    outside = [(who, {"MTU": one.mtu}) for who, one in found if not one.loopback]
    if len(found) < 2:
        return missing
    return judge_keys(rule, outside, Wording(good="one size")).merged(missing)
