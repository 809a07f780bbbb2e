"""The objectives, and which one a config names."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from unisono.config.preference import PreferenceSection
from unisono.config.schema import RunConfig
from unisono.model.forward import Forward, Rows
from unisono.objectives.losses import (
    dft_losses,
    dpo_losses,
    kto_losses,
    orpo_losses,
    reward_losses,
    simpo_losses,
)
from unisono.objectives.objective import (
    BOTH,
    PAIR_METRICS,
    Counts,
    Micro,
    Objective,
    Part,
    accurate,
    answers_of,
    pair_sums,
    sums_of,
)


@dataclass(frozen=True)
class TokenObjective(Objective):
    """Supervised fine-tuning and pretraining: the mean cross entropy of the loss tokens.

    Attributes:
        smoothing: the share of the target probability that is spread evenly over the vocabulary, in training (arXiv:1512.00567).
        dft: whether a token is weighted by its own probability, in training.
    """

    smoothing: float = 0.0
    dft: bool = False

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; in evaluation mode the plain cross entropy."""
        del known
        training = forward.loaded.model.training
        if self.dft and training:
            loss = dft_losses(forward.log_probs(micro.rows)).sum() / counts.loss_tokens
        else:
            smoothing = self.smoothing if training else 0.0
            loss = forward.loss(micro.rows, count=counts.loss_tokens, smoothing=smoothing)
        return Part(loss, loss.new_zeros(0))


@dataclass(frozen=True)
class Reward(Objective):
    """Reward models: one value for each answer, that of the last token, higher for the chosen one (Bradley and Terry 1952; arXiv:2203.02155)."""

    metrics = PAIR_METRICS[:4]
    sides = BOTH

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        chosen, rejected = forward.scores(micro.rows).view(-1, 2).unbind(1)
        margin = chosen - rejected
        sums = sums_of(chosen, rejected, margin, accurate(margin))
        return Part(reward_losses(chosen, rejected).sum() / counts.units, sums)


_ROUNDING = 2.0**-20  # of a sum of float32, relative: eight units in the last place


@dataclass(frozen=True)
class Dpo(Objective):
    """Direct preference optimization: the chosen answer gains on the rejected one, compared with a reference model (arXiv:2305.18290).

    The losses are sigmoid, hinge and ipo. A reward is β times the log-ratio of model and reference.
    """

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


@dataclass(frozen=True)
class Orpo(Objective):
    """Odds-ratio preference optimization: fine-tuning and preference in one, without a reference model (arXiv:2403.07691).

    As in TRL, the cross entropy is that of all tokens of the chosen row, prompt and answer, and a mean over the tokens of the global batch;
    the odds ratio is a mean over pairs. A reward is β times the mean log-probability of an answer's tokens.
    """

    settings: PreferenceSection
    metrics = PAIR_METRICS
    sides = BOTH

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        section, rows = self.settings, _with_prompts(micro.rows)
        log_probs = forward.log_probs(rows)
        is_answer = torch.isin(rows.label_index, micro.rows.label_index)
        answers = micro.rows.sums(log_probs[is_answer]).view(-1, 2)
        tokens = torch.tensor(micro.rows.loss_counts, dtype=answers.dtype, device=answers.device).view(-1, 2)
        chosen, rejected = (answers / tokens).unbind(1)
        cross_entropy = -rows.sums(log_probs).view(-1, 2)[:, 0].sum()
        losses = orpo_losses(chosen, rejected, beta=section.beta)
        if section.sft_weight:
            losses = losses - section.sft_weight * chosen
        loss = cross_entropy / (counts.first_tokens - counts.units) + losses.sum() / counts.units
        rewards = section.beta * chosen.detach(), section.beta * rejected.detach()
        return Part(loss, pair_sums(*rewards, chosen, rejected))


def _with_prompts(rows: Rows) -> Rows:
    """The rows with every token of chosen rows but the first as a loss token; rejected rows keep theirs."""
    device = rows.input_ids.device
    lengths = torch.tensor(rows.lengths, device=device)
    row_of = torch.repeat_interleave(torch.arange(len(rows.lengths), device=device), lengths)  # (T,)
    predicts = (row_of % 2 == 0) & (rows.position_ids < lengths[row_of] - 1)
    predicts[rows.label_index] = True
    labels = torch.roll(rows.input_ids, -1)
    labels[rows.label_index] = rows.labels  # an answer may be closed by a token that is not the next one
    index = predicts.nonzero()[:, 0]
    counts = torch.bincount(row_of[index], minlength=len(rows.lengths)).tolist()
    return replace(rows, label_index=index, labels=labels[index], loss_counts=counts)


@dataclass(frozen=True)
class Simpo(Objective):
    """Simple preference optimization: pairs by mean log-probability, without a reference model (arXiv:2405.14734).

    A reward is β times the mean log-probability of an answer's tokens.
    """

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


@dataclass(frozen=True)
class Kto(Objective):
    """Kahneman-Tversky optimization: answers that are rated good or bad one by one, compared with a reference model (arXiv:2402.01306).

    The divergence from the reference is estimated over the global batch, from prompts with the answers of other rows.
    """

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


def _diffusion(config: RunConfig) -> Objective:
    from unisono.diffusion.pipeline import trains_text
    from unisono.objectives.diffusion import Diffusion

    return Diffusion(config.diffusion, trains_text=trains_text(config))


def _tokens(config: RunConfig) -> Objective:
    return TokenObjective(config.optim.label_smoothing, dft=config.optim.loss_weight == "dft")


_MADE: dict[str, Callable[[RunConfig], Objective]] = {
    "sft": _tokens,
    "pretrain": _tokens,
    "reward": lambda config: Reward(),
    "dpo": lambda config: Dpo(config.preference),
    "kto": lambda config: Kto(config.preference),
    "orpo": lambda config: Orpo(config.preference),
    "simpo": lambda config: Simpo(config.preference),
    "diffusion": _diffusion,
}


def objective_of(config: RunConfig) -> Objective:
    """The objective that a config names, with its settings."""
    return _MADE[config.objective](config)
