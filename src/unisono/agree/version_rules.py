"""Which versions must be equal on all nodes, and down to which part: a policy table."""

import re
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import Literal

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import unknown_for
from unisono.agree.groups import differing, partition
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.naming import enumerate_words
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import show, show_digest

Part = Literal["exact", "release", "minor", "major"]

_DEPTH: dict[Part, int] = {"major": 1, "minor": 2}


@dataclass(frozen=True, slots=True)
class VersionRule:
    """How equal the versions of one package must be; a smaller difference is only a warning."""

    package: str
    part: Part
    why: str


VERSION_RULES: dict[str, VersionRule] = {
    rule.package: rule
    for rule in (
        VersionRule("unisono", "exact", "the messages between nodes and the order of steps are its own"),
        VersionRule("python", "minor", "hashes, random streams and bytecode change between minor versions"),
        VersionRule("torch", "release", "collectives, and the bits of many kernels, change between releases"),
        VersionRule("cuda", "major", "kernels and NCCL are built for one major version"),
        VersionRule("nccl", "release", "ranks with different NCCL do not understand each other"),
        VersionRule("transformers", "release", "models and chat templates change between releases"),
        VersionRule(
            "peft", "release", "names, shapes and initial values of adapters change between releases"
        ),
    )
}
"""All else differs with a warning."""

BY_HAND: dict[str, tuple[str, ...]] = {
    "python": (
        "on {who}: make the environment anew with Python {value}",
        "or use one container image on all nodes",
    ),
    "cuda": (
        "on {who}: install a torch that is built for CUDA {value}",
        "or use one container image on all nodes",
    ),
    "nccl": (
        "on {who}: install the same torch, which brings NCCL {value}",
        "LD_LIBRARY_PATH and LD_PRELOAD may lead to another NCCL",
    ),
    "driver": ("on {who}: install the NVIDIA driver {value}, if the others do well with it",),
}
"""What pip cannot install."""


def essential(package: str, version: str | None) -> str | None:
    """The part of `version` that must be equal; None where it is not installed, or where nothing is asked of the package."""
    rule = VERSION_RULES.get(package)
    if rule is None or version is None:
        return None
    if rule.part == "exact":
        return version
    public = version.partition("+")[0].strip()
    return public if rule.part == "release" else ".".join(public.split(".")[: _DEPTH[rule.part]])


def release_of(version: str) -> tuple[int, ...]:
    """`2.26.2+cuda12.2` as (2, 26, 2); empty if it does not begin with a number."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")[:6] if len(part) < 10) if found else ()


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
