"""Processes and threads as /proc shows them: state, wait channel, children, owner, environment,
exit status; and those that outlive their run (Linux).
"""

import contextlib
import fcntl
import os
import platform
import pwd
import re
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.base.files import read_object
from unisono.guard.facts.limits import CGROUP_ROOT, cgroup_folders
from unisono.guard.facts.machine import DeviceHolder

# They count the fields of stat after the name and its bracket; the state is number 0.
_UTIME, _STIME = 11, 12
_TICKS = os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 4096
_MOST_CHILDREN = 64
_START_FIELD = 19  # field of stat after the name and its bracket; the first of them is the state
_MOST_BYTES = 64 << 20  # of a plan
_POLL_S = 0.05
# It holds the path of guard.json, which has run_id and front_pid (guard.integrations.border).
_GUARD_VARIABLE = b"UNISONO_GUARD="


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """A process at one moment.

    Attributes:
        state: of its main thread: R, S, D, Z …; T: stopped by a signal, t: held by a tracer, as
            py-spy is for a moment.
        cpu_s: CPU seconds of all its threads so far.
    """

    state: str
    cpu_s: float


def read_stat(pid: int) -> ProcessStat | None:
    """State and CPU time from /proc/PID/stat, about 20 µs; None if there is no such process."""
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
    """Bytes read and written so far, including caches, disks and pipes; 0 if unknown."""
    counts = (line.partition(": ") for line in _line(Path(f"/proc/{pid}/io")).splitlines())
    return sum(int(value) for name, _, value in counts if name in ("rchar", "wchar", "read_bytes"))


def wait_channel(pid: int) -> str:
    """The kernel function in which the main thread waits; empty if it runs, or unknown."""
    return wait_channel_in(Path(f"/proc/{pid}"))


def child_states(pid: int) -> str:
    """States of its child processes, one letter each; without those that were already reaped."""
    states = []
    for child in children_of(pid)[:_MOST_CHILDREN]:
        stat = read_stat(child)
        if stat is not None:
            states.append(stat.state)
    return "".join(states)


def has_handler(pid: int, number: int) -> bool:
    """Whether the process has its own handler for a signal; without one most signals end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def frozen_cgroup(pid: int, *, root: Path = CGROUP_ROOT) -> Path | None:
    """The cgroup that froze the process, which receives no signal until it is thawed; None: not
    frozen.
    """
    for folder in cgroup_folders("freezer", root=root, cgroup_file=Path(f"/proc/{pid}/cgroup")):
        if _line(folder / "cgroup.freeze") == "1" or _line(folder / "freezer.state").startswith("FR"):
            return folder
    return None


def children_of(pid: int) -> list[int]:
    """Child processes of all threads."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    children: list[int] = []
    for thread in threads:
        children += map(int, _line(thread / "children").split())
    return children


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # gone, or no such file in this kernel
        return ""


_STATES = {
    "D": "waits in the kernel, where no signal reaches it",
    "R": "runs",
    "S": "sleeps",
    "T": "is stopped",
    "Z": "has ended",
}


class ThreadCounters(NamedTuple):
    """Counters that grow while a thread makes progress: context switches and ticks of CPU time."""

    switches: int
    ticks: int


@dataclass(frozen=True, slots=True)
class ThreadState:
    """A thread at one moment.

    Attributes:
        name: of the thread; the kernel keeps 15 characters.
        state: R, S, D, T, Z …
        wait_channel: the kernel function that it waits in; empty if unknown.
        moves: counters, to compare with those of a different time.
    """

    number: int
    name: str
    state: str
    wait_channel: str
    moves: ThreadCounters

    @property
    def is_uninterruptible(self) -> bool:
        """Whether it waits uninterruptibly, e.g. for storage; not even SIGKILL ends it."""
        return self.state == "D"

    def __str__(self) -> str:
        where = f", in {self.wait_channel}" if self.wait_channel else ""
        return (
            f"thread {self.number} is in state {self.state} ({_STATES.get(self.state, 'see ps(1)')}{where})"
        )


def read_thread(pid: int, number: int) -> ThreadState | None:
    """A thread of a process; None if it has ended or is not readable."""
    base = Path(f"/proc/{pid}/task/{number}")
    try:
        name, _, statistics = (base / "stat").read_text().partition("(")[2].rpartition(")")
        status = (base / "status").read_text()
    except OSError:
        return None
    fields = statistics.split()
    switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return ThreadState(
        number,
        name,
        fields[0],
        wait_channel_in(base),
        ThreadCounters(switches, int(fields[_UTIME]) + int(fields[_STIME])),
    )


def stuck_threads(pid: int) -> list[ThreadState]:
    """Threads of a process in uninterruptible sleep."""
    try:
        numbers = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    looks = (read_thread(pid, number) for number in sorted(numbers))
    return [look for look in looks if look is not None and look.is_uninterruptible]


def wait_channel_in(base: Path) -> str:
    """The wait channel of a thread's folder in /proc; empty if it runs, or unknown."""
    try:
        channel = (base / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel


def processes_below(pid: int) -> list[tuple[int, int]]:
    """(pid, parent pid) of all descendants of a process, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = _bytes(Path(entry.path, "stat"))
            if stat:
                children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(entry.name))
    pairs: list[tuple[int, int]] = []
    todo = [pid]
    while todo:
        parent = todo.pop(0)
        for child in sorted(children.get(parent, ())):
            pairs.append((child, parent))
            todo.append(child)
    return pairs


def variables_of(pid: int, names: Sequence[str]) -> dict[str, str]:
    """Some initial environment variables of a process; empty if it has ended or belongs to a
    different user.
    """
    encoded = {name.encode() for name in names}
    variables = {}
    for item in _bytes(Path(f"/proc/{pid}/environ")).split(b"\0"):
        name, equals, value = item.partition(b"=")
        if equals and name in encoded:
            variables[name.decode()] = value.decode("utf-8", "replace")
    return variables


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


_INFO = struct.Struct(
    "=QQ11Ii"
)  # mask, cgroup, then pid, tgid, ppid and eight of user and group; the exit status
_GET_INFO = (
    (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
)  # PIDFD_GET_INFO, _IOWR(0xFF, 11, struct pidfd_info)
_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT; since Linux 6.15


def exit_status(pidfd: int, pid: int) -> int | None:
    """Return code of a process that is not a child; negative for a signal.

    None if its parent has reaped it already and the kernel does not keep it.

    Args:
        pidfd: of the process, which has ended.
    """
    status = _by_pidfd(pidfd)
    # If its parent has not taken it yet, or does just now, the descriptor has it.
    if status is None:
        status = _by_proc(pid)
    if status is None:
        status = _by_pidfd(pidfd)
    return os.waitstatus_to_exitcode(status) if status is not None else None


def _by_pidfd(pidfd: int) -> int | None:
    """Kernels since 6.15 keep the status while the descriptor is open, even after the parent has
    reaped the process.
    """
    request = bytearray(_INFO.pack(_INFO_EXIT, *(0,) * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, request, True)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(request)
    return int(status) if mask & _INFO_EXIT else None


def _by_proc(pid: int) -> int | None:
    """Until the parent reaps the process: the last field of /proc/PID/stat, visible to its own
    user.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return int(fields[49]) if fields[0] == "Z" and len(fields) > 49 else None


_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The first PID namespace, made at the machine's start (PROC_PID_INIT_INO in Linux's proc_ns.h)."""
_INTERPRETER = re.compile(r"(python|pypy|bash|sh|dash|zsh|perl|ruby|node|java|Rscript)[\d.]*")
"""To these the first argument is a program; to others it may be a password."""
_PYTHON_FLAGS = ("-u", "-B", "-O", "-OO", "-s", "-S", "-E", "-I", "-m")
"""Its options without a value, and the one after which stands the program. After any other may
stand a secret.
"""


def holder_of(pid: int, memory_bytes: int | None = None, *, proc: Path = Path("/proc")) -> DeviceHolder:
    """User and program of a process, as far as visible; processes outside a container are not."""
    folder = proc / str(pid)
    try:
        user = _user(folder.stat().st_uid)
        words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return DeviceHolder(pid, memory_bytes)
    return DeviceHolder(pid, memory_bytes, user, _program(words))


def holder_of_driver(pid: int, memory_bytes: int | None = None) -> DeviceHolder:
    """The holder with a pid from the NVIDIA driver, which is the host's and means a different
    process inside a container.
    """
    try:
        # The link's text is not a path.
        is_the_hosts = os.readlink("/proc/self/ns/pid") == _HOST_PID_NAMESPACE  # noqa: PTH115
    except OSError:
        is_the_hosts = False
    return holder_of(pid, memory_bytes) if is_the_hosts else DeviceHolder(pid, memory_bytes)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _program(words: list[str]) -> str:
    """The program and its script or module: `python train.py`."""
    if not words or not words[0]:
        return ""
    program = Path(words[0]).name
    # After -c comes code, which may contain anything.
    if not _INTERPRETER.fullmatch(program) or "-c" in words:
        return program
    arguments = words[1:]
    while arguments and arguments[0] in _PYTHON_FLAGS:
        arguments = arguments[1:]
    script = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    return f"{program} {Path(script).name}" if script else program


@dataclass(frozen=True, slots=True)
class Orphan:
    """A process that outlived an earlier run.

    Attributes:
        run_id: of its run; empty if its plan is gone.
        plan: the run's plan; of a guarded program its guard.json.
        age_s: seconds since it began.
        state: of its main thread; D: uninterruptible wait in the kernel.
        mine: whether it belongs to this user.
        began: start time in ticks since boot; distinguishes a reused pid.
    """

    pid: int
    run_id: str
    plan: str
    age_s: float
    state: str
    mine: bool
    began: int


def find_orphans(proc: Path = Path("/proc")) -> list[Orphan]:
    """All visible orphans, the oldest first."""
    orphans = [orphan for pid in _pids(proc) if (orphan := _orphan(proc, pid)) is not None]
    return sorted(orphans, key=lambda orphan: (orphan.began, orphan.pid))


def end_orphan(orphan: Orphan, *, limit_s: float = 3.0) -> bool:
    """Kills an orphan of this user if it is still the same process; returns whether it is gone.

    SIGKILL, since the front that would clean up is gone.
    """
    if not orphan.mine or not hasattr(os, "pidfd_open"):
        return False
    try:
        fd = os.pidfd_open(orphan.pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        if _start_ticks(Path("/proc"), orphan.pid) != orphan.began:
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except PermissionError:
        return False
    finally:
        os.close(fd)
    return _has_ended(orphan, limit_s)


def _has_ended(orphan: Orphan, limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while _is_alive(orphan):
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_S)
    return True


def _is_alive(orphan: Orphan) -> bool:
    stat = read_stat(orphan.pid)
    return (
        stat is not None
        and stat.state not in "ZX"
        and _start_ticks(Path("/proc"), orphan.pid) == orphan.began
    )


def _pids(proc: Path) -> Iterator[int]:
    for folder in proc.iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            yield int(folder.name)


def _orphan(proc: Path, pid: int) -> Orphan | None:
    folder = proc / str(pid)
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        owner = folder.stat().st_uid
    except OSError:  # it has just ended, or is not ours to read
        return None
    front, file = _front_of(words) or _front_of_guarded_program(folder) or (None, Path())
    if front is not None and not _same_pid_namespace(folder):
        return None
    began, stat = _start_ticks(proc, pid), read_stat(pid)
    if front is None or began is None or stat is None or stat.state in "ZX":
        return None
    began_of_front = _start_ticks(proc, front)
    # A later process only has got the number of the front.
    if began_of_front is not None and began_of_front <= began:
        return None
    age_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began / _TICKS)
    run_id = str(read_object(file, most_bytes=_MOST_BYTES).get("run_id") or "")
    return Orphan(pid, run_id, str(file), age_s, stat.state, owner == os.geteuid(), began)


def _same_pid_namespace(folder: Path) -> bool:
    """Whether the process is in this pid namespace: in a container its front has a different
    pid.
    """
    try:
        lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return all(len(line.split()) <= 2 for line in lines if line.startswith("NSpid:"))


def _front_of(words: list[str]) -> tuple[int, Path] | None:
    """Front pid and plan from a rank's command line; None for other processes."""
    for index, word in enumerate(words[:-1]):
        if word == "unisono.worker" and words[index - 1] == "-m" and "--front-pid" in words[:-1]:
            number = words[words.index("--front-pid") + 1]
            return (int(number), Path(words[index + 1])) if number.isdecimal() else None
    return None


def _front_of_guarded_program(folder: Path) -> tuple[int, Path] | None:
    """The front and run directory of a process under `unisono run`, from its environment."""
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    named = next(
        (value[len(_GUARD_VARIABLE) :] for value in variables if value.startswith(_GUARD_VARIABLE)), None
    )
    if named is None:
        return None
    file = Path(os.fsdecode(named))
    front = read_object(file, most_bytes=_MOST_BYTES).get("front_pid")
    return (front, file) if isinstance(front, int) else None


def _start_ticks(proc: Path, pid: int) -> int | None:
    """Start time of a process in ticks since boot; None if there is no such process."""
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[_START_FIELD])
    except (OSError, IndexError, ValueError):
        return None


_RANK_POLL_S = 0.02


def living_ranks(front: int) -> list[int]:
    """Pids of a front's ranks and their forks, by command line; without zombies."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and _is_rank_of(folder, str(front).encode()):
            stat = read_stat(int(folder.name))
            if stat is not None and stat.state not in "ZX":
                pids.append(int(folder.name))
    return sorted(pids)


def wait_until_ended(front: int, *, limit_s: float) -> list[int]:
    """Waits until a front's ranks have ended; returns those still alive after `limit_s`."""
    limit = time.monotonic() + limit_s
    while (left := living_ranks(front)) and time.monotonic() < limit:
        time.sleep(_RANK_POLL_S)
    return left


def _is_rank_of(folder: Path, front: bytes) -> bool:
    if folder.name == str(os.getpid()):
        return False
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is not ours to read
        return False
    if b"--events" not in words or b"--front-pid" not in words[:-1]:  # tasks have no events
        return False
    return words[words.index(b"--front-pid") + 1] == front


_READ = {"x86_64": 0, "aarch64": 63}  # read(2), by machine
_TERMINALS = ("/dev/tty", "/dev/pts/", "/dev/console")


def reads_input(pid: int) -> bool:
    """Whether a process's main thread waits in read(2) for stdin or a terminal; False where that
    may not be seen.
    """
    try:
        number, descriptor, *_ = Path(f"/proc/{pid}/syscall").read_text().split()
        if int(number) != _READ.get(platform.machine()):
            return False
        link = f"/proc/{pid}/fd/{int(descriptor, 16)}"
        target = os.readlink(link)  # noqa: PTH115 - a Path would read `pipe:[1]` as a relative path
    except (OSError, ValueError):  # `running`; gone; a different user's
        return False
    return int(descriptor, 16) == 0 or target.startswith(_TERMINALS)
