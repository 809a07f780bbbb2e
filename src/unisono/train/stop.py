"""Signals: finish the step, save, and go; during start-up, go."""

import os
import signal
from types import FrameType
from typing import Literal

Outcome = Literal["preempted", "interrupted"]

EXIT_CODES: dict[Outcome, int] = {"preempted": 75, "interrupted": 130}
_OUTCOMES: dict[int, Outcome] = {
    signal.SIGTERM: "preempted", signal.SIGUSR1: "preempted", signal.SIGINT: "interrupted",
}  # fmt: skip


class StopRequest:
    """What a signal asked for. Installed once, in the main thread of a worker.

    Attributes:
        outcome: preempted (SIGTERM, SIGUSR1) or interrupted (SIGINT), once one has come.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._training = False

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ends because of it."""
        assert self.outcome is not None
        return EXIT_CODES[self.outcome]

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
