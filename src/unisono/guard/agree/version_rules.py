"""Versions of packages and code: which must be equal on all nodes, down to which part, and which
are known to be bad.
"""

import re
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from unisono.base.causes import Evidence
from unisono.guard.agree.agreement import (
    Agreement,
    Wording,
    differing,
    judge_keys,
    partition,
    unknown_for,
    violation,
)
from unisono.guard.agree.membership import Members
from unisono.guard.agree.reports import (
    NodeReport,
    count,
    enumerate_words,
    name_all,
    settings_of,
    show,
    show_digest,
)
from unisono.guard.agree.rules import NODE_RULES

VersionPart = Literal["exact", "release", "minor", "major"]

_DEPTH: dict[VersionPart, int] = {"major": 1, "minor": 2}


@dataclass(frozen=True, slots=True)
class VersionRule:
    """Which part of a package's version must be equal; a smaller difference is only a warning."""

    package: str
    part: VersionPart
    why: str


VERSION_RULES: dict[str, VersionRule] = {
    rule.package: rule
    for rule in (
        VersionRule("unisono", "exact", "it defines the messages between nodes and the order of steps"),
        VersionRule("python", "minor", "hashes, random streams and bytecode change between minor versions"),
        VersionRule(
            "torch", "release", "collectives, and the results of many kernels, change between releases"
        ),
        VersionRule("cuda", "major", "kernels and NCCL are built for one major version"),
        VersionRule("nccl", "release", "ranks with different NCCL versions are incompatible"),
        VersionRule("transformers", "release", "models and chat templates change between releases"),
        VersionRule(
            "peft", "release", "names, shapes and initial values of adapters change between releases"
        ),
    )
}
"""Other differences are warnings."""

BY_HAND: dict[str, tuple[str, ...]] = {
    "python": (
        "on {who}: recreate the environment with Python {value}",
        "or use one container image on all nodes",
    ),
    "cuda": (
        "on {who}: install a torch that is built for CUDA {value}",
        "or use one container image on all nodes",
    ),
    "nccl": (
        "on {who}: install the same torch, which includes NCCL {value}",
        "check LD_LIBRARY_PATH and LD_PRELOAD for a different NCCL",
    ),
    "driver": ("on {who}: install the NVIDIA driver {value}, if it works on the other nodes",),
}
"""Remedies for what pip cannot install."""


def essential(package: str, version: str | None) -> str | None:
    """The part of `version` that must be equal; None if it is not installed or has no rule."""
    rule = VERSION_RULES.get(package)
    if rule is None or version is None:
        return None
    if rule.part == "exact":
        return version
    public = version.partition("+")[0].strip()
    return public if rule.part == "release" else ".".join(public.split(".")[: _DEPTH[rule.part]])


def release_of(version: str) -> tuple[int, ...]:
    """`2.26.2+cuda12.2` as (2, 26, 2); empty if it does not start with a number."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")[:6] if len(part) < 10) if match else ()


def judge_versions(members: Members) -> Agreement:
    """Versions that results and wire formats depend on are equal; smaller differences are
    warnings.
    """
    rule = NODE_RULES["versions"]
    measured = [(who, report) for who, report in members if report.versions]
    unknown = unknown_for(rule, [who for who, r in members if not r.versions], "no versions reported")
    if not measured:
        return unknown
    # They do not matter on CPU, nor if another node has no devices.
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
    versions = [
        (who, {name: value for name, value in report.versions.items() if name not in skipped})
        for who, report in measured
    ]
    if not differing(versions):
        return Agreement()
    rule = replace(NODE_RULES["versions"], violated="warn", subject="versions that should be equal")
    return judge_keys(rule, versions, Wording(shown=_version, remedies=BY_HAND))


def _version(_: str, value: Hashable) -> str:
    return "not installed" if value is None else show(value)


def judge_packages(members: Members) -> Agreement:
    """The other installed packages are equal; differences are only warnings."""
    rule = NODE_RULES["packages"]
    unknown = [who for who, report in members if not report.environment_digest]
    digests = partition((who, r.environment_digest) for who, r in members if r.environment_digest)
    missing = unknown_for(rule, unknown, "no packages reported")
    if not digests:
        return missing
    text = f"{len(members[0][1].packages)} packages, equal on all nodes"
    if len(digests) == 1:
        return Agreement.noted(rule.id, "pass", text).merged(missing)
    reports = dict(members)
    reported = [
        (who, {name: version for name, version in packages.items() if name not in VERSION_RULES})
        for group in digests
        for packages in [reports[group.members[0]].packages]
        for who in group.members
    ]
    return judge_keys(rule, reported, Wording(shown=_version, good=text)).merged(missing)


def judge_code(members: Members) -> Agreement:
    """The source files that will run are equal."""
    rule = NODE_RULES["code"]
    reported = [(who, report.code) for who, report in members if report.code]
    missing = unknown_for(rule, [who for who, r in members if not r.code], "no source files hashed")
    if not reported:
        return missing
    good = f"{len(reported[0][1])} source files, equal on all nodes"
    return judge_keys(rule, reported, Wording(shown=_digest, good=good)).merged(missing)


def _digest(_: str, value: Hashable) -> str:
    return f"digest {show_digest(value)}" if isinstance(value, str) else "missing"


Versions = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A range of versions of one package with a known bug.

    Attributes:
        package: its name in pip or in the report's versions.
        since: the first bad version.
        before: the first good one; empty: none is known.
        what: the bug, and when it occurs.
        source: where it is reported.
        concerns: `train` for bugs that affect our own runs, `programs` for those that affect
            foreign programs under `unisono run`.
    """

    package: str
    since: tuple[int, ...]
    before: tuple[int, ...]
    what: str
    least_good: str
    command: str
    source: str
    concerns: str = "train"
    when: Callable[[NodeReport], bool] = lambda _: True

    def holds(self, versions: Versions) -> bool:
        """Whether the installed version is in the range."""
        installed = release_of(versions.get(self.package, ""))
        return bool(installed) and installed >= self.since and (not self.before or installed < self.before)


def _has_several(report: NodeReport) -> bool:
    return report.device_kind == "cuda" and report.nproc > 1


def _cuda(report: NodeReport) -> bool:
    return report.device_kind == "cuda" and (report.nodes > 1 or report.nproc > 1)


def _cumem_host(report: NodeReport) -> bool:
    return _has_several(report) and settings_of(report).get("NCCL_CUMEM_HOST_ENABLE", "1").strip() != "0"


def _cumem_without_peers(report: NodeReport) -> bool:
    names = [device.name.split() for device in report.chosen]
    return _cumem_host(report) and any("T4" in words or "L4" in words for words in names)


def _infiniband(report: NodeReport) -> bool:
    return (
        _cuda(report)
        and report.nodes > 1
        and any(one.kind == "infiniband" and one.up for one in report.interfaces)
    )


# fmt: off
KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "torch", (2, 7, 0), (2, 7, 1),
        "init_process_group(device_id=…) makes NCCL 2.26 hang at random", "2.7.1",
        "pip install 'torch>=2.7.1', or export TORCH_NCCL_USE_COMM_NONBLOCKING=0",
        "https://github.com/pytorch/pytorch/issues/153960", when=_cuda,
    ),
    KnownBad(
        "torch", (2, 2, 0), (2, 2, 1),
        "DTensor and device meshes silently return wrong values", "2.2.1", "pip install 'torch>=2.2.1'",
        "https://github.com/pytorch/pytorch/issues/119295", concerns="programs",
    ),
    KnownBad(
        "nccl", (2, 24), (2, 26, 5),
        "cuMem host memory cannot be allocated in containers without NUMA permissions: out of memory or a "
        "CUDA error at the first collective",
        "2.26.5", "export NCCL_CUMEM_HOST_ENABLE=0 on all nodes, or docker run --cap-add SYS_NICE",
        "https://github.com/pytorch/pytorch/issues/152302", when=_cumem_host,
    ),
    KnownBad(
        "nccl", (2, 26, 5), (),
        "CUDA error 217, `peer access is not supported`, on devices without peer access such as T4 and L4, "
        "with some drivers", "",
        "export NCCL_CUMEM_HOST_ENABLE=0 on all nodes",
        "https://github.com/NVIDIA/nccl/issues/1838", when=_cumem_without_peers,
    ),
    KnownBad(
        "nccl", (2, 25), (2, 26, 2),
        "ncclCommAbort hangs: a failed run does not exit", "2.26.2", "pip install 'torch>=2.7.1'",
        "https://github.com/pytorch/pytorch/issues/149153", when=_cuda,
    ),
    KnownBad(
        "nccl", (2, 29), (2, 29, 3),
        "collectives may hang", "2.29.3", "install a torch that includes NCCL 2.29.3 or newer",
        "https://github.com/pytorch/pytorch/pull/174338", when=_cuda,
    ),
    KnownBad(
        "nccl", (2,), (2, 23, 4),
        "does not detect nvidia_peermem: GPUDirect RDMA stays off and InfiniBand is about ten times slower", "2.23.4",
        "pip install 'torch>=2.7.1'",
        "https://github.com/NVIDIA/nccl/issues/1676", when=_infiniband,
    ),
    KnownBad(
        "ray", (1,), (2, 60),
        "Ray Train destroys the process group without checking that it exists: a finished run ends in "
        "AssertionError", "2.60.0",
        "pip install 'ray[train]>=2.60'",
        "https://github.com/ray-project/ray/pull/61156", concerns="programs",
    ),
    KnownBad(
        "llamafactory", (0,), (0, 9, 3),
        "under Ray, the process group is destroyed twice: a finished run ends in AssertionError", "0.9.3",
        "pip install 'llamafactory>=0.9.3'",
        "https://github.com/hiyouga/LlamaFactory/pull/7395", concerns="programs",
    ),
    *(
        KnownBad(
            name, (1,), (2, 0),
            "strategy='ddp' with one device still creates a process group, and requires a working NCCL", "2.0.0",
            f"pip install '{name}>=2', and strategy='auto'",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/10900", concerns="programs",
        )
        for name in ("pytorch-lightning", "lightning")
    ),
)
# fmt: on
"""Only bugs with a source. torchrun's problem with different clocks, in every version so far, is
the cause clock_skew.
"""


def judge_known_bad(members: Members) -> Agreement:
    """A warning for each known bug that could affect a run of ours on these nodes."""
    rule = NODE_RULES["known_bad"]
    agreement = Agreement()
    for entry in (entry for entry in KNOWN_BAD if entry.concerns == "train"):
        hit = [(who, _installed(entry, report)) for who, report in members if _meets(entry, report)]
        for group in partition(hit):
            where = name_all(group.members)
            fix = [entry.command, f"see {entry.source}"]
            if entry.least_good:
                fix.insert(1, f"the minimum good version is {entry.least_good}")
            agreement = agreement.merged(
                violation(
                    rule,
                    f"{entry.package} {group.value} on {where}: {entry.what}",
                    people=group.members,
                    fix=fix,
                    evidence=[Evidence(where=where, text=f"{entry.package} {group.value}")],
                )
            )
    if agreement.checks:
        return agreement
    return Agreement.noted(
        rule.id, "pass", f"none of {count(len(KNOWN_BAD), 'known bug')} affects these versions"
    )


def _meets(entry: KnownBad, report: NodeReport) -> bool:
    return entry.holds({entry.package: _installed(entry, report)}) and entry.when(report)


def _installed(entry: KnownBad, report: NodeReport) -> str:
    return report.versions.get(entry.package) or report.packages.get(entry.package, "")
