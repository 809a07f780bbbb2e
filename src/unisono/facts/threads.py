"""What the kernel says of a thread: whether it moves, and what it waits in (proc(5), Linux)."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_STATES = {
    "D": "waits in the kernel, where no signal reaches it",
    "R": "runs",
    "S": "sleeps",
    "T": "is stopped",
    "Z": "has ended",
}
_UTIME, _STIME = 11, 12  # fields of stat after the name and its bracket; the first of them is the state


class Moves(NamedTuple):
    """What grows while a thread does anything at all: switches between threads, and ticks of CPU time."""

    switches: int
    ticks: int


@dataclass(frozen=True, slots=True)
class ThreadLook:
    """A thread at one moment.

    Attributes:
        number: the kernel's, of the thread.
        name: as the process calls it; the kernel keeps 15 letters.
        state: R, S, D, T, Z …
        waits_in: the kernel's function, or an empty string where it is not told.
        moves: to be compared with those of another moment.
    """

    number: int
    name: str
    state: str
    waits_in: str
    moves: Moves

    @property
    def is_uninterruptible(self) -> bool:
        """Whether it waits for storage, or something like it, and not even SIGKILL ends it."""
        return self.state == "D"

    def __str__(self) -> str:
        where = f", in {self.waits_in}" if self.waits_in else ""
        return (
            f"thread {self.number} is in state {self.state} ({_STATES.get(self.state, 'see ps(1)')}{where})"
        )


def look_at_thread(pid: int, number: int) -> ThreadLook | None:
    """A thread of a process; None if it has ended, or the system does not tell."""
    base = Path(f"/proc/{pid}/task/{number}")
    try:
        name, _, rest = (base / "stat").read_text().partition("(")[2].rpartition(")")
        status = (base / "status").read_text()
    except OSError:
        return None
    fields = rest.split()
    switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return ThreadLook(
        number, name, fields[0], waits_in(base), Moves(switches, int(fields[_UTIME]) + int(fields[_STIME]))
    )


def stuck_threads(pid: int) -> list[ThreadLook]:
    """The threads of a process that no signal reaches."""
    try:
        numbers = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    looks = (look_at_thread(pid, number) for number in sorted(numbers))
    return [look for look in looks if look is not None and look.is_uninterruptible]


def waits_in(base: Path) -> str:
    """What a thread waits in, of its folder in /proc; an empty string where it runs, or the kernel does not tell."""
    try:
        found = (base / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if found == "0" else found
