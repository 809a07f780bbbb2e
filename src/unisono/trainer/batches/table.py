"""The rows of a token table as a source of batches, and as the rows of an evaluation."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch

from unisono.guard.places.ranks import RankPlace
from unisono.trainer.batches.contents import TableContents
from unisono.trainer.batches.source import BatchSource, Counts, Micro, MicroBatch, StepBatches
from unisono.trainer.data.token_table import Split, TokenTable, collate_units
from unisono.trainer.families.family import ContentsLoader
from unisono.trainer.model.attention import to_device
from unisono.trainer.model.forward import PictureInputs, Rows
from unisono.trainer.plan import RunPlan, SequenceStream, deal


@dataclass
class TableRows:
    """The rows of one split, loaded as micro batches.

    Attributes:
        table: of the split.
        device: the computation's.
        reference: (rows of the table, 2) float32, the reference's log-probabilities; None without
            one.
        contents: what the rows have beside their tokens, e.g. pictures; None for text.
    """

    table: TokenTable
    device: torch.device
    reference: torch.Tensor | None = None
    contents: TableContents | None = None

    @classmethod
    def open(cls, directory: Path, split: Split, device: torch.device) -> Self:
        """The rows of a split of a table.

        Raises:
            OSError: if a file is missing or damaged.
        """
        return cls(TokenTable.open(directory, split), device)

    def add_contents(self, loader: ContentsLoader | None, *, seed: int, global_batch: int) -> None:
        """Loads the rows with their contents from now on, if they have any."""
        if loader is not None:
            self.contents = TableContents(self.table, loader, seed, global_batch)

    def load(
        self, sequences: Sequence[int], sides: Sequence[int] = (0,), *, places: Sequence[int] | None = None
    ) -> Micro:
        """The units of some sequences as tensors on the device.

        Args:
            sequences: of the table.
            sides: of each unit, the rows of tokens to load.
            places: where in the order of the run each of them is used; None: in an evaluation.
        """
        units = self.units_of(sequences)
        return self.load_units(units, sides, places=places)

    def load_units(
        self, units: Sequence[int], sides: Sequence[int] = (0,), *, places: Sequence[int] | None = None
    ) -> Micro:
        """Some units, each a row of the table, as tensors on the device; see `load`."""
        batch, device = collate_units(self.table, units, sides), self.device
        rows = Rows(
            to_device(batch.input_ids, device),
            to_device(batch.position_ids, device),
            list(batch.lengths),
            to_device(batch.label_index, device),
            to_device(batch.labels, device),
            loss_counts=list(batch.loss_counts),
            common=list(batch.common),
            weights=None if batch.weights is None else to_device(batch.weights, device),
        )
        columns = {}
        desirable = self.table.columns.get("label")
        if desirable is not None:
            columns["label"] = to_device(desirable[batch.units] != 0, device)
        if self.reference is not None:
            columns["reference"] = self.reference[batch.units].to(device)
        micro = Micro(rows, len(batch.units), batch.row_ids, columns)
        if self.contents is None:
            return micro
        return self.contents.add(micro, units, sides, units if places is None else places)

    def units_of(self, sequences: Sequence[int]) -> list[int]:
        """The units of some sequences, each a row of the table."""
        return [int(unit) for sequence in sequences for unit in self.table.rows_of(sequence)]

    def question(self, row: int) -> "PromptAnswer | None":
        """The question of a row, with its pictures; None if nothing precedes its answer, or a
        picture follows it.
        """
        question = question_of(self.table, row)
        if question is None or self.contents is None:
            return question
        stored = int(self.table.columns["stored"][row])
        pictures = self.contents.loader.load_evaluation([stored], [0])
        if not isinstance(pictures, PictureInputs):
            return question
        behind = self.table.row(row)[0][len(question.prompt) :]
        if np.isin(behind, pictures.image_ids).any():
            return None
        return replace(question, pictures=pictures.in_full(), stored=stored)

    def counts(self, sequences: Sequence[int]) -> Counts:
        """The counts of some sequences."""
        table, chosen = self.table, np.asarray(sequences, dtype=np.int64)
        tokens, unpredicted = int(table.sequence_tokens()[chosen].sum()), 0
        if table.sides > 1:
            units = self.units_of(sequences)
            tokens = sum(len(table.row(unit)[0]) for unit in units)
            ids = () if self.contents is None else self.contents.loader.feature_ids
            unpredicted = sum(int(np.isin(table.row(unit)[0], ids).sum()) for unit in units) if ids else 0
        return Counts(
            units=int((table.sequence_ends[chosen + 1] - table.sequence_ends[chosen]).sum()),
            loss_tokens=int(table.sequence_loss_tokens()[chosen].sum()),
            first_tokens=tokens,
            unpredicted=unpredicted,
        )


Tables = dict[Split, TableRows]
_COUNTED_STEPS = 50


@dataclass
class TableSource(BatchSource):
    """The training rows in the plan's order, and this rank's share of them: a pure function of the
    step.
    """

    rows: TableRows
    stream: SequenceStream
    global_batch: int
    micro_batch: int
    total_sequences: int
    dp_rank: int = 0
    dp_size: int = 1

    @classmethod
    def of(cls, plan: RunPlan, place: RankPlace, rows: TableRows) -> Self:
        """The rows that a rank trains on in a run."""
        table = rows.table
        groups = table.columns.get("group")
        firsts = [table.rows_of(i)[0] for i in range(table.sequences)] if groups is not None else []
        of_sequences = groups[firsts].tolist() if groups is not None else []
        per_step = plan.config.rows_per_step
        stream = SequenceStream(table.sequences, plan.config.seed, of_sequences, per_step)
        share = {"dp_rank": plan.mesh.dp_rank(place.rank), "dp_size": plan.mesh.dp_size}
        return cls(rows, stream, per_step, plan.micro_batch, plan.total_sequences, **share)

    def __post_init__(self) -> None:
        self._tokens = self.rows.table.sequence_tokens()

    def sequences(self, step: int) -> list[int]:
        """The sequences of a step's global batch."""
        return self.stream.step(step, global_batch=self.global_batch, total_sequences=self.total_sequences)

    def step(self, step: int) -> StepBatches:
        """The sequences of a step, distributed over the ranks and split into micro batches."""
        sequences = self.sequences(step)
        shares = deal(self._tokens[sequences].tolist(), ranks=self.dp_size)
        first, share = (step - 1) * self.global_batch, shares[self.dp_rank]
        cut = [share[i : i + self.micro_batch] for i in range(0, len(share), self.micro_batch)]
        return StepBatches(
            step=step,
            sequences=sequences,
            micros=[
                self._micro([sequences[index] for index in group], [first + index for index in group])
                for group in cut
            ],
            rounds=-(-max(map(len, shares)) // self.micro_batch),
            tokens=int(self._tokens[sequences].sum()),
            counts=self.rows.counts(sequences),
        )

    def _micro(self, sequences: list[int], places: list[int]) -> MicroBatch:
        ends = self.rows.table.sequence_ends
        units = [int(ends[sequence + 1] - ends[sequence]) for sequence in sequences]
        return MicroBatch(sequences, places, units, partial(self.rows.load, sequences, places=places))

    def longest(self, sides: Sequence[int], *, padded: bool = False) -> MicroBatch:
        """The largest micro batch possible, of only these sides of each unit."""
        sequences = self._longest(sides, padded=padded)
        return self._micro(sequences, [0] * len(sequences))

    def _longest(self, sides: Sequence[int], *, padded: bool) -> list[int]:
        table, tokens = self.rows.table, self._tokens
        if padded or len(sides) < table.sides:
            starts = table.sequence_ends[:-1]
            lengths = [table.side_lengths(side)[table.sequence_rows] for side in sides]
            tokens = np.add.reduceat(np.add.reduce(lengths), starts)
            if padded:
                longest_row = np.maximum.reduceat(np.maximum.reduce(lengths), starts)
                return _largest_padded(longest_row, np.diff(table.sequence_ends), self.micro_batch)
        order = np.argsort(tokens, kind="stable")[::-1]
        return [int(i) for i in order[: self.micro_batch]]

    def padding(self) -> float:
        """The share of padding in the first steps of this rank."""
        table, steps = self.rows.table, -(-self.total_sequences // self.global_batch)
        lengths = np.stack([table.side_lengths(side) for side in range(table.sides)], axis=1)
        tokens = places = 0
        for step in range(1, min(steps, _COUNTED_STEPS) + 1):
            for micro in self.step(step).micros:
                of_rows = lengths[self.rows.units_of(micro.sequences)]
                tokens += int(of_rows.sum())
                places += of_rows.size * int(of_rows.max())
        return 1 - tokens / places if places else 0.0

    def shortest(self) -> MicroBatch:
        """The sequence with the fewest tokens."""
        return self._micro([int(np.argmin(self._tokens))], [0])

    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        """The origin of the rows of some sequences."""
        return [self.rows.table.row_id(unit) for unit in self.rows.units_of(sequences)]

    def examples(self) -> list[list[int]]:
        """The first, the middle and the last row of the table."""
        table = self.rows.table
        return [table.row(i)[0].tolist() for i in (0, table.rows // 2, table.rows - 1)]


def _largest_padded(longest_row: np.ndarray, rows: np.ndarray, size: int) -> list[int]:
    """At most `size` sequences, of which the number of rows times the longest row is as large as
    possible.

    Each sequence in turn, from that with the shortest longest row, is the one that decides the
    length; those with most rows before it fill the group.
    """
    best, largest, total = -1, [0], 0
    most: list[tuple[int, int]] = []  # rows and index of up to size - 1 of those before, a heap
    for i in np.argsort(longest_row, kind="stable").tolist():
        if (padded := (total + int(rows[i])) * int(longest_row[i])) > best:
            best, largest = padded, [i, *(index for _, index in most)]
        total += int(rows[i])
        heapq.heappush(most, (int(rows[i]), i))
        if len(most) == size:
            total -= heapq.heappop(most)[0]
    return largest


# ---- evaluation


@dataclass(frozen=True)
class EvaluationRows:
    """All sequences of an evaluation table, in order, in groups of one micro batch; the ranks take
    groups in turn.

    Attributes:
        rows: of the evaluation table.
        micro_batch: sequences in a group.
        dp_rank: the rank of `dp` that takes these groups.
        dp_size: number of these ranks.
    """

    rows: TableRows
    micro_batch: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def sequences(self) -> int:
        """Their number."""
        return self.rows.table.sequences

    @property
    def at_once(self) -> int:
        """Sequences of a round, over all ranks."""
        return self.micro_batch * self.dp_size

    def rounds(self) -> Iterator[list[int]]:
        """This rank's group in each round; empty if the last round has none for it.

        All ranks have the same number of rounds.
        """
        for begin in range(0, self.sequences, self.at_once):
            first = begin + self.dp_rank * self.micro_batch
            yield list(range(first, min(first + self.micro_batch, self.sequences)))

    def questions(self) -> Iterator["PromptAnswer"]:
        """The questions of rows whose answer is a reference, which an undesirable answer is not."""
        table = self.rows.table
        desirable = table.columns.get("label")
        for row in range(table.rows):
            if desirable is None or desirable[row]:
                question = self.rows.question(row)
                if question is not None:
                    yield question


@dataclass(frozen=True)
class PromptAnswer:
    """The last answer of a row, and the prompt before it, as tokens.

    Attributes:
        pictures: of the prompt; None: it has none.
        stored: the row in the file of tokens, if it has pictures.
        row: of the table.
    """

    prompt: list[int]
    answer: list[int]
    pictures: PictureInputs | None = None
    stored: int = -1
    row: int = -1


def question_of(table: TokenTable, row: int) -> PromptAnswer | None:
    """The question of a row, whose answer is its last run of loss tokens; None if nothing precedes
    it.
    """
    ids, targets = table.row(row)
    end = len(ids)
    while end > 0 and not targets[end - 1]:
        end -= 1
    start = end
    while start > 0 and targets[start - 1]:
        start -= 1
    if start == 0 or start == end:
        return None
    return PromptAnswer(ids[:start].tolist(), ids[start:end].tolist(), row=row)
