"""Resource limits of this process: cores, memory, /dev/shm, ulimits and control groups; OOM kills
and core dumps.
"""

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def cgroup_folders(
    controller: str, *, root: Path = CGROUP_ROOT, cgroup_file: Path = OWN_CGROUP
) -> Iterator[Path]:
    """All cgroup folders whose limits apply to this process: version 2, then version 1 of
    `controller`.

    In a container the path that the kernel reports is often not mounted, only its root: such
    folders are still given, and reading from them fails.
    """
    inside = _cgroup_paths(cgroup_file)
    yield from _with_parents(root, inside.get("", ""))
    for names, path in inside.items():
        if controller in names.split(","):
            yield from _with_parents(root / controller, path)


def _cgroup_paths(cgroup_file: Path) -> dict[str, str]:
    """The process's path by controller names; version 2 has no names."""
    paths = {"": ""}
    try:
        for line in cgroup_file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths[controllers] = path.strip("/")
    except (OSError, ValueError):
        return {"": ""}
    return paths


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


@contextlib.contextmanager
def memory_limited(most: int) -> Iterator[None]:
    """A context in which this process can map at most `most` bytes more; whatever asks for more
    gets a MemoryError.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(most)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def limit_memory(most: int) -> None:
    """Lowers the limit of the address space to its present size plus `most` bytes, unless it is
    lower already.
    """
    used = _address_space()
    if used is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + most
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space() -> int | None:
    """Bytes mapped by this process; None on systems without /proc."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return int(os.read(fd, 32).split()[0]) * resource.getpagesize()
    finally:
        os.close(fd)


_NEVER = 1 << 60  # version 1 writes "no limit" as a number near 2^63
_WITHOUT_PROC = 8 * 10**9


@dataclass(frozen=True)
class SystemLimits:
    """Resources of a process. None: could not be read, or (for ulimits) unlimited."""

    # It is part of a node's report.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    cores: int
    memory_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None
    locked_memory_bytes: int | None
    stack_bytes: int | None
    processes: int | None


# Nothing is written to /dev/shm.
def read_limits(*, shm: Path = Path("/dev/shm")) -> SystemLimits:  # noqa: S108
    """Reads the current values."""
    size, free = _space(shm)
    return SystemLimits(
        cores=usable_cores(),
        memory_bytes=available_memory(),
        shm_bytes=size,
        shm_free_bytes=free,
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_memory_bytes=_soft(resource.RLIMIT_MEMLOCK),
        stack_bytes=_soft(resource.RLIMIT_STACK),
        processes=_smallest([_soft(resource.RLIMIT_NPROC), _pids_left()]),
    )


def usable_cores(*, root: Path = CGROUP_ROOT, cgroup_file: Path = OWN_CGROUP) -> int:
    """Cores this process may use: CPU affinity and cgroup CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for folder in cgroup_folders("cpu", root=root, cgroup_file=cgroup_file):
        share = _cpu_share(folder)
        if share is not None:
            cores = min(cores, max(1, int(share)))
    return cores


def _cpu_share(folder: Path) -> float | None:
    """A cgroup's CPU quota in cores; None: unlimited."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota = _word(folder / "cpu.cfs_quota_us") or "max"
        period = _word(folder / "cpu.cfs_period_us") or "100000"
    try:
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def available_memory(
    *, root: Path = CGROUP_ROOT, cgroup_file: Path = OWN_CGROUP, info: Path = Path("/proc/meminfo")
) -> int:
    """Bytes that a new process can allocate: free system memory, within all cgroup limits."""
    left = [_memory_left(folder) for folder in cgroup_folders("memory", root=root, cgroup_file=cgroup_file)]
    return _smallest([_available(info), *left]) or 0


def _available(info: Path) -> int:
    try:
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return _WITHOUT_PROC
    return _WITHOUT_PROC


def _memory_left(folder: Path) -> int | None:
    """Bytes up to a cgroup's limit; None: unlimited.

    The page cache can be reclaimed, so it counts as free.
    """
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _NEVER:
            return max(0, limit - used + _stat(folder / "memory.stat", cache_name))
    return None


def _stat(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _pids_left() -> int | None:
    """Number of further processes within the cgroup's limit."""
    left = []
    for folder in cgroup_folders("pids"):
        most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and now is not None:
            left.append(max(0, most - now))
    return min(left, default=None)


def _space(folder: Path) -> tuple[int | None, int | None]:
    """Size and free bytes of a file system."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None, None
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _soft(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _smallest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _number(file: Path) -> int | None:
    word = _word(file)
    return int(word) if word and word.isdigit() else None


def _word(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def oom_kills(
    root: Path = Path("/sys/fs/cgroup"), cgroup_file: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The cgroup's number of OOM kills; None if it cannot be read."""
    for path in _event_files(root, cgroup_file):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _event_files(root: Path, cgroup_file: Path) -> list[Path]:
    """Files that may hold the count: cgroup 2, then 1; in a container often only the root is
    mounted.
    """
    inside = {"": "", "memory": ""}
    try:
        for line in cgroup_file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inside[controllers] = path.lstrip("/")
    except (OSError, ValueError):
        inside = {"": "", "memory": ""}
    second, first = root / "memory.events", root / "memory" / "memory.oom_control"
    return [
        root / inside[""] / second.name,
        second,
        first.parent / inside["memory"] / first.name,
        first,
    ]


_PATTERN = Path("/proc/sys/kernel/core_pattern")


@dataclass(frozen=True, slots=True)
class CoreDumps:
    """Core dump settings.

    Attributes:
        limit_bytes: of one dump (ulimit -c); None: unlimited.
        to_file: whether the kernel writes a file; else it pipes the dump to a program.
        pattern: the kernel's core_pattern; relative: in the working directory.
    """

    limit_bytes: int | None
    to_file: bool
    pattern: str


def read_core_dumps() -> CoreDumps:
    """Reads the current values."""
    soft = resource.getrlimit(resource.RLIMIT_CORE)[0]
    try:
        text = _PATTERN.read_text().strip()
    except OSError:
        text = ""
    return CoreDumps(None if soft == resource.RLIM_INFINITY else soft, not text.startswith("|"), text)
