"""The signals that the front gets: each goes on to the program, in order, as often as it comes."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any, Self

from unisono.launch.interrupts import taken_over

_PASSED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
_ASK_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Signals:
    """While it is entered, signals are noted, and not acted upon.

    Attributes:
        first: the first that asks to stop; None as long as none has come.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._noted: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Self:
        self._before = taken_over(_PASSED, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # Only the last lines are left then, and an impatient signal must not take the exit code.
            signal.signal(
                number, signal.SIG_IGN if self.first is not None and number in _ASK_TO_STOP else handler
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
        noted, self._noted = self._noted, []
        return noted

    def _note(self, number: int, _frame: FrameType | None) -> None:
        one = signal.Signals(number)
        self._noted.append(one)
        if self.first is None and one in _ASK_TO_STOP:
            self.first = one
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")
