"""Odds-ratio preference optimization: fine-tuning and preference in one, without a reference model (arXiv:2403.07691).

As in TRL, the cross entropy is that of all tokens of the chosen row, prompt and answer, and a mean over the tokens of the global batch; the
odds ratio is a mean over pairs.
"""

from dataclasses import dataclass, replace

import torch

from unisono.config.preference import PreferenceSection
from unisono.model.forward import Forward, Rows
from unisono.objectives.losses import orpo_losses
from unisono.objectives.objective import BOTH, PAIR_METRICS, Counts, Micro, Objective, Part, pair_sums


@dataclass(frozen=True)
class Orpo(Objective):
    """ORPO. A reward is β times the mean log-probability of an answer's tokens."""

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
