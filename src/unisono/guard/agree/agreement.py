"""Agreement: checks with their status and verdicts, and how they are made from groups of equal
values.
"""

import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from unisono.base.causes import Evidence, Verdict
from unisono.base.text import one_line
from unisono.guard.agree.reports import (
    Check,
    Member,
    Status,
    count,
    culprit_hosts,
    culprit_ranks,
    enumerate_words,
    name_all,
    show,
)
from unisono.guard.agree.rules import Rule

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True)
class ValueGroup(Generic[Value]):
    """The members that reported the same value, in order."""

    value: Value
    members: tuple[Member, ...]


def partition(reported: Iterable[tuple[Member, Value]]) -> list[ValueGroup[Value]]:
    """Groups of equal values, the largest first; among equally large ones, the one with the first
    member.
    """
    by_value: dict[Value, list[Member]] = {}
    for who, value in reported:
        by_value.setdefault(value, []).append(who)
    groups = [ValueGroup(value, tuple(sorted(members))) for value, members in by_value.items()]
    return sorted(groups, key=lambda group: (-len(group.members), group.members))


def odd_out(
    groups: Sequence[ValueGroup[Value]], *, suspect: Callable[[Member], bool] | None = None
) -> tuple[Member, ...]:
    """The members that differ, given `groups` from `partition`; empty if that cannot be decided.

    Where there is a strict majority, all others differ; without one, the smallest group does, if it
    is the only smallest. On a tie the result is empty, unless `suspect` selects some members, e.g.
    those whose value was inferred.
    """
    if len(groups) < 2:
        return ()
    total = sum(len(group.members) for group in groups)
    if majority(groups):
        return tuple(sorted(who for group in groups[1:] for who in group.members))
    smallest = len(groups[-1].members)
    tied = [group for group in groups if len(group.members) == smallest]
    if len(tied) == 1:
        return tied[0].members
    if suspect is None:
        return ()
    suspects = tuple(sorted(who for group in tied for who in group.members if suspect(who)))
    return suspects if len(suspects) < total else ()


def majority(groups: Sequence[ValueGroup[Value]]) -> ValueGroup[Value] | None:
    """The group with more than half of all members, or None."""
    total = sum(len(group.members) for group in groups)
    return groups[0] if groups and 2 * len(groups[0].members) > total else None


def odd_first(groups: Sequence[ValueGroup[Value]], odd: Iterable[Member]) -> list[ValueGroup[Value]]:
    """The groups in the order of a message: those that differ first; if none does, by node."""
    blamed = set(odd)
    return sorted(
        groups,
        key=lambda group: (
            not blamed.intersection(group.members),
            -len(group.members) if blamed else 0,
            group.members,
        ),
    )


def differing(
    reported: Sequence[tuple[Member, Mapping[str, Hashable]]],
) -> dict[str, list[ValueGroup[Hashable]]]:
    """For each key that is not equal everywhere, its groups; a missing key has the value None.

    Equal mappings are grouped first, so that a thousand equal ones cost little more than one.
    """
    members: dict[frozenset[tuple[str, Hashable]], list[Member]] = {}
    examples: dict[frozenset[tuple[str, Hashable]], Mapping[str, Hashable]] = {}
    for who, mapping in reported:
        content = frozenset(mapping.items())
        members.setdefault(content, []).append(who)
        examples.setdefault(content, mapping)
    if len(members) < 2:
        return {}
    groups: dict[str, list[ValueGroup[Hashable]]] = {}
    for key in sorted({key for mapping in examples.values() for key in mapping}):
        values = {content: mapping.get(key) for content, mapping in examples.items()}
        if len(set(values.values())) > 1:
            groups[key] = partition(
                (who, values[content]) for content, group in members.items() for who in group
            )
    return groups


@dataclass(frozen=True)
class Agreement:
    """Checks and verdicts. The first fatal verdict is the decisive one."""

    checks: list[Check] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    """Fatal ones first; otherwise in the order of the checks."""

    @classmethod
    def noted(cls, check_id: str, status: Status, text: str, *, where: str = "", fix: str = "") -> Self:
        """One check without a verdict."""
        return cls([Check(id=check_id, status=status, text=text, where=where, fix=fix)])

    @classmethod
    def found(cls, check_id: str, verdict: Verdict, *, where: str = "") -> Self:
        """One check that failed (a fatal verdict) or warns (a mere warning)."""
        status: Status = "fail" if verdict.severity == "fatal" else "warn"
        fix = verdict.fix[0] if verdict.fix else ""
        check = Check(id=check_id, status=status, text=verdict.summary, where=where, fix=fix)
        return cls([check], [verdict])

    @property
    def fatal(self) -> list[Verdict]:
        """The verdicts that prevent a start, the decisive one first."""
        return [verdict for verdict in self.verdicts if verdict.severity == "fatal"]

    @property
    def warnings(self) -> list[Verdict]:
        """The verdicts that are only reported."""
        return [verdict for verdict in self.verdicts if verdict.severity != "fatal"]

    @property
    def agreed(self) -> bool:
        """Whether nothing prevents a start.

        A check that could not be made does not prevent it and is listed as unknown.
        """
        return not self.fatal

    def with_status(self, *status: Status) -> list[Check]:
        """The checks with one of these statuses."""
        return [check for check in self.checks if check.status in status]

    def merged(self, *others: "Agreement") -> "Agreement":
        """The checks and verdicts of this agreement, then those of the others; fatal verdicts come
        first.
        """
        all_of_them = (self, *others)
        return Agreement(
            checks=[check for one in all_of_them for check in one.checks],
            verdicts=[verdict for one in all_of_them for verdict in one.fatal]
            + [verdict for one in all_of_them for verdict in one.warnings],
        )

    def to_json(self) -> dict[str, object]:
        """For agreement.json: the number of checks by status, all checks, and the verdicts."""
        counts = {status: len(self.with_status(status)) for status in ("pass", "warn", "fail", "unknown")}
        return {
            "agreed": self.agreed,
            "counts": counts,
            "checks": [check.to_json() for check in self.checks],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }


_GROUPS_IN_SUMMARY = 3
_GROUPS_IN_EVIDENCE = 6


@dataclass(frozen=True)
class Stage:
    """A phase in which reports are compared, and how its members are displayed."""

    phase: str
    """`agree.nodes`, `agree.training`, …"""
    name: Callable[[Iterable[Member]], str] = name_all


NODES = Stage("agree.nodes")


def verdict_of(
    rule: Rule,
    summary: str,
    *,
    stage: Stage,
    culprits: Iterable[Member] = (),
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
        phase=stage.phase,
        evidence=tuple(evidence),
        fix=tuple(fix),
        confidence=confidence,
    )


def violation(
    rule: Rule,
    summary: str,
    *,
    stage: Stage = NODES,
    people: Iterable[Member] = (),
    where: Iterable[Member] | None = None,
    evidence: Sequence[Evidence] = (),
    fix: Sequence[str] = (),
    confidence: float = 1.0,
) -> Agreement:
    """A check that failed or warns, with its verdict.

    Args:
        rule: of the check; its `violated` decides whether the run may start.
        summary: one line with both values.
        stage: in which the check is made.
        where: the members that it concerns, if they are not the culprits.
        fix: commands or advice.
    """
    people = tuple(people)
    about = tuple(where) if where is not None else people
    verdict = verdict_of(
        rule, summary, stage=stage, culprits=people, evidence=evidence, fix=fix, confidence=confidence
    )
    return Agreement.found(rule.id, verdict, where=stage.name(about) if about else "")


def describe_groups(groups: Sequence[ValueGroup[Value]], stage: Stage, shown: Callable[[Value], str]) -> str:
    """`1e-4 on node 0 (a), 1e-5 on node 1 (b)`."""
    parts = [f"{shown(group.value)} on {stage.name(group.members)}" for group in groups[:_GROUPS_IN_SUMMARY]]
    left = sum(len(group.members) for group in groups[_GROUPS_IN_SUMMARY:])
    if left:
        parts.append(f"{count(len(groups) - _GROUPS_IN_SUMMARY, 'other value')} on {left} more")
    return ("; " if any(", " in part for part in parts) else ", ").join(parts)


def evidence_of(
    groups: Sequence[ValueGroup[Value]], stage: Stage, text: Callable[[Value], str]
) -> list[Evidence]:
    """One observation for each group, up to a limit."""
    evidence = [
        Evidence(where=stage.name(group.members), text=text(group.value))
        for group in groups[:_GROUPS_IN_EVIDENCE]
    ]
    omitted = groups[_GROUPS_IN_EVIDENCE:]
    if omitted:
        where = stage.name(who for group in omitted for who in group.members)
        evidence.append(Evidence(where=where, text=f"{count(len(omitted), 'other value')}"))
    return evidence


def remedy_for(rule: Rule, people: Sequence[Member]) -> list[str]:
    """The rule's remedy with the members filled in."""
    name = NODES.name(people) if people else "every node"
    return [line.replace("{who}", name) for line in rule.remedy]


def unknown_for(rule: Rule, people: Sequence[Member], reason: str) -> Agreement:
    """A check with status unknown for `people`; empty if there are none."""
    if not people:
        return Agreement()
    where = NODES.name(people)
    return Agreement.noted(rule.id, "unknown", f"{rule.subject}: not known on {where}: {reason}", where=where)


_KEYS_IN_EVIDENCE = 12
_KEYS_NAMED = 20

Keyed = Sequence[tuple[Member, Mapping[str, Hashable]]]


def _show(_: str, value: Hashable) -> str:
    return show(value)


def _quoted(_: str, value: Hashable) -> str:
    return shlex.quote(show(value))


@dataclass(frozen=True)
class Wording:
    """How keys and values are displayed.

    Attributes:
        order: sorts the keys that differ, the most important first; the default is alphabetical.
        remedies: instead of the rule's, for some keys.
        good: the text of the check if nothing differs.
    """

    shown: Callable[[str, Hashable], str] = _show
    typed: Callable[[str, Hashable], str] = _quoted
    label: Callable[[str], str] = one_line
    order: Callable[[str], int] | None = None
    remedies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    good: str = "the same everywhere"


def judge_keys(rule: Rule, reported: Keyed, wording: Wording, *, stage: Stage = NODES) -> Agreement:
    """The verdict on all keys that differ: the first is in the summary, the others in the
    evidence.
    """
    differences = differing(reported)
    if not differences:
        return Agreement.noted(rule.id, "pass", wording.good)
    keys = sorted(differences, key=wording.order) if wording.order else list(differences)
    odd = {key: odd_out(differences[key]) for key in keys}
    culprits = sorted({who for people in odd.values() for who in people})
    first = keys[0]
    groups = odd_first(differences[first], odd[first])
    summary = (
        f"{wording.label(first)}: {describe_groups(groups, stage, lambda value: wording.shown(first, value))}"
    )
    if len(keys) > 1:
        summary += f"; and {count(len(keys) - 1, 'more difference')} ({rule.subject})"
    fix = _remedy(rule, wording, first, differences[first], odd[first], stage)
    return violation(
        rule,
        summary,
        stage=stage,
        people=culprits,
        evidence=_evidence(differences, keys, odd, wording, stage, rule),
        fix=fix,
    )


def _evidence(
    differences: Mapping[str, Sequence[ValueGroup[Hashable]]],
    keys: Sequence[str],
    odd: Mapping[str, Sequence[Member]],
    wording: Wording,
    stage: Stage,
    rule: Rule,
) -> list[Evidence]:
    evidence = []
    for key in keys[:_KEYS_IN_EVIDENCE]:
        texts = {
            group.value: f"{one_line(key)}: {wording.shown(key, group.value)}" for group in differences[key]
        }
        evidence += evidence_of(odd_first(differences[key], odd[key]), stage, texts.__getitem__)
    if len(keys) > _KEYS_IN_EVIDENCE:
        names = enumerate_words([one_line(key) for key in keys[_KEYS_IN_EVIDENCE:]], at_most=_KEYS_NAMED)
        evidence.append(Evidence(where=rule.subject, text=f"also different: {names}"))
    return evidence


def _remedy(
    rule: Rule,
    wording: Wording,
    key: str,
    groups: Sequence[ValueGroup[Hashable]],
    odd: Sequence[Member],
    stage: Stage,
) -> list[str]:
    """The remedy with names and values filled in.

    Lines with `{value}` apply if there is a majority, those with `{choices}` if there is none.
    """
    most = majority(groups)
    lines = wording.remedies.get(key, rule.remedy)
    if most is not None and most.value is None and rule.absent and key not in wording.remedies:
        lines = rule.absent
    value = "" if most is None or most.value is None else wording.typed(key, most.value)
    choices = "" if most else _choices(wording, key, groups)
    filled = [
        line.replace("{who}", stage.name(odd) if odd else "every node")
        .replace("{key}", one_line(key))
        .replace("{value}", value)
        .replace("{choices}", choices)
        for line in lines
        if (value or "{value}" not in line) and (choices or "{choices}" not in line)
    ]
    return [line.removeprefix("or ") if index == 0 else line for index, line in enumerate(filled)]


def _choices(wording: Wording, key: str, groups: Sequence[ValueGroup[Hashable]]) -> str:
    """`lr=1e-4` or `lr=1e-5`: the values to choose from, if they are few."""
    values = sorted({wording.typed(key, group.value) for group in groups if group.value is not None})
    return " or ".join(f"`{one_line(key)}={value}`" for value in values) if 0 < len(values) < 4 else ""
