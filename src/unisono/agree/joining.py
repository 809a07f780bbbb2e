"""Verdicts on who is there and who is not: nodes that never called, left, refuse, or have another secret."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from unisono.agree.naming import Who, count, name_all, name_node, number_list, plain_host
from unisono.causes import Evidence, Verdict, find_cause
from unisono.text import one_line

_PHASE = "agree.join"
_SHOWN_CALLS = 8


class Call(Protocol):
    """Somebody who called and was not let in: `control.events.Rejected`."""

    @property
    def address(self) -> str:
        """From where, `IP:port`."""
        ...

    @property
    def why(self) -> str:
        """One line for people."""
        ...

    @property
    def kind(self) -> str:
        """`token`, `duplicate`, `stale`, `malformed`, `late`."""
        ...

    @property
    def claims(self) -> int | None:
        """The node rank that it says it has."""
        ...


def missing_nodes(
    nodes: int,
    present: Mapping[int, str],
    rejected: Sequence[Call],
    waited_s: float,
    *,
    hosts: Mapping[int, str] | None = None,
) -> Verdict:
    """Some nodes never called.

    Args:
        nodes: how many there should be.
        present: the host of each that is here.
        rejected: those who called and were not let in.
        waited_s: for how long.
        hosts: the host of each node, where it is known, as by --hosts.
    """
    names = hosts or {}
    absent = [rank for rank in range(nodes) if rank not in present]
    named = [Who(rank, -1, names[rank]) for rank in absent if rank in names]
    missing = name_all(named) if named and len(named) == len(absent) else number_list("node", absent)
    here = name_all(Who(rank, -1, host) for rank, host in present.items()) if present else "nobody"
    summary = (
        f"{missing} {'has' if len(absent) == 1 else 'have'} never called; {here} {'is' if len(present) < 2 else 'are'} here"
        f" ({len(present):,} of {nodes:,}, waited {waited_s:.0f} s)"
    )
    calls = sorted(rejected, key=lambda call: (call.claims not in absent, call.address))
    told_away = [call for call in calls if call.claims in absent]
    return Verdict(
        cause="node_missing", when="before", summary=summary, hosts=tuple(plain_host(who.host) for who in named), phase=_PHASE,
        evidence=tuple(_call_evidence(calls)), fix=tuple(_missing_fix(missing, told_away)),
    )  # fmt: skip


def _missing_fix(missing: str, told_away: Sequence[Call]) -> list[str]:
    if any(call.kind == "token" for call in told_away):
        first = f"give {missing} the token of this job: --token-file, or UNISONO_TOKEN"
    elif told_away:
        first = f"see why {missing} was not let in: {one_line(told_away[0].why, limit=120)}"
    else:
        first = f"look at the terminal of {missing}: its own error is there, or it was never started"
    return [
        first,
        "start the same command on every node, with --node-rank from 0 without a gap; raise --join-timeout if it is slow",
    ]


def _call_evidence(calls: Iterable[Call]) -> list[Evidence]:
    return [
        Evidence(
            where=f"call from {one_line(call.address, limit=60)}",
            text=f"{one_line(call.why, limit=200)}"
            + ("" if call.claims is None else f" (says it is node {call.claims})"),
        )
        for call in list(calls)[:_SHOWN_CALLS]
    ]


def wrong_token(call: Call) -> Verdict:
    """Somebody called who has another secret. What it says of itself is unproven, so that nobody is named by host."""
    says = "" if call.claims is None else f" (says it is node {call.claims})"
    return Verdict(
        cause="token_rejected", when="before", phase=_PHASE,
        summary=f"a caller from {one_line(call.address, limit=60)}{says} does not have the token of this job",
        evidence=tuple(_call_evidence([call])),
        fix=("copy one token to all nodes: --token-file FILE, or UNISONO_TOKEN in the environment",
             "end processes of earlier starts on that machine"),
    )  # fmt: skip


def lost_node(node_rank: int, host: str, why: str, *, silent: bool, moment: str = "the start") -> Verdict:
    """A node was here and is gone before anything was started.

    Args:
        node_rank: which.
        host: its name.
        why: one line.
        silent: whether it fell silent; otherwise its connection was closed, so that its own terminal says why.
        moment: before what.
    """
    who = name_node(node_rank, host)
    cause = "node_unreachable" if silent else "node_missing"
    return Verdict(
        cause=cause, when="before", phase=_PHASE, hosts=(plain_host(host),),
        summary=f"{who} was here, and {'has fallen silent' if silent else 'left'} before {moment}: {one_line(why, limit=160)}",
        fix=(f"look at the terminal of {who}",) if not silent else _remedy(cause),
    )  # fmt: skip


def refused_node(
    node_rank: int, host: str, problems: Sequence[Mapping[str, object]], *, verdict: Verdict | None = None
) -> Verdict:
    """A node refused to go on by its own checks.

    Args:
        node_rank: which.
        host: its name.
        problems: what it found: what, where, why, fix.
        verdict: its own, if it has one; its cause is kept.
    """
    who = name_node(node_rank, host)
    texts = [one_line(str(problem.get("what") or "no reason given"), limit=200) for problem in problems]
    first = verdict.summary if verdict else (texts[0] if texts else "no reason was given")
    more = f"; and {count(len(texts) - 1, 'more problem')}" if not verdict and len(texts) > 1 else ""
    fixes = [one_line(str(problem["fix"]), limit=200) for problem in problems if problem.get("fix")]
    whys = [one_line(str(problem.get("why") or ""), limit=300) for problem in problems]
    evidence = [
        Evidence(
            where=one_line(str(problem.get("where") or who), limit=120),
            text=f"{text}: {why}" if why else text,
        )
        for problem, text, why in zip(problems[:_SHOWN_CALLS], texts, whys, strict=False)
    ]
    return Verdict(
        cause=verdict.cause if verdict and find_cause(verdict.cause) else "node_refused", when="before", phase=_PHASE,
        hosts=(plain_host(host),), summary=first if who in first else f"{who} refused: {first}{more}",
        evidence=(*(verdict.evidence if verdict else ()), *evidence),
        fix=verdict.fix if verdict and verdict.fix else tuple(dict.fromkeys(fixes)) or _remedy("node_refused"),
    )  # fmt: skip


def _remedy(cause: str) -> tuple[str, ...]:
    known = find_cause(cause)
    return known.remedy if known else ()
