"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal: collected, and carried through to the end of the grace time."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Self

from unisono.events import Message
from unisono.text import parse_seconds, show_seconds

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


_NOTHING_TO_SAVE_S = 3.0
_FOR_THE_FRONTS_S = 2.0
"""Of the grace time: to end ranks that do not end by themselves, and to write how the run ended."""
_FOR_THE_FRONTS_SHARE = 0.4


class Stopping:
    """Says when ranks are to be told, and when patience is over; and tells people both."""

    def __init__(self, interrupts: Interrupts, *, grace: str, show: Callable[[Message], None]) -> None:
        self._interrupts = interrupts
        self._grace_s = parse_seconds(grace)
        self._show = show
        self._told = False

    @property
    def patience_s(self) -> float:
        """How long the ranks have after the signal: the grace time is that of the whole job."""
        return self._grace_s - min(_FOR_THE_FRONTS_S, self._grace_s * _FOR_THE_FRONTS_SHARE)

    def due(
        self, *, ready: bool, newest: "NewestCheckpoint", finished: bool
    ) -> Literal["signal", "end"] | None:
        """What is to be done now.

        Args:
            ready: whether there is something to save.
            newest: the newest checkpoint, for the message.
            finished: whether the result has been handed over, so that nothing can be lost.
        """
        first = self._interrupts.first
        if first is None:
            return None
        if not self._told:
            self._told = True
            self._say(self._first_text(first, ready=ready))
            return "signal"
        patience_s = self.patience_s if ready else min(self.patience_s, _NOTHING_TO_SAVE_S)
        waited_s = time.monotonic() - self._interrupts.at
        if self._interrupts.twice:
            why = "a second signal"
        elif waited_s > patience_s:
            why = f"not done {show_seconds(waited_s)} after the signal, of the {show_seconds(self._grace_s)} that grace allows"
        else:
            return None
        if ready and not finished:
            self._say(f"{why}: ending the ranks; {newest}")
        return "end"

    def _say(self, text: str) -> None:
        self._show({"kind": "note", "time": time.time(), "text": text})

    def _first_text(self, first: signal.Signals, *, ready: bool) -> str:
        name = "Ctrl-C" if first is signal.SIGINT else first.name
        who = name + (f" to {self._interrupts.where}" if self._interrupts.where else "")
        if not ready:
            return f"{who} before the first step of this start: ending; nothing has changed"
        patience = show_seconds(self.patience_s)
        return f"{who}: finishing the step, saving a checkpoint (at most {patience}; {name} again leaves at once)"


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint, in words.

    Attributes:
        path: of it, or None.
        step: of it.
        reached: the last step that was finished.
        kept: whether ranks keep each step in memory, from which the front makes a checkpoint when they are gone.
    """

    path: str | None
    step: int
    reached: int
    kept: bool = False

    def __str__(self) -> str:
        lost = self.reached - (self.step if self.path else 0)
        steps = "1 step" if lost == 1 else f"{lost} steps"
        if self.path is None:
            return "there is no checkpoint yet" + ("" if self.kept else f", and {steps} are lost")
        if lost <= 0:
            return f"the newest checkpoint is {self.path}, and nothing after it is lost"
        verb = "is" if lost == 1 else "are"
        return f"the newest checkpoint is {self.path}, and {steps} after it {verb} " + (
            "not in it" if self.kept else "lost"
        )
