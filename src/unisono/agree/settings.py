"""What nodes were told: the config, environment variables, versions, packages, and code."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.environment_rules import ONLY_WARN, compared, meant, only_warns
from unisono.agree.finding import judge_keys, unknown_for
from unisono.agree.groups import differing, partition
from unisono.agree.naming import Who, enumerate_words, name_all
from unisono.agree.report import NodeReport
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import freeze, show, show_digest, show_value
from unisono.agree.version_rules import VERSION_RULES, essential

Said = Sequence[tuple[Who, Mapping[str, Hashable]]]


def judge_config(members: Members) -> Agreement:
    """All keys of the resolved config are equal."""
    said = [(who, {key: freeze(value) for key, value in report.config.items()}) for who, report in members]
    return judge_keys(
        NODE_RULES["config"], said, good=f"{len(members[0][1].config)} keys, the same everywhere"
    )


def settings_of(report: NodeReport) -> dict[str, str]:
    """What NCCL, torch and the rest will read: the files of NCCL, and the environment, which beats them."""
    return {**report.nccl_files, **report.variables}


def judge_environment(members: Members) -> Agreement:
    """Variables that are part of the protocol between ranks have the same effect on all nodes."""
    rule = NODE_RULES["env"]
    settings = [(who, settings_of(report)) for who, report in members]
    names = {name for _, values in settings for name in values if compared(name)}
    fatal = sorted(name for name in names if not only_warns(name))
    mild = sorted(names.difference(fatal))
    found = judge_keys(
        rule, _effects(settings, fatal), shown=_shown(settings), label=_sources(members),
        good=f"{len(fatal)} that must be equal are" if fatal else "none is set that must be equal",
    )  # fmt: skip
    if not mild:
        return found
    warned = judge_keys(
        replace(rule, violated="warn", subject="environment variables that had better be equal"),
        _effects(settings, mild), shown=_shown(settings), label=_reasons, good=f"{len(mild)} that had better be equal are",
    )  # fmt: skip
    return found.merged(warned)


def _effects(settings: Sequence[tuple[Who, Mapping[str, str]]], names: Sequence[str]) -> Said:
    return [
        (who, {name: meant(name, values[name]) for name in names if name in values})
        for who, values in settings
    ]


def _shown(settings: Sequence[tuple[Who, Mapping[str, str]]]) -> Callable[[str, Hashable], str]:
    """Values as they are set; the default and nothing at all are one thing, and are called so where both occur."""

    def shown(name: str, value: Hashable) -> str:
        if isinstance(value, str):
            return show_value(name, value)
        spelt = {
            values[name] for _, values in settings if name in values and meant(name, values[name]) is None
        }
        return f"not set or {show(min(spelt))}" if spelt else "not set"

    return shown


def _sources(members: Members) -> Callable[[str], str]:
    """Names of variables, with the nodes where a file of NCCL's sets them."""

    def label(name: str) -> str:
        filed = [who for who, r in members if name in r.nccl_files and name not in r.variables]
        return f"{name} (nccl.conf on {name_all(filed)})" if filed else name

    return label


def _reasons(name: str) -> str:
    why = ONLY_WARN.get(name, "an unknown variable")
    return f"{name} ({why})"


def judge_versions(members: Members) -> Agreement:
    """Versions that numbers and wire formats depend on are equal; smaller differences are said."""
    rule = NODE_RULES["versions"]
    measured = [(who, report) for who, report in members if report.versions]
    unknown = unknown_for(rule, [who for who, r in members if not r.versions], "no versions were reported")
    if not measured:
        return unknown
    unused = {"cuda", "nccl"} if all(report.device_kind == "cpu" for _, report in measured) else set()
    policy = [name for name in VERSION_RULES if name not in unused]
    essentials = [
        (who, {name: essential(name, report.versions.get(name)) for name in policy})
        for who, report in measured
    ]
    refused = set(differing(essentials))
    found = judge_keys(
        rule, essentials, rank_keys=policy.index, shown=_version, good=f"{enumerate_words(policy)}: equal where they must be"
    )  # fmt: skip
    return found.merged(_smaller_differences(measured, refused), unknown)


def _smaller_differences(measured: Members, refused: Collection[str]) -> Agreement:
    rest = [
        (who, {name: value for name, value in report.versions.items() if name not in refused}) for who, report in measured
    ]  # fmt: skip
    if not differing(rest):
        return Agreement()
    rule = replace(NODE_RULES["versions"], violated="warn", subject="versions that had better be equal")
    return judge_keys(rule, rest, shown=_version)


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
    return judge_keys(rule, said, shown=_version, good=text).merged(missing)


def judge_code(members: Members) -> Agreement:
    """The source files that will run are equal."""
    rule = NODE_RULES["code"]
    said = [(who, report.code) for who, report in members if report.code]
    missing = unknown_for(rule, [who for who, r in members if not r.code], "no source files were digested")
    if not said:
        return missing
    good = f"{len(said[0][1])} source files, the same everywhere"
    return judge_keys(rule, said, shown=_digest, good=good).merged(missing)


def _digest(_: str, value: Hashable) -> str:
    return f"digest {show_digest(value)}" if isinstance(value, str) else "missing"
