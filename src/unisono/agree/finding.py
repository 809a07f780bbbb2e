"""Makes checks and verdicts out of groups: one summary with both values, evidence per group, the line to type."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from unisono.agree.agreement import Agreement
from unisono.agree.groups import Group, Value
from unisono.agree.naming import Who, count, culprit_hosts, culprit_ranks, name_all
from unisono.agree.rule import Rule
from unisono.causes import Evidence, Verdict

_GROUPS_IN_SUMMARY = 3
_GROUPS_IN_EVIDENCE = 6


@dataclass(frozen=True)
class Scene:
    """Where something is judged, and how those who are compared are written."""

    phase: str
    """`agree.nodes`, `agree.ranks`, …"""
    name: Callable[[Iterable[Who]], str] = name_all


NODES = Scene("agree.nodes")


def verdict_of(
    rule: Rule,
    summary: str,
    *,
    scene: Scene,
    culprits: Iterable[Who] = (),
    evidence: Sequence[Evidence] = (),
    fix: Sequence[str] = (),
    confidence: float = 1.0,
) -> Verdict:
    """A verdict before the start, with the rule's cause and severity."""
    culprits = tuple(culprits)
    return Verdict(
        cause=rule.cause,
        when="before",
        severity="fatal" if rule.violated == "fail" else "warning",
        summary=summary,
        ranks=culprit_ranks(culprits),
        hosts=culprit_hosts(culprits),
        phase=scene.phase,
        evidence=tuple(evidence),
        fix=tuple(fix),
        confidence=confidence,
    )


def finding(
    rule: Rule,
    summary: str,
    *,
    scene: Scene = NODES,
    people: Iterable[Who] = (),
    where: Iterable[Who] | None = None,
    evidence: Sequence[Evidence] = (),
    fix: Sequence[str] = (),
    confidence: float = 1.0,
) -> Agreement:
    """A check that failed or warns, with its verdict.

    Args:
        rule: whose check it is; its `violated` decides whether the run may start.
        summary: one line with both values.
        scene: where this is judged.
        people: the culprits.
        where: whom it is about, if that is not the culprits.
        evidence: what shows it.
        fix: what to type.
        confidence: of the blame.
    """
    people = tuple(people)
    about = tuple(where) if where is not None else people
    verdict = verdict_of(
        rule, summary, scene=scene, culprits=people, evidence=evidence, fix=fix, confidence=confidence
    )  # fmt: skip
    return Agreement.found(rule.id, verdict, where=scene.name(about) if about else "")


def say_groups(groups: Sequence[Group[Value]], scene: Scene, shown: Callable[[Value], str]) -> str:
    """`1e-4 on node 0 (a), 1e-5 on node 1 (b)`."""
    parts = [f"{shown(group.value)} on {scene.name(group.members)}" for group in groups[:_GROUPS_IN_SUMMARY]]
    left = sum(len(group.members) for group in groups[_GROUPS_IN_SUMMARY:])
    if left:
        parts.append(f"{count(len(groups) - _GROUPS_IN_SUMMARY, 'other value')} on {left} more")
    return ("; " if any(", " in part for part in parts) else ", ").join(parts)


def evidence_of(groups: Sequence[Group[Value]], scene: Scene, text: Callable[[Value], str]) -> list[Evidence]:
    """One observation for each group, up to a bound."""
    found = [
        Evidence(where=scene.name(group.members), text=text(group.value)) for group in groups[:_GROUPS_IN_EVIDENCE]
    ]  # fmt: skip
    rest = groups[_GROUPS_IN_EVIDENCE:]
    if rest:
        where = scene.name(who for group in rest for who in group.members)
        found.append(Evidence(where=where, text=f"{count(len(rest), 'other value')}"))
    return found


def remedy_for(rule: Rule, people: Sequence[Who], *, scene: Scene = NODES) -> list[str]:
    """The rule's remedy with names in it."""
    name = scene.name(people) if people else "every node"
    return [line.replace("{who}", name) for line in rule.remedy]


def unknown_for(
    rule: Rule, people: Sequence[Who], reason: str, *, scene: Scene = NODES, fix: str = ""
) -> Agreement:
    """Says that something could not be looked at somewhere; an empty agreement where it could everywhere."""
    if not people:
        return Agreement()
    where = scene.name(people)
    return Agreement.noted(
        rule.id, "unknown", f"{rule.subject}: not known on {where}: {reason}", where=where, fix=fix
    )
