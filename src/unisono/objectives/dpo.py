"""Direct preference optimization: the chosen answer gains on the rejected one, compared with a reference model (arXiv:2305.18290)."""

from dataclasses import dataclass

from unisono.config.preference import PreferenceSection
from unisono.model.forward import Forward
from unisono.objectives.losses import dpo_losses
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

_ROUNDING = 2.0**-20  # of a sum of float32, relative: eight units in the last place


@dataclass(frozen=True)
class Dpo(Objective):
    """DPO with the losses sigmoid, hinge and ipo. A reward is β times the log-ratio of model and reference."""

    settings: PreferenceSection
    metrics = PAIR_METRICS
    sides = BOTH
    uses_reference = True

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
        # Before the first step the rewards are equal. The rounding of log-probabilities, which depends on the micro batch, must not decide.
        rounding = section.beta * _ROUNDING * (answers.chosen + answers.rejected).detach().abs()
        sums = pair_sums(*rewards, answers.chosen, answers.rejected, rounding=rounding)
        return Part(losses.sum() / counts.units, sums)
