"""Input of a rank from its front: signals to stop, and messages on stdin.

A rank only notes a stop request, however often it comes: schedulers signal whole process groups, and the front forwards the signals that it
gets, so a rank sees the same request twice. The front counts signals, and ends the ranks after a second one.
"""

import functools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

Outcome = Literal["preempted", "interrupted"]

EXIT_CODES: dict[Outcome, int] = {"preempted": 75, "interrupted": 130}
_OUTCOMES: dict[int, Outcome] = {
    signal.SIGTERM: "preempted",
    signal.SIGUSR1: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGINT: "interrupted",
}
_AGAIN_AFTER_S = 1.0

_FLAGS: tuple[Outcome, Outcome] = ("preempted", "interrupted")


def flags_of(outcome: Outcome | None) -> list[float]:
    """A stop request as two numbers, which are summed over the ranks."""
    return [float(outcome == flag) for flag in _FLAGS]


def outcome_of(flags: Sequence[float]) -> Outcome | None:
    """Why all ranks stop, from the sums; an interrupt by the user comes before a preemption."""
    preempted, interrupted = flags
    return "interrupted" if interrupted else "preempted" if preempted else None


class StopRequest:
    """The stop request of a signal. Installed once, in the main thread of a worker.

    Attributes:
        outcome: preempted (SIGTERM, SIGUSR1, SIGHUP) or interrupted (SIGINT), once a signal has arrived.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._training = False
        self._on_signal: Callable[[str], None] | None = None
        self._first_at: float | None = None

    def install(self, on_signal: Callable[[str], None] | None) -> None:
        """Installs the signal handlers. A thread handles signals, also while the main thread waits in a collective or for a disk.

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
        if (
            self._training and self.outcome != "interrupted"
        ):  # an interrupt by the user comes before a preemption
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

Message = dict[str, Any]

_STDIN = 0


class FrontMessages:
    """Messages of the front, queued by kind."""

    def __init__(self) -> None:
        shards: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._of_kind: dict[str, queue.SimpleQueue[Message]] = {
            "go": queue.SimpleQueue(),
            "shard_written": shards,
            "shard_moves": shards,
        }
        self._over = threading.Event()
        threading.Thread(target=self._read, name="front-line", daemon=True).start()

    def next(self, kind: str, *, timeout_s: float) -> Message | None:
        """The next message of a kind; None after the timeout."""
        try:
            return self._of_kind[kind].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_for(self, kind: str) -> Message | None:
        """The next message of a kind; None if the front closes stdin first."""
        while not self._over.is_set():
            message = self.next(kind, timeout_s=0.1)
            if message is not None:
                return message
        return self.next(kind, timeout_s=0.0)

    def _read(self) -> None:
        # Not through sys.stdin: a thread that holds its buffer's lock aborts the process when Python exits.
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
