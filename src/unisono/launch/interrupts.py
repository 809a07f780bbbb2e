"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal, as one question that the watching loop asks."""

import signal
import time
from types import FrameType
from typing import Any, Self

_ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Stopped(BaseException):
    """Raised out of whatever runs when a signal asks to stop and nothing has to be saved yet.

    Not an Exception, as KeyboardInterrupt is none: nobody who handles errors should swallow it.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        super().__init__(number.name)


class Interrupts:
    """While it is entered, a signal to stop is noted; until `collect` it also raises Stopped at once.

    Attributes:
        first: the first signal that asked to stop, or None.
        at: when it came, in monotonic seconds.
        twice: whether a Ctrl-C came on top of it: leave at once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at = 0.0
        self.twice = False
        self._raises = True
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _ASKS_TO_STOP:
            before = signal.getsignal(number)
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue  # started by nohup
            self._before[number] = before
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, number: signal.Signals) -> None:
        """Notes a wish to stop that came to another node."""
        if self.first is None:
            self.first = number
            self.at = time.monotonic()

    def collect(self) -> None:
        """From here on signals are only noted: there is something to save."""
        self._raises = False

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, else 75 (DESIGN A2)."""
        return exit_code_of(self.first) if self.first else 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
            self.at = time.monotonic()
            if self._raises:
                raise Stopped(self.first)
        elif number == signal.SIGINT:
            self.twice = True


def exit_code_of(number: signal.Signals) -> int:
    """130 for Ctrl-C, 75 for what a scheduler or a closed terminal sends."""
    return 130 if number is signal.SIGINT else 75
