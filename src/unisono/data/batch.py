"""Lays sequences side by side, without padding. Letters: T tokens of the batch, N loss tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unisono.data.table import TokenTable

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows laid one after the other; attention never crosses from one to the next.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, from 0 in every row.
        lengths: tokens of each row, in order; they sum to T.
        label_index: (N,) int64, the positions whose hidden state predicts a loss token.
        labels: (N,) int64, the token to predict at each.
        sequences: the sequences, in order.
        row_ids: where each row comes from.
    """

    input_ids: Ints
    position_ids: Ints
    lengths: list[int]
    label_index: Ints
    labels: Ints
    sequences: list[int]
    row_ids: list[str]

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """N."""
        return len(self.labels)


def collate(table: TokenTable, sequences: Sequence[int]) -> Batch:
    """The batch of some sequences of a table."""
    rows = [int(row) for sequence in sequences for row in table.rows_of(sequence)]
    parts = [table.row(row) for row in rows]
    lengths = [len(ids) for ids, _ in parts]
    input_ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in parts)])
    targets = np.concatenate([np.zeros(0, np.bool_), *(wanted for _, wanted in parts)])
    starts = np.cumsum([0, *lengths])[:-1]
    predicted = np.flatnonzero(targets)
    return Batch(
        input_ids=input_ids,
        position_ids=np.arange(len(input_ids), dtype=np.int64) - np.repeat(starts, lengths),
        lengths=lengths,
        label_index=predicted - 1,  # the state before a token predicts it
        labels=input_ids[predicted],
        sequences=[int(s) for s in sequences],
        row_ids=[table.row_id(row) for row in rows],
    )
