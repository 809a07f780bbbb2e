"""`unisono.guarded()`: three lines with which a custom loop reports its steps and its loss.

    with unisono.guarded() as guard:
        for batch in guard.steps(loader):
            ...
            guard.step(loss)

Under `unisono run` the watch then knows phase, step and loss. Elsewhere it does nothing, and costs nothing.
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
    """A loop that reports its progress.

    Attributes:
        done: number of optimizer steps made.
    """

    def __init__(self, at: GuardedProcess | None, *, done: int = 0) -> None:
        """Nothing is reported yet.

        Args:
            at: this guarded process; None if it is not guarded.
            done: optimizer steps made before, for a resumed run.
        """
        self._at = at
        self.done = done
        self._reported_at = -math.inf

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
        """The batches, with a heartbeat before and after each is read."""
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
            loss: of the step, as a number. A tensor is read only if it is on the CPU, since a read would synchronize the device; it is
                reported once per second, and immediately if it is not finite.
        """
        self.done += 1
        if self._at is None:
            return
        self._at.step(self.done + 1)
        value = _number(loss)
        now = time.monotonic()
        if value is not None and (now - self._reported_at >= _EVERY_S or not math.isfinite(value)):
            self._reported_at = now
            self._at.emit("step", step=self.done, loss=value if math.isfinite(value) else str(value))

    def phase(self, name: str) -> None:
        """Enters a phase: "evaluate", "save", "load_data", "load_model"; then "program"."""
        if self._at is not None:
            self._at.phase(name)


def guarded(*, done: int = 0) -> Guarded:
    """A loop that reports its progress under `unisono run`; elsewhere it reports nothing.

    Args:
        done: optimizer steps made before, for a resumed run.
    """
    return Guarded(this_process(), done=done)


def _number(loss: Any) -> float | None:
    """The loss, if it is in host memory."""
    if isinstance(loss, int | float):
        return float(loss)
    device = getattr(loss, "device", None)
    if getattr(device, "type", None) != "cpu" or getattr(loss, "numel", int)() != 1:
        return None
    return float(loss.detach().item())
