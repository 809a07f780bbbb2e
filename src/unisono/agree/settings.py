"""What nodes were told: the config and environment variables; and what they run: versions, packages, code."""

import shlex
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.environment_rules import ONLY_WARN, compared, meant, only_warns
from unisono.agree.finding import unknown_for
from unisono.agree.groups import differing, partition
from unisono.agree.keys import Said, Wording, judge_keys
from unisono.agree.naming import Who, enumerate_words
from unisono.agree.report import NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import freeze, show, show_digest, show_value
from unisono.agree.version_rules import BY_HAND, VERSION_RULES, essential

Settings = Sequence[tuple[Who, NodeReport, Mapping[str, str]]]


def judge_config(members: Members) -> Agreement:
    """All keys of the resolved config are equal."""
    said = [(who, {key: freeze(value) for key, value in report.config.items()}) for who, report in members]
    good = f"{len(members[0][1].config)} keys, the same everywhere"
    return judge_keys(NODE_RULES["config"], said, Wording(good=good))


def settings_of(report: NodeReport) -> dict[str, str]:
    """What NCCL, torch and the rest will read: the files of NCCL, and the environment, which beats them."""
    return {**report.nccl_files, **report.variables}


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


def judge_versions(members: Members) -> Agreement:
    """Versions that numbers and wire formats depend on are equal; smaller differences are said."""
    rule = NODE_RULES["versions"]
    measured = [(who, report) for who, report in members if report.versions]
    unknown = unknown_for(rule, [who for who, r in members if not r.versions], "no versions were reported")
    if not measured:
        return unknown
    # On CPU they do not matter, and next to a node without devices they are not the point.
    unused = {"cuda", "nccl"} if any(report.device_kind == "cpu" for _, report in measured) else set()
    policy = [name for name in VERSION_RULES if name not in unused]
    essentials = [
        (who, {name: essential(name, report.versions.get(name)) for name in policy})
        for who, report in measured
    ]
    refused = set(differing(essentials))
    good = f"{enumerate_words(policy)}: equal where they must be"
    wording = Wording(shown=_version, order=policy.index, remedies=BY_HAND, good=good)
    return judge_keys(rule, essentials, wording).merged(
        _smaller_differences(measured, refused | unused), unknown
    )


def _smaller_differences(measured: Members, skipped: Collection[str]) -> Agreement:
    rest = [
        (who, {name: value for name, value in report.versions.items() if name not in skipped})
        for who, report in measured
    ]
    if not differing(rest):
        return Agreement()
    rule = replace(NODE_RULES["versions"], violated="warn", subject="versions that had better be equal")
    return judge_keys(rule, rest, Wording(shown=_version, remedies=BY_HAND))


def _version(_: str, value: Hashable) -> str:
    return "not installed" if value is None else show(value)


def judge_packages(members: Members) -> Agreement:
    """The other installed packages are equal; differences are listed, and the run starts."""
    rule = NODE_RULES["packages"]
    unknown = [who for who, report in members if not report.environment_digest]
    digests = partition((who, r.environment_digest) for who, r in members if r.environment_digest)
    missing = unknown_for(rule, unknown, "no packages were reported")
    if not digests:
        return missing
    text = f"{len(members[0][1].packages)} packages, the same everywhere"
    if len(digests) == 1:
        return Agreement.noted(rule.id, "pass", text).merged(missing)
    reports = dict(members)
    said = [
        (who, {name: version for name, version in packages.items() if name not in VERSION_RULES})
        for group in digests
        for packages in [reports[group.members[0]].packages]
        for who in group.members
    ]
    return judge_keys(rule, said, Wording(shown=_version, good=text)).merged(missing)


def judge_code(members: Members) -> Agreement:
    """The source files that will run are equal."""
    rule = NODE_RULES["code"]
    said = [(who, report.code) for who, report in members if report.code]
    missing = unknown_for(rule, [who for who, r in members if not r.code], "no source files were digested")
    if not said:
        return missing
    good = f"{len(said[0][1])} source files, the same everywhere"
    return judge_keys(rule, said, Wording(shown=_digest, good=good)).merged(missing)


def _digest(_: str, value: Hashable) -> str:
    return f"digest {show_digest(value)}" if isinstance(value, str) else "missing"
