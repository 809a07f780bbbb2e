# ruff: noqa: S108 - /dev/shm is what is looked at
"""What the system lets processes have on each node: files, shared memory, cores, memory; and what stays reserved."""

from collections.abc import Callable
from dataclasses import replace

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members
from unisono.agree.finding import NODES, evidence_of, finding, remedy_for, unknown_for
from unisono.agree.groups import partition
from unisono.agree.naming import count, name_all
from unisono.agree.report import NodeReport
from unisono.agree.rule import Rule
from unisono.agree.rules import NODE_RULES
from unisono.agree.showing import show_bytes
from unisono.agree.version_rules import release_of

_FEWEST_FILES = 256  # below it a rank does not even get its libraries, sockets and rows open
_FEW_FILES = 4096
_FEW_FILES_MANY_RANKS = 32_768
_MANY_RANKS = 128
_FEW_PROCESSES = 1024
_TINY_SHM = 64 * 2**20  # what a container gets unless told otherwise
_SMALL_SHM = 2**30
_LITTLE_LOCKED = 64 * 2**20
_STACK_FIXED_IN_NCCL = (2, 28)


def judge_limits(members: Members) -> Agreement:
    """Files and processes, shared memory, cores, memory."""
    world = sum(max(0, report.nproc) for _, report in members)
    return Agreement().merged(
        _judge(
            NODE_RULES["limits"],
            members,
            lambda r: _too_few_files(r, world),
            _many_files(members),
            fatal=True,
        ),
        _judge_rest(members),
        _judge_shm(members),
        _judge(NODE_RULES["cores"], members, _too_few_cores, "enough for all ranks"),
        _judge(NODE_RULES["memory"], members, _too_little_memory, _reserves(members)),
    )


def _judge(
    rule: Rule, members: Members, trouble: Callable[[NodeReport], str], good: str, *, fatal: bool = False
) -> Agreement:
    """One check; `trouble` gives an empty string where all is well, and begins with `!` where it is fatal."""
    groups = partition((who, trouble(report)) for who, report in members)
    bad = [group for group in groups if group.value]
    if not bad:
        return Agreement.noted(rule.id, "pass", good)
    worst = [group for group in bad if fatal and group.value.startswith("!")]
    shown = worst or bad
    people = sorted(who for group in shown for who in group.members)
    return finding(
        replace(rule, violated="fail" if worst else "warn"),
        "; ".join(f"{name_all(group.members)}: {_plain(group.value)}" for group in shown[:3]), people=people,
        evidence=evidence_of(bad, NODES, _plain), fix=remedy_for(rule, people),
    )  # fmt: skip


def _plain(value: str) -> str:
    return value.lstrip("!")


def _too_few_files(report: NodeReport, world: int) -> str:
    files = report.limits.open_files  # None: as many as one likes
    if files is None:
        return ""
    if files < _FEWEST_FILES:
        return f"!only {count(files, 'open file')} a process (ulimit -n)"
    wanted = _FEW_FILES_MANY_RANKS if world >= _MANY_RANKS else _FEW_FILES
    return (
        f"{count(files, 'open file')} a process (ulimit -n), {wanted:,} are wanted" if files < wanted else ""
    )


def _many_files(members: Members) -> str:
    files = [report.limits.open_files for _, report in members if report.limits.open_files is not None]
    return f"at least {count(min(files), 'open file')} a process" if files else "open files are not limited"


def _judge_rest(members: Members) -> Agreement:
    """Limits that are only worth a word."""
    rule = NODE_RULES["limits"]
    found = Agreement()
    for look, fix in (
        (_few_processes, "`ulimit -u`; in Kubernetes the pod's pid limit"),
        (_little_locked_memory, "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`"),
        (_endless_stack, "`ulimit -s 8192`, or NCCL 2.28"),
    ):
        groups = [group for group in partition((who, look(report)) for who, report in members) if group.value]
        for group in groups[:3]:
            where = name_all(group.members)
            found = found.merged(
                finding(
                    replace(rule, violated="warn"),
                    f"{where}: {group.value}",
                    people=group.members,
                    fix=[f"on {where}: {fix}"],
                )
            )
    return found


def _few_processes(report: NodeReport) -> str:
    limit = report.limits.processes
    return (
        f"only {count(limit, 'process', 'processes')} and threads"
        if limit is not None and limit < _FEW_PROCESSES
        else ""
    )


def _little_locked_memory(report: NodeReport) -> str:
    locked = report.limits.locked_memory_bytes
    adapters = any(one.kind == "infiniband" and one.up for one in report.interfaces)
    if not adapters or locked is None or locked >= _LITTLE_LOCKED:
        return ""
    return f"{show_bytes(locked)} of memory may be locked (ulimit -l): InfiniBand needs more"


def _endless_stack(report: NodeReport) -> str:
    """NCCL before 2.28 makes threads with the limit as their stack. None may also mean that it could not be read."""
    nccl = release_of(report.versions.get("nccl", ""))
    if (
        report.device_kind != "cuda"
        or not nccl
        or nccl >= _STACK_FIXED_IN_NCCL
        or report.limits.stack_bytes is not None
    ):
        return ""
    return f"no limit of the stack (ulimit -s) with NCCL {'.'.join(map(str, nccl))}"


def _judge_shm(members: Members) -> Agreement:
    rule = NODE_RULES["shm"]
    unknown = [who for who, report in members if report.limits.shm_bytes is None]
    known = [(who, report) for who, report in members if report.limits.shm_bytes is not None]
    missing = unknown_for(rule, unknown, "/dev/shm could not be looked at")
    if not known:
        return missing
    least = min(report.limits.shm_bytes or 0 for _, report in known)
    return _judge(rule, known, _small_shm, f"at least {show_bytes(least)}", fatal=True).merged(missing)


def _small_shm(report: NodeReport) -> str:
    size, free = report.limits.shm_bytes or 0, report.limits.shm_free_bytes
    # NCCL between the devices of one machine is what needs it; gloo on CPU and lone ranks do not.
    needed = report.device_kind == "cuda" and report.nproc > 1
    if size < _TINY_SHM:
        return f"{'!' if needed else ''}/dev/shm has {show_bytes(size)}"
    if free is not None and free < _TINY_SHM:
        return f"{'!' if needed else ''}/dev/shm has {show_bytes(free)} free of {show_bytes(size)}; `ls -l /dev/shm` shows leftovers"
    return f"/dev/shm has {show_bytes(size)}, 1 GiB is wanted" if size < _SMALL_SHM and needed else ""


def _too_few_cores(report: NodeReport) -> str:
    cores, threads = report.limits.cores, report.threads
    if report.nproc > cores:
        return f"{count(report.nproc, 'rank')} on {count(cores, 'core')}"
    if report.nproc * threads > cores:
        return f"{report.nproc} × {count(threads, 'thread')} on {count(cores, 'core')}"
    return ""


def _too_little_memory(report: NodeReport) -> str:
    kept = report.reserved.get("memory_bytes", 0)
    if report.limits.memory_bytes <= kept:
        return f"{show_bytes(report.limits.memory_bytes)} of memory, and {show_bytes(kept)} are left to the system"
    return ""


def _reserves(members: Members) -> str:
    """What the plan leaves to the system."""
    kept = {
        key: max(report.reserved.get(key, 0) for _, report in members)
        for key in ("memory_bytes", "shm_bytes", "cores")
    }
    parts = [
        f"{show_bytes(kept['memory_bytes'])} of memory" if kept["memory_bytes"] else "",
        f"{show_bytes(kept['shm_bytes'])} of /dev/shm" if kept["shm_bytes"] else "",
        count(kept["cores"], "core") if kept["cores"] else "",
    ]
    said = ", ".join(part for part in parts if part)
    return f"{said} left to the system on each node" if said else "nothing is reserved for the system"
