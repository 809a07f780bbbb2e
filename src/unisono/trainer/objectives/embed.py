"""Embeddings of texts: an anchor is nearer to its positive than to all other texts of its batch.

U is the number of rows of a global batch, S that of texts of a row (2, or 3 with a negative), E the
size of an embedding; all tensors are float32. The loss of row i is InfoNCE (arXiv:1807.03748) with
the texts of all rows as candidates, as `MultipleNegativesRankingLoss` of sentence-transformers:

    -log( exp(s(aᵢ, pᵢ) / τ) / Σⱼ exp(s(aᵢ, dⱼ) / τ) )    dⱼ: the positives and negatives

A row is compared with rows on other ranks and of other micro batches. So the embeddings of the
whole batch are computed first, without gradient, and added up over the ranks. Each micro batch then
puts its own embeddings, with their gradient, in the places of its rows, and takes the gradient of
the loss of all rows. The gradients of all micro batches add up to that of the whole batch, as in
GradCache (arXiv:2101.06983), which stores the gradients of the embeddings instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize

from unisono.base.errors import ConfigError
from unisono.trainer.batches.source import (
    BatchSource,
    Counts,
    Micro,
    MicroBatch,
    SourceRank,
    SourceStopped,
    StepBatches,
)
from unisono.trainer.batches.table import EvaluationRows, TableSource
from unisono.trainer.config.heads import EmbedSection
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.load import uses_dropout
from unisono.trainer.objectives.objective import Objective, Part

_BATCH, _PLACES = "batch", "places"  # columns of a micro batch


def ranking_losses(embeddings: torch.Tensor, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row of a batch, (U,), and whether its positive is the nearest candidate,
    (U,) bool; a tie counts as such for the first.

    Args:
        embeddings: (U, S, E), of the anchor and the other texts of each row.
        temperature: τ.
    """
    candidates = embeddings[:, 1:].transpose(0, 1).flatten(0, 1)  # (U · (S - 1), E), positives first
    similarities = embeddings[:, 0] @ candidates.T / temperature
    wanted = torch.arange(len(embeddings), device=embeddings.device)
    return cross_entropy(similarities, wanted, reduction="none"), similarities.argmax(1) == wanted


def embed(forward: Forward, micro: Micro, section: EmbedSection) -> torch.Tensor:
    """(U, S, E): the embeddings of the texts of a micro batch."""
    values = forward.embeddings(micro.rows, pooling=section.pooling)
    values = normalize(values, dim=-1) if section.normalize else values
    return values.view(micro.units, -1, values.shape[-1])


@dataclass(frozen=True)
class Embed(Objective):
    """InfoNCE with the other rows of the global batch as negatives.

    Attributes:
        section: of the config.
        sides: all texts of a row.
    """

    section: EmbedSection
    sides: tuple[int, ...]
    metrics = ("accuracy",)

    def source(self, rows: BatchSource, forward: Forward, group: SourceRank) -> BatchSource:
        """The rows of the data, with the embeddings of the whole batch.

        Raises:
            ConfigError: if the model has dropout.
        """
        assert isinstance(rows, TableSource)
        if uses_dropout(forward.loaded):
            raise ConfigError.of(
                "the model has dropout",
                where="model.path",
                why="a text is embedded twice, and must have the same embedding",
                fix="set the dropout in its config.json to 0",
            )
        return EmbeddedSource(rows, forward, group, self)

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss; without the other rows of its batch it is alone."""
        del known
        own = embed(forward, micro, self.section)
        batch, places = micro.columns.get(_BATCH), micro.columns.get(_PLACES)
        if batch is None or places is None:
            losses, right = ranking_losses(own, temperature=self.section.temperature)
            return Part(losses.sum() / counts.units, _sums(right))
        losses, right = ranking_losses(batch.index_copy(0, places, own), temperature=self.section.temperature)
        # The gradient is that of all rows by these embeddings; the value is that of these rows.
        mine, total = losses.detach()[places].sum(), losses.sum()
        return Part((mine + total - total.detach()) / counts.units, _sums(right[places]))


def _sums(right: torch.Tensor) -> torch.Tensor:
    return torch.stack([right.float().sum(), right.new_tensor(len(right), dtype=torch.float32)])


@dataclass
class EmbeddedSource(BatchSource):
    """The rows of a table; their micro batches have the embeddings of the whole batch as a column,
    with the place of each row in it.
    """

    rows: TableSource
    forward: Forward
    group: SourceRank
    objective: Embed
    measures = True

    def step(self, step: int) -> StepBatches:
        """The rows of a step, after their embeddings are computed and added up over all ranks."""
        batches = self.rows.step(step)
        if self.group.world_size == 1 and len(batches.micros) == 1:
            return batches
        first = (step - 1) * self.rows.global_batch
        starts = self._starts(batches.sequences)
        places = [
            np.concatenate([_range(starts, place - first) for place in micro.places])
            for micro in batches.micros
        ]
        own = [partial(micro.load, self.objective.sides) for micro in batches.micros]
        shortest = partial(self.rows.shortest().load, self.objective.sides)
        rounds = [(load, numbers) for load, numbers in zip(own, places, strict=True)]
        rounds += [(shortest, np.zeros(0, np.int64))] * (batches.rounds - len(own))
        batch = self._embeddings(rounds, units=int(starts[-1]))
        self.group.sum(batch)
        micros = [
            self._with_batch(micro, batch, numbers)
            for micro, numbers in zip(batches.micros, places, strict=True)
        ]
        return replace(batches, micros=micros)

    def _starts(self, sequences: Sequence[int]) -> np.ndarray:
        """(sequences + 1,) int64: where the units of each sequence begin in a batch."""
        ends = self.rows.rows.table.sequence_ends
        chosen = np.asarray(sequences, dtype=np.int64)
        return np.concatenate([[0], np.cumsum(ends[chosen + 1] - ends[chosen])]).astype(np.int64)

    def _embeddings(
        self, rounds: Sequence[tuple["partial[Micro]", np.ndarray]], *, units: int
    ) -> torch.Tensor:
        """(U, S, E) of a batch, with zeros for rows of other ranks; all ranks call it with equally
        many rounds, as a forward of sharded weights is collective.
        """
        batch: torch.Tensor | None = None
        with torch.no_grad():
            for done, (load, places) in enumerate(rounds):
                self.group.enter("compute", done=done, total=len(rounds))
                micro = load()
                values = embed(self.forward, micro, self.objective.section)
                if batch is None:
                    batch = values.new_zeros(units, *values.shape[1:])
                if len(places):
                    batch[torch.from_numpy(places).to(values.device)] = values
        assert batch is not None
        return batch

    def _with_batch(self, micro: MicroBatch, batch: torch.Tensor, places: np.ndarray) -> MicroBatch:
        def load(sides: Sequence[int]) -> Micro:
            loaded = micro.load(sides)
            columns = {_BATCH: batch, _PLACES: torch.from_numpy(places).to(batch.device)}
            return replace(loaded, columns={**loaded.columns, **columns})

        return replace(micro, load=load)

    def measure(self, evaluation: object) -> Mapping[str, float]:
        """Loss and accuracy of the evaluation rows, in order, in batches of as many sequences as a
        step has. All ranks must call it, which get the same.

        Raises:
            SourceStopped: on all ranks, if a stop request came meanwhile.
        """
        assert isinstance(evaluation, EvaluationRows)
        sums = np.zeros(3)
        for sequences in _cut(range(evaluation.sequences), self.rows.global_batch):
            starts = evaluation_starts(evaluation, sequences)
            rounds = list(self._rounds_of(evaluation, sequences, starts))
            batch = self._embeddings(rounds, units=int(starts[-1]))
            self.group.sum(batch)
            flags = torch.tensor(self.group.stop_flags, dtype=torch.float64, device=batch.device)
            self.group.sum(flags)
            stops = self.group.figures(flags)
            if any(stops):
                raise SourceStopped(stops)
            sums += batch_sums(batch, temperature=self.objective.section.temperature)
        loss, right, rows = sums.tolist()
        return {"loss": loss / rows, "accuracy": right / rows}

    def _rounds_of(
        self, evaluation: EvaluationRows, sequences: Sequence[int], starts: np.ndarray
    ) -> Iterator[tuple["partial[Micro]", np.ndarray]]:
        """This rank's micro batches of some sequences, one for each round."""
        sides = self.objective.sides
        cut = _cut(range(len(sequences)), evaluation.micro_batch)
        for first in range(0, len(cut), evaluation.dp_size):
            number = first + evaluation.dp_rank
            if number >= len(cut):
                yield partial(evaluation.rows.load, [sequences[0]], sides), np.zeros(0, np.int64)
                continue
            places = np.concatenate([_range(starts, index) for index in cut[number]])
            yield partial(evaluation.rows.load, [sequences[i] for i in cut[number]], sides), places

    def longest(self, sides: Sequence[int], *, padded: bool = False) -> MicroBatch:
        """The largest micro batch possible."""
        return self.rows.longest(sides, padded=padded)

    def padding(self) -> float | None:
        """The share of padding in the first steps of this rank."""
        return self.rows.padding()

    def shortest(self) -> MicroBatch:
        """The sequence with the fewest tokens."""
        return self.rows.shortest()

    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        """The origin of the rows of some sequences."""
        return self.rows.row_ids(sequences)

    def examples(self) -> list[list[int]]:
        """The first, the middle and the last row of the table."""
        return self.rows.examples()


def evaluation_starts(evaluation: EvaluationRows, sequences: Sequence[int]) -> np.ndarray:
    """(sequences + 1,) int64: where the units of each sequence begin among those of all."""
    units = [len(evaluation.rows.table.rows_of(sequence)) for sequence in sequences]
    return np.cumsum([0, *units], dtype=np.int64)


def batch_sums(batch: torch.Tensor, *, temperature: float) -> np.ndarray:
    """(3,) float64: the sum of the losses of a batch, of right rows, and the number of rows."""
    losses, right = ranking_losses(batch, temperature=temperature)
    return np.array([float(losses.double().sum()), float(right.sum()), len(batch)])


def _cut(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _range(starts: np.ndarray, index: int) -> np.ndarray:
    return np.arange(starts[index], starts[index + 1])
