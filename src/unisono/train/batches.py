"""From the plan's order to the tensors of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unisono.data.batch import Batch, collate
from unisono.data.table import TokenTable
from unisono.model.forward import Rows
from unisono.plan import Stream


@dataclass(frozen=True)
class StepBatches:
    """What one optimizer step takes.

    Attributes:
        step: from 1.
        groups: sequence indices of each micro batch.
        tokens: input tokens of the global batch.
        loss_tokens: what its loss is divided by.
    """

    step: int
    groups: list[list[int]]
    tokens: int
    loss_tokens: int


@dataclass
class TrainingData:
    """The rows of training in the order of the plan."""

    table: TokenTable
    stream: Stream
    global_batch: int
    micro_batch: int
    total_sequences: int

    def __post_init__(self) -> None:
        self._tokens = self.table.sequence_tokens()
        self._loss_tokens = self.table.sequence_loss_tokens()

    def step(self, step: int) -> StepBatches:
        """The sequences of a step, dealt into micro batches."""
        sequences = self.stream.step(
            step, global_batch=self.global_batch, total_sequences=self.total_sequences
        )
        return StepBatches(
            step,
            [sequences[i : i + self.micro_batch] for i in range(0, len(sequences), self.micro_batch)],
            int(self._tokens[sequences].sum()),
            int(self._loss_tokens[sequences].sum()),
        )

    def position(self, step: int, micro_step: int) -> int:
        """The global sequence index at which a micro batch begins; streams of randomness are keyed by it."""
        return (step - 1) * self.global_batch + micro_step * self.micro_batch

    def longest(self) -> list[int]:
        """The sequences of the largest micro batch that could come."""
        order = np.argsort(self._tokens, kind="stable")[::-1]
        return [int(i) for i in order[: self.micro_batch]]

    def row_ids(self, step: StepBatches) -> list[str]:
        """Where the rows of a step come from, for people."""
        rows = [row for group in step.groups for sequence in group for row in self.table.rows_of(sequence)]
        return [self.table.row_id(int(row)) for row in rows]


def evaluation_groups(table: TokenTable, *, micro_batch: int) -> Iterator[list[int]]:
    """All sequences of an evaluation table, in order, in groups of a micro batch."""
    for first in range(0, table.sequences, micro_batch):
        yield list(range(first, min(first + micro_batch, table.sequences)))


def load_rows(table: TokenTable, sequences: Sequence[int], device: torch.device) -> tuple[Rows, Batch]:
    """The rows of some sequences as tensors on the device, and the batch that they come from."""
    batch = collate(table, sequences)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    rows = Rows(
        tensor(batch.input_ids),
        tensor(batch.position_ids),
        list(batch.lengths),
        tensor(batch.label_index),
        tensor(batch.labels),
    )
    return rows, batch
