"""Simple preference optimization: pairs by mean log-probability, without a reference model (arXiv:2405.14734)."""

from dataclasses import dataclass

import torch

from unisono.config.preference import PreferenceSection
from unisono.model.forward import Forward
from unisono.objectives.losses import simpo_losses
from unisono.objectives.objective import PAIR_METRICS, Counts, Micro, Part, answers_of, means, pair_sums


@dataclass(frozen=True)
class Simpo:
    """SimPO. A reward is β times the mean log-probability of an answer's tokens."""

    settings: PreferenceSection
    metrics: tuple[str, ...] = PAIR_METRICS
    sides: tuple[int, ...] = (0, 1)
    first_sides: tuple[int, ...] = ()
    uses_reference: bool = False

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Not needed."""
        raise NotImplementedError

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        section, answers = self.settings, answers_of(forward, micro)
        chosen, rejected = answers.chosen / answers.chosen_tokens, answers.rejected / answers.rejected_tokens
        losses = simpo_losses(chosen, rejected, beta=section.beta, gamma=section.gamma)
        if section.sft_weight:
            losses = losses - section.sft_weight * chosen
        rewards = section.beta * chosen.detach(), section.beta * rejected.detach()
        return Part(losses.sum() / counts.units, pair_sums(*rewards, chosen, rejected))

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """The means over pairs."""
        del known
        return means(self.metrics, sums)
