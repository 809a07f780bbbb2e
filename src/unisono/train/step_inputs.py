"""Inputs of a step: its batches as tensors, and the seeds of its random streams."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.data.token_table import Batch, TokenTable, collate
from unisono.model.forward import Rows
from unisono.plan import Stream, deal


@dataclass(frozen=True)
class StepBatches:
    """The batches of one optimizer step.

    Attributes:
        step: from 1.
        sequences: the sequences of the global batch, in the plan's order, over all ranks.
        groups: sequence indices of each micro batch of this rank.
        positions: where in the endless stream of sequences each micro batch begins.
        rounds: the largest number of micro batches on any rank.
        tokens: input tokens of the global batch.
        loss_tokens: loss tokens of the global batch; the loss is divided by this number.
    """

    step: int
    sequences: list[int]
    groups: list[list[int]]
    positions: list[int]
    rounds: int
    tokens: int
    loss_tokens: int


@dataclass
class TrainingData:
    """The training rows in the plan's order, and this rank's share of them."""

    table: TokenTable
    stream: Stream
    global_batch: int
    micro_batch: int
    total_sequences: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        self._tokens = self.table.sequence_tokens()
        self._loss_tokens = self.table.sequence_loss_tokens()

    def step(self, step: int) -> StepBatches:
        """The sequences of a step, distributed over the ranks and split into micro batches."""
        sequences = self.stream.step(
            step, global_batch=self.global_batch, total_sequences=self.total_sequences
        )
        shares = deal(self._tokens[sequences].tolist(), ranks=self.world_size)
        first = (step - 1) * self.global_batch
        cut = [
            shares[self.rank][i : i + self.micro_batch]
            for i in range(0, len(shares[self.rank]), self.micro_batch)
        ]
        return StepBatches(
            step=step,
            sequences=sequences,
            groups=[[sequences[place] for place in group] for group in cut],
            positions=[first + group[0] for group in cut],
            rounds=-(-max(map(len, shares)) // self.micro_batch),
            tokens=int(self._tokens[sequences].sum()),
            loss_tokens=int(self._loss_tokens[sequences].sum()),
        )

    def longest(self) -> list[int]:
        """The sequences of the largest micro batch possible."""
        order = np.argsort(self._tokens, kind="stable")[::-1]
        return [int(i) for i in order[: self.micro_batch]]

    def shortest(self) -> list[int]:
        """The cheapest sequence, for a forward whose loss does not count."""
        return [int(np.argmin(self._tokens))]

    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        """The origin of the rows of some sequences, for messages: `train.jsonl:17`."""
        rows = [row for sequence in sequences for row in self.table.rows_of(sequence)]
        return [self.table.row_id(int(row)) for row in rows]


@dataclass(frozen=True)
class EvaluationBatches:
    """All sequences of an evaluation table, in order, in groups of one micro batch; the ranks take groups in turn.

    Attributes:
        table: the evaluation table.
        micro_batch: sequences in a group.
        rank: the rank that takes these groups.
        world_size: number of ranks.
    """

    table: TokenTable
    micro_batch: int
    rank: int = 0
    world_size: int = 1

    def rounds(self) -> Iterator[list[int]]:
        """This rank's group in each round; empty if the last round has none for it. All ranks have the same number of rounds."""
        turn = self.micro_batch * self.world_size
        for begin in range(0, self.table.sequences, turn):
            first = begin + self.rank * self.micro_batch
            yield list(range(first, min(first + self.micro_batch, self.table.sequences)))


def load_rows(table: TokenTable, sequences: Sequence[int], device: torch.device) -> tuple[Rows, Batch]:
    """The rows of some sequences as tensors on the device, and the batch that they come from on the host."""
    batch = collate(table, sequences)

    def to_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    rows = Rows(
        to_device(batch.input_ids),
        to_device(batch.position_ids),
        list(batch.lengths),
        to_device(batch.label_index),
        to_device(batch.labels),
    )
    return rows, batch


# ---- Random streams

_MASK = (1 << 63) - 1
_TORCH = "torch's default generator"


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """The seed of a random stream, e.g. for the dropout of the micro batch that begins at a global sequence index."""
    material = hashlib.sha256(f"unisono {name} {seed} {index}".encode()).digest()
    return int.from_bytes(material[:8], "big") & _MASK


def seed_torch(seed: int, name: str, index: int = 0) -> None:
    """Seeds torch's global generators, CPU and GPU, with the seed of a random stream."""
    torch.manual_seed(stream_seed(seed, name, index))


class GeneratorWatch:
    """Detects draws from Python's, NumPy's and (if unisono does not use it) torch's global random generator.

    unisono seeds its own streams before each use, so a run resumes exactly. Code that draws from a global generator, such as a model's own
    Python code, is not resumed exactly, and the user should know.
    """

    def __init__(self, *, torch_is_used: bool) -> None:
        self._torch_is_used = torch_is_used
        self._seen = self._fingerprints()
        self._reported: set[str] = set()

    def torch_was_seeded(self) -> None:
        """Notes that the present state of torch's generator comes from unisono's own seeding."""
        if not self._torch_is_used:
            self._seen[_TORCH] = _torch_state()

    def moved(self) -> list[str]:
        """The generators that have moved since the last call; each is given once per run."""
        now = self._fingerprints()
        found = [
            name for name, value in now.items() if value != self._seen[name] and name not in self._reported
        ]
        self._seen = now
        self._reported.update(found)
        return found

    def _fingerprints(self) -> dict[str, int]:
        state: Any = np.random.get_state()
        found = {
            "python's random": hash(random.getstate()),
            "numpy.random": hash((state[1].tobytes(), state[2])),
        }
        if not self._torch_is_used:
            found[_TORCH] = _torch_state()
        return found


def _torch_state() -> int:
    return hash(torch.random.get_rng_state().numpy().tobytes())
