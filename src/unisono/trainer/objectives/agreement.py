"""What the ranks of a run tell each other between two steps: sums, and the verdict of one that has
failed.
"""

import json
from collections.abc import Sequence

import torch

from unisono.base.causes import Verdict
from unisono.trainer.batches.source import SourceFailed, SourceRank


def sum_or_fail(rank: SourceRank, figures: Sequence[float], verdict: Verdict | None) -> list[float]:
    """The sums of figures over the ranks, exact up to 2⁵³. All ranks must call it.

    Args:
        rank: this rank.
        figures: of this rank.
        verdict: why this rank cannot go on; None: it can.

    Raises:
        SourceFailed: on all ranks, with the verdict of the first one that has any.
    """
    data = b"" if verdict is None else json.dumps(verdict.to_json()).encode()
    values = torch.zeros(len(figures) + rank.world_size, dtype=torch.float64, device=rank.device)
    values[: len(figures)] = values.new_tensor(figures)
    values[len(figures) + rank.rank] = len(data)
    rank.sum(values)
    summed = rank.figures(values)
    sums, sizes = summed[: len(figures)], summed[len(figures) :]
    first = next((number for number, size in enumerate(sizes) if size), None)
    if first is not None:
        words = bytes_of_rank(rank, first, data, size=int(sizes[first]))
        raise SourceFailed(Verdict.from_json(json.loads(words)))
    return sums


def bytes_of_rank(rank: SourceRank, source: int, data: bytes, *, size: int) -> bytes:
    """The bytes of one rank, on all ranks, which must all call it.

    Args:
        rank: this rank.
        source: the number of the rank that has them.
        data: of this rank; only those of `source` count.
        size: their number, known to all.
    """
    shared = torch.zeros(size, dtype=torch.float64, device=rank.device)
    if rank.rank == source:
        shared += shared.new_tensor(list(data))
    rank.sum(shared)
    return bytes(map(int, rank.figures(shared)))
