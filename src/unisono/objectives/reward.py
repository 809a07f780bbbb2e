"""Reward models: one value for each answer, higher for the chosen one (Bradley and Terry 1952; arXiv:2203.02155)."""

from dataclasses import dataclass

from unisono.model.forward import Forward
from unisono.objectives.losses import reward_losses
from unisono.objectives.objective import BOTH, PAIR_METRICS, Counts, Micro, Objective, Part, accurate, sums_of


@dataclass(frozen=True)
class Reward(Objective):
    """A reward is the value at the last token of a row."""

    metrics = PAIR_METRICS[:4]
    sides = BOTH

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        chosen, rejected = forward.scores(micro.rows).view(-1, 2).unbind(1)
        margin = chosen - rejected
        sums = sums_of(chosen, rejected, margin, accurate(margin))
        return Part(reward_losses(chosen, rejected).sum() / counts.units, sums)
