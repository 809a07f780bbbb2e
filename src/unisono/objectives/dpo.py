"""Direct preference optimization: the chosen answer gains on the rejected one, compared with a reference model (arXiv:2305.18290)."""

from dataclasses import dataclass

import torch

from unisono.config.preference import PreferenceSection
from unisono.model.forward import Forward
from unisono.objectives.losses import dpo_losses
from unisono.objectives.objective import PAIR_METRICS, Counts, Micro, Part, answers_of, means, pair_sums


@dataclass(frozen=True)
class Dpo:
    """DPO with the losses sigmoid, hinge and ipo. A reward is β times the log-ratio of model and reference."""

    settings: PreferenceSection
    metrics: tuple[str, ...] = PAIR_METRICS
    sides: tuple[int, ...] = (0, 1)
    first_sides: tuple[int, ...] = ()
    uses_reference: bool = True

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Not needed."""
        raise NotImplementedError

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        assert micro.reference is not None
        section, answers = self.settings, answers_of(forward, micro)
        chosen, rejected = answers.chosen - micro.reference[:, 0], answers.rejected - micro.reference[:, 1]
        rewards = section.beta * chosen.detach(), section.beta * rejected.detach()
        if section.loss == "ipo":
            chosen, rejected = chosen / answers.chosen_tokens, rejected / answers.rejected_tokens
        losses = dpo_losses(
            chosen, rejected, beta=section.beta, kind=section.loss, label_smoothing=section.label_smoothing
        )
        if section.sft_weight:
            losses = losses - section.sft_weight * answers.chosen / answers.chosen_tokens
        return Part(losses.sum() / counts.units, pair_sums(*rewards, answers.chosen, answers.rejected))

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """The means over pairs."""
        del known
        return means(self.metrics, sums)
