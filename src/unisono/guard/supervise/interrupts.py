"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal: recorded, and followed up until the grace period
is over.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Self

from unisono.base.messages import NoteMessage
from unisono.base.text import parse_seconds, show_seconds

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

AGAIN_AFTER_S = 1.0


def install_handlers(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> dict[signal.Signals, Any]:
    """Installs a handler for signals; gives the previous handlers.

    A SIGHUP that nohup ignores stays ignored.
    """
    taken: dict[signal.Signals, Any] = {}
    for number in numbers:
        before = signal.getsignal(number)
        if number is signal.SIGHUP and before is signal.SIG_IGN:
            continue
        taken[number] = before
        signal.signal(number, handler)
    return taken


class Stopped(BaseException):
    """Raised wherever the front is when a signal requests a stop and nothing has to be saved yet.

    Like KeyboardInterrupt not an Exception: error handlers must not swallow it.

    Attributes:
        number: the signal.
        where: the process that got it, if it was not this front.
    """

    def __init__(self, number: signal.Signals, where: str = "") -> None:
        self.number = number
        self.where = where
        super().__init__(number.name)


class Interrupts:
    """A context that records signals to stop; until `collect` they also raise Stopped at once.

    Attributes:
        first: the first signal to stop, here or elsewhere in the job; None as long as there is
            none.
        where: the process that got it, if it was not this front.
        at: when it came, in monotonic seconds.
        twice: whether a second signal followed: leave at once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.where = ""
        self.at = 0.0
        self.twice = False
        self._own_at: float | None = None
        self._raises = True
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = install_handlers(_STOP_SIGNALS, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # After a request to stop only the last lines remain, and an impatient third signal must
            # not change the exit code.
            signal.signal(number, handler if self.first is None else signal.SIG_IGN)

    def request_stop(self, number: signal.Signals, *, where: str, again: bool = False) -> None:
        """Records a signal to stop that a different process of the job got.

        Args:
            number: the signal.
            where: the process that got it.
            again: whether it is the second one there.
        """
        if self.first is None:
            self.first, self.where, self.at = number, where, time.monotonic()
        self.twice = self.twice or again

    def collect(self) -> None:
        """From now on signals are only recorded: there is something to save."""
        self._raises = False

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A context in which a signal raises Stopped, also an earlier one: there is nothing to save
        here.

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
        """130 after Ctrl-C, else 75."""
        return exit_code_of(self.first) if self.first else 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._own_at is not None:
            self.twice = self.twice or now - self._own_at >= AGAIN_AFTER_S
            return
        self._own_at = now
        if self.first is None:
            self.first, self.at = signal.Signals(number), now
            if self._raises:
                raise Stopped(self.first)


def exit_code_of(number: signal.Signals) -> int:
    """130 for Ctrl-C, 75 for the signals of a scheduler or a closed terminal."""
    return 130 if number is signal.SIGINT else 75


_NOTHING_TO_SAVE_S = 3.0
_FRONT_S = 2.0
"""Part of the grace period that it takes to end ranks that do not end by themselves, and to write
how the run ended.
"""
_FRONT_SHARE = 0.4


class GracefulStop:
    """Decides when ranks get the signal and when the grace period is over, and shows a note of
    each.
    """

    def __init__(self, interrupts: Interrupts, *, grace: str, show: Callable[[NoteMessage], None]) -> None:
        self._interrupts = interrupts
        self._grace_s = parse_seconds(grace)
        self._show = show
        self._is_signalled = False

    @property
    def patience_s(self) -> float:
        """How long the ranks have after the signal; the grace period is that of the whole job."""
        return self._grace_s - min(_FRONT_S, self._grace_s * _FRONT_SHARE)

    def next_action(
        self, *, ready: bool, newest: "NewestCheckpoint", finished: bool
    ) -> Literal["signal", "end"] | None:
        """Whether to signal the ranks or to end them now; None: neither.

        Args:
            ready: whether there is something to save.
            newest: the newest checkpoint, for the message.
            finished: whether the result has been handed over, so that nothing can be lost.
        """
        first = self._interrupts.first
        if first is None:
            return None
        if not self._is_signalled:
            self._is_signalled = True
            self._notify(self._first_text(first, ready=ready))
            return "signal"
        patience_s = self.patience_s if ready else min(self.patience_s, _NOTHING_TO_SAVE_S)
        waited_s = time.monotonic() - self._interrupts.at
        if self._interrupts.twice:
            why = "a second signal"
        elif waited_s > patience_s:
            why = (
                f"not done {show_seconds(waited_s)} after the signal (grace period:"
                f" {show_seconds(self._grace_s)})"
            )
        else:
            return None
        if ready and not finished:
            self._notify(f"{why}: ending the ranks; {newest}")
        return "end"

    def _notify(self, text: str) -> None:
        self._show({"kind": "note", "time": time.time(), "text": text})

    def _first_text(self, first: signal.Signals, *, ready: bool) -> str:
        name = "Ctrl-C" if first is signal.SIGINT else first.name
        who = name + (f" to {self._interrupts.where}" if self._interrupts.where else "")
        if not ready:
            return f"{who} before the first step of this start: ending; nothing has changed"
        patience = show_seconds(self.patience_s)
        return (
            f"{who}: finishing the step, saving a checkpoint (at most {patience}; {name} again exits at once)"
        )


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint, for messages.

    Attributes:
        path: of the checkpoint, or None.
        reached: the last step that was finished.
        in_memory: whether ranks keep each step in memory, from which the front saves a checkpoint
            when they have ended.
    """

    path: str | None
    step: int
    reached: int
    in_memory: bool = False

    def __str__(self) -> str:
        lost = self.reached - (self.step if self.path else 0)
        steps = f"{lost} step" if lost == 1 else f"{lost} steps"
        if self.path is None:
            return "there is no checkpoint yet" + ("" if self.in_memory else f", and {steps} are lost")
        if lost <= 0:
            return f"the newest checkpoint is {self.path}, and nothing after it is lost"
        return (
            f"the newest checkpoint is {self.path}, and {steps} after it {'is' if lost == 1 else 'are'}"
            f" {'not in it' if self.in_memory else 'lost'}"
        )
