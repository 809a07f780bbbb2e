"""What came of running steps again: the logged figures beside the new ones, and whether they had to be the same. Pure."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unisono.errors import IntegrityError

COMPARED = ("loss", "grad_norm")
_ROUNDING = 1e-2  # relative; what other sums in another order make of a loss in a few steps stays far below


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that came out otherwise; None: it was not a number."""

    step: int
    name: str
    logged: float | None
    again: float | None

    @property
    def is_rounding(self) -> bool:
        """Whether rounding can have made it."""
        if self.logged is None or self.again is None:
            return False
        return math.isclose(self.logged, self.again, rel_tol=_ROUNDING)


@dataclass(frozen=True)
class Replayed:
    """Steps that were run again.

    Attributes:
        checkpoint: the step that they began from.
        first, last: the steps.
        differences: all that came out otherwise, in order.
        excuses: why they may; empty where the same bits had to come out.
        seconds: from the start of the ranks to their end.
    """

    checkpoint: int
    first: int
    last: int
    differences: tuple[Difference, ...] = ()
    excuses: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def steps(self) -> str:
        """`step 7` or `steps 7-9`."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"

    @property
    def is_right(self) -> bool:
        """Whether what came out is what had to: the same bits, or the same to rounding where that is all one can ask for."""
        losses = [one for one in self.differences if one.name == "loss"]
        return not self.differences or (bool(self.excuses) and all(one.is_rounding for one in losses))

    def lines(self) -> list[str]:
        """For people; the first line is the answer."""
        one = self.first == self.last
        if not self.differences:
            return [
                f"{self.steps} give{'s' * one} the same loss{'es' * (not one)} and gradient norm{'s' * (not one)}, bit for bit"
            ]
        first = self.differences[0]
        shown = f"{first.name} of step {first.step} is {first.again!r} now, and was {first.logged!r}"
        if self.is_right:
            return [
                f"{self.steps} give{'s' * one} the same to rounding, not bit-exactly: {shown}",
                *self.excuses,
            ]
        return [f"{self.steps} do{'es' * one} not give the same: {shown}", *self.excuses]

    def error(self, where: str) -> IntegrityError:
        """The explanation if the replay differs."""
        known = "; ".join(self.excuses)
        why = (
            f"more than rounding can make, which these allow for: {known}"
            if known
            else "nothing that is known has changed: data, model, packages, ranks, threads and device are those of the run"
        )
        return IntegrityError.of(
            self.lines()[0],
            where=where,
            why=why,
            fix="run it once more: if the figures change again, this machine's arithmetic is not to be trusted (memory, heat); if not,"
            " the logged steps were made with something else, or it is a defect of unisono: please report it",
        )

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "step": self.checkpoint,
            "steps": [self.first, self.last],
            "equal": not self.differences,
            "right": self.is_right,
            "differences": [asdict(one) for one in self.differences],
            "excuses": list(self.excuses),
            "seconds": self.seconds,
        }


def compare(
    logged: Mapping[int, Mapping[str, Any]], again: Mapping[int, Mapping[str, Any]]
) -> tuple[Difference, ...]:
    """Every figure of the steps in `again` that is not bit-exactly the logged one.

    Args:
        logged: the lines of metrics.jsonl by step.
        again: those of the replay.
    """
    return tuple(
        Difference(step, name, logged[step].get(name), again[step].get(name))
        for step in sorted(again)
        for name in COMPARED
        if logged[step].get(name) != again[step].get(name)
    )
