"""Signals: finish the step, save, and go; during start-up, go."""

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Literal

Outcome = Literal["preempted", "interrupted"]

EXIT_CODES: dict[Outcome, int] = {"preempted": 75, "interrupted": 130}
_OUTCOMES: dict[int, Outcome] = {
    signal.SIGTERM: "preempted", signal.SIGUSR1: "preempted", signal.SIGINT: "interrupted",
}  # fmt: skip


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
        outcome: preempted (SIGTERM, SIGUSR1) or interrupted (SIGINT), once one has come.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._training = False

    def install(self) -> None:
        """Takes over the three signals."""
        for number in _OUTCOMES:
            signal.signal(number, self._handle)

    def training_begins(self) -> None:
        """From now on there is something to save, and a signal waits for the end of the step."""
        self._training = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        outcome = _OUTCOMES[number]
        if not self._training or self.outcome == outcome == "interrupted":
            os._exit(EXIT_CODES[outcome])  # nothing of this start is worth keeping, or the second Ctrl-C
        self.outcome = outcome
