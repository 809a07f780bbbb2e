"""Reads a run's checkpoints again during the run, so that disk damage is detected while there is a different checkpoint.

A thread in the head's front, slow on purpose: at a limited rate, at the lowest priority, and never while a checkpoint is written.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from unisono.checkpoint.retention import last_verified, record_verified
from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.verify import Reading, read_manifest, read_through
from unisono.errors import UnisonoError
from unisono.events import Message
from unisono.facts import Clock, SystemClock
from unisono.facts.storage import responds
from unisono.text import one_line

_HOURS = 3600.0
_FINISH_S = 1.0  # for a read in progress; one that hangs on a dead disk ends with the process
_SAVE_AT_MOST_S = 600.0  # leftovers of a dead writer do not delay reading for longer
_LAST_PRIORITY = 19


@dataclass(frozen=True)
class ReadingRate:
    """The rate and frequency of reading.

    Attributes:
        look_every_s: seconds between searches for a checkpoint to read.
        again_after_s: seconds after which a checkpoint is read again.
    """

    bytes_per_s: float = 50e6
    look_every_s: float = 5.0
    again_after_s: float = 6 * _HOURS


class _RunEndedError(Exception):
    """The run has ended, so the reading ends."""


@dataclass
class Pace:
    """Limits the rate of a reader, and pauses it while a checkpoint is written.

    Attributes:
        bytes_per_s: the largest rate over the whole reading.
        clock: measures time.
        wait: waits for some seconds; True: the reading must end.
        is_saving: whether a checkpoint is being written.
    """

    bytes_per_s: float
    clock: Clock
    wait: Callable[[float], bool]
    is_saving: Callable[[], bool] = lambda: False
    _next: float | None = None
    """When the next bytes may be read, in monotonic seconds."""

    def __call__(self, n_bytes: int) -> None:
        """Waits as long as the bytes just read must take at this rate.

        Raises:
            _EndedError: if the reading must end.
        """
        now = self.clock.monotonic()
        self._next = max(now, self._next or now) + n_bytes / self.bytes_per_s
        if self.wait(self._next - now):
            raise _RunEndedError
        while self.is_saving():
            if self.wait(0.2):
                raise _RunEndedError


@dataclass
class Verifier:
    """A companion of an attempt that reads checkpoints once the ranks train.

    Attributes:
        show: gets warnings of damage, in the thread that calls `look`.
        clock: measures time, and dates the last reading of a checkpoint.
    """

    root: Path
    key: bytes
    show: Callable[[Message], None]
    rhythm: ReadingRate = ReadingRate()
    clock: Clock = field(default_factory=SystemClock)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _warnings: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue, init=False)
    _read: dict[tuple[str, int], float | None] = field(default_factory=dict, init=False)
    """When each was last read, in seconds since 1970, by name and inode: a step may be saved again."""
    _saves: dict[str, float] = field(default_factory=dict, init=False)
    """When a directory in progress was first seen, in monotonic seconds."""
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)

    def on_message(self, rank: int, message: Message) -> None:
        """Starts when rank 0 is ready."""
        if rank == 0 and message["kind"] == "ready" and self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
            self._thread.start()

    def look(self) -> UnisonoError | None:
        """Shows the warnings; never ends the run."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.show(self._warnings.get_nowait())
        return None

    def finish(self) -> None:
        """Ends the reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_FINISH_S)
        self.look()

    def _run(self) -> None:
        with contextlib.suppress(
            OSError, AttributeError
        ):  # for this thread only; not possible on every system
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST_PRIORITY)
        try:
            while not self._stop.wait(self.rhythm.look_every_s):
                with contextlib.suppress(
                    OSError
                ):  # the storage is unavailable: saving reports that, and this thread tries again
                    self._look_for_work()
        except _RunEndedError:
            return
        except Exception as error:  # noqa: BLE001 - the edge of the thread: the run continues without its verifier, with a warning
            self._warn(
                "verifier_ended",
                f"checkpoints are no longer read again in the background: {error!r}",
                "`unisono checkpoint verify RUN` reads them; please report this",
            )

    def _look_for_work(self) -> None:
        """Reads the due checkpoints, one after the other."""
        while not self._is_saving():
            listed = CheckpointStore(self.root, key=self.key).list()
            marks = {path: mark for path in listed if (mark := _mark_of(path)) is not None}
            self._read = {mark: self._last_read(path, mark) for path, mark in marks.items()}
            seen = [(path, self._read[mark]) for path, mark in marks.items()]
            path = next_due(seen, now=self.clock.wall(), again_after_s=self.rhythm.again_after_s)
            if path is None:
                return
            self._read_again(path, marks[path])

    def _last_read(self, path: Path, mark: tuple[str, int]) -> float | None:
        """When a checkpoint was last read, by this start or an earlier one, in seconds since 1970; None if not since it was written."""
        if mark in self._read:
            return self._read[mark]
        found = last_verified(self.root, path.name, read_manifest(path))
        if found is None or not found.read_again:
            return None
        try:
            return datetime.fromisoformat(found.at).astimezone(UTC).timestamp()
        except ValueError:
            return None

    def _read_again(self, path: Path, mark: tuple[str, int]) -> None:
        pace = Pace(self.rhythm.bytes_per_s, self.clock, self._stop.wait, self._is_saving)
        reading = read_through(path, key=self.key, pace=pace)
        self._read[mark] = self.clock.wall()
        if _mark_of(path) != mark:  # pruned in the meantime
            return
        if responds(self.root):  # a thread that hangs in the kernel would block the exit of this process
            record_verified(self.root, [reading])
        if not reading.intact:
            self._warn_of_damage(reading)

    def _warn_of_damage(self, reading: Reading) -> None:
        finding = next(finding for finding in reading.findings if finding.is_fatal)
        mark = (reading.path.name, str(finding))
        if mark in self._warned:
            return
        self._warned.add(mark)
        self._warn(
            "checkpoint_damaged",
            f"checkpoint {reading.path.name} was damaged after it was written: {finding}, in {reading.path}. It no longer counts as kept",
            "the run continues; check for disk errors (dmesg), and restore the file from a copy if you need that step",
        )

    def _warn(self, code: str, text: str, fix: str) -> None:
        self._warnings.put(
            {"kind": "warning", "time": time.time(), "code": code, "text": one_line(text), "fix": fix}
        )

    def _is_saving(self) -> bool:
        """Whether the directory shows a checkpoint in progress."""
        try:
            names = {entry.name for entry in os.scandir(self.root) if ".tmp-" in entry.name}
        except OSError:
            return False
        now = self.clock.monotonic()
        self._saves = {name: self._saves.get(name, now) for name in names}
        return any(now - since < _SAVE_AT_MOST_S for since in self._saves.values())


def _mark_of(path: Path) -> tuple[str, int] | None:
    """Name and inode, which distinguish this directory from a different one of the same name; None if it is gone."""
    try:
        return path.name, path.stat().st_ino
    except FileNotFoundError:
        return None


def next_due(seen: Iterable[tuple[Path, float | None]], *, now: float, again_after_s: float) -> Path | None:
    """The checkpoint to read next: the latest unread one, otherwise the one read longest ago, if due again. Pure.

    Args:
        seen: the checkpoints, oldest first, with the time of their last reading in seconds since 1970.
        now: in seconds since 1970.
        again_after_s: seconds after which a checkpoint is read again.
    """
    listed = list(seen)
    for path, read in reversed(listed):
        if read is None or read > now + again_after_s:  # the clock may have been set back
            return path
    due = [(read, path) for path, read in listed if read is not None and now - read >= again_after_s]
    return min(due)[1] if due else None
