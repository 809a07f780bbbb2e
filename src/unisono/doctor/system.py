"""What this machine lets a run have: limits, shared memory, cores, memory, clock."""

from datetime import UTC, datetime
from pathlib import Path

import unisono
from unisono.agree.display import Member, show_bytes
from unisono.agree.machines import judge_limits
from unisono.agree.version_rules import judge_known_bad
from unisono.doctor.agreed import as_findings
from unisono.doctor.check import Check, CheckFunction, Finding, Surroundings, found
from unisono.doctor.disks import CACHES, OUTPUT, caches, output
from unisono.doctor.left_behind import ORPHANS, orphans
from unisono.facts.limits import CoreDumps, read_core_dumps
from unisono.facts.probes import is_synchronised

LIMITS = Check(
    "system.limits", "limits of the shell and the container",
    "a rank opens files, sockets and threads by the hundred, and ends in the middle of a run where it may have no more",
    "`ulimit -n`, `-u`, `-l`, `-s`, and the control group's pids.max. Fails below 256 open files a process; warns below 4,096 (32,768 from 128 ranks on),"
    " below 1,024 processes and threads, below 64 MiB of locked memory with InfiniBand, and without a limit of the stack with NCCL before 2.28.",
    ("ulimit",),
)  # fmt: skip
SHM = Check(
    "system.shm", "shared memory",
    "ranks and loaders of one machine exchange through /dev/shm, and NCCL fails with a bus error or a refusal where it is full",
    "Size and free bytes of /dev/shm. Warns below 64 MiB, and fails there where several ranks with devices need it; for these it warns below 1 GiB.",
    ("shm_too_small",),
)  # fmt: skip
CORES = Check(
    "system.cores", "cores against ranks and threads",
    "ranks that share cores wait for each other in every step",
    "Cores by affinity and by the control groups' share of time, against ranks × threads. Warns where they do not suffice.",
    ("straggler",),
)  # fmt: skip
MEMORY = Check(
    "system.memory", "memory of the machine",
    "the kernel ends a process, mostly a rank, where memory runs out",
    "What is free, within the limits of all control groups above, against what is left to the system (a tenth, at least 1 GiB). Warns where nothing else is left.",
    ("host_oom_killed",),
)  # fmt: skip
CORE_DUMPS = Check(
    "system.core_dumps", "core dumps",
    "a rank that crashes writes all its memory into a file, and eight of them fill the disk that checkpoints need",
    "`ulimit -c` and the kernel's core_pattern. Warns where dumps of any size become files.",
    ("disk_full",),
)  # fmt: skip
CLOCK = Check(
    "system.clock", "clock",
    "certificates are refused, files look newer than now, and torchrun's rendezvous takes living nodes for dead where a clock is wrong; unisono itself compares no clocks",
    "Fails where it is earlier than the day on which unisono's own files were installed; warns where the kernel says that no time service keeps it.",
    ("clock_skew",),
)  # fmt: skip
VERSIONS = Check(
    "system.versions", "versions with known faults",
    "some versions of torch, NCCL and others hang or compute wrongly, and each costs days until it is found",
    "Installed versions against a table of reported faults that this machine could meet. Warns, with the least good version and the report.",
    ("version_known_bad",),
)  # fmt: skip

_RULES = {"limits": LIMITS, "shm": SHM, "cores": CORES, "memory": MEMORY, "known_bad": VERSIONS}
_LARGE_DUMP = 2**30
_DAY_S = 86_400.0


def limits(facts: Surroundings) -> list[Finding]:
    """Limits, shared memory, cores and memory, by agreement's own rules."""
    report = facts.report
    return as_findings(judge_limits([(Member(report.node_rank, -1, report.host), report)]), report, _RULES)


def versions(facts: Surroundings) -> list[Finding]:
    """Known faults, by agreement's own table."""
    report = facts.report
    return as_findings(judge_known_bad([(Member(report.node_rank, -1, report.host), report)]), report, _RULES)


def core_dumps(facts: Surroundings) -> list[Finding]:
    """Whether a crash fills the disk."""
    del facts
    return [judge_core_dumps(read_core_dumps())]


def judge_core_dumps(dumps: CoreDumps) -> Finding:
    """Pure."""
    size = "of any size" if dumps.limit_bytes is None else f"up to {show_bytes(dumps.limit_bytes)}"
    if dumps.limit_bytes == 0:
        return found(CORE_DUMPS, "pass", "none are written (ulimit -c 0)")
    if not dumps.to_file:
        return found(CORE_DUMPS, "pass", f"a program takes them: {dumps.pattern}")
    where = (
        dumps.pattern
        if dumps.pattern.startswith("/")
        else f"{dumps.pattern or 'core'} in the working directory"
    )
    if dumps.limit_bytes is None or dumps.limit_bytes > _LARGE_DUMP:
        return found(
            CORE_DUMPS, "warn", f"files {size} a crashed process: {where}", fix=["`ulimit -c 0` before the start, unless a crash is being looked into"]
        )  # fmt: skip
    return found(CORE_DUMPS, "pass", f"files {size}: {where}")


def clock(facts: Surroundings) -> list[Finding]:
    """Whether the clock can be right."""
    installed_s = Path(unisono.__file__).stat().st_mtime
    return [judge_clock(facts.probes.clock.wall(), installed_s=installed_s, synchronised=is_synchronised())]


def judge_clock(wall_s: float, *, installed_s: float, synchronised: bool | None) -> Finding:
    """Pure. Seconds since 1970; `installed_s`: when unisono's files were written, by the clock of that day.

    The time stands only where it matters or nothing is wrong: nodes that are wrong in the same way share a line.
    """
    now = f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if wall_s < installed_s - _DAY_S:
        was = f"{datetime.fromtimestamp(installed_s, UTC):%Y-%m-%d}"
        fix = ["`timedatectl set-ntp true`", "or `date -s` with the right time"]
        return found(CLOCK, "fail", f"{now}, but unisono's files were installed on {was}", fix=fix)
    if synchronised is False:
        fix = [
            "`timedatectl set-ntp true`, then `chronyc tracking`; in a container this is the host's matter"
        ]
        return found(CLOCK, "warn", "the kernel says that no time service keeps it", fix=fix)
    if synchronised is None:
        return found(CLOCK, "unknown", "whether a time service keeps it cannot be told")
    return found(CLOCK, "pass", f"{now}; kept by a time service")


CATALOGUE: tuple[Check, ...] = (
    LIMITS,
    SHM,
    CORES,
    MEMORY,
    CORE_DUMPS,
    CLOCK,
    VERSIONS,
    OUTPUT,
    CACHES,
    ORPHANS,
)
CHECKS: tuple[CheckFunction, ...] = (limits, core_dumps, clock, versions, output, caches, orphans)
