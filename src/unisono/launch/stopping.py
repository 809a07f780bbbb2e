"""A wish to stop, from the signal to the end of the grace time."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from unisono.events import Message
from unisono.launch.interrupts import Interrupts
from unisono.units import parse_seconds, show_seconds

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

    def due(self, *, ready: bool, newest: "Newest", finished: bool) -> Literal["signal", "end"] | None:
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
class Newest:
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
