"""Objectives on rows of data: cross entropy of tokens, pairs, and rated answers; and their losses.

All tensors are float32. U is the number of units: pairs, or rated answers. A loss is given for each
unit, (U,); the caller adds them up and divides by the number of units of the global batch. A *sum*
is the log-probability of an answer, summed over its loss tokens; a *mean* is that sum divided by
the number of those tokens; a *log-ratio* is the sum (or mean) under the model less that under the
reference.

The formulas are those of TRL 1.16, `DPOTrainer`, `KTOTrainer`, `RewardTrainer`, and of
trl.experimental `ORPOTrainer` and `CPOTrainer`. Where LLaMA-Factory 0.9.5 differs for the same
loss, the function says how.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from unisono.trainer.batches.source import Counts, Micro
from unisono.trainer.config.sections import PreferenceSection
from unisono.trainer.model.forward import Forward, Rows
from unisono.trainer.objectives.objective import (
    BOTH,
    PAIR_METRICS,
    Objective,
    Part,
    accurate,
    answers_of,
    pair_sums,
    sums_of,
)

LN_2 = 0.6931471805599453


def dft_losses(log_probs: torch.Tensor) -> torch.Tensor:
    """(N,): the loss of each token: its cross entropy times its own probability, which has no
    gradient (DFT, arXiv:2508.05629).

    LLaMA-Factory's `use_dft_loss` is the same.

    Args:
        log_probs: (N,), log-probabilities of the loss tokens.
    """
    return -log_probs * log_probs.detach().exp()


def dpo_losses(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    beta: float,
    kind: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """(U,): the loss of pairs by the log-ratios of their answers (DPO, arXiv:2305.18290, equation
    7).

    Rewards are beta × log-ratio, of sums for every kind. LLaMA-Factory's losses are the same; its
    rewards and log-probabilities of ipo are of means. TRL has label smoothing in other losses only
    (robust, exo_pair, aot); aot on batches of one pair is the one here.

    Args:
        chosen: (U,), log-ratios of the chosen answers: of sums; for ipo of means, as its authors
            have confirmed to TRL.
        rejected: (U,), log-ratios of the rejected answers.
        beta: how strongly the model is held at the reference; for ipo the τ of its paper.
        kind: sigmoid; hinge (SLiC, arXiv:2305.10425); ipo (arXiv:2310.12036, equation 17).
        label_smoothing: for sigmoid, the probability that a pair is swapped (conservative DPO,
            https://ericmitchell.ai/cdpo.pdf).
    """
    delta = chosen - rejected
    if kind == "hinge":
        return torch.relu(1 - beta * delta)
    if kind == "ipo":
        return (delta - 1 / (2 * beta)) ** 2
    losses = -logsigmoid(beta * delta)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * logsigmoid(-beta * delta)
    return losses


def kto_losses(
    log_ratios: torch.Tensor,
    desirable: torch.Tensor,
    *,
    beta: float,
    kl: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """(U,): the loss of rated answers (KTO, arXiv:2402.01306, equation 7).

    `kl` is the mean over the global batch of the log-ratios of mismatched answers, and 0 if that is
    negative. TRL takes the mean over the micro batch of all ranks, and pairs each prompt with the
    previous answer of that micro batch; LLaMA-Factory takes the mean likewise, and pairs with the
    previous row of the data. Rewards are beta × log-ratio: their means, and those of
    log-probabilities, are over the desirable answers (chosen) and the others (rejected) apart, and
    absent where a batch has none. There is no accuracy.

    Args:
        log_ratios: (U,), log-ratios of sums.
        desirable: (U,) bool; True for answers that are wanted.
        beta: how strongly the model is held at the reference.
        kl: estimate of the divergence from the reference, at least 0; it has no gradient.
        desirable_weight: weight of desirable answers.
        undesirable_weight: weight of the others.
    """
    signs = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * (1 - torch.sigmoid(signs * beta * (log_ratios - kl)))


def orpo_losses(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float) -> torch.Tensor:
    """(U,): the odds-ratio term of pairs (ORPO, arXiv:2403.07691, equations 4 and 7); the loss is
    the chosen side's cross entropy plus it.

    TRL's cross entropy is the mean over all tokens of the batch's chosen rows but their first,
    prompts included; LLaMA-Factory's is the mean over pairs of that of the chosen answer's tokens.
    Rewards are beta × mean, and log-probabilities are means.

    Args:
        chosen: (U,), means of the chosen answers. A probability of 1 has infinite odds: it counts
            as the largest float32 below 1.
        rejected: (U,), means of the rejected answers.
        beta: weight of the term (λ in the paper).
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * logsigmoid(log_odds)


def simpo_losses(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float) -> torch.Tensor:
    """(U,): the loss of pairs without a reference (SimPO, arXiv:2405.14734, equation 6).

    Rewards are beta × mean, and log-probabilities are means. LLaMA-Factory's is the same. TRL's
    `CPOConfig` adds the cross entropy of the chosen answers unless `cpo_alpha` is 0.

    Args:
        chosen: (U,), means of the chosen answers.
        rejected: (U,), means of the rejected answers.
        beta: scale of the reward.
        gamma: the margin by which the chosen reward should exceed the other one. It is not scaled
            by beta.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def reward_losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """(U,): the loss of pairs by their rewards (Bradley and Terry 1952; arXiv:2203.02155, equation
    1).

    LLaMA-Factory's is the same; its reward has a bias, which cancels out.

    Args:
        chosen: (U,), rewards of the chosen answers.
        rejected: (U,), rewards of the rejected answers.
    """
    return -logsigmoid(chosen - rejected)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of values up to 0, accurate near 0 and far from it (Mächler 2012), with
    finite gradients.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps / 2)
    is_near = x > -LN_2
    # Each branch sees values of its own side only: the gradient of the other would be NaN.
    near, far = torch.where(is_near, x, -LN_2), torch.where(is_near, -LN_2, x)
    return torch.where(is_near, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


@dataclass(frozen=True)
class TokenObjective(Objective):
    """Supervised fine-tuning and pretraining: the mean cross entropy of the loss tokens, each times
    its weight if rows have weights.

    Attributes:
        smoothing: the share of the target probability that is spread evenly over the vocabulary, in
            training (arXiv:1512.00567).
        dft: whether a token is weighted by its own probability, in training.
    """

    smoothing: float = 0.0
    dft: bool = False

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; in evaluation mode the plain cross entropy."""
        del known
        training, weights = forward.loaded.model.training, micro.rows.weights
        if (self.dft and training) or weights is not None:
            log_probs = forward.log_probs(micro.rows)
            losses = dft_losses(log_probs) if self.dft and training else -log_probs
            loss = (losses if weights is None else weights * losses).sum() / counts.loss_tokens
        else:
            smoothing = self.smoothing if training else 0.0
            loss = forward.loss(micro.rows, count=counts.loss_tokens, smoothing=smoothing)
        return Part(loss, loss.new_zeros(0))


@dataclass(frozen=True)
class Reward(Objective):
    """Reward models: one value for each answer, that of the last token, higher for the chosen one
    (Bradley and Terry 1952; arXiv:2203.02155).
    """

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
    """Direct preference optimization: the chosen answer gains on the rejected one, compared with a
    reference model (arXiv:2305.18290).

    The losses are sigmoid, hinge and ipo. A reward is β times the log-ratio of model and reference.
    """

    settings: PreferenceSection
    metrics = PAIR_METRICS
    sides = BOTH
    uses_reference = True

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        section, answers = self.settings, answers_of(forward, micro)
        reference = micro.columns["reference"]
        chosen, rejected = answers.chosen - reference[:, 0], answers.rejected - reference[:, 1]
        rewards = section.beta * chosen.detach(), section.beta * rejected.detach()
        if section.loss == "ipo":
            chosen, rejected = chosen / answers.chosen_tokens, rejected / answers.rejected_tokens
        losses = dpo_losses(
            chosen, rejected, beta=section.beta, kind=section.loss, label_smoothing=section.label_smoothing
        )
        if section.sft_weight:
            losses = losses - section.sft_weight * answers.chosen / answers.chosen_tokens
        # Before the first step the rewards are equal. The rounding of log-probabilities, which
        # depends on the micro batch, must not decide.
        rounding = section.beta * _ROUNDING * (answers.chosen + answers.rejected).detach().abs()
        sums = pair_sums(*rewards, answers.chosen, answers.rejected, rounding=rounding)
        return Part(losses.sum() / counts.units, sums)


@dataclass(frozen=True)
class Orpo(Objective):
    """Odds-ratio preference optimization: fine-tuning and preference in one, without a reference
    model (arXiv:2403.07691).

    As in TRL, the cross entropy is that of all tokens of the chosen row, prompt and answer, and a
    mean over the tokens of the global batch (those of pictures are not predicted); the odds ratio
    is a mean over pairs. A reward is β times the mean log-probability of an answer's tokens.
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
        predicted = counts.first_tokens - counts.unpredicted - counts.units
        loss = cross_entropy / predicted + losses.sum() / counts.units
        rewards = section.beta * chosen.detach(), section.beta * rejected.detach()
        return Part(loss, pair_sums(*rewards, chosen, rejected))


def _with_prompts(rows: Rows) -> Rows:
    """The rows with every token of chosen rows as a loss token, but the first one and those of
    pictures; rejected rows keep theirs.
    """
    device = rows.input_ids.device
    lengths = torch.tensor(rows.lengths, device=device)
    row_of = torch.repeat_interleave(torch.arange(len(rows.lengths), device=device), lengths)  # (T,)
    predicts = (row_of % 2 == 0) & (rows.position_ids < lengths[row_of] - 1)
    labels = torch.roll(rows.input_ids, -1)
    if rows.pictures is not None:
        predicts &= ~torch.isin(labels, torch.tensor(rows.pictures.image_ids, device=device))
    predicts[rows.label_index] = True
    labels[rows.label_index] = rows.labels  # an answer may be closed by a token that is not the next one
    index = predicts.nonzero()[:, 0]
    counts = torch.bincount(row_of[index], minlength=len(rows.lengths)).tolist()
    return replace(rows, label_index=index, labels=labels[index], loss_counts=counts)


@dataclass(frozen=True)
class Simpo(Objective):
    """Simple preference optimization: pairs by mean log-probability, without a reference model
    (arXiv:2405.14734).

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
    """Kahneman-Tversky optimization: answers that are rated good or bad one by one, compared with a
    reference model (arXiv:2402.01306).

    The divergence from the reference is estimated over the global batch, from prompts with the
    answers of other rows.
    """

    settings: PreferenceSection
    metrics = ("rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected")
    first_sides = (1,)
    uses_reference = True

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Σ of the log-ratios of the mismatched answers."""
        return (micro.rows.sums(forward.log_probs(micro.rows)) - micro.columns["reference"][:, 1]).sum()

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; `known` is the estimate of the divergence before it
        is limited to 0 or more.
        """
        section, good = self.settings, micro.columns["label"]
        log_probs = micro.rows.sums(forward.log_probs(micro.rows))
        ratios = log_probs - micro.columns["reference"][:, 0]
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
        """Means over the desirable and over the other answers, the difference of their rewards, and
        the estimate of the divergence.
        """
        figures = super().figures(sums)
        if "rewards_chosen" in figures and "rewards_rejected" in figures:
            figures["reward_margin"] = figures["rewards_chosen"] - figures["rewards_rejected"]
        return {**figures, "kl": max(known, 0.0)}
