"""The disks that a run writes to: its output_dir, caches, temporary files. Each is tried by a process of its own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unisono.agree.display import Member, show_bytes
from unisono.agree.node_files import judge_storage
from unisono.agree.reports import OutputFacts
from unisono.doctor.agreed import as_findings
from unisono.doctor.check import Check, Finding, Surroundings, found
from unisono.doctor.looking import STORAGE_S
from unisono.facts.storage import StorageFacts, probe_storage

OUTPUT = Check(
    "system.output", "output_dir",
    "a disk that is full, read-only or does not answer takes the first checkpoint with it, hours after the start",
    "A megabyte is written, synced, renamed, read back and removed in output_dir (without CONFIG: in ./runs) or its nearest parent, by a process of its own."
    " Fails where that fails, where nothing comes for ten seconds, and where less than 64 MiB is free. Warns where it is in memory (tmpfs).",
    ("storage_unfit", "disk_full", "io_blocked"),
)  # fmt: skip
CACHES = Check(
    "system.caches", "caches and temporary files",
    "tokens, downloads and temporary files need room beside the run, and a cache that hangs stops every rank in its first seconds",
    "The same trial in unisono's cache, the hub's cache and the folder of temporary files. Fails where one cannot be written or does not answer; warns below 1 GiB free.",
    ("disk_full", "io_blocked"),
)  # fmt: skip
_LEAST_FREE = 2**30
_IN_MEMORY = ("tmpfs", "ramfs")


def output(facts: Surroundings) -> list[Finding]:
    """Where the run will write, by agreement's own rules."""
    report = facts.report
    judged = as_findings(
        judge_storage([(Member(report.node_rank, -1, report.host), report)]),
        report,
        {"storage.write": OUTPUT},
    )
    return [_hanging(finding, report.output) for finding in judged] + _kind(report.output)


def _hanging(finding: Finding, output: OutputFacts) -> Finding:
    """A start waits longer and finds out; here a disk that does not answer is what one wanted to know."""
    kind = output.file_system or "unknown file system"
    if finding.status == "unknown" and "does not answer" in output.trouble:
        return found(
            OUTPUT, "fail", f"{output.path} ({kind}): {output.trouble}",
            fix=[f"`df {output.path}` in another shell; `dmesg | tail`, here or on its server; or choose another output_dir"],
        )  # fmt: skip
    first = f"{output.path} ({kind}): {finding.evidence[0]}"
    if output.path in finding.evidence[0]:
        first = f"{finding.evidence[0]} ({kind})"
    return Finding(finding.id, finding.status, (first, *finding.evidence[1:]), finding.fix)


def _kind(output: OutputFacts) -> list[Finding]:
    if output.file_system not in _IN_MEMORY:
        return []
    text = f"{output.path} is in memory ({output.file_system}): gone with the machine, and what is written there counts as memory"
    return [found(OUTPUT, "warn", text, fix=["choose an output_dir on a disk"])]


def caches(facts: Surroundings) -> list[Finding]:
    """What is written beside the run."""
    environment = facts.environment
    folders = {
        "unisono's cache": environment.cache_dir,
        "the hub's cache": environment.hub_cache,
        "temporary files": environment.temporary_dir,
    }
    with ThreadPoolExecutor(len(folders)) as pool:
        tried = list(pool.map(_try, folders.values()))
    return [judge_cache(name, one) for name, one in zip(folders, tried, strict=True)]


def _try(folder: Path) -> StorageFacts:
    return probe_storage(folder, limit_s=STORAGE_S)


def judge_cache(name: str, tried: StorageFacts) -> Finding:
    """Pure."""
    where = f"{name}: {tried.path} ({tried.file_system or 'unknown file system'})"
    fix = [f"`ls -ld {tried.path}`; `df -h {tried.path}`", f"or set {_VARIABLE[name]} to a folder elsewhere"]
    if not tried.writable:
        return found(CACHES, "fail", f"{where}: {tried.trouble or 'cannot be tried'}", fix=fix)
    free = "" if tried.free_bytes is None else f"{show_bytes(tried.free_bytes)} free"
    if tried.free_bytes is not None and tried.free_bytes < _LEAST_FREE:
        return found(CACHES, "warn", f"{where}: only {free}", fix=fix)
    return found(CACHES, "pass", f"{where}: {free}")


_VARIABLE = {"unisono's cache": "XDG_CACHE_HOME", "the hub's cache": "HF_HOME", "temporary files": "TMPDIR"}
