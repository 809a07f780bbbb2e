"""A tensor of the run, or what one rank has of it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """A tensor of the run, or this rank's part of it.

    Attributes:
        name: of the tensor.
        tensor: this rank's, on its device. It is the live one, and changes with the next update.
        shape: of the whole.
        offsets: where in the whole it begins; all zero where it is the whole.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether there are no other parts of it."""
        return tuple(self.tensor.shape) == self.shape
