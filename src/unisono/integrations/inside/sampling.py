"""A rank's third thread: looks at torch's own count of collectives, and, where the main thread is silent, at what is pending.

It sees what nobody calls from Python: the reducer of DDP, the all-gathers of FSDP. A look at the counts takes 4 µs. torch's count of completed
ones is not used: gloo lets it fall behind, and even back. Which of the recorded collectives are done, their `retired` tells.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.watch.beat import Beats
from unisono.watch.flight_recorder import flight_record, recorders

_EVERY_S = 0.25
_SILENT_S = 1.0
_LITTLE_S = (
    0.004  # of a processor, in a second: less is nothing, and a loop that polls four times a second is still
)
_MUCH_BYTES = 1 << 16


def count_begun() -> int:
    """How many collectives this process has begun, by torch's own count."""
    return sum(begun_of(json.loads(dump(includeCollectives=False))) for dump in recorders())


def dump_of_interest() -> bytes:
    """All that one recorder has: the one in which something is pending, or else the one that has recorded last."""
    return flight_record(rank_by=pending_of)


class Sampling(threading.Thread):
    """The thread. It ends with the process, and is nothing that anybody waits for."""

    def __init__(self, beats: Beats, where: Callable[[], dict[str, Any]]) -> None:
        """Has not begun.

        Args:
            beats: of the thread that trains.
            where: what is known of where that is; it goes into a dump as it is.
        """
        super().__init__(name="unisono-sampling", daemon=True)
        self._beats = beats
        self._where = where
        self._begun = 0
        self._use = _Use()

    def run(self) -> None:
        """Looks four times a second; closer once a second while the main thread is silent and nothing is begun."""
        self._beats.note_groups(begun=0, pending=0, still_ns=0)
        seen, since, looked = (-1, -1), time.monotonic(), 0.0
        while True:
            time.sleep(_EVERY_S)
            now = time.monotonic()
            with suppress(
                ValueError, LookupError, TypeError, RuntimeError
            ):  # a recorder that is not known here
                self._begun = count_begun()
            moved = (self._beats.written, self._begun)
            if moved != seen:
                seen, since = moved, now
                self._beats.note_groups(begun=self._begun, pending=0, still_ns=0)
                self._use = _Use()
            elif now - since >= _SILENT_S and now - looked >= _SILENT_S:
                looked = now
                self._look_closer()

    def dump(self) -> bytes:
        """All that a recorder has, and where the thread that trains is, for the front that asks for it."""
        where, dump = json.dumps(self._where()).encode(), dump_of_interest()
        return b"%s, %s" % (where[:-1], dump[1:]) if dump.startswith(b'{"') else dump

    def _look_closer(self) -> None:
        pending = 0
        with suppress(ValueError, LookupError, TypeError, RuntimeError):
            pending = pending_of(json.loads(dump_of_interest() or b"{}"))
        self._beats.note_groups(begun=self._begun, pending=pending, still_ns=self._use.still_ns())


def begun_of(dump: Any) -> int:
    """How many collectives all process groups have begun together."""
    return sum(
        max(0, int(status["last_enqueued_collective"])) for status in dump.get("pg_status", {}).values()
    )


def pending_of(dump: Any) -> int:
    """How many of the recorded collectives are begun and not done."""
    return sum(not entry["retired"] for entry in dump.get("entries") or ())


class _Use:
    """What the process, and those that it has started, have used since they were last seen to do something."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self._since = time.monotonic_ns()

    def still_ns(self) -> int:
        """For how long they have used next to nothing."""
        now = time.monotonic_ns()
        own_s = (
            time.process_time() - time.thread_time()
        )  # this thread's own looks are no work of the program's
        found = (own_s, _ticks_below(os.getpid()), _io_bytes())
        last, self._last = self._last, found
        if (
            last is None
            or found[0] - last[0] > _LITTLE_S
            or found[1] != last[1]
            or found[2] - last[2] > _MUCH_BYTES
        ):
            self._since = now
        return now - self._since


def _ticks_below(pid: int) -> int:
    """Processor time of all processes below one, and of those that they have outlived, in the kernel's ticks."""
    total, todo, seen = 0, [pid], 0
    while todo and seen < _MOST_BELOW:
        for child in _children(todo.pop()):
            seen += 1
            with suppress(OSError, IndexError):
                fields = Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()
                total += sum(map(int, fields[11:15]))
                todo.append(child)
    return total


_MOST_BELOW = 256


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - of names alone
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _io_bytes() -> int:
    """What this process has read and written so far."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.partition(": ")[2]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
