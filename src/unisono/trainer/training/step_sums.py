"""The figures of a step that are summed over the ranks beside the gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unisono.trainer.training.front_io import STOP_FLAGS, Outcome, flags_of, outcome_of

_FIXED = 1 + len(STOP_FLAGS)  # the loss, and a number for each reason to stop


@dataclass(frozen=True, slots=True)
class StepSums:
    """The sums of a step over all ranks.

    Attributes:
        loss: of the global batch.
        stop: the stop request that any rank has, or None.
        odd_ranks: ranks whose own loss is NaN or infinite.
        origin_of_nan: the highest origin that any rank has noted, see `OwnPart.origin_of_nan`.
        metrics: of the objective's metrics: for each its sum, and over how many; then the sums of
            routers.
    """

    loss: float
    stop: Outcome | None
    odd_ranks: list[int]
    origin_of_nan: int
    metrics: list[float]

    @classmethod
    def decode(cls, numbers: Sequence[float], *, world_size: int) -> "StepSums":
        """The sums from the summed numbers of `encode`."""
        end = _FIXED + world_size
        ranks = numbers[_FIXED:end]
        return cls(
            loss=numbers[0],
            stop=outcome_of(numbers[1:_FIXED]),
            odd_ranks=[rank for rank, figure in enumerate(ranks) if figure % 2],
            origin_of_nan=int(max(ranks)) // 2,
            metrics=list(numbers[end:]),
        )


def encode_step(
    loss: torch.Tensor,
    metrics: torch.Tensor,
    origin: torch.Tensor,
    *,
    stop: Outcome | None,
    rank: int,
    world_size: int,
) -> torch.Tensor:
    """One rank's numbers, (size_of_step,) float32 on the device of the loss, which are then summed
    over the ranks.

    The loss, the stop request, a figure of each rank, and the metrics. A rank's figure is 1 if its
    own loss is NaN or infinite, plus twice the origin of that; the figures of the other ranks are
    0.

    Args:
        loss: 0-dim.
        metrics: (metrics,), sums.
        origin: 0-dim.
    """
    numbers = torch.zeros(size_of_step(world_size, metrics=len(metrics)), device=loss.device)
    numbers[0] = loss
    if stop is not None:
        numbers[1:_FIXED] = torch.tensor(flags_of(stop))
    numbers[_FIXED + rank] = ~torch.isfinite(loss) + 2 * origin
    numbers[_FIXED + world_size :] = metrics
    return numbers


def size_of_step(world_size: int, *, metrics: int) -> int:
    """How many numbers a step has: the fixed ones, one for each rank, and sums of metrics."""
    return _FIXED + world_size + metrics
