"""What the kernel says of a process: whether its main thread runs, what that waits in, what it has used, what it has started (Linux)."""

import os
from dataclasses import dataclass
from pathlib import Path

from unisono.facts.cgroup import ROOT, cgroup_folders
from unisono.facts.threads import waits_in

_UTIME, _STIME = 11, 12  # fields of stat after the name and its bracket; the first of them is the state
_TICKS = os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 4096
_MOST_CHILDREN = 64


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process at one moment.

    Attributes:
        state: of its main thread: R, S, D, Z …; T: stopped by a signal, t: held by a tracer, as py-spy is for a moment.
        cpu_s: CPU seconds of all its threads so far.
    """

    state: str
    cpu_s: float


def read_stat(pid: int) -> ProcessStat | None:
    """One reading of a small file, some 20 µs; None if there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, _STAT_BYTES)
    except OSError:  # it ended meanwhile
        return None
    finally:
        os.close(fd)
    fields = text.rpartition(b")")[2].split()  # a name may hold brackets and spaces
    return ProcessStat(fields[0].decode("ascii"), (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS)


def io_bytes(pid: int) -> int:
    """What the process has read and written so far, from caches, disks and pipes together; 0 where the kernel does not tell."""
    counts = (line.partition(": ") for line in _content(Path(f"/proc/{pid}/io")).splitlines())
    return sum(int(value) for name, _, value in counts if name in ("rchar", "wchar", "read_bytes"))


def wait_channel(pid: int) -> str:
    """The kernel's function that the main thread waits in; an empty string where it runs, or the kernel does not tell."""
    return waits_in(Path(f"/proc/{pid}"))


def child_states(pid: int) -> str:
    """The states of the processes that it has started, one letter each; those that were waited for already are not among them."""
    found = []
    for child in _children(pid)[:_MOST_CHILDREN]:
        stat = read_stat(child)
        if stat is not None:
            found.append(stat.state)
    return "".join(found)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for a signal; without one most signals end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def frozen_group(pid: int, *, root: Path = ROOT) -> Path | None:
    """The control group whose freezer holds the process: no signal reaches it until it is thawed."""
    for folder in cgroup_folders("freezer", root=root, own=Path(f"/proc/{pid}/cgroup")):
        if _content(folder / "cgroup.freeze") == "1" or _content(folder / "freezer.state").startswith("FR"):
            return folder
    return None


def _children(pid: int) -> list[int]:
    """Each thread has its own."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        found += map(int, _content(thread / "children").split())
    return found


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # gone, or no such file in this kernel
        return ""
