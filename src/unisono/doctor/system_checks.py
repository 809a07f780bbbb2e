"""Checks of this machine: limits, shared memory, cores, memory, disks, clock, versions, processes of earlier runs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import unisono
from unisono.agree.display import Member, show_bytes
from unisono.agree.machines import judge_limits
from unisono.agree.node_files import judge_storage
from unisono.agree.reports import OutputFacts
from unisono.agree.version_rules import judge_known_bad
from unisono.doctor.check import Check, CheckFunction, Finding, Surroundings, found
from unisono.doctor.local_report import STORAGE_S, agreement_findings
from unisono.facts.limits import CoreDumps, read_core_dumps
from unisono.facts.orphans import Orphan, end_orphan, find_orphans
from unisono.facts.probes import is_synchronised
from unisono.facts.storage import StorageFacts, probe_storage
from unisono.text import show_seconds

OUTPUT = Check(
    "system.output",
    "output_dir",
    "a disk that is full, read-only or does not answer takes the first checkpoint with it, hours after the start",
    "A megabyte is written, synced, renamed, read back and removed in output_dir (without CONFIG: in ./runs) or its nearest parent, by a process of its own."
    " Fails where that fails, where nothing comes for ten seconds, and where less than 64 MiB is free. Warns where it is in memory (tmpfs).",
    ("storage_unfit", "disk_full", "io_blocked"),
)
CACHES = Check(
    "system.caches",
    "caches and temporary files",
    "tokens, downloads and temporary files need room beside the run, and a cache that hangs stops every rank in its first seconds",
    "The same trial in unisono's cache, the hub's cache and the folder of temporary files. Fails where one cannot be written or does not answer; warns below 1 GiB free.",
    ("disk_full", "io_blocked"),
)
_MIN_FREE = 2**30
_MEMORY_TYPES = ("tmpfs", "ramfs")


def check_output(facts: Surroundings) -> list[Finding]:
    """Where the run will write, by agreement's own rules."""
    report = facts.report
    judged = agreement_findings(
        judge_storage([(Member(report.node_rank, -1, report.host), report)]),
        report,
        {"storage.write": OUTPUT},
    )
    return [_with_file_system(finding, report.output) for finding in judged] + _in_memory(report.output)


def _with_file_system(finding: Finding, output: OutputFacts) -> Finding:
    """A start waits longer and finds out; here a disk that does not answer is what one wanted to know."""
    kind = output.file_system or "unknown file system"
    if finding.status == "unknown" and "does not answer" in output.trouble:
        return found(
            OUTPUT,
            "fail",
            f"{output.path} ({kind}): {output.trouble}",
            fix=[
                f"`df {output.path}` in another shell; `dmesg | tail`, here or on its server; or choose another output_dir"
            ],
        )
    first = f"{output.path} ({kind}): {finding.evidence[0]}"
    if output.path in finding.evidence[0]:
        first = f"{finding.evidence[0]} ({kind})"
    return Finding(finding.id, finding.status, (first, *finding.evidence[1:]), finding.fix)


def _in_memory(output: OutputFacts) -> list[Finding]:
    if output.file_system not in _MEMORY_TYPES:
        return []
    text = f"{output.path} is in memory ({output.file_system}): gone with the machine, and what is written there counts as memory"
    return [found(OUTPUT, "warn", text, fix=["choose an output_dir on a disk"])]


def check_caches(facts: Surroundings) -> list[Finding]:
    """What is written beside the run."""
    environment = facts.environment
    folders = {
        "unisono's cache": environment.cache_dir,
        "the hub's cache": environment.hub_cache,
        "temporary files": environment.temporary_dir,
    }
    with ThreadPoolExecutor(len(folders)) as pool:
        tried = list(pool.map(_probe_folder, folders.values()))
    return [judge_cache(name, one) for name, one in zip(folders, tried, strict=True)]


def _probe_folder(folder: Path) -> StorageFacts:
    return probe_storage(folder, limit_s=STORAGE_S)


def judge_cache(name: str, tried: StorageFacts) -> Finding:
    """Pure."""
    where = f"{name}: {tried.path} ({tried.file_system or 'unknown file system'})"
    fix = [f"`ls -ld {tried.path}`; `df -h {tried.path}`", f"or set {_VARIABLE[name]} to a folder elsewhere"]
    if not tried.writable:
        return found(CACHES, "fail", f"{where}: {tried.trouble or 'cannot be tried'}", fix=fix)
    free = "" if tried.free_bytes is None else f"{show_bytes(tried.free_bytes)} free"
    if tried.free_bytes is not None and tried.free_bytes < _MIN_FREE:
        return found(CACHES, "warn", f"{where}: only {free}", fix=fix)
    return found(CACHES, "pass", f"{where}: {free}")


_VARIABLE = {"unisono's cache": "XDG_CACHE_HOME", "the hub's cache": "HF_HOME", "temporary files": "TMPDIR"}


ORPHANS = Check(
    "system.orphans",
    "processes of earlier runs",
    "a rank that outlived its run holds its device's memory, its port and its cores, and the next run fails for no reason of its own",
    "Processes with a rank's command line, or under `unisono run`, whose front is gone; each with its run's id, its pid and its age. Warns."
    " Nothing is ended unless `--end-orphans` asks for it, and then only processes of one's own.",
    ("stale_process",),
)
_SHOWN = 20


def check_orphans(facts: Surroundings) -> list[Finding]:
    """Finds them, and ends them where that was asked for."""
    left = find_orphans()
    ended = {orphan: end_orphan(orphan) for orphan in left} if facts.request.end_orphans else {}
    return [judge_orphans(left, ended)]


def judge_orphans(left: Sequence[Orphan], ended: dict[Orphan, bool]) -> Finding:
    """Pure. `ended`: for those that were to be ended, whether they are gone."""
    if not left:
        return found(ORPHANS, "pass", "none")
    rows = [f"{_row(orphan)}{'; ended' if ended.get(orphan) else ''}" for orphan in left[:_SHOWN]]
    living = [orphan for orphan in left if not ended.get(orphan)]
    if not living:
        return found(ORPHANS, "pass", f"{len(left)} ended", *rows)
    text = f"{len(living)} without {'its' if len(living) == 1 else 'their'} front"
    mine = [orphan for orphan in living if orphan.mine and orphan.state != "D"]
    fix = []
    if mine:
        fix = [
            "`unisono doctor --end-orphans`",
            f"or `kill -9 {' '.join(str(orphan.pid) for orphan in mine[:_SHOWN])}`",
        ]
    if any(orphan.state == "D" for orphan in living):
        fix.append("what waits in the kernel (state D) ends when its storage answers, or with the machine")
    if any(not orphan.mine for orphan in living):
        fix.append("what belongs to another user is theirs to end")
    return found(ORPHANS, "warn", text, *rows, fix=fix)


def _row(orphan: Orphan) -> str:
    run = f"run {orphan.run_id}" if orphan.run_id else f"run unknown ({orphan.plan})"
    whose = "" if orphan.mine else ", another user's"
    return f"{run}: process {orphan.pid}, {show_seconds(orphan.age_s)} old, state {orphan.state}{whose}"


LIMITS = Check(
    "system.limits",
    "limits of the shell and the container",
    "a rank opens files, sockets and threads by the hundred, and ends in the middle of a run where it may have no more",
    "`ulimit -n`, `-u`, `-l`, `-s`, and the control group's pids.max. Fails below 256 open files a process; warns below 4,096 (32,768 from 128 ranks on),"
    " below 1,024 processes and threads, below 64 MiB of locked memory with InfiniBand, and without a limit of the stack with NCCL before 2.28.",
    ("ulimit",),
)
SHM = Check(
    "system.shm",
    "shared memory",
    "ranks and loaders of one machine exchange through /dev/shm, and NCCL fails with a bus error or a refusal where it is full",
    "Size and free bytes of /dev/shm. Warns below 64 MiB, and fails there where several ranks with devices need it; for these it warns below 1 GiB.",
    ("shm_too_small",),
)
CORES = Check(
    "system.cores",
    "cores against ranks and threads",
    "ranks that share cores wait for each other in every step",
    "Cores by affinity and by the control groups' share of time, against ranks × threads. Warns where they do not suffice.",
    ("straggler",),
)
MEMORY = Check(
    "system.memory",
    "host memory",
    "the kernel ends a process, mostly a rank, where memory runs out",
    "What is free, within the limits of all control groups above, against what is left to the system (a tenth, at least 1 GiB). Warns where nothing else is left.",
    ("host_oom_killed",),
)
CORE_DUMPS = Check(
    "system.core_dumps",
    "core dumps",
    "a rank that crashes writes all its memory into a file, and eight of them fill the disk that checkpoints need",
    "`ulimit -c` and the kernel's core_pattern. Warns where dumps of any size become files.",
    ("disk_full",),
)
CLOCK = Check(
    "system.clock",
    "clock",
    "certificates are refused, files look newer than now, and torchrun's rendezvous takes living nodes for dead where a clock is wrong; unisono itself compares no clocks",
    "Fails where it is earlier than the day on which unisono's own files were installed; warns where the kernel says that no time service keeps it.",
    ("clock_skew",),
)
VERSIONS = Check(
    "system.versions",
    "versions with known bugs",
    "some versions of torch, NCCL and others hang or compute wrongly, and each costs days until it is found",
    "Installed versions against a table of reported faults that this machine could meet. Warns, with the least good version and the report.",
    ("version_known_bad",),
)

_RULES = {"limits": LIMITS, "shm": SHM, "cores": CORES, "memory": MEMORY, "known_bad": VERSIONS}
_LARGE_DUMP = 2**30
_DAY_S = 86_400.0


def check_limits(facts: Surroundings) -> list[Finding]:
    """Limits, shared memory, cores and memory, by agreement's own rules."""
    report = facts.report
    return agreement_findings(
        judge_limits([(Member(report.node_rank, -1, report.host), report)]), report, _RULES
    )


def check_versions(facts: Surroundings) -> list[Finding]:
    """Known faults, by agreement's own table."""
    report = facts.report
    return agreement_findings(
        judge_known_bad([(Member(report.node_rank, -1, report.host), report)]), report, _RULES
    )


def check_core_dumps(facts: Surroundings) -> list[Finding]:
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
            CORE_DUMPS,
            "warn",
            f"files {size} a crashed process: {where}",
            fix=["`ulimit -c 0` before the start, unless a crash is being looked into"],
        )
    return found(CORE_DUMPS, "pass", f"files {size}: {where}")


def check_clock(facts: Surroundings) -> list[Finding]:
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
CHECKS: tuple[CheckFunction, ...] = (
    check_limits,
    check_core_dumps,
    check_clock,
    check_versions,
    check_output,
    check_caches,
    check_orphans,
)
