"""`unisono.guarded()`: three lines with which a loop of one's own says where it is, and what it loses.

    with unisono.guarded() as guard:
        for batch in guard.steps(loader):
            ...
            guard.step(loss)

Under `unisono run` those who watch know the phase, the step and the loss from then on. Elsewhere it does nothing, and costs nothing.
"""

import math
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from unisono.integrations.inside.guarded_process import GuardedProcess, this_process

_Batch = TypeVar("_Batch")
_EVERY_S = 1.0


class Guarded:
    """A loop that tells where it is.

    Attributes:
        done: optimizer steps that have been made.
    """

    def __init__(self, at: GuardedProcess | None, *, done: int = 0) -> None:
        """Tells nobody yet.

        Args:
            at: this process at the border; None where nothing guards it.
            done: optimizer steps that were made before, of a run that goes on.
        """
        self._at = at
        self.done = done
        self._told = -math.inf

    def __enter__(self) -> Self:
        if self._at is not None:
            self._at.step(self.done + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._at is not None and error is None:
            self._at.phase("program")

    def steps(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches, each with a sign of life where it is asked for and where it is there."""
        if self._at is None:
            yield from batches
            return
        reading = iter(batches)
        while True:
            self._at.phase("data")
            try:
                batch = next(reading)
            except StopIteration:
                self._at.phase("program")
                return
            self._at.take_batch()
            self._at.phase("compute")
            yield batch

    def step(self, loss: object = None) -> None:
        """An optimizer step has been made.

        Args:
            loss: of the step, as a number. Of a tensor only one on the CPU is read, for another would make the device wait; it is told once
                in a second, and at once where it is no number any more.
        """
        self.done += 1
        if self._at is None:
            return
        self._at.step(self.done + 1)
        value = _number(loss)
        now = time.monotonic()
        if value is not None and (now - self._told >= _EVERY_S or not math.isfinite(value)):
            self._told = now
            self._at.tell("step", step=self.done, loss=value if math.isfinite(value) else str(value))

    def phase(self, name: str) -> None:
        """Something else is done from here on: "evaluate", "save", "load_data", "load_model"; then "program"."""
        if self._at is not None:
            self._at.phase(name)


def guarded(*, done: int = 0) -> Guarded:
    """A loop that tells where it is, under `unisono run`; elsewhere it tells nobody.

    Args:
        done: optimizer steps that were made before, of a run that goes on.
    """
    return Guarded(this_process(), done=done)


def _number(loss: Any) -> float | None:
    """The loss, where it is in this machine's memory."""
    if isinstance(loss, int | float):
        return float(loss)
    device = getattr(loss, "device", None)
    if getattr(device, "type", None) != "cpu" or getattr(loss, "numel", int)() != 1:
        return None
    return float(loss.detach().item())
