"""Environment variables that nodes must have equal: compared by their effect."""

import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.environment_rules import ONLY_WARN, compared, meant, only_warns
from unisono.agree.keys import Said, Wording, judge_keys
from unisono.agree.naming import Who
from unisono.agree.report import NodeReport, settings_of
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import show, show_value

Settings = Sequence[tuple[Who, NodeReport, Mapping[str, str]]]


def judge_environment(members: Members) -> Agreement:
    """Variables that are part of the protocol between ranks have the same effect on all nodes."""
    rule = NODE_RULES["env"]
    settings = [(who, report, settings_of(report)) for who, report in members]
    names = {name for _, _, values in settings for name in values if compared(name)}
    fatal = sorted(name for name in names if not only_warns(name))
    mild = sorted(names.difference(fatal))
    good = f"{len(fatal)} that must be equal are" if fatal else "none is set that must be equal"
    wording = Wording(shown=_shown(settings), typed=_typed(settings), remedies=_filed(members), good=good)
    found = judge_keys(rule, _effects(settings, fatal), wording)
    if not mild:
        return found
    rule = replace(rule, violated="warn", subject="environment variables that had better be equal")
    wording = replace(wording, label=_with_reason, good=f"{len(mild)} that had better be equal are")
    return found.merged(judge_keys(rule, _effects(settings, mild), wording))


def _effects(settings: Settings, names: Sequence[str]) -> Said:
    return [
        (who, {name: meant(name, values[name]) for name in names if name in values})
        for who, _, values in settings
    ]


def _spelt(settings: Settings, name: str, value: Hashable) -> list[tuple[NodeReport, str]]:
    """Who has it with this effect, and as what it is set there."""
    return [
        (report, values[name])
        for _, report, values in settings
        if name in values and meant(name, values[name]) == value
    ]


def _shown(settings: Settings) -> Callable[[str, Hashable], str]:
    """Values as they are set, and where, if that is a file; the default and nothing are one thing, called so where both occur."""

    def shown(name: str, value: Hashable) -> str:
        holders = _spelt(settings, name, value)
        if value is None:
            return " or ".join(["not set", *sorted({show(spelt) for _, spelt in holders})])
        filed = bool(holders) and all(name not in report.variables for report, _ in holders)
        return show_value(name, min(spelt for _, spelt in holders)) + (" (in nccl.conf)" if filed else "")

    return shown


def _typed(settings: Settings) -> Callable[[str, Hashable], str]:
    """Values as a shell wants them."""

    def typed(name: str, value: Hashable) -> str:
        return shlex.quote(min((spelt for _, spelt in _spelt(settings, name, value)), default=str(value)))

    return typed


def _filed(members: Members) -> dict[str, tuple[str, ...]]:
    """What to do about variables that a file sets: nobody can unset them in a shell."""
    names = {name for _, report in members for name in report.nccl_files if name not in report.variables}
    line = "on {who}: look into /etc/nccl.conf and ~/.nccl.conf: {key} must be the same on all nodes, or be in none"
    return dict.fromkeys(names, (line,))


def _with_reason(name: str) -> str:
    return f"{name} ({ONLY_WARN.get(name, 'differs')})"
