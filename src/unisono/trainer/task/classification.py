"""The part of the task `eval` for classifiers: loss, accuracy and F1, and the counts of each
label.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from unisono.base.events import Reporter
from unisono.trainer.batches.table import TableRows
from unisono.trainer.config.heads import ClassifySection, SequenceHead
from unisono.trainer.data import grouped
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.objectives.classify import Classify, label_figures, weights_of
from unisono.trainer.plan.task_requests import LabelFigures
from unisono.trainer.task.inference import InferenceModel
from unisono.trainer.task.target import Target

_TOKENS = 8_192  # per forward


def section_for(head: SequenceHead) -> ClassifySection:
    """`classify` for rows that a classifier is measured on: with its labels."""
    return ClassifySection(labels=list(head.labels), multi_label=head.multi_label)


def _objective(target: Target, head: SequenceHead) -> Classify:
    """The loss, with the weights of the run if it is one."""
    plan = target.plan
    weights = None
    if plan is not None and plan.data.labels is not None:
        weights = weights_of(plan.config.classify, plan.data.labels)
    return Classify(len(head.labels), head.multi_label, weights)


def classification_figures(
    opened: InferenceModel, table: TokenTable, sequences: Sequence[int], report: Reporter, *, each: bool
) -> tuple[dict[str, float | None], list[Mapping[str, object]], list[LabelFigures]]:
    """Loss, accuracy and F1; if `each` the labels of every row with those that the model gives;
    and the counts of each label.
    """
    head, rows = opened.target.head, TableRows(table, opened.device)
    assert head is not None
    objective, counts = _objective(opened.target, head), rows.counts(sequences)
    total, sums, done = 0.0, [0.0] * (2 * len(objective.metrics)), 0
    figures_of_rows: list[Mapping[str, object]] = []
    lengths = table.sequence_tokens()
    groups = list(grouped(((one, int(lengths[one])) for one in sequences), most=_TOKENS))
    with torch.no_grad():
        known = 0.0
        if objective.first_sides:
            firsts = (objective.first(opened.forward, rows.load(group)) for group in groups)
            known = sum(float(first) for first in firsts) / counts.units
        for group in groups:
            micro = rows.load(group)
            values = opened.forward.row_values(micro.rows)
            part = objective.part(values, micro.columns["label"], counts=counts, known=known)
            total += float(part.loss)
            sums = [one + other for one, other in zip(sums, part.sums.tolist(), strict=True)]
            if each:
                figures_of_rows += _rows(head, micro.row_ids, values.cpu(), micro.columns["label"].cpu())
            done += len(group)
            report.phase("evaluate", "measuring the loss", done=done, total=len(sequences))
    figures: dict[str, float | None] = {
        "rows": counts.units,
        "tokens": int(lengths[list(sequences)].sum()),
        "loss": total,
        **objective.figures(sums),
    }
    return figures, figures_of_rows, label_figures(head.labels, objective.counts(sums))


def _rows(
    head: SequenceHead, row_ids: Sequence[str], values: torch.Tensor, present: torch.Tensor
) -> Iterator[Mapping[str, object]]:
    """Of each row its labels, those that the model gives, and the probability of every label."""
    shares = values.sigmoid() if head.multi_label else values.softmax(1)
    for row, share, own in zip(row_ids, shares.tolist(), present.tolist(), strict=True):
        probabilities = dict(zip(head.labels, share, strict=True))
        if head.multi_label:
            given = [name for name, value in probabilities.items() if value > 0.5]
            right = [name for name, has in zip(head.labels, own, strict=True) if has]
            yield {"row": row, "labels": right, "predicted": given, "probabilities": probabilities}
        else:
            best = max(probabilities, key=lambda name: probabilities[name])
            label = head.labels[own.index(True)]
            yield {"row": row, "label": label, "predicted": best, "probabilities": probabilities}
