"""Who the nodes say they are, how many they say there are, and how many ranks each would start."""

from collections.abc import Sequence

from unisono.agree.agreement import Agreement
from unisono.agree.finding import NODES, evidence_of, finding, say_groups
from unisono.agree.groups import Group, majority, odd_out, partition, told
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.naming import Who, count, enumerate_words, name_all, name_node, number_list
from unisono.agree.report import NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import show
from unisono.causes import Evidence

Members = Sequence[tuple[Who, NodeReport]]


def judge_identity(members: Members) -> Agreement:
    """Every node has a number of its own, and no process reports twice."""
    rule = NODE_RULES["identity"]
    for text, same in (
        ("call themselves node {0}", partition((who, who.node_rank) for who, _ in members)),
        ("are the same process {1}", partition((who, (r.host, r.pid, r.address)) for who, r in members)),
    ):
        twice = [group for group in same if len(group.members) > 1]
        if twice:
            return _twice(text, twice[0].members, members)
    return Agreement.noted(rule.id, "pass", f"{count(len(members), 'node')}, each with a number of its own")


def _twice(text: str, same: Sequence[Who], members: Members) -> Agreement:
    rule = NODE_RULES["identity"]
    reports = [report for who, report in members if who in same]
    pids = ", ".join(f"pid {report.pid} on {report.host} ({report.address})" for report in reports[:6])
    named = text.format(same[0].node_rank, f"(pid {reports[0].pid})")
    return finding(
        rule, f"{count(len(reports), 'report')} {named}: {pids}", people=same, fix=rule.remedy,
        evidence=[
            Evidence(where=name_node(r.node_rank, r.host), text=f"address {r.address}, pid {r.pid}") for r in reports[:6]
        ],
    )  # fmt: skip


def judge_nodes(members: Members) -> Agreement:
    """All nodes mean the same number of nodes, and every number from 0 on is there."""
    rule = NODE_RULES["nodes"]
    found = judge_keys(rule, [(who, {"--nodes": report.nodes}) for who, report in members], Wording())
    if not found.agreed:
        return found
    wanted = members[0][1].nodes
    present = {who.node_rank for who, _ in members}
    outside = [who for who, _ in members if not 0 <= who.node_rank < wanted]
    if outside:
        free = [str(number) for number in range(min(wanted, 8)) if number not in present]
        summary = f"{name_all(outside)} in a job of {count(wanted, 'node')}: numbers begin at 0"
        fix = [
            f"on {name_all(outside)}: pass --node-rank {' or '.join(free) or 'N'}; or on every node --nodes {max(present) + 1}"
        ]
        return finding(rule, summary, people=outside, fix=fix)
    if len(present) < wanted:
        missing = (number for number in range(min(wanted, max(present) + 1000)) if number not in present)
        text = (
            f"{len(present):,} of {count(wanted, 'node')} compared; {number_list('node', missing)} not here"
        )
        return Agreement.noted(rule.id, "unknown", text)
    return Agreement.noted(rule.id, "pass", f"all {wanted:,} here" if wanted > 1 else "one node")


def judge_nproc(members: Members, *, may_differ: bool = True) -> Agreement:
    """The ranks of each node: equal, or unequal and declared on every node.

    Args:
        members: the nodes.
        may_differ: whether it is enough that all are declared; other people's programs take the world for nodes × ranks.
    """
    rule = NODE_RULES["nproc"]
    groups = partition((who, report.nproc) for who, report in members)
    if len(groups) == 1:
        where = f"each of {count(len(members), 'node')}" if len(members) > 1 else "one node"
        return Agreement.noted(rule.id, "pass", f"{count(groups[0].value, 'rank')} on {where}")
    inferring = {who for who, report in members if not report.nproc_declared}
    if not inferring and may_differ:
        told_groups = say_groups(told(groups, ()), NODES, lambda value: count(value, "rank"))
        return Agreement.noted(rule.id, "pass", f"unequal as declared on every node: {told_groups}")
    odd = _blamed(groups, inferring, everybody=len(members))
    return finding(
        rule, _would_start(told(groups, odd)), people=odd,
        evidence=_sources(members, odd), fix=_remedies(members, groups, odd, inferring),
    )  # fmt: skip


def _blamed(groups: Sequence[Group[int]], inferring: set[Who], *, everybody: int) -> tuple[Who, ...]:
    """Explicit beats inferred: where both are there, those who inferred another number than most are odd, and nobody else."""
    if len(inferring) in (0, everybody):
        return odd_out(groups)
    most = majority(groups)
    return tuple(
        sorted(who for group in groups if group is not most for who in group.members if who in inferring)
    )


def _would_start(groups: Sequence[Group[int]]) -> str:
    """`node 1 (b) would start 1 rank, nodes 0 (a) and 2 (c) would start 2`."""
    parts = [
        f"{name_all(group.members)} would start {count(group.value, 'rank') if first else group.value}"
        for first, group in zip((True, *(False,) * len(groups)), groups[:4], strict=False)
    ]
    if len(groups) > 4:
        parts.append(f"{count(sum(len(group.members) for group in groups[4:]), 'node')} other numbers")
    return ", ".join(parts)


def _sources(members: Members, odd: Sequence[Who]) -> list[Evidence]:
    reasons = partition((who, _source(report)) for who, report in members)
    blamed = set(odd)
    reasons.sort(key=lambda group: (not blamed.intersection(group.members), group.members))
    return evidence_of(reasons, NODES, str)


def _source(report: NodeReport) -> str:
    """`CUDA_VISIBLE_DEVICES=0 (set), nproc_per_node 1 inferred, 1 of 2 devices visible`."""
    shown = report.visible_variable
    parts = [
        "CUDA_VISIBLE_DEVICES not set" if shown is None else f"CUDA_VISIBLE_DEVICES={show(shown)} (set)",
        f"nproc_per_node {report.nproc} " + (f"declared by {report.nproc_origin}" if report.nproc_declared else "inferred"),
    ]  # fmt: skip
    if report.physical:
        parts.append(f"{len(report.visible)} of {count(len(report.physical), 'device')} visible")
    elif report.device_note:
        parts.append(report.device_note)
    return ", ".join(parts)


def _remedies(
    members: Members, groups: Sequence[Group[int]], odd: Sequence[Who], inferring: set[Who]
) -> list[str]:
    most = majority(groups)
    wanted = most.value if most else None
    if wanted is None and odd:
        rest = [group for group in groups if not set(group.members) <= set(odd)]
        wanted = rest[0].value if len(rest) == 1 else None
    numbers = enumerate_words([f"--nproc {group.value}" for group in groups if wanted in (None, group.value)])
    declare = f"pass {numbers.replace(' and ', ' or ')} on every node"
    if not odd and 0 < len(inferring) < len(members):
        return [f"{declare}; or pass --nproc on {name_all(inferring)} too, if unequal numbers are meant"]
    reports = dict(members)
    masked = [who for who in odd if reports[who].visible_variable is not None]
    others_masked = any(report.visible_variable is not None for who, report in members if who not in odd)
    if masked and not others_masked:
        return [f"unset CUDA_VISIBLE_DEVICES on {_hosts(masked)}, or {declare}"]
    if odd and not masked and others_masked:
        return [f"set CUDA_VISIBLE_DEVICES on {_hosts(odd)} as on the other nodes, or {declare}"]
    return [declare]


def _hosts(people: Sequence[Who]) -> str:
    return enumerate_words(list(dict.fromkeys(who.host for who in people)), at_most=6)
