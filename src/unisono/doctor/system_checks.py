"""Checks of this machine: limits, shared memory, cores, memory, disks, clock, versions, processes of earlier runs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import unisono
from unisono.agree.compare import judge_storage
from unisono.agree.machines import judge_limits
from unisono.agree.reports import Member, OutputFacts, show_bytes
from unisono.agree.version_rules import judge_known_bad
from unisono.doctor.check import (
    STORAGE_S,
    Check,
    CheckFunction,
    Finding,
    Surroundings,
    agreement_findings,
    found,
)
from unisono.facts import is_synchronised
from unisono.facts.limits import CoreDumps, read_core_dumps
from unisono.facts.processes import Orphan, end_orphan, find_orphans
from unisono.facts.storage import StorageFacts, probe_storage
from unisono.text import show_seconds

OUTPUT = Check(
    "system.output",
    "the output directory",
    "a disk that is full, read-only or unresponsive loses the first checkpoint, hours after the start",
    "A separate process writes, syncs, renames, reads back and removes a megabyte in output_dir (without CONFIG: ./runs) or its nearest parent."
    " Fails if that fails, if the disk does not respond for ten seconds, or if less than 64 MiB is free. Warns if the folder is in memory (tmpfs).",
    ("storage_unfit", "disk_full", "io_blocked"),
)
CACHES = Check(
    "system.caches",
    "caches and temporary files",
    "tokens, downloads and temporary files need space beside the run, and a hanging cache blocks every rank in its first seconds",
    "The same trial as for system.output, in unisono's cache, the Hub's cache and the temporary directory. Fails if one is not writable or does not respond; warns below 1 GiB free.",
    ("disk_full", "io_blocked"),
)
_MIN_FREE = 2**30
_MEMORY_TYPES = ("tmpfs", "ramfs")


def check_output(facts: Surroundings) -> list[Finding]:
    """The run's output folder, by the rules of agreement."""
    report = facts.report
    judged = agreement_findings(
        judge_storage([(Member(report.node_rank, -1, report.host), report)]),
        report,
        {"storage.write": OUTPUT},
    )
    return [_with_file_system(finding, report.output) for finding in judged] + _in_memory(report.output)


def _with_file_system(finding: Finding, output: OutputFacts) -> Finding:
    """A finding with the path and its file system. A start waits longer and finds out; doctor reports an unresponsive disk as a failure."""
    kind = output.file_system or "file system unknown"
    if finding.status == "unknown" and "does not answer" in output.trouble:
        return found(
            OUTPUT,
            "fail",
            f"{output.path} ({kind}): {output.trouble}",
            fix=[
                f"`df {output.path}` in a second shell; `dmesg | tail`, here or on its server; or choose a different output_dir"
            ],
        )
    first = f"{output.path} ({kind}): {finding.evidence[0]}"
    if output.path in finding.evidence[0]:
        first = f"{finding.evidence[0]} ({kind})"
    return Finding(finding.id, finding.status, (first, *finding.evidence[1:]), finding.fix)


def _in_memory(output: OutputFacts) -> list[Finding]:
    if output.file_system not in _MEMORY_TYPES:
        return []
    text = f"{output.path} is in memory ({output.file_system}): it is lost on reboot, and files there use up memory"
    return [found(OUTPUT, "warn", text, fix=["choose an output_dir on a disk"])]


def check_caches(facts: Surroundings) -> list[Finding]:
    """Folders that are written beside the run."""
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
    fix = [f"`ls -ld {tried.path}`; `df -h {tried.path}`", f"or set {_VARIABLE[name]} to a different folder"]
    if not tried.writable:
        return found(CACHES, "fail", f"{where}: {tried.trouble or 'cannot be tested'}", fix=fix)
    free = "" if tried.free_bytes is None else f"{show_bytes(tried.free_bytes)} free"
    if tried.free_bytes is not None and tried.free_bytes < _MIN_FREE:
        return found(CACHES, "warn", f"{where}: only {free}", fix=fix)
    return found(CACHES, "pass", f"{where}: {free}")


_VARIABLE = {"unisono's cache": "XDG_CACHE_HOME", "the hub's cache": "HF_HOME", "temporary files": "TMPDIR"}


ORPHANS = Check(
    "system.orphans",
    "processes of earlier runs",
    "a rank that outlived its run keeps its GPU memory, port and cores, and the next run fails because of it",
    "Processes with a rank's command line, or under `unisono run`, whose front has ended; each with run id, pid and age. Warns."
    " Nothing is killed without `--end-orphans`, and then only your own processes.",
    ("stale_process",),
)
_SHOWN = 20


def check_orphans(facts: Surroundings) -> list[Finding]:
    """Finds orphans, and kills them with --end-orphans."""
    left = find_orphans()
    ended = {orphan: end_orphan(orphan) for orphan in left} if facts.request.end_orphans else {}
    return [judge_orphans(left, ended)]


def judge_orphans(left: Sequence[Orphan], ended: dict[Orphan, bool]) -> Finding:
    """The finding on orphans. Pure. `ended`: for those to be killed, whether they are gone."""
    if not left:
        return found(ORPHANS, "pass", "none")
    rows = [f"{_row(orphan)}{'; ended' if ended.get(orphan) else ''}" for orphan in left[:_SHOWN]]
    living = [orphan for orphan in left if not ended.get(orphan)]
    if not living:
        return found(ORPHANS, "pass", f"{len(left)} ended", *rows)
    text = f"{len(living)} process{'' if len(living) == 1 else 'es'} without a front"
    own_orphans = [orphan for orphan in living if orphan.mine and orphan.state != "D"]
    fix = []
    if own_orphans:
        fix = [
            "`unisono doctor --end-orphans`",
            f"or `kill -9 {' '.join(str(orphan.pid) for orphan in own_orphans[:_SHOWN])}`",
        ]
    if any(orphan.state == "D" for orphan in living):
        fix.append(
            "a process that waits in the kernel (state D) ends when its storage responds, or on reboot"
        )
    if any(not orphan.mine for orphan in living):
        fix.append("ask the other user to end theirs")
    return found(ORPHANS, "warn", text, *rows, fix=fix)


def _row(orphan: Orphan) -> str:
    run = f"run {orphan.run_id}" if orphan.run_id else f"run unknown ({orphan.plan})"
    owner = "" if orphan.mine else ", another user's"
    return f"{run}: process {orphan.pid}, {show_seconds(orphan.age_s)} old, state {orphan.state}{owner}"


LIMITS = Check(
    "system.limits",
    "ulimits and container limits",
    "a rank opens hundreds of files, sockets and threads, and fails mid-run when it reaches a limit",
    "`ulimit -n`, `-u`, `-l`, `-s`, and the cgroup's pids.max. Fails below 256 open files per process; warns below 4,096 (32,768 from 128 ranks on),"
    " below 1,024 processes and threads, below 64 MiB of locked memory with InfiniBand, and for an unlimited stack with NCCL before 2.28.",
    ("ulimit",),
)
SHM = Check(
    "system.shm",
    "shared memory",
    "ranks and data loaders of one machine communicate through /dev/shm, and NCCL fails with a bus error or an allocation error if it is full",
    "Size and free bytes of /dev/shm. Warns below 64 MiB. For several ranks with GPUs, fails below 64 MiB and warns below 1 GiB.",
    ("shm_too_small",),
)
CORES = Check(
    "system.cores",
    "cores compared with ranks and threads",
    "ranks that share cores slow each other down in every step",
    "Cores by CPU affinity and by cgroup CPU quota, compared with ranks × threads. Warns if there are too few.",
    ("straggler",),
)
MEMORY = Check(
    "system.memory",
    "host memory",
    "the kernel kills a process, usually a rank, when memory runs out",
    "Free memory within all cgroup limits, compared with the reserve of the system (a tenth, at least 1 GiB). Warns if only the reserve is left.",
    ("host_oom_killed",),
)
CORE_DUMPS = Check(
    "system.core_dumps",
    "core dumps",
    "a crashed rank writes all its memory to a file, and eight of them fill the disk that checkpoints need",
    "`ulimit -c` and the kernel's core_pattern. Warns if dumps of any size are written to files.",
    ("disk_full",),
)
CLOCK = Check(
    "system.clock",
    "clock",
    "with a wrong clock certificates are rejected, files seem to be from the future, and torchrun's rendezvous considers live nodes dead; unisono itself compares no clocks",
    "Fails if the clock is earlier than the day on which unisono was installed; warns if the kernel reports that no time service synchronizes it.",
    ("clock_skew",),
)
VERSIONS = Check(
    "system.versions",
    "versions with known bugs",
    "some versions of torch, NCCL and others hang or compute wrong results, which takes days to find out",
    "Installed versions are compared with a table of reported bugs that apply to this machine. Warns, with the first fixed version and the bug report.",
    ("version_known_bad",),
)

_RULES = {"limits": LIMITS, "shm": SHM, "cores": CORES, "memory": MEMORY, "known_bad": VERSIONS}
_LARGE_DUMP = 2**30
_DAY_S = 86_400.0


def check_limits(facts: Surroundings) -> list[Finding]:
    """Limits, shared memory, cores and memory, by the rules of agreement."""
    report = facts.report
    return agreement_findings(
        judge_limits([(Member(report.node_rank, -1, report.host), report)]), report, _RULES
    )


def check_versions(facts: Surroundings) -> list[Finding]:
    """Known bugs, by the table of agreement."""
    report = facts.report
    return agreement_findings(
        judge_known_bad([(Member(report.node_rank, -1, report.host), report)]), report, _RULES
    )


def check_core_dumps(facts: Surroundings) -> list[Finding]:
    """Whether core dumps can fill the disk."""
    del facts
    return [judge_core_dumps(read_core_dumps())]


def judge_core_dumps(dumps: CoreDumps) -> Finding:
    """Pure."""
    size = "of any size" if dumps.limit_bytes is None else f"up to {show_bytes(dumps.limit_bytes)}"
    if dumps.limit_bytes == 0:
        return found(CORE_DUMPS, "pass", "disabled (ulimit -c 0)")
    if not dumps.to_file:
        return found(CORE_DUMPS, "pass", f"handled by a program: {dumps.pattern}")
    where = (
        dumps.pattern
        if dumps.pattern.startswith("/")
        else f"{dumps.pattern or 'core'} in the working directory"
    )
    if dumps.limit_bytes is None or dumps.limit_bytes > _LARGE_DUMP:
        return found(
            CORE_DUMPS,
            "warn",
            f"files {size} per crashed process: {where}",
            fix=["`ulimit -c 0` before the start, unless you are debugging a crash"],
        )
    return found(CORE_DUMPS, "pass", f"files {size}: {where}")


def check_clock(facts: Surroundings) -> list[Finding]:
    """Whether the clock is plausible and synchronized."""
    installed_s = Path(unisono.__file__).stat().st_mtime
    return [judge_clock(facts.probes.clock.wall(), installed_s=installed_s, synchronised=is_synchronised())]


def judge_clock(wall_s: float, *, installed_s: float, synchronised: bool | None) -> Finding:
    """The finding on the clock. Pure. Seconds since 1970; `installed_s`: modification time of unisono's files.

    The time is shown only where it matters or nothing is wrong, so that nodes with the same problem share a line.
    """
    now = f"{datetime.fromtimestamp(wall_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if wall_s < installed_s - _DAY_S:
        was = f"{datetime.fromtimestamp(installed_s, UTC):%Y-%m-%d}"
        fix = ["`timedatectl set-ntp true`", "or `date -s` with the right time"]
        return found(CLOCK, "fail", f"{now}, but unisono's files were installed on {was}", fix=fix)
    if synchronised is False:
        fix = ["`timedatectl set-ntp true`, then `chronyc tracking`; for a container do it on the host"]
        return found(CLOCK, "warn", "the kernel reports that no time service synchronizes it", fix=fix)
    if synchronised is None:
        return found(CLOCK, "unknown", "unknown whether a time service synchronizes it")
    return found(CLOCK, "pass", f"{now}; synchronized by a time service")


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
