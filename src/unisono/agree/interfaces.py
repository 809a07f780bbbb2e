"""Variables that name a network interface: gloo takes exact names, NCCL prefixes and its signs ^ and =."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.agree.addresses import is_bridge, is_loopback
from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import finding
from unisono.agree.groups import Group, partition
from unisono.agree.naming import enumerate_words, name_all
from unisono.agree.report import Interface, NodeReport, settings_of
from unisono.agree.rules import NODE_RULES
from unisono.causes import Evidence
from unisono.text import nearest, one_line

LITERAL = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
PATTERNS = ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one variable on one node; the order of the fields groups equal ones."""

    variable: str
    value: str
    text: str
    fatal: bool
    fix: str


def judge_interfaces(members: Members) -> Agreement:
    """Each interface that a variable names is there, up, and leads to the other nodes."""
    rule = NODE_RULES["interfaces"]
    if sum(report.nproc for _, report in members) < 2:
        return Agreement()
    together = all(is_loopback(report.address) for _, report in members)  # several "nodes" on one machine
    named = [
        (who, r) for who, r in members if any(settings_of(r).get(name) for name in (*LITERAL, *PATTERNS))
    ]
    blind = [who for who, report in named if not report.interfaces]
    troubles = [
        (who, trouble)
        for who, report in named
        if report.interfaces
        for trouble in _troubles(report, several=len(members) > 1 and not together)
    ]
    found = Agreement()
    for group in sorted(partition(troubles), key=lambda group: (not group.value.fatal, group.members)):
        found = found.merged(_found(group, members))
    if blind:
        text = f"the interfaces of {name_all(blind)} could not be listed"
        found = found.merged(Agreement.noted(rule.id, "unknown", text, where=name_all(blind)))
    if not troubles and not blind:
        names = (
            f"those named on {name_all(who for who, _ in named)} are there"
            if named
            else "no variable names one"
        )
        return Agreement.noted(rule.id, "pass", names)
    return found


def _found(group: Group[Trouble], members: Members) -> Agreement:
    trouble = group.value
    cause = "nccl_socket_iface" if trouble.variable in PATTERNS else "address_unreachable"
    rule = replace(NODE_RULES["interfaces"], cause=cause, violated="fail" if trouble.fatal else "warn")
    reports = dict(members)
    there = partition((who, _listed(reports[who].interfaces)) for who in group.members)
    return finding(
        rule, f"{trouble.variable}={trouble.value} on {name_all(group.members)}: {trouble.text}", people=group.members,
        evidence=[Evidence(where=name_all(one.members), text=f"its interfaces: {one.value}") for one in there[:6]],
        fix=[trouble.fix.replace("{who}", name_all(group.members))],
    )  # fmt: skip


def _listed(interfaces: Sequence[Interface]) -> str:
    words = [
        f"{one_line(one.name)} {'up' if one.up else 'down'} {', '.join(map(one_line, one.addresses[:3])) or 'without address'}"
        for one in interfaces
    ]
    return enumerate_words(words, at_most=8)


def _troubles(report: NodeReport, *, several: bool) -> list[Trouble]:
    settings = settings_of(report)
    found = [
        _literal(name, settings[name], report, several=several) for name in LITERAL if settings.get(name)
    ]
    found += [
        _pattern(name, settings[name], report, several=several) for name in PATTERNS if settings.get(name)
    ]
    return [trouble for trouble in found if trouble is not None]


def _literal(variable: str, value: str, report: NodeReport, *, several: bool) -> Trouble | None:
    """What gloo would say to a comma list of exact names."""
    setting = one_line(value, limit=60)
    if any(sign in value for sign in "^="):
        text = "^ and = are NCCL's signs, gloo takes exact names and fails at once"
        return Trouble(variable, setting, text, variable == "GLOO_SOCKET_IFNAME", _set_to(variable, report))
    known = {one.name: one for one in report.interfaces}
    words = [word.strip() for word in value.split(",") if word.strip()]
    absent = [word for word in words if word not in known]
    if absent:
        close = nearest(absent[0], list(known))
        text = f"there is no interface {one_line(absent[0])}" + (f"; did you mean {close}?" if close else "")
        return Trouble(variable, setting, text, variable == "GLOO_SOCKET_IFNAME", _set_to(variable, report))
    chosen = [known[word] for word in words]
    return _unfit(variable, setting, chosen, report, fatal=variable == "GLOO_SOCKET_IFNAME", several=several)


def _pattern(variable: str, value: str, report: NodeReport, *, several: bool) -> Trouble | None:
    """What NCCL would find: `eth` and `eth0,ib` are prefixes, `=eth0` is exact, `^docker,lo` excludes."""
    setting = one_line(value, limit=60)
    chosen = matching(value, report.interfaces)
    fatal = report.device_kind == "cuda"  # with gloo on CPU the variable has no effect
    if not chosen:
        text = "no interface has such a name"
        return Trouble(variable, setting, text, fatal, _set_to(variable, report))
    return _unfit(variable, setting, chosen, report, fatal=fatal, several=several)


def matching(value: str, interfaces: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL takes for this value."""
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


def _unfit(
    variable: str,
    setting: str,
    chosen: Sequence[Interface],
    report: NodeReport,
    *,
    fatal: bool,
    several: bool,
) -> Trouble | None:
    """What is wrong with the interfaces that would be used, or None."""
    names = enumerate_words([one_line(one.name) for one in chosen], at_most=4)
    up = [one for one in chosen if one.up]
    if not up:
        return Trouble(variable, setting, f"{names} is down", fatal, _set_to(variable, report))
    if not several:
        return None
    if all(one.loopback for one in up):
        text = f"{names} leads to no other node"
        return Trouble(variable, setting, text, fatal, _set_to(variable, report))
    addresses = [address for one in up if not one.loopback for address in one.addresses]
    if report.address in addresses:
        return None
    if all(is_bridge(one) or one.loopback for one in up):
        text = f"{names} is the bridge of this machine's own containers, and leads to no other node"
        return Trouble(variable, setting, text, fatal, _set_to(variable, report))
    text = f"{names} has {enumerate_words([one_line(a) for a in addresses], at_most=3) or 'no address'}, and the nodes reach each other on {one_line(report.address)}"
    return Trouble(variable, setting, text, fatal=False, fix=_set_to(variable, report))


def _set_to(variable: str, report: NodeReport) -> str:
    good = next((one.name for one in report.interfaces if report.address in one.addresses), None)
    if good is None:
        return f"on {{who}}: `unset {variable}`"
    return f"on {{who}}: `export {variable}={one_line(good)}`, or `unset {variable}`"
