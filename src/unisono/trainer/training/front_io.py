"""A rank and its front: signals to stop, messages on stdin, and reports of storage that does not
respond.

A rank only notes a stop request, however often it comes: schedulers signal whole process groups,
and the front forwards the signals that it gets, so a rank sees the same request twice. The front
counts signals, and ends the ranks after a second one.
"""

import functools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from unisono.base.causes import Verdict
from unisono.base.errors import Problem
from unisono.base.events import Reporter
from unisono.base.messages import RefusedMessage, message_of
from unisono.guard.facts.processes import ThreadCounters, ThreadState, read_thread
from unisono.guard.watch import Beats
from unisono.trainer.checkpoint.writer import StorageFailed
from unisono.trainer.training.saver import MOVES_EVERY_S, STUCK_S, Save, Saver

Outcome = Literal["preempted", "interrupted", "directory_lost"]


class TrainingEnd(NamedTuple):
    """How training ended, for the `result` message; by default completely."""

    outcome: str = "completed"
    exit_code: int = 0
    verdict: Verdict | None = None


EXIT_CODES: dict[Outcome, int] = {"preempted": 75, "interrupted": 130, "directory_lost": 6}
_OUTCOMES: dict[int, Outcome] = {
    signal.SIGTERM: "preempted",
    signal.SIGUSR1: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGINT: "interrupted",
}
_AGAIN_AFTER_S = 1.0

STOP_FLAGS: tuple[Outcome, ...] = ("directory_lost", "interrupted", "preempted")
"""Reasons to stop, the one that counts most first."""


def flags_of(outcome: Outcome | None) -> list[float]:
    """A stop request as a number for each reason, which are summed over the ranks."""
    return [float(outcome == flag) for flag in STOP_FLAGS]


def outcome_of(flags: Sequence[float]) -> Outcome | None:
    """Why all ranks stop, from the sums."""
    return next((reason for reason, count in zip(STOP_FLAGS, flags, strict=True) if count), None)


class StopRequest:
    """The stop request of a signal. Installed once, in the main thread of a worker.

    Attributes:
        outcome: preempted (SIGTERM, SIGUSR1, SIGHUP) or interrupted (SIGINT), once a signal has
            arrived; directory_lost, once this rank has seen that the run's directory is gone.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._training = False
        self._on_signal: Callable[[str], None] | None = None
        self._first_at: float | None = None

    def install(self, on_signal: Callable[[str], None] | None) -> None:
        """Installs the signal handlers.

        A thread handles signals, also while the main thread waits in a collective or for a disk.

        Args:
            on_signal: called with the name of each signal; None if there is no front to count them.
        """
        self._on_signal = on_signal
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in _OUTCOMES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                signal.signal(number, _handled_by_the_thread)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True, name="signals").start()

    def training_begins(self) -> None:
        """From now on there is state to save: a signal takes effect at the end of the step."""
        self._training = True

    def _listen(self, fd: int) -> None:
        while numbers := os.read(fd, 64):
            for number in numbers:
                if number in _OUTCOMES:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        outcome = _OUTCOMES[number]
        # An interrupt by the user comes before a preemption.
        if self._training and self.outcome in (None, "preempted"):
            self.outcome = outcome
        if self._on_signal is not None:
            self._on_signal(number.name)
        if not self._training or (self._on_signal is None and self._is_second()):
            os._exit(EXIT_CODES[outcome])  # there is no progress to save

    def _is_second(self) -> bool:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= _AGAIN_AFTER_S


def _handled_by_the_thread(*_: object) -> None:
    """Does nothing: Python has already written the signal's number to the pipe."""


# ---- Messages


class FrontLine(TypedDict, total=False):
    """A line of the front: where the ranks meet, or what another rank reports of its shard."""

    kind: str
    store: tuple[str, int]
    rank: int
    temporary: str
    error: str
    verdict: dict[str, object] | None
    files: dict[str, dict[str, object]]


_STDIN = 0


class FrontMessages:
    """Messages of the front, queued by kind."""

    def __init__(self) -> None:
        shards: queue.SimpleQueue[FrontLine] = queue.SimpleQueue()
        self._of_kind: dict[str, queue.SimpleQueue[FrontLine]] = {
            "go": queue.SimpleQueue(),
            "shard_written": shards,
            "shard_moves": shards,
        }
        self._over = threading.Event()
        threading.Thread(target=self._read, name="front-line", daemon=True).start()

    def next(self, kind: str, *, timeout_s: float) -> FrontLine | None:
        """The next message of a kind; None after the timeout."""
        try:
            return self._of_kind[kind].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_for(self, kind: str) -> FrontLine | None:
        """The next message of a kind; None if the front closes stdin first."""
        while not self._over.is_set():
            message = self.next(kind, timeout_s=0.1)
            if message is not None:
                return message
        return self.next(kind, timeout_s=0.0)

    def _read(self) -> None:
        # Not through sys.stdin: a thread that holds its buffer's lock aborts the process when
        # Python exits.
        rest = b""
        while chunk := os.read(_STDIN, 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
        self._over.set()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # cut off: the front was killed
        known = self._of_kind.get(str(message.get("kind"))) if isinstance(message, dict) else None
        if known is not None:
            known.put(message)


@functools.cache
def front_messages() -> FrontMessages:
    """The only reader of this process's stdin."""
    return FrontMessages()


# ---- Storage that does not respond. A thread observes the one that writes: the kernel's counters
# show whether it makes progress.

_EVERY_S = 0.5
_REPORTED_AFTER_S = 5.0
_GIVEN_UP_AFTER_S = 20.0
_FIX = (
    "check that file system (frozen? full? network mount with an unreachable server?); older checkpoints are"
    " unchanged"
)


class StorageWatch:
    """Watches the saves of a rank, and the main thread's own writes.

    Use it as a context manager around the run.

    Args:
        saver: the rank's saver.
        report: receives warnings about storage that does not respond.
        beats: records that the main thread makes progress while it writes, however slowly.

    Attributes:
        writing: the main thread's present write.
    """

    def __init__(self, saver: Saver, report: Reporter, beats: Beats | None = None) -> None:
        self._saver = saver
        self._beats = beats or Beats()
        self._main_moves: ThreadCounters | None = None
        self._report = report
        self._ended = threading.Event()
        self._reported: Save | None = None
        self._passed_on: tuple[Save, float] | None = None
        self._moves: ThreadCounters | None = None
        self.writing: _Writing | None = None
        self._thread = threading.Thread(target=self._run, name="storage-watch", daemon=True)

    def __enter__(self) -> "StorageWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def ends_if_stuck(self, what: str, path: Path, *, only_files: bool = False) -> "_Writing":
        """A context in which the main thread's write is watched; if it makes no progress, the rank
        exits with code 6.

        Args:
            what: description of the write, for messages.
            path: the path that is written.
            only_files: whether the main thread can only be waiting for files. Then interruptible
                waits count, too, as with FUSE.
        """
        return _Writing(self, what, path, only_files=only_files)

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._look_at_save()
            if (writing := self.writing) is not None:
                self._look_at_main(writing)

    def _look_at_save(self) -> None:
        save = self._saver.last
        if save is None or save.done.is_set():
            self._reported = None
            return
        look = read_thread(os.getpid(), save.thread_id)
        if look is not None and look.moves != self._moves:
            self._moves = look.moves
            if not save.waits:
                save.advance()  # the kernel is writing, without any return to the thread
        self._pass_on_moves(save)
        blocked_s = save.blocked_s
        if blocked_s > STUCK_S and save.on_stuck is not None:
            save.on_stuck(f"no progress for {blocked_s:.0f} s, {save.activity}; {look}")
            save.on_stuck = None
        if blocked_s > _REPORTED_AFTER_S and self._reported is not save:
            self._reported = save
            self._report.send(
                {
                    "kind": "warning",
                    "code": "storage_blocked",
                    "step": save.step,
                    "fix": _FIX,
                    "where": save.activity,
                    "text": (
                        f"the save of step {save.step} has made no progress for {blocked_s:.0f} s:"
                        f" {save.activity}; {look}; training continues; nothing is saved until the storage"
                        " responds"
                    ),
                }
            )

    def _pass_on_moves(self, save: Save) -> None:
        """Reports to the ranks that wait for this save that it has made progress."""
        last = self._passed_on[1] if self._passed_on and self._passed_on[0] is save else save.began
        if save.on_move is not None and not save.waits and save.moved - last >= MOVES_EVERY_S:
            self._passed_on = save, save.moved
            save.on_move()

    def _look_at_main(self, writing: "_Writing") -> None:
        look = read_thread(os.getpid(), os.getpid())
        if look is not None and look.moves != self._main_moves:
            self._main_moves = look.moves
            self._beats.progress(sum(look.moves))
        idle_s = writing.idle_s(look)
        if look is None or idle_s < _REPORTED_AFTER_S:
            return
        text = f"{writing.what} has made no progress for {idle_s:.0f} s: {look}"
        if not writing.is_reported:
            writing.is_reported = True
            self._report.send(
                {
                    "kind": "warning",
                    "code": "storage_blocked",
                    "text": text,
                    "where": str(writing.path),
                    "fix": _FIX,
                }
            )
        if idle_s > _GIVEN_UP_AFTER_S:
            error = StorageFailed(
                Problem(text, str(writing.path), "the storage does not answer", _GIVE_UP_FIX),
                path=writing.path,
            )
            self._report.send(message_of(RefusedMessage, error.to_json()))
            os._exit(error.exit_code)  # the main thread is blocked in the kernel, and handles no exception


_GIVE_UP_FIX = "fix the storage, and run the same command again: it resumes from the newest checkpoint"


class _Writing:
    """A write of the main thread, as a context manager. It costs about a microsecond per step."""

    def __init__(self, watch: StorageWatch, what: str, path: Path, *, only_files: bool) -> None:
        self.what, self.path = what, path
        self.is_reported = False
        self._watch = watch
        self._states = "DS" if only_files else "D"
        self._moves: ThreadCounters | None = None
        self._since = 0.0

    def __enter__(self) -> None:
        self._watch.writing = self

    def __exit__(self, *_: object) -> None:
        self._watch.writing = None

    def idle_s(self, look: ThreadState | None) -> float:
        """Seconds for which the main thread has waited in the kernel without progress."""
        moves = look.moves if look is not None and look.state in self._states else None
        if moves is None or moves != self._moves:
            self._moves, self._since = moves, time.monotonic()
        return time.monotonic() - self._since
