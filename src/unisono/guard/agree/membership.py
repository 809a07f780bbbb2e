"""Which nodes take part: their node ranks, their number, the ranks of each; and the verdicts on
nodes that are missing, lost or rejected.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.text import one_line
from unisono.guard.agree.agreement import (
    NODES,
    Agreement,
    ValueGroup,
    Wording,
    describe_groups,
    evidence_of,
    judge_keys,
    majority,
    odd_first,
    odd_out,
    partition,
    violation,
)
from unisono.guard.agree.reports import (
    Member,
    NodeReport,
    count,
    enumerate_words,
    name_all,
    name_node,
    number_list,
    plain_host,
    show,
)
from unisono.guard.agree.rules import NODE_RULES

Members = Sequence[tuple[Member, NodeReport]]


def judge_identity(members: Members) -> Agreement:
    """Every node has a different node rank, and no process reports twice."""
    rule = NODE_RULES["identity"]
    for text, same in (
        ("use node rank {0}", partition((who, who.node_rank) for who, _ in members)),
        ("are the same process {1}", partition((who, (r.host, r.pid, r.address)) for who, r in members)),
    ):
        duplicates = [group for group in same if len(group.members) > 1]
        if duplicates:
            return _duplicate(text, duplicates[0].members, members)
    return Agreement.noted(rule.id, "pass", f"{count(len(members), 'node')}, each with its own node rank")


def _duplicate(text: str, same: Sequence[Member], members: Members) -> Agreement:
    rule = NODE_RULES["identity"]
    reports = [report for who, report in members if who in same]
    pids = ", ".join(f"pid {report.pid} on {report.host} ({report.address})" for report in reports[:6])
    named = text.format(same[0].node_rank, f"(pid {reports[0].pid})")
    return violation(
        rule,
        f"{count(len(reports), 'report')} {named}: {pids}",
        people=same,
        fix=rule.remedy,
        evidence=[
            Evidence(where=name_node(r.node_rank, r.host), text=f"address {r.address}, pid {r.pid}")
            for r in reports[:6]
        ],
    )


def judge_nodes(members: Members) -> Agreement:
    """All nodes expect the same number of nodes, and every node rank from 0 is present."""
    rule = NODE_RULES["nodes"]
    agreement = judge_keys(rule, [(who, {"--nodes": report.nodes}) for who, report in members], Wording())
    if not agreement.agreed:
        return agreement
    nodes = members[0][1].nodes
    present = {who.node_rank for who, _ in members}
    outside = [who for who, _ in members if not 0 <= who.node_rank < nodes]
    if outside:
        free = [str(number) for number in range(min(nodes, 8)) if number not in present]
        summary = f"{name_all(outside)} in a job of {count(nodes, 'node')}: node ranks start at 0"
        fix = [
            f"on {name_all(outside)}: pass --node-rank {' or '.join(free) or 'N'}; or on every node --nodes"
            f" {max(present) + 1}"
        ]
        return violation(rule, summary, people=outside, fix=fix)
    if len(present) < nodes:
        missing = (number for number in range(min(nodes, max(present) + 1000)) if number not in present)
        text = f"{len(present):,} of {count(nodes, 'node')} compared; {number_list('node', missing)} absent"
        return Agreement.noted(rule.id, "unknown", text)
    return Agreement.noted(rule.id, "pass", f"all {nodes:,} here" if nodes > 1 else "one node")


def judge_nproc(members: Members, *, may_differ: bool = True) -> Agreement:
    """The number of ranks of each node: equal, or different and declared on every node.

    Args:
        may_differ: whether different numbers are allowed if all are declared; foreign programs
            compute the world as nodes × ranks.
    """
    rule = NODE_RULES["nproc"]
    groups = partition((who, report.nproc) for who, report in members)
    if len(groups) == 1:
        where = f"each of {count(len(members), 'node')}" if len(members) > 1 else "one node"
        return Agreement.noted(rule.id, "pass", f"{count(groups[0].value, 'rank')} on {where}")
    inferring = {who for who, report in members if not report.nproc_declared}
    if not inferring and may_differ:
        described = describe_groups(odd_first(groups, ()), NODES, lambda value: count(value, "rank"))
        return Agreement.noted(rule.id, "pass", f"different, as declared on every node: {described}")
    odd = _blamed(groups, inferring, total=len(members))
    return violation(
        rule,
        _would_start(odd_first(groups, odd)),
        people=odd,
        evidence=_sources(members, odd),
        fix=_remedies(members, groups, odd, inferring),
    )


def _blamed(groups: Sequence[ValueGroup[int]], inferring: set[Member], *, total: int) -> tuple[Member, ...]:
    """Explicit beats inferred: if there are both, only nodes that inferred a number different from
    the majority's are blamed.
    """
    if len(inferring) in (0, total):
        return odd_out(groups)
    most = majority(groups)
    return tuple(
        sorted(who for group in groups if group is not most for who in group.members if who in inferring)
    )


def _would_start(groups: Sequence[ValueGroup[int]]) -> str:
    """`node 1 (b) would start 1 rank, nodes 0 (a) and 2 (c) would start 2`."""
    parts = [
        f"{name_all(group.members)} would start {count(group.value, 'rank') if first else group.value}"
        for first, group in zip((True, *(False,) * len(groups)), groups[:4], strict=False)
    ]
    if len(groups) > 4:
        parts.append(f"{count(sum(len(group.members) for group in groups[4:]), 'node')} other numbers")
    return ", ".join(parts)


def _sources(members: Members, odd: Sequence[Member]) -> list[Evidence]:
    reasons = partition((who, _source(report)) for who, report in members)
    blamed = set(odd)
    reasons.sort(key=lambda group: (not blamed.intersection(group.members), group.members))
    return evidence_of(reasons, NODES, str)


def _source(report: NodeReport) -> str:
    """`CUDA_VISIBLE_DEVICES=0 (set), nproc_per_node 1 inferred, 1 of 2 devices visible`."""
    shown = report.visible_variable
    parts = [
        "CUDA_VISIBLE_DEVICES not set" if shown is None else f"CUDA_VISIBLE_DEVICES={show(shown)} (set)",
        f"nproc_per_node {report.nproc} "
        + (f"declared by {report.nproc_origin}" if report.nproc_declared else "inferred"),
    ]
    if report.physical:
        parts.append(f"{len(report.visible)} of {count(len(report.physical), 'device')} visible")
    elif report.device_note:
        parts.append(report.device_note)
    return ", ".join(parts)


def _remedies(
    members: Members, groups: Sequence[ValueGroup[int]], odd: Sequence[Member], inferring: set[Member]
) -> list[str]:
    most = majority(groups)
    nproc = most.value if most else None
    if nproc is None and odd:
        others = [group for group in groups if not set(group.members) <= set(odd)]
        nproc = others[0].value if len(others) == 1 else None
    numbers = enumerate_words([f"--nproc {group.value}" for group in groups if nproc in (None, group.value)])
    declare = f"pass {numbers.replace(' and ', ' or ')} on every node"
    if not odd and 0 < len(inferring) < len(members):
        return [f"{declare}; or pass --nproc on {name_all(inferring)} too, if different numbers are intended"]
    reports = dict(members)
    masked = [who for who in odd if reports[who].visible_variable is not None]
    others_masked = any(report.visible_variable is not None for who, report in members if who not in odd)
    if masked and not others_masked:
        return [f"unset CUDA_VISIBLE_DEVICES on {_hosts(masked)}, or {declare}"]
    if odd and not masked and others_masked:
        return [f"set CUDA_VISIBLE_DEVICES on {_hosts(odd)} as on the other nodes, or {declare}"]
    return [declare]


def _hosts(people: Sequence[Member]) -> str:
    return enumerate_words(list(dict.fromkeys(who.host for who in people)), at_most=6)


_PHASE = "agree.join"
_SHOWN_CALLS = 8


class RejectedCall(Protocol):
    """A connection that was rejected: `control.connection.Rejected`."""

    @property
    def address(self) -> str:
        """Address of the caller, `IP:port`."""
        ...

    @property
    def why(self) -> str:
        """Why it was rejected, one line."""
        ...

    @property
    def kind(self) -> str:
        """`token`, `duplicate`, `stale`, `malformed`, `late`."""
        ...

    @property
    def claims(self) -> int | None:
        """The node rank that it claims."""
        ...


def missing_nodes(
    nodes: int,
    present: Mapping[int, str],
    rejected: Sequence[RejectedCall],
    waited_s: float,
    *,
    hosts: Mapping[int, str] | None = None,
) -> Verdict:
    """The verdict on nodes that never connected.

    Args:
        nodes: the expected number of nodes.
        present: the host of each node that is connected.
        waited_s: seconds waited.
        hosts: the host of each node, where it is known, e.g. from --hosts.
    """
    names = hosts or {}
    absent = [rank for rank in range(nodes) if rank not in present]
    named = [Member(rank, -1, names[rank]) for rank in absent if rank in names]
    missing = name_all(named) if named and len(named) == len(absent) else number_list("node", absent)
    present_names = (
        name_all(Member(rank, -1, host) for rank, host in present.items()) if present else "nobody"
    )
    summary = (
        f"{missing} {'has' if len(absent) == 1 else 'have'} never connected; {present_names}"
        f" {'is' if len(present) < 2 else 'are'} connected ({len(present):,} of {nodes:,}, waited"
        f" {waited_s:.0f} s)"
    )
    calls = sorted(rejected, key=lambda call: (call.claims not in absent, call.address))
    turned_down = [call for call in calls if call.claims in absent]
    return Verdict(
        cause="node_missing",
        when="before",
        summary=summary,
        hosts=tuple(plain_host(who.host) for who in named),
        phase=_PHASE,
        evidence=tuple(_call_evidence(calls)),
        fix=tuple(_missing_fix(missing, turned_down)),
    )


def _missing_fix(missing: str, turned_down: Sequence[RejectedCall]) -> list[str]:
    if any(call.kind == "token" for call in turned_down):
        first = f"give {missing} the token of this job: --token-file, or UNISONO_TOKEN"
    elif turned_down:
        first = f"{missing} was rejected: {one_line(turned_down[0].why, limit=120)}"
    else:
        first = f"check the terminal of {missing} for an error, or start it"
    return [
        first,
        (
            "start the same command on every node, with --node-rank 0, 1, 2, …; raise --join-timeout if nodes"
            " start slowly"
        ),
    ]


def _call_evidence(calls: Iterable[RejectedCall]) -> list[Evidence]:
    return [
        Evidence(
            where=f"call from {one_line(call.address, limit=60)}",
            text=f"{one_line(call.why, limit=200)}"
            + ("" if call.claims is None else f" (claims to be node {call.claims})"),
        )
        for call in list(calls)[:_SHOWN_CALLS]
    ]


def wrong_token(call: RejectedCall) -> Verdict:
    """The verdict on a caller with a wrong or missing token.

    Its claims are not authenticated, so no host is blamed.
    """
    claim = "" if call.claims is None else f" (claims to be node {call.claims})"
    return Verdict(
        cause="token_rejected",
        when="before",
        phase=_PHASE,
        summary=(
            f"a caller from {one_line(call.address, limit=60)}{claim} does not have the token of this job"
        ),
        evidence=tuple(_call_evidence([call])),
        fix=(
            "copy one token to all nodes: --token-file FILE, or UNISONO_TOKEN in the environment",
            "kill processes of earlier starts on that machine",
        ),
    )


def lost_node(node_rank: int, host: str, why: str, *, silent: bool, moment: str = "the start") -> Verdict:
    """The verdict on a node that was lost before anything was started.

    Args:
        why: one line.
        silent: whether it stopped responding; otherwise its connection was closed, and its own
            terminal has the cause.
        moment: before which it was lost.
    """
    who = name_node(node_rank, host)
    cause = "node_unreachable" if silent else "node_missing"
    return Verdict(
        cause=cause,
        when="before",
        phase=_PHASE,
        hosts=(plain_host(host),),
        summary=(
            f"{who} was connected, and {'stopped responding' if silent else 'left'} before {moment}:"
            f" {one_line(why, limit=160)}"
        ),
        fix=(f"check the terminal of {who}",) if not silent else _remedy(cause),
    )


def refused_node(
    node_rank: int, host: str, problems: Sequence[Mapping[str, object]], *, verdict: Verdict | None = None
) -> Verdict:
    """The verdict on a node whose own checks failed.

    Args:
        problems: of its checks, each with what, where, why, fix.
        verdict: the node's own, if it has one; its cause is used.
    """
    who = name_node(node_rank, host)
    texts = [one_line(str(problem.get("what") or "no reason given"), limit=200) for problem in problems]
    first = verdict.summary if verdict else (texts[0] if texts else "no reason was given")
    more = f"; and {count(len(texts) - 1, 'more problem')}" if not verdict and len(texts) > 1 else ""
    fixes = [one_line(str(problem["fix"]), limit=200) for problem in problems if problem.get("fix")]
    reasons = [one_line(str(problem.get("why") or ""), limit=300) for problem in problems]
    evidence = [
        Evidence(
            where=one_line(str(problem.get("where") or who), limit=120),
            text=f"{text}: {why}" if why else text,
        )
        for problem, text, why in zip(problems[:_SHOWN_CALLS], texts, reasons, strict=False)
    ]
    return Verdict(
        cause=verdict.cause if verdict and find_cause(verdict.cause) else "node_refused",
        when="before",
        phase=_PHASE,
        hosts=(plain_host(host),),
        summary=first if who in first else f"{who} refused: {first}{more}",
        evidence=(*(verdict.evidence if verdict else ()), *evidence),
        fix=(
            verdict.fix if verdict and verdict.fix else tuple(dict.fromkeys(fixes)) or _remedy("node_refused")
        ),
    )


def _remedy(cause: str) -> tuple[str, ...]:
    entry = find_cause(cause)
    return entry.remedy if entry else ()
