"""Kahneman-Tversky optimization: answers that are rated good or bad one by one, compared with a reference model (arXiv:2402.01306)."""

from dataclasses import dataclass

import torch

from unisono.config.preference import PreferenceSection
from unisono.model.forward import Forward
from unisono.objectives.losses import kto_losses
from unisono.objectives.objective import Counts, Micro, Objective, Part, sums_of


@dataclass(frozen=True)
class Kto(Objective):
    """KTO. The divergence from the reference is estimated over the global batch, from prompts with the answers of other rows."""

    settings: PreferenceSection
    metrics = ("rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected")
    first_sides = (1,)
    uses_reference = True

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Σ of the log-ratios of the mismatched answers."""
        assert micro.reference is not None
        return (micro.rows.sums(forward.log_probs(micro.rows)) - micro.reference[:, 1]).sum()

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; `known` is the estimate of the divergence before it is limited to 0 or more."""
        assert micro.reference is not None
        assert micro.labels is not None
        section, good = self.settings, micro.labels
        log_probs = micro.rows.sums(forward.log_probs(micro.rows))
        ratios = log_probs - micro.reference[:, 0]
        losses = kto_losses(
            ratios,
            good,
            beta=section.beta,
            kl=max(known, 0.0),
            desirable_weight=section.desirable_weight,
            undesirable_weight=section.undesirable_weight,
        )
        if section.sft_weight:
            tokens = torch.tensor(micro.rows.loss_counts, dtype=ratios.dtype, device=ratios.device)
            losses = losses - section.sft_weight * torch.where(good, log_probs / tokens, 0.0)
        rewards = section.beta * ratios.detach()
        sums = sums_of(rewards[good], rewards[~good], log_probs[good], log_probs[~good])
        return Part(losses.sum() / counts.units, sums)

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """Means over the desirable and over the other answers, the difference of their rewards, and the estimate of the divergence."""
        found = super().figures(sums)
        if "rewards_chosen" in found and "rewards_rejected" in found:
            found["reward_margin"] = found["rewards_chosen"] - found["rewards_rejected"]
        return {**found, "kl": max(known, 0.0)}
