"""The losses of objectives, as functions of log-probabilities: no model, no I/O.

All tensors are float32. U is the number of units: pairs, or rated answers. A loss is given for each unit, (U,); the caller adds them up and
divides by the number of units of the global batch. A *sum* is the log-probability of an answer, summed over its loss tokens; a *mean* is that
sum divided by the number of those tokens; a *log-ratio* is the sum (or mean) under the model less that under the reference.

The formulas are those of TRL 1.16, `DPOTrainer`, `KTOTrainer`, `RewardTrainer`, and of trl.experimental `ORPOTrainer` and `CPOTrainer`. Where
LLaMA-Factory 0.9.5 differs for the same loss, the function says how.
"""

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

LN_2 = 0.6931471805599453


def dft_losses(log_probs: torch.Tensor) -> torch.Tensor:
    """(N,): the loss of each token: its cross entropy times its own probability, which has no gradient (DFT, arXiv:2508.05629).

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
    """(U,): the loss of pairs by the log-ratios of their answers (DPO, arXiv:2305.18290, equation 7).

    Rewards are beta × log-ratio, of sums for every kind. LLaMA-Factory's losses are the same; its rewards and log-probabilities of ipo
    are of means. TRL has label smoothing in other losses only (robust, exo_pair, aot); aot on batches of one pair is the one here.

    Args:
        chosen: (U,), log-ratios of the chosen answers: of sums; for ipo of means, as its authors have confirmed to TRL.
        rejected: (U,), log-ratios of the rejected answers.
        beta: how strongly the model is held at the reference; for ipo the τ of its paper.
        kind: sigmoid; hinge (SLiC, arXiv:2305.10425); ipo (arXiv:2310.12036, equation 17).
        label_smoothing: for sigmoid, the probability that a pair is swapped (conservative DPO, https://ericmitchell.ai/cdpo.pdf).
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

    `kl` is the mean over the global batch of the log-ratios of mismatched answers, and 0 if that is negative. TRL takes the mean over the
    micro batch of all ranks, and pairs each prompt with the previous answer of that micro batch; LLaMA-Factory takes the mean likewise, and
    pairs with the previous row of the data. Rewards are beta × log-ratio: their means, and those of log-probabilities, are over the
    desirable answers (chosen) and the others (rejected) apart, and absent where a batch has none. There is no accuracy.

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
    """(U,): the odds-ratio term of pairs (ORPO, arXiv:2403.07691, equations 4 and 7); the loss is the chosen side's cross entropy plus it.

    TRL's cross entropy is the mean over all tokens of the batch's chosen rows but their first, prompts included; LLaMA-Factory's is the mean
    over pairs of that of the chosen answer's tokens. Rewards are beta × mean, and log-probabilities are means.

    Args:
        chosen: (U,), means of the chosen answers. A probability of 1 has infinite odds: it counts as the largest float32 below 1.
        rejected: (U,), means of the rejected answers.
        beta: weight of the term (λ in the paper).
    """
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * logsigmoid(log_odds)


def simpo_losses(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float, gamma: float) -> torch.Tensor:
    """(U,): the loss of pairs without a reference (SimPO, arXiv:2405.14734, equation 6).

    Rewards are beta × mean, and log-probabilities are means. LLaMA-Factory's is the same. TRL's `CPOConfig` adds the cross entropy of the
    chosen answers unless `cpo_alpha` is 0.

    Args:
        chosen: (U,), means of the chosen answers.
        rejected: (U,), means of the rejected answers.
        beta: scale of the reward.
        gamma: the margin by which the chosen reward should exceed the other one. It is not scaled by beta.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def reward_losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """(U,): the loss of pairs by their rewards (Bradley and Terry 1952; arXiv:2203.02155, equation 1).

    LLaMA-Factory's is the same; its reward has a bias, which cancels out.

    Args:
        chosen: (U,), rewards of the chosen answers.
        rejected: (U,), rewards of the rejected answers.
    """
    return -logsigmoid(chosen - rejected)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of values up to 0, accurate near 0 and far from it (Mächler 2012), with finite gradients."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps / 2)
    is_near = x > -LN_2
    # Each branch sees values of its own side only: the gradient of the other would be NaN.
    near, far = torch.where(is_near, x, -LN_2), torch.where(is_near, -LN_2, x)
    return torch.where(is_near, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
