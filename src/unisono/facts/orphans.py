"""Processes that outlive their run: orphans of earlier runs, and ranks of an attempt that has ended (Linux)."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.facts.processes import read_stat
from unisono.files import parse_json, read_text

_START_FIELD = 19  # field of stat after the name and its bracket; the first of them is the state
_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_BYTES = 64 << 20  # of a plan
_POLL_S = 0.05
_GUARD_VARIABLE = (
    b"UNISONO_GUARD="  # unisono.integrations.border: the path of guard.json, with run_id and front_pid
)


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
    found = [orphan for pid in _pids(proc) if (orphan := _orphan(proc, pid)) is not None]
    return sorted(found, key=lambda orphan: (orphan.began, orphan.pid))


def end_orphan(orphan: Orphan, *, limit_s: float = 3.0) -> bool:
    """Kills an orphan of this user if it is still the same process; returns whether it is gone. SIGKILL, since the front that would clean up is gone."""
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
    if began_of_front is not None and began_of_front <= began:  # a later one only has the number of the front
        return None
    age_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began / _TICKS)
    run_id = str(_json_object(file).get("run_id") or "")
    return Orphan(pid, run_id, str(file), age_s, stat.state, owner == os.geteuid(), began)


def _same_pid_namespace(folder: Path) -> bool:
    """Whether the process is in this pid namespace: in a container its front has a different pid."""
    try:
        lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return all(len(line.split()) <= 2 for line in lines if line.startswith("NSpid:"))


def _front_of(words: list[str]) -> tuple[int, Path] | None:
    """Front pid and plan from a rank's command line; None for other processes."""
    for place, word in enumerate(words[:-1]):
        if word == "unisono.worker" and words[place - 1] == "-m" and "--front-pid" in words[:-1]:
            number = words[words.index("--front-pid") + 1]
            return (int(number), Path(words[place + 1])) if number.isdecimal() else None
    return None


def _front_of_guarded_program(folder: Path) -> tuple[int, Path] | None:
    """The same for a process under `unisono run`, from its environment."""
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
    front = _json_object(file).get("front_pid")
    return (front, file) if isinstance(front, int) else None


def _json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if unreadable."""
    try:
        value = parse_json(read_text(file, most_bytes=_MOST_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and _is_rank_of(folder, str(front).encode()):
            stat = read_stat(int(folder.name))
            if stat is not None and stat.state not in "ZX":
                found.append(int(folder.name))
    return sorted(found)


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
