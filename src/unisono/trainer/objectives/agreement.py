"""What the ranks of a run tell each other between two steps: sums, and the verdict of one that has
failed.
"""

import json
from collections.abc import Sequence

import torch

from unisono.base.causes import Verdict
from unisono.trainer.batches.source import SourceFailed, SourceRank, SourceStopped


def sum_or_fail(
    rank: SourceRank, figures: Sequence[float], verdict: Verdict | None, *, is_cut_short: bool = False
) -> list[float]:
    """The sums of figures over the ranks, exact up to 2⁵³. All ranks must call it.

    Args:
        rank: this rank.
        figures: of this rank.
        verdict: why this rank cannot go on; None: it can.
        is_cut_short: whether this rank has ended its work for its stop request.

    Raises:
        SourceStopped: on all ranks, if any has cut its work short.
        SourceFailed: on all ranks, with the verdict of the first one that has any.
    """
    data = b"" if verdict is None else json.dumps(verdict.to_json()).encode()
    flags = [flag if is_cut_short else 0.0 for flag in rank.stop_flags]
    sizes = [float(len(data)) if number == rank.rank else 0.0 for number in range(rank.world_size)]
    values = torch.tensor([*figures, *flags, *sizes], dtype=torch.float64, device=rank.device)
    rank.sum(values)
    summed = rank.figures(values)
    sums, flags = summed[: len(figures)], summed[len(figures) : len(figures) + len(flags)]
    sizes = summed[len(figures) + len(flags) :]
    if any(flags):
        raise SourceStopped(flags)
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
