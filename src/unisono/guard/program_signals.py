"""Signals that the front gets and passes on to the program, and the deadline for its end after a signal."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any, Self

from unisono.supervise.interrupts import AGAIN_AFTER_S, install_handlers
from unisono.text import show_seconds

GRACE_S = 40.0
"""Grace period of a program after a signal. torchrun gives its ranks 30 s."""
_AGAIN_S = 5.0

_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SignalQueue:
    """A context that records signals without acting on them.

    Attributes:
        first: the first signal to stop; None as long as there is none.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Self:
        self._before = install_handlers(_PASSED_ON, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # Only the last lines remain then, and an impatient signal must not change the exit code.
            signal.signal(
                number, signal.SIG_IGN if self.first is not None and number in _STOP_SIGNALS else handler
            )
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """The file descriptor that is readable when a signal has come."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Signals since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        received, self._received = self._received, []
        return received

    def _note(self, number: int, _frame: FrameType | None) -> None:
        one = signal.Signals(number)
        self._received.append(one)
        if self.first is None and one in _STOP_SIGNALS:
            self.first = one
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")


class StopDeadline:
    """The deadline for the program's end after a signal on any node. It has no clock.

    Attributes:
        end_by: when the program and its descendants are killed, by the clock of `take`; None: no signal yet.
        late: the message for that moment.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Starts without a signal.

        Args:
            grace_s: how long the program has after the first signal.
        """
        self.end_by: float | None = None
        self.late = ""
        self._grace_s = grace_s
        self._times = 0
        self._last: dict[int, float] = {}

    def take(self, number: signal.Signals, node_rank: int, now: float) -> str | None:
        """Takes a signal; gives the message about it, None if it changes nothing.

        Schedulers signal every node and all its processes: as in supervise.interrupts, a second signal counts if it comes to the same node
        at least a second later.

        Args:
            number: the signal.
            node_rank: of the front that got it.
            now: seconds of any monotonic clock.
        """
        if number not in _STOP_SIGNALS or now - self._last.get(node_rank, -AGAIN_AFTER_S) < AGAIN_AFTER_S:
            return None
        is_new = not self._times or node_rank in self._last
        self._last[node_rank] = now
        if not is_new:
            return None
        self._times += 1
        allowed_s = (
            self._grace_s if self._times == 1 else min(self._grace_s, _AGAIN_S) if self._times == 2 else 0.0
        )
        by = now + allowed_s
        self.end_by = by if self.end_by is None else min(self.end_by, by)
        name, patience = "Ctrl-C" if number is signal.SIGINT else number.name, show_seconds(allowed_s)
        self.late = f"the program has not ended {patience} after {name}: killing it and its child processes"
        if self._times == 1:
            again = show_seconds(min(self._grace_s, _AGAIN_S))
            return (
                f"{name} was passed on to the program, which has {patience} (--grace) to end before it is killed with its child processes"
                f" ({name} again: after {again})"
            )
        return (
            f"{name} again: the program and its child processes are killed after {patience}"
            if allowed_s
            else None
        )
