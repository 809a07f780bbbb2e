"""Versions that are known to be bad: what goes wrong, the least good version, the command, and where that is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import finding
from unisono.agree.groups import partition
from unisono.agree.naming import count, name_all
from unisono.agree.report import NodeReport, settings_of
from unisono.agree.rules import NODE_RULES
from unisono.agree.version_rules import release_of
from unisono.causes import Evidence

Versions = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A range of versions of one package in which something goes wrong.

    Attributes:
        package: as pip, or as the report's versions, name it.
        since: the first bad version.
        before: the first good one; empty: none is known.
        what: goes wrong, and when.
        least_good: the version to install.
        command: the line to type.
        source: where it is reported and explained.
        concerns: `train` for what our own runs meet, `programs` for what foreign programs meet under `unisono run`.
        when: further conditions that a node's report shows.
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
        """Whether the installed version is in the bad range."""
        installed = release_of(versions.get(self.package, ""))
        return bool(installed) and installed >= self.since and (not self.before or installed < self.before)


def _several_here(report: NodeReport) -> bool:
    return report.device_kind == "cuda" and report.nproc > 1


def _cuda(report: NodeReport) -> bool:
    return report.device_kind == "cuda" and (report.nodes > 1 or report.nproc > 1)


def _cumem_host(report: NodeReport) -> bool:
    return _several_here(report) and settings_of(report).get("NCCL_CUMEM_HOST_ENABLE", "1").strip() != "0"


def _cumem_without_peers(report: NodeReport) -> bool:
    names = [device.name.split() for device in report.chosen]
    return _cumem_host(report) and any("T4" in words or "L4" in words for words in names)


def _infiniband(report: NodeReport) -> bool:
    return (
        _cuda(report)
        and report.nodes > 1
        and any(one.kind == "infiniband" and one.up for one in report.interfaces)
    )


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "torch", (2, 7, 0), (2, 7, 1),
        "init_process_group(device_id=…) makes NCCL 2.26 hang at random", "2.7.1",
        "pip install 'torch>=2.7.1', or export TORCH_NCCL_USE_COMM_NONBLOCKING=0",
        "https://github.com/pytorch/pytorch/issues/153960", when=_cuda,
    ),
    KnownBad(
        "torch", (2, 2, 0), (2, 2, 1),
        "DTensor and device meshes give wrong values in silence", "2.2.1", "pip install 'torch>=2.2.1'",
        "https://github.com/pytorch/pytorch/issues/119295", concerns="programs",
    ),
    KnownBad(
        "nccl", (2, 24), (2, 26, 5),
        "host memory by cuMem cannot be had in containers without NUMA rights: out of memory or a CUDA error at the first collective",
        "2.26.5", "export NCCL_CUMEM_HOST_ENABLE=0 on all nodes, or docker run --cap-add SYS_NICE",
        "https://github.com/pytorch/pytorch/issues/152302", when=_cumem_host,
    ),
    KnownBad(
        "nccl", (2, 26, 5), (),
        "CUDA error 217, `peer access is not supported`, on devices without peer access such as T4 and L4, with some drivers", "",
        "export NCCL_CUMEM_HOST_ENABLE=0 on all nodes",
        "https://github.com/NVIDIA/nccl/issues/1838", when=_cumem_without_peers,
    ),
    KnownBad(
        "nccl", (2, 25), (2, 26, 2),
        "ncclCommAbort hangs: a run that failed does not end", "2.26.2", "pip install 'torch>=2.7.1'",
        "https://github.com/pytorch/pytorch/issues/149153", when=_cuda,
    ),
    KnownBad(
        "nccl", (2, 29), (2, 29, 3),
        "collectives may hang", "2.29.3", "install a torch that brings NCCL 2.29.3 or newer",
        "https://github.com/pytorch/pytorch/pull/174338", when=_cuda,
    ),
    KnownBad(
        "nccl", (2,), (2, 23, 4),
        "does not see nvidia_peermem: GPUDirect RDMA stays off and InfiniBand is about ten times slower", "2.23.4",
        "pip install 'torch>=2.7.1'",
        "https://github.com/NVIDIA/nccl/issues/1676", when=_infiniband,
    ),
    KnownBad(
        "ray", (1,), (2, 60),
        "Ray Train destroys the process group without looking whether it is there: a finished run ends in AssertionError", "2.60.0",
        "pip install 'ray[train]>=2.60'",
        "https://github.com/ray-project/ray/pull/61156", concerns="programs",
    ),
    KnownBad(
        "llamafactory", (0,), (0, 9, 3),
        "under Ray it destroys the process group that Ray destroys, too: a finished run ends in AssertionError", "0.9.3",
        "pip install 'llamafactory>=0.9.3'",
        "https://github.com/hiyouga/LlamaFactory/pull/7395", concerns="programs",
    ),
    *(
        KnownBad(
            name, (1,), (2, 0),
            "strategy='ddp' with one device makes a process group all the same, and needs NCCL to work", "2.0.0",
            f"pip install '{name}>=2', and strategy='auto'",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/10900", concerns="programs",
        )
        for name in ("pytorch-lightning", "lightning")
    ),
)  # fmt: skip
"""Only what has a source. torchrun's trouble with clocks that differ, in every version so far, is the cause clock_skew."""


def judge_known_bad(members: Members) -> Agreement:
    """A warning for each known fault that a run of ours could meet on these nodes."""
    rule = NODE_RULES["known_bad"]
    found = Agreement()
    for entry in (entry for entry in KNOWN_BAD if entry.concerns == "train"):
        hit = [(who, _version(entry, report)) for who, report in members if _meets(entry, report)]
        for group in partition(hit):
            where = name_all(group.members)
            fix = [entry.command, f"see {entry.source}"]
            if entry.least_good:
                fix.insert(1, f"the least good version is {entry.least_good}")
            found = found.merged(
                finding(
                    rule, f"{entry.package} {group.value} on {where}: {entry.what}", people=group.members, fix=fix,
                    evidence=[Evidence(where=where, text=f"{entry.package} {group.value}")],
                )
            )  # fmt: skip
    if found.checks:
        return found
    return Agreement.noted(
        rule.id, "pass", f"none of {count(len(KNOWN_BAD), 'known fault')} concerns these versions"
    )


def _meets(entry: KnownBad, report: NodeReport) -> bool:
    return entry.holds({entry.package: _version(entry, report)}) and entry.when(report)


def _version(entry: KnownBad, report: NodeReport) -> str:
    return report.versions.get(entry.package) or report.packages.get(entry.package, "")
