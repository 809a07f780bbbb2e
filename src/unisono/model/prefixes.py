"""Both sides of a pair begin with the same prompt: its tokens go through the model once.

Letters: T tokens of all rows, S of them that are computed. Every layer but attention treats tokens one by one, and causal attention makes a
token depend on those before it only. So equal beginnings of two rows have equal hidden states in both, and equal gradients add up. Attention
itself sees all rows complete: it gathers the common tokens for both, and drops the second output.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class Merged(NamedTuple):
    """Which tokens are computed."""

    kept: torch.Tensor
    """(S,) int64: their places among the T tokens."""
    place: torch.Tensor
    """(T,) int64: for each token, its own place or that of its equal among the S."""
    again: torch.Tensor
    """(T - S,) int64: the places of the other tokens among the T."""


def merge(lengths: Sequence[int], common: Sequence[int], device: torch.device) -> Merged:
    """Merges common beginnings.

    Args:
        lengths: tokens of each row.
        common: for each row, how many tokens it has in common with the row before it; that row has none itself.
        device: of the rows.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)  # (T,)
    starts = np.cumsum([0, *lengths])[:-1]
    positions = np.arange(len(rows)) - starts[rows]
    is_again = positions < np.asarray(common)[rows]
    source = np.where(is_again, starts[rows - 1] + positions, np.arange(len(rows)))
    place = (np.cumsum(~is_again) - 1)[source]
    found = (np.flatnonzero(~is_again), place, np.flatnonzero(is_again))
    return Merged(*(torch.from_numpy(values).to(device, non_blocking=True) for values in found))


class Spread(torch.autograd.Function):
    """Values of the computed tokens (S, …) for all tokens (T, …); gradients of equal tokens add up."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, merged: Merged) -> torch.Tensor:
        """(T, …)."""
        ctx.merged = merged
        return values.index_select(0, merged.place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(S, …)."""
        kept, place, again = ctx.merged
        found = grad.index_select(0, kept)
        # A token occurs twice at most, so no place occurs twice here.
        twice = place.index_select(0, again)
        found.index_copy_(0, twice, found.index_select(0, twice) + grad.index_select(0, again))
        return found, None


class Keep(torch.autograd.Function):
    """Values of all tokens (T, …) for the computed ones (S, …)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, merged: Merged) -> torch.Tensor:
        """(S, …)."""
        ctx.kept, ctx.shape = merged.kept, values.shape
        return values.index_select(0, merged.kept)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(T, …), zero for the other tokens."""
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.kept, grad), None
