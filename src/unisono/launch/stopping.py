"""A wish to stop, from the signal to the end of the grace time."""

import signal
import time
from collections.abc import Callable
from typing import Literal

from unisono.events import Message
from unisono.launch.interrupts import Interrupts
from unisono.units import parse_seconds, show_seconds

_NOTHING_TO_SAVE_S = 3.0


class Stopping:
    """Says when ranks are to be told, and when patience is over; and tells people both."""

    def __init__(self, interrupts: Interrupts, *, grace: str, show: Callable[[Message], None]) -> None:
        self._interrupts = interrupts
        self._grace_s = parse_seconds(grace)
        self._show = show
        self._deadline: float | None = None

    def due(self, *, ready: bool, checkpoint: str | None) -> Literal["signal", "end"] | None:
        """What is to be done now.

        Args:
            ready: whether there is something to save.
            checkpoint: the newest one, for the message.
        """
        first = self._interrupts.first
        if first is None:
            return None
        now = time.monotonic()
        if self._deadline is None:
            patience = self._grace_s if ready else min(self._grace_s, _NOTHING_TO_SAVE_S)
            self._deadline = self._interrupts.at + patience
            self._say(_text(first, patience, ready=ready))
            return "signal"
        why = ""
        if self._interrupts.twice:
            why = "Ctrl-C again"
        elif now > self._deadline:
            why = f"not done {show_seconds(now - self._interrupts.at)} after the signal"
        if why and ready:
            self._say(f"{why}: ending the ranks; the newest checkpoint is {checkpoint or 'none'}")
        return "end" if why else None

    def _say(self, text: str) -> None:
        self._show({"kind": "note", "time": time.time(), "text": text})


def _text(first: signal.Signals, patience_s: float, *, ready: bool) -> str:
    name = "Ctrl-C" if first is signal.SIGINT else first.name
    if not ready:
        return f"{name} before the first step: ending; nothing has changed"
    again = "; Ctrl-C again leaves at once" if first is signal.SIGINT else ""
    return f"{name}: finishing the step, saving a checkpoint (at most {show_seconds(patience_s)}{again})"
