"""Who says the same, and who is the odd one out."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from unisono.agree.naming import Who

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True)
class Group(Generic[Value]):
    """Everybody who gave the same value, in order."""

    value: Value
    members: tuple[Who, ...]


def partition(said: Iterable[tuple[Who, Value]]) -> list[Group[Value]]:
    """Groups of equal values, the largest first; among equally large ones, the one with the first member."""
    by_value: dict[Value, list[Who]] = {}
    for who, value in said:
        by_value.setdefault(value, []).append(who)
    groups = [Group(value, tuple(sorted(members))) for value, members in by_value.items()]
    return sorted(groups, key=lambda group: (-len(group.members), group.members))


def odd_out(
    groups: Sequence[Group[Value]], *, suspect: Callable[[Who], bool] | None = None
) -> tuple[Who, ...]:
    """Who is to blame for the difference between `groups` (from `partition`); nobody, if that cannot be told.

    Against a strict majority all others are odd; without one the smallest group is, if it is the only smallest. On a tie
    nobody is blamed, unless `suspect` tells some of them apart: a value that was inferred, say.
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


def majority(groups: Sequence[Group[Value]]) -> Group[Value] | None:
    """The group of more than half of all, or None."""
    total = sum(len(group.members) for group in groups)
    return groups[0] if groups and 2 * len(groups[0].members) > total else None


def told(groups: Sequence[Group[Value]], odd: Iterable[Who]) -> list[Group[Value]]:
    """The order in which a person is told: the odd ones first; where nobody is odd, by node."""
    blamed = set(odd)
    return sorted(
        groups,
        key=lambda group: (not blamed.intersection(group.members), -len(group.members) if blamed else 0, group.members),
    )  # fmt: skip


def differing(said: Sequence[tuple[Who, Mapping[str, Hashable]]]) -> dict[str, list[Group[Hashable]]]:
    """For each key that is not the same everywhere, its groups; a missing key has the value None.

    Whole mappings are grouped first, so that a thousand equal ones cost little more than one.
    """
    members: dict[frozenset[tuple[str, Hashable]], list[Who]] = {}
    examples: dict[frozenset[tuple[str, Hashable]], Mapping[str, Hashable]] = {}
    for who, mapping in said:
        content = frozenset(mapping.items())
        members.setdefault(content, []).append(who)
        examples.setdefault(content, mapping)
    if len(members) < 2:
        return {}
    found: dict[str, list[Group[Hashable]]] = {}
    for key in sorted({key for mapping in examples.values() for key in mapping}):
        values = {content: mapping.get(key) for content, mapping in examples.items()}
        if len(set(values.values())) > 1:
            found[key] = partition(
                (who, values[content]) for content, group in members.items() for who in group
            )
    return found
