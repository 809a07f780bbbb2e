"""Signals: finish the step, save, and go; during start-up, go.

A rank only notes a wish, however often it comes: schedulers signal whole groups of processes, and the front passes on what it got, so
the same wish reaches a rank twice. Its front counts, and ends ranks when a second signal means it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

Outcome = Literal["preempted", "interrupted"]

EXIT_CODES: dict[Outcome, int] = {"preempted": 75, "interrupted": 130}
_OUTCOMES: dict[int, Outcome] = {
    signal.SIGTERM: "preempted", signal.SIGUSR1: "preempted", signal.SIGHUP: "preempted", signal.SIGINT: "interrupted",
}  # fmt: skip
_AGAIN_AFTER_S = 1.0

_FLAGS: tuple[Outcome, Outcome] = ("preempted", "interrupted")


def flags_of(outcome: Outcome | None) -> list[float]:
    """A wish to stop as two numbers, which are summed over the ranks."""
    return [float(outcome == flag) for flag in _FLAGS]


def outcome_of(flags: Sequence[float]) -> Outcome | None:
    """What all ranks stop for, from the sums; a person at a keyboard is heard before a scheduler."""
    preempted, interrupted = flags
    return "interrupted" if interrupted else "preempted" if preempted else None


class StopRequest:
    """What a signal asked for. Installed once, in the main thread of a worker.

    Attributes:
        outcome: preempted (SIGTERM, SIGUSR1, SIGHUP) or interrupted (SIGINT), once one has come.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._training = False
        self._tell: Callable[[str], None] | None = None
        self._first_at: float | None = None

    def install(self, tell: Callable[[str], None] | None) -> None:
        """Takes over the signals. They are heard in a thread, also while the main one waits in a collective or for a disk.

        Args:
            tell: is told the name of each signal; None where there is no front to count them.
        """
        self._tell = tell
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in _OUTCOMES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                signal.signal(number, _leave_it_to_the_thread)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True, name="signals").start()

    def training_begins(self) -> None:
        """From now on there is something to save, and a signal waits for the end of the step."""
        self._training = True

    def _listen(self, fd: int) -> None:
        while numbers := os.read(fd, 64):
            for number in numbers:
                if number in _OUTCOMES:
                    self._heard(signal.Signals(number))

    def _heard(self, number: signal.Signals) -> None:
        outcome = _OUTCOMES[number]
        if self._training and self.outcome != "interrupted":  # a person is heard before a scheduler
            self.outcome = outcome
        if self._tell is not None:
            self._tell(number.name)
        if not self._training or (self._tell is None and self._is_second()):
            os._exit(EXIT_CODES[outcome])  # nothing of this start is worth keeping

    def _is_second(self) -> bool:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= _AGAIN_AFTER_S


def _leave_it_to_the_thread(*_: object) -> None:
    """Python writes the number into the pipe before it comes to this."""
