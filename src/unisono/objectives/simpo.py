"""Simple preference optimization: pairs by mean log-probability, without a reference model (arXiv:2405.14734)."""

from dataclasses import dataclass

from unisono.config.preference import PreferenceSection
from unisono.model.forward import Forward
from unisono.objectives.losses import simpo_losses
from unisono.objectives.objective import (
    BOTH,
    PAIR_METRICS,
    Counts,
    Micro,
    Objective,
    Part,
    answers_of,
    pair_sums,
)


@dataclass(frozen=True)
class Simpo(Objective):
    """SimPO. A reward is β times the mean log-probability of an answer's tokens."""

    settings: PreferenceSection
    metrics = PAIR_METRICS
    sides = BOTH

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
