"""Compares mappings key by key: which keys differ, who is odd, and the line to type for the first of them."""

import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.agree.agreement import Agreement
from unisono.agree.finding import NODES, Scene, evidence_of, finding, say_groups
from unisono.agree.groups import Group, differing, majority, odd_out, told
from unisono.agree.naming import Who, count, enumerate_words
from unisono.agree.rule import Rule
from unisono.agree.showing import show
from unisono.causes import Evidence
from unisono.text import one_line

_KEYS_IN_EVIDENCE = 12
_KEYS_NAMED = 20

Said = Sequence[tuple[Who, Mapping[str, Hashable]]]


def _show(_: str, value: Hashable) -> str:
    return show(value)


def _typed(_: str, value: Hashable) -> str:
    return shlex.quote(show(value))


@dataclass(frozen=True)
class Wording:
    """How keys and values are written.

    Attributes:
        shown: a value for people.
        typed: a value in a command.
        label: a key in the summary.
        order: sorts the keys that differ, the most telling first; else they are in the order of the alphabet.
        remedies: in place of the rule's, for some keys.
        good: the text of the check where nothing differs.
    """

    shown: Callable[[str, Hashable], str] = _show
    typed: Callable[[str, Hashable], str] = _typed
    label: Callable[[str], str] = one_line
    order: Callable[[str], int] | None = None
    remedies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    good: str = "the same everywhere"


def judge_keys(rule: Rule, said: Said, wording: Wording, *, scene: Scene = NODES) -> Agreement:
    """The verdict on all keys that differ; the first of them is in the summary, the others in the evidence."""
    found = differing(said)
    if not found:
        return Agreement.noted(rule.id, "pass", wording.good)
    keys = sorted(found, key=wording.order) if wording.order else list(found)
    odd = {key: odd_out(found[key]) for key in keys}
    culprits = sorted({who for people in odd.values() for who in people})
    first = keys[0]
    groups = told(found[first], odd[first])
    summary = (
        f"{wording.label(first)}: {say_groups(groups, scene, lambda value: wording.shown(first, value))}"
    )
    if len(keys) > 1:
        summary += f"; and {count(len(keys) - 1, 'more difference')} ({rule.subject})"
    fix = _remedy(rule, wording, first, found[first], odd[first], scene)
    return finding(
        rule, summary, scene=scene, people=culprits, evidence=_evidence(found, keys, odd, wording, scene, rule), fix=fix
    )  # fmt: skip


def _evidence(
    found: Mapping[str, Sequence[Group[Hashable]]],
    keys: Sequence[str],
    odd: Mapping[str, Sequence[Who]],
    wording: Wording,
    scene: Scene,
    rule: Rule,
) -> list[Evidence]:
    evidence = []
    for key in keys[:_KEYS_IN_EVIDENCE]:
        texts = {group.value: f"{one_line(key)}: {wording.shown(key, group.value)}" for group in found[key]}
        evidence += evidence_of(told(found[key], odd[key]), scene, texts.__getitem__)
    if len(keys) > _KEYS_IN_EVIDENCE:
        names = enumerate_words([one_line(key) for key in keys[_KEYS_IN_EVIDENCE:]], at_most=_KEYS_NAMED)
        evidence.append(Evidence(where=rule.subject, text=f"these differ too: {names}"))
    return evidence


def _remedy(
    rule: Rule,
    wording: Wording,
    key: str,
    groups: Sequence[Group[Hashable]],
    odd: Sequence[Who],
    scene: Scene,
) -> list[str]:
    """The remedy with names and values in it.

    Lines with `{value}` are for where most have the same, those with `{choices}` for where nobody knows which is right.
    """
    most = majority(groups)
    lines = wording.remedies.get(key, rule.remedy)
    if most is not None and most.value is None and rule.absent and key not in wording.remedies:
        lines = rule.absent
    value = "" if most is None or most.value is None else wording.typed(key, most.value)
    choices = "" if most else _choices(wording, key, groups)
    filled = [
        line.replace("{who}", scene.name(odd) if odd else "every node").replace("{key}", one_line(key))
        .replace("{value}", value).replace("{choices}", choices)
        for line in lines
        if (value or "{value}" not in line) and (choices or "{choices}" not in line)
    ]  # fmt: skip
    return [line.removeprefix("or ") if place == 0 else line for place, line in enumerate(filled)]


def _choices(wording: Wording, key: str, groups: Sequence[Group[Hashable]]) -> str:
    """`lr=1e-4` or `lr=1e-5`: what one may decide for, if it is not too much."""
    values = sorted({wording.typed(key, group.value) for group in groups if group.value is not None})
    return " or ".join(f"`{one_line(key)}={value}`" for value in values) if 0 < len(values) < 4 else ""
