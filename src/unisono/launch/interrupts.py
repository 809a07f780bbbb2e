"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal, as one question that the watching loop asks.

What counts as a second signal: one that this front itself gets at least AGAIN_AFTER_S after the first that it got. Schedulers
signal whole groups of processes, wrappers pass on what the group has got already, and other nodes get theirs a little later:
all of that is one wish. Ranks do not count at all; they only note the wish, however often it comes.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

_ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

AGAIN_AFTER_S = 1.0


def taken_over(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Has signals handled from here on; gives what handled each before. A SIGHUP that nohup has turned off stays off."""
    taken: dict[signal.Signals, Any] = {}
    for number in numbers:
        before = signal.getsignal(number)
        if number is signal.SIGHUP and before is signal.SIG_IGN:
            continue
        taken[number] = before
        signal.signal(number, handler)
    return taken


class Stopped(BaseException):
    """Raised out of whatever runs when a signal asks to stop and nothing has to be saved yet.

    Not an Exception, as KeyboardInterrupt is none: nobody who handles errors should swallow it.

    Attributes:
        number: the signal.
        where: who got it, if that was not this front.
    """

    def __init__(self, number: signal.Signals, where: str = "") -> None:
        self.number = number
        self.where = where
        super().__init__(number.name)


class Interrupts:
    """While it is entered, a signal to stop is noted; until `collect` it also raises Stopped at once.

    Attributes:
        first: the first signal that asked to stop, here or elsewhere in the job; None as long as there is none.
        where: who got it, if that was not this front.
        at: when it came, in monotonic seconds.
        twice: whether a second one came on top of it: leave at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first: signal.Signals | None = None
        self.where = ""
        self.at = 0.0
        self.twice = False
        self._clock = clock
        self._own_at: float | None = None
        self._raises = True
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = taken_over(_ASKS_TO_STOP, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # After a wish to stop only the last lines are left, and an impatient third signal must not take the exit code.
            signal.signal(number, handler if self.first is None else signal.SIG_IGN)

    def ask(self, number: signal.Signals, *, where: str, again: bool = False) -> None:
        """Notes a wish to stop that came to another process of the job.

        Args:
            number: the signal.
            where: who got it.
            again: it is a second one there.
        """
        if self.first is None:
            self.first, self.where, self.at = number, where, self._clock()
        self.twice = self.twice or again

    def collect(self) -> None:
        """From here on signals are only noted: there is something to save."""
        self._raises = False

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """While it is entered, a signal raises Stopped, also one that came before: there is nothing to be saved here.

        Raises:
            Stopped: for a signal.
        """
        self._raises = True
        try:
            if self.first is not None:
                raise Stopped(self.first, self.where)
            yield
        finally:
            self._raises = False

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, else 75 (DESIGN A2)."""
        return exit_code_of(self.first) if self.first else 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self._own_at is not None:
            self.twice = self.twice or now - self._own_at >= AGAIN_AFTER_S
            return
        self._own_at = now
        if self.first is None:
            self.first, self.at = signal.Signals(number), now
            if self._raises:
                raise Stopped(self.first)


def exit_code_of(number: signal.Signals) -> int:
    """130 for Ctrl-C, 75 for what a scheduler or a closed terminal sends."""
    return 130 if number is signal.SIGINT else 75
