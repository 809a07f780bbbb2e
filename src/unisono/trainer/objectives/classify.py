"""Classification of rows by the state of their last token.

U is the number of rows, L that of labels. All tensors are float32. Losses are those of
transformers' sequence classification: cross entropy where a row has one label, and binary cross
entropy where it has any number of them; means over the rows of the global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from unisono.trainer.batches.source import Counts, Micro
from unisono.trainer.config.heads import ClassifySection
from unisono.trainer.model.forward import Forward
from unisono.trainer.objectives.objective import Objective, Part
from unisono.trainer.plan.run_plan import LabelSummary
from unisono.trainer.plan.task_requests import LabelFigures


def weights_of(section: ClassifySection, labels: LabelSummary) -> tuple[float, ...] | None:
    """The weight of each label; None if all count the same.

    `balanced` is scikit-learn's: the rows of the training / (labels × rows with the label). Of
    several labels in a row each is balanced against its absence: rows without it / rows with it. A
    label without rows has weight 1.
    """
    given, total = section.class_weights, sum(labels.rows)
    if given is None:
        return None
    if isinstance(given, dict):
        return tuple(given.get(name, 1.0) for name in labels.names)
    if labels.multi_label:
        return tuple((labels.train_rows - rows) / rows if rows else 1.0 for rows in labels.rows)
    return tuple(total / (len(labels.rows) * rows) if rows else 1.0 for rows in labels.rows)


def label_figures(names: Sequence[str], counts: Sequence[tuple[int, int, int]]) -> list[LabelFigures]:
    """Precision, recall and F1 of each label; 0 where a share is of nothing, as in scikit-learn.

    Args:
        names: of the labels.
        counts: for each: rows that have it, that were predicted to, and of these the right ones.
    """
    return [
        {
            "label": name,
            "rows": rows,
            "predicted": predicted,
            "right": right,
            "precision": right / predicted if predicted else 0.0,
            "recall": right / rows if rows else 0.0,
            "f1": 2 * right / (rows + predicted) if rows + predicted else 0.0,
        }
        for name, (rows, predicted, right) in zip(names, counts, strict=True)
    ]


@dataclass(frozen=True)
class Classify(Objective):
    """Cross entropy of labels.

    With weights, the mean is torch's: the sum of weighted losses / the sum of the weights of the
    rows' labels, both over the global batch. Of several labels in a row a weight multiplies the
    loss where the label is present (`pos_weight` of torch's `BCEWithLogitsLoss`).

    Attributes:
        labels: number of labels.
        multi_label: whether a row has any number of them.
        weights: of each label; None: all 1.
    """

    labels: int
    multi_label: bool = False
    weights: tuple[float, ...] | None = None
    metrics: tuple[str, ...] = field(init=False)
    first_sides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Pairs of sums: rows right and rows; then of each label rows and predicted, and right.
        each = [name for label in range(self.labels) for name in (f"rows {label}", f"right {label}")]
        object.__setattr__(self, "metrics", ("accuracy", *each))
        needs_weights = self.weights is not None and not self.multi_label
        object.__setattr__(self, "first_sides", (0,) if needs_weights else ())

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Σ of the weights of the rows' labels."""
        del forward
        return self._weights(micro.columns["label"])[_single(micro.columns["label"])].sum()

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; `known` is the mean weight of a row."""
        values = forward.row_values(micro.rows)
        return self.part(values, micro.columns["label"], counts=counts, known=known)

    def part(self, values: torch.Tensor, present: torch.Tensor, *, counts: Counts, known: float) -> Part:
        """The part of the loss of rows by the model's values, (U, L), and the labels that they
        have, (U, L) bool.
        """
        weights = None if self.weights is None else self._weights(present)
        if self.multi_label:
            total = binary_cross_entropy_with_logits(
                values, present.float(), pos_weight=weights, reduction="sum"
            )
            return Part(total / (counts.units * self.labels), self._sums(values > 0, present))
        total = cross_entropy(values, _single(present), weight=weights, reduction="sum")
        predicted = torch.zeros_like(present).scatter_(1, values.detach().argmax(1, keepdim=True), value=True)
        return Part(total / (counts.units * (known or 1.0)), self._sums(predicted, present))

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """Accuracy: the share of rows whose labels are all right; F1: the mean over the labels that
        a row has or is predicted to have.
        """
        del known
        if not sums[1]:
            return {}
        of_labels = label_figures([""] * self.labels, self.counts(sums))
        occurring = [one["f1"] for one in of_labels if one["rows"] or one["predicted"]]
        f1 = sum(occurring) / len(occurring) if occurring else 0.0
        return {"accuracy": sums[0] / sums[1], "f1": f1}

    def counts(self, sums: Sequence[float]) -> list[tuple[int, int, int]]:
        """For each label: rows that have it, that are predicted to, and of these the right ones."""
        whole = [round(value) for value in sums]
        return [(whole[i], whole[i + 1], whole[i + 2]) for i in range(2, len(whole), 4)]

    def _weights(self, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.weights, dtype=torch.float32, device=like.device)

    def _sums(self, predicted: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """(2 · metrics,) of predicted and present labels, (U, L) bool."""
        right_rows = (predicted == present).all(1).sum()
        right = (predicted & present).sum(0)
        each = torch.stack([present.sum(0), predicted.sum(0), right, torch.zeros_like(right)], 1)
        return torch.cat(
            [torch.stack([right_rows, right_rows.new_tensor(len(present))]), each.flatten()]
        ).float()


def _single(present: torch.Tensor) -> torch.Tensor:
    """(U,) int64: the label of each row, of (U, L) bool."""
    return present.int().argmax(1)
