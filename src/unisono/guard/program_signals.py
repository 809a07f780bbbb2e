"""The signals that the front gets: each goes on to the program, in order, as often as it comes; and how long it may take to end then."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any, Self

from unisono.supervise.interrupts import AGAIN_AFTER_S, install_handlers
from unisono.text import show_seconds

GRACE_S = 40.0
"""For a program to end after a signal. torchrun gives its ranks 30 s."""
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
    """While it is entered, signals are noted, and not acted upon.

    Attributes:
        first: the first that asks to stop; None as long as none has come.
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
            # Only the last lines are left then, and an impatient signal must not take the exit code.
            signal.signal(
                number, signal.SIG_IGN if self.first is not None and number in _STOP_SIGNALS else handler
            )
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """Those that have come since the last call."""
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
    """How long the program may take to end, once a signal has asked for it on some node. No clock of its own.

    Attributes:
        end_by: when it is killed, with all that it started, in the seconds of `ask`; None: nobody has asked.
        late: what is to be said then.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Waits for the first signal.

        Args:
            grace_s: how long the program has after it.
        """
        self.end_by: float | None = None
        self.late = ""
        self._grace_s = grace_s
        self._times = 0
        self._last: dict[int, float] = {}

    def take(self, number: signal.Signals, node_rank: int, now: float) -> str | None:
        """Takes one signal; gives what is to be said of it, None for one that changes nothing.

        Schedulers signal every node, and every process of it: as in supervise.interrupts, a second signal is one that comes to the same node
        a second later.

        Args:
            number: the signal.
            node_rank: whose front got it.
            now: seconds of any steady clock.
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
        self.late = (
            f"the program has not ended {patience} after {name}: it is killed, with all that it started"
        )
        if self._times == 1:
            again = show_seconds(min(self._grace_s, _AGAIN_S))
            return (
                f"{name} is passed on to the program, which has {patience} (--grace) to end; then it is killed, with all that it started"
                f" ({name} again: after {again})"
            )
        return (
            f"{name} again: the program is killed after {patience}, with all that it started"
            if allowed_s
            else None
        )
