"""What a model computes for fixed inputs, by which files are compared with the model that was
trained when they are loaded again.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
"""Root mean square of the difference, relative to the spread of the outputs, that rounding
explains.
"""
_TIMES_OWN_ROUNDING = 2.0


@dataclass(frozen=True)
class ResultOutputs(ABC):
    """The outputs of a model for fixed inputs.

    Attributes:
        name: what they are called.
        outputs: float32, of any shapes.
        dtype: in which they were computed.
    """

    name: ClassVar[str]

    outputs: list[torch.Tensor]
    dtype: str

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> Self:
        """Reads what `write` wrote.

        Raises:
            OSError, SafetensorError: if it cannot be read.
        """

    @abstractmethod
    def write(self, path: Path) -> None:
        """Writes them to a file, which replaces an earlier one.

        Raises:
            OSError: if the storage fails.
        """

    @abstractmethod
    def again(self, model: Any, *, dtype: str) -> Self:
        """Those of another model for the same inputs."""

    def difference(self, other: "ResultOutputs") -> float:
        """The root mean square of the difference, relative to the spread of these; infinite where
        only one is a number.
        """
        ours, theirs = (torch.cat([one.flatten() for one in result.outputs]) for result in (self, other))
        if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
            return float("inf")
        ours, theirs = ours[ours.isfinite()], theirs[theirs.isfinite()]
        if not ours.numel():
            return 0.0
        return float((theirs - ours).square().mean().sqrt() / ours.std().clamp_min(1e-6))

    def tolerance(self, other: "ResultOutputs", precise: "ResultOutputs | None" = None) -> float:
        """The difference that rounding explains.

        Args:
            other: of the model that was loaded again.
            precise: of the same model, computed in float32: by how much the rounding of its dtype
                alone moves its outputs. Deep models in 16 bits exceed the figures of TOLERANCE.
        """
        known = TOLERANCE[self.dtype]
        return known if precise is None else max(known, _TIMES_OWN_ROUNDING * precise.difference(other))
