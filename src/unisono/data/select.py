"""Which rows are evaluated, and how often each is trained in an epoch: functions of the seed alone. Pure."""

import math

from unisono.plan.sequences import permutation

# `permutation` is keyed by (seed, epoch); no epoch is negative, so these streams never meet the order of training.
_EVAL, _WEIGHT = -1, -2


def eval_rows(n: int, *, share: float, seed: int) -> list[int]:
    """The rows that are split off for evaluation, in order: a share of `n`, rounded, at least one."""
    return sorted(permutation(n, seed=seed, epoch=_EVAL)[: max(1, round(share * n))])


def times(n: int, *, weight: float, seed: int, source: int) -> list[int]:
    """How often each of a source's `n` rows occurs in an epoch.

    Every row occurs floor(weight) times, and the share of rows that is left over, chosen by the seed, once more:
    weight 2 gives all rows twice, weight 0.5 gives half of them.
    """
    often = math.floor(weight)
    counts = [often] * n
    for row in permutation(n, seed=seed, epoch=_WEIGHT - source)[: round((weight - often) * n)]:
        counts[row] += 1
    return counts
