"""The losses of `objective: grpo`: GRPO and similar losses on sampled answers, by their advantages.

All tensors are float32 and flat. A is the number of answers of a micro batch, N of their loss
tokens. For a token t of an answer with advantage a: r is the ratio of its probability now and when
it was sampled, exp(new - old); clip(r) is r within 1 - clip[0] and 1 + clip[1]. The sums are those
of the micro batch; the counts they are divided by are those of the *global* step, so that parts add
up to the same loss for any number of micro batches and ranks:

| loss    | of a token (of an answer: gspo, rloo) | the sum over tokens is divided by             |
|---------|---------------------------------------|-----------------------------------------------|
| dapo    | -min(r · a, clip(r) · a)              | loss tokens                                   |
| bnpo    | the same                              | loss tokens                                   |
| grpo    | the same                              | tokens of its answer × answers                |
| dr_grpo | the same                              | answers × max_new_tokens                      |
| cispo   | -clip(r) · a · new, clip(r) without a | loss tokens                                   |
|         | gradient                              |                                               |
| gspo    | as dapo, r of the mean of new - old   | answers                                       |
| rloo    | as dapo, r of the sum of new - old    | answers                                       |

`reference` adds β · r · k3 of each token, divided alike: for gspo the mean, for rloo the sum over
the tokens of an answer. With the factor r (DeepSeek-V3.2, arXiv:2512.02556), which has
a gradient, the gradient is that of the divergence; without it, as in arXiv:2402.03300 and for
`use_bias_correction_kl: false` of TRL, it is another one, even where r is 1.

The formulas are those of TRL 1.16, `GRPOTrainer` and `RLOOTrainer` (gspo: `loss_type` grpo with
`importance_sampling_level` sequence). As there, an answer without a loss (truncated) counts among
the answers, and its tokens do not count among the loss tokens. What differs:

- Counts are exact for each optimizer step. TRL's bnpo divides by the tokens of the micro batch of
  one rank, and takes the mean of those; its dapo and cispo divide by the mean number of tokens over
  the steps of a rollout.
- cispo has the lower bound of the paper too; clip[0] of 1 or more is none, as in TRL, whose
  `epsilon_high` is 1 + clip[1].
- rloo has k3 in the loss if there is a reference; TRL's has k1 in the reward
  (`advantages.less_divergence`). It has a dual clip. An answer without a loss adds 0, not its
  advantage, which has no gradient.
- Log-ratios count up to ±LARGEST, as in verl and SkyRL: without a limit the ratio of a long answer
  may be infinite, and its gradient NaN.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from unisono.trainer.config.rollout_sections import GrpoSection
from unisono.trainer.objectives.objective import Part

POLICY_METRICS = ("ratio", "clip_low", "clip_high", "kl_old", "kl")
"""Metrics of sampled answers. Of tokens, or of answers for gspo and rloo: ratio, of new and old
probability; clip_low, clip_high, shares of ratios which are clipped, so that they have no gradient
(cispo: a limited weight, which TRL counts for positive advantages only). Of tokens: kl_old, the
divergence (k3) of the model that sampled from this one; kl, that of this model from the reference
(r · k3).
"""
LARGEST = 20.0
"""The largest log-ratio that counts."""
_OF_ANSWERS = ("gspo", "rloo")
"""Losses with one ratio for an answer."""


@dataclass(frozen=True)
class PolicyBatch:
    """The answers of a micro batch; their tokens follow each other.

    Attributes:
        new: (N,), log-probabilities of the loss tokens, with a gradient.
        old: (N,), those at the time of sampling.
        reference: (N,), those under the reference model; None: no divergence in the loss.
        advantages: (A,).
        counts: loss tokens of each answer; they sum to N.
        has_loss: (A,) bool; False for answers that count but have no loss. They may as well be
            absent.
        weights: (N,), factors of the losses, without those of the divergence; None: 1.
    """

    new: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor | None
    advantages: torch.Tensor
    counts: list[int]
    has_loss: torch.Tensor
    weights: torch.Tensor | None = None

    @cached_property
    def tokens(self) -> torch.Tensor:
        """(A,): the counts as a tensor."""
        return torch.tensor(self.counts, device=self.new.device)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """(A,): the sums of values (N,) of the tokens of each answer."""
        return torch.stack([part.sum() for part in values.split(self.counts)])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(N,): the values (A,) of answers at each of their tokens."""
        return torch.repeat_interleave(values, self.tokens, output_size=len(self.new))


def policy_loss(
    batch: PolicyBatch, section: GrpoSection, *, answers: int, loss_tokens: int, max_new_tokens: int
) -> Part:
    """A micro batch's part of the loss, and the sums of POLICY_METRICS.

    Args:
        batch: the answers.
        section: the loss and its settings.
        answers: of the global step, with those that have no loss.
        loss_tokens: tokens of the global step, of answers that have a loss.
        max_new_tokens: most tokens of an answer.
    """
    ratios, advantages, divergences = _ratios(batch, section.loss), batch.spread(batch.advantages), None
    if section.loss == "cispo":
        losses = cispo_losses(batch.new, ratios, advantages, clip=section.clip)
    else:
        losses = clipped_losses(ratios, advantages, clip=section.clip, dual_clip=section.dual_clip)
    if batch.weights is not None:
        losses = losses * batch.weights
    if batch.reference is not None:
        divergences = ratios * k3(limited(batch.reference - batch.new))
        of_tokens = batch.spread(batch.sums(divergences)) if section.loss == "rloo" else divergences
        losses = losses + section.beta * of_tokens
    else:
        assert not section.beta or section.loss == "rloo", "the divergence may be in the reward of rloo only"
    if section.loss in ("dapo", "bnpo", "cispo"):
        divisor = torch.full_like(batch.tokens, max(loss_tokens, 1))
    elif section.loss == "dr_grpo":
        divisor = torch.full_like(batch.tokens, max(answers, 1) * max_new_tokens)
    else:  # losses of gspo and rloo are the same at all tokens of an answer
        divisor = batch.tokens * max(answers, 1)
    weights = batch.spread(batch.has_loss / divisor)
    with torch.no_grad():
        sums = _sums(batch, section, ratios, divergences)
    return Part((weights * losses).sum(), sums)


def clipped_losses(
    ratios: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> torch.Tensor:
    """(N,): the clipped surrogate (PPO, arXiv:1707.06347, equation 7), with bounds of their own on
    both sides (DAPO, arXiv:2503.14476).

    Args:
        ratios: (N,), of new and old probability, with a gradient.
        advantages: (N,).
        clip: how far a ratio counts below 1, if the advantage is negative, and above 1, if it is
            positive.
        dual_clip: the largest ratio that counts for a negative advantage (arXiv:1912.09729). As
            TRL's `delta` it should exceed 1 + clip[1], and limits positive ones too if it does not.
    """
    clipped = ratios.clamp(1 - clip[0], 1 + clip[1])
    if dual_clip is not None:
        ratios = ratios.clamp(max=dual_clip)
    return -torch.minimum(ratios * advantages, clipped * advantages)


def cispo_losses(
    new: torch.Tensor, ratios: torch.Tensor, advantages: torch.Tensor, *, clip: tuple[float, float]
) -> torch.Tensor:
    """(N,): log-probabilities weighted by advantage and clipped ratio, which has no gradient: every
    token keeps one (CISPO, arXiv:2506.13585).

    Args:
        new: (N,), log-probabilities, with a gradient.
        ratios: (N,), of new and old probability.
        advantages: (N,).
        clip: how far a ratio counts below 1 and above 1.
    """
    return -ratios.detach().clamp(1 - clip[0], 1 + clip[1]) * advantages * new


def correction_weights(log_ratios: torch.Tensor, counts: list[int], *, kind: str, cap: float) -> torch.Tensor:
    """(N,): weights of tokens that another model sampled than the one that is trained, truncated or
    masked importance sampling (https://fengyao.notion.site/off-policy-rl): p / q of the token, or
    of its whole answer; above `cap` it is that, or 0.

    Args:
        log_ratios: (N,), log(p / q), p of the training forward and q of the sampler.
        counts: tokens of each answer; they sum to N.
        kind: token or sequence, truncate or mask, e.g. `token_mask`.
        cap: the largest weight.
    """
    unit, _, limit = kind.partition("_")
    if unit == "sequence":
        sums = torch.stack([part.sum() for part in log_ratios.split(counts)])
        log_ratios = torch.repeat_interleave(sums, torch.tensor(counts, device=sums.device))
    ratios = limited(log_ratios).exp()
    return ratios.clamp(max=cap) if limit == "truncate" else torch.where(ratios > cap, 0.0, ratios)


def k3(log_ratios: torch.Tensor) -> torch.Tensor:
    """(N,): estimates of the divergence of q from p by tokens that q has sampled: p / q - 1 -
    log(p / q), at least 0 (http://joschu.net/blog/kl-approx.html).

    Args:
        log_ratios: (N,), log(p / q).
    """
    return torch.expm1(log_ratios) - log_ratios


def _ratios(batch: PolicyBatch, loss: str) -> torch.Tensor:
    """(N,): of new and old probability; of gspo and rloo one for all tokens of an answer."""
    log_ratios = batch.new - batch.old
    if loss in _OF_ANSWERS:
        of_answers = batch.sums(log_ratios)
        log_ratios = batch.spread(of_answers / batch.tokens if loss == "gspo" else of_answers)
    return limited(log_ratios).exp()


def limited(log_ratios: torch.Tensor) -> torch.Tensor:
    """(N,): log-ratios, as far as they count."""
    return log_ratios.clamp(-LARGEST, LARGEST)


def _sums(
    batch: PolicyBatch, section: GrpoSection, ratios: torch.Tensor, divergences: torch.Tensor | None
) -> torch.Tensor:
    """(2 · metrics,): of each of POLICY_METRICS the sum and the number."""
    counts, advantages = batch.spread(batch.has_loss.float()), batch.spread(batch.advantages)
    shares = batch.spread(batch.has_loss / batch.tokens) if section.loss in _OF_ANSWERS else counts
    both_signs = section.loss == "cispo"
    values = [
        (ratios, shares),
        ((ratios < 1 - section.clip[0]) & (both_signs | (advantages < 0)), shares),
        ((ratios > 1 + section.clip[1]) & (both_signs | (advantages > 0)), shares),
        (k3(limited(batch.new - batch.old)), counts),
        (counts, torch.zeros_like(counts)) if divergences is None else (divergences, counts),
    ]
    return torch.stack([part for value, weight in values for part in ((weight * value).sum(), weight.sum())])
