"""A run that is ready to train: the inputs of its steps, its parts, its state, and what a
checkpoint of it holds.
"""

import hashlib
import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from unisono.base.events import Reporter
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import MetricsWriter
from unisono.guard.watch import Beats
from unisono.trainer.checkpoint.state import Tensors, optimizer_tensors
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.writer import StorageFailed
from unisono.trainer.data.token_table import Batch, Split, TokenTable, collate_units
from unisono.trainer.model.attention import to_device
from unisono.trainer.model.forward import Forward, Rows
from unisono.trainer.model.layers import has_kernels
from unisono.trainer.objectives.objective import Counts, Micro, Objective
from unisono.trainer.plan import RankPlace, RunPlan, Stream, deal
from unisono.trainer.track import Trackers
from unisono.trainer.training.front_io import FrontMessages, Outcome, StopRequest, StorageWatch
from unisono.trainer.training.gradient_sync import GradientSync
from unisono.trainer.training.optim import Optimizers
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.saver import Part, Saver
from unisono.trainer.training.sharding import ShardedRoot

if TYPE_CHECKING:
    from unisono.trainer.diffusion.drawing import Sampler
    from unisono.trainer.diffusion.latents import PictureLoader


@dataclass(frozen=True)
class StepBatches:
    """The batches of one optimizer step.

    Attributes:
        step: from 1.
        sequences: the sequences of the global batch, in the plan's order, over all ranks.
        groups: sequence indices of each micro batch of this rank.
        places: where in the endless stream of sequences each sequence of each micro batch is.
        rounds: the largest number of micro batches on any rank.
        tokens: input tokens of the global batch.
        counts: of the global batch; the loss is divided by them.
    """

    step: int
    sequences: list[int]
    groups: list[list[int]]
    places: list[list[int]]
    rounds: int
    tokens: int
    counts: Counts


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
            places=[[first + place for place in group] for group in cut],
            rounds=-(-max(map(len, shares)) // self.micro_batch),
            tokens=int(self._tokens[sequences].sum()),
            counts=counts_of(self.table, sequences),
        )

    def longest(self, sides: Sequence[int], *, padded: bool = False) -> list[int]:
        """The sequences of the largest micro batch possible, of only these sides of each unit.

        The size is the number of tokens or, if rows are padded, the number of rows times the
        longest of them.
        """
        tokens, starts = self._tokens, self.table.sequence_ends[:-1]
        if padded or len(sides) < self.table.sides:
            lengths = [self.table.side_lengths(side)[self.table.sequence_rows] for side in sides]
            tokens = np.add.reduceat(np.add.reduce(lengths), starts)
            if padded:
                longest_row = np.maximum.reduceat(np.maximum.reduce(lengths), starts)
                return _largest_padded(longest_row, np.diff(self.table.sequence_ends), self.micro_batch)
        order = np.argsort(tokens, kind="stable")[::-1]
        return [int(i) for i in order[: self.micro_batch]]

    def shortest(self) -> list[int]:
        """The cheapest sequence, for a forward whose loss does not count."""
        return [int(np.argmin(self._tokens))]

    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        """The origin of the rows of some sequences, for messages: `train.jsonl:17`."""
        rows = [row for sequence in sequences for row in self.table.rows_of(sequence)]
        return [self.table.row_id(int(row)) for row in rows]


def _largest_padded(longest_row: np.ndarray, rows: np.ndarray, size: int) -> list[int]:
    """At most `size` sequences, of which the number of rows times the longest row is as large as
    possible.

    Each sequence in turn, from that with the shortest longest row, is the one that decides the
    length; those with most rows before it fill the group.
    """
    best, found, total = -1, [0], 0
    most: list[tuple[int, int]] = []  # rows and index of up to size - 1 of those before, a heap
    for i in np.argsort(longest_row, kind="stable").tolist():
        if (padded := (total + int(rows[i])) * int(longest_row[i])) > best:
            best, found = padded, [i, *(index for _, index in most)]
        total += int(rows[i])
        heapq.heappush(most, (int(rows[i]), i))
        if len(most) == size:
            total -= heapq.heappop(most)[0]
    return found


@dataclass(frozen=True)
class EvaluationBatches:
    """All sequences of an evaluation table, in order, in groups of one micro batch; the ranks take
    groups in turn.

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
        """This rank's group in each round; empty if the last round has none for it.

        All ranks have the same number of rounds.
        """
        turn = self.micro_batch * self.world_size
        for begin in range(0, self.table.sequences, turn):
            first = begin + self.rank * self.micro_batch
            yield list(range(first, min(first + self.micro_batch, self.table.sequences)))


def counts_of(table: TokenTable, sequences: Sequence[int]) -> Counts:
    """The counts of some sequences of a table."""
    chosen = np.asarray(sequences, dtype=np.int64)
    tokens = int(table.sequence_tokens()[chosen].sum())
    if table.sides > 1:
        tokens = sum(
            len(table.row(int(unit))[0]) for sequence in sequences for unit in table.rows_of(sequence)
        )
    return Counts(
        units=int((table.sequence_ends[chosen + 1] - table.sequence_ends[chosen]).sum()),
        loss_tokens=int(table.sequence_loss_tokens()[chosen].sum()),
        first_tokens=tokens,
    )


def load_micro(
    table: TokenTable,
    sequences: Sequence[int],
    device: torch.device,
    *,
    sides: Sequence[int] = (0,),
    reference: torch.Tensor | None = None,
) -> tuple[Micro, Batch]:
    """The units of some sequences as tensors on the device, and the batch that they come from on
    the host.

    Args:
        table: of the split.
        sequences: its sequences.
        device: the computation's.
        sides: of each unit, the rows of tokens to load.
        reference: (rows of the table, 2), the reference's log-probabilities; None if the objective
            has none.
    """
    return load_units(
        table,
        [int(unit) for sequence in sequences for unit in table.rows_of(sequence)],
        device,
        sides=sides,
        reference=reference,
    )


def load_units(
    table: TokenTable,
    units: Sequence[int],
    device: torch.device,
    *,
    sides: Sequence[int] = (0,),
    reference: torch.Tensor | None = None,
) -> tuple[Micro, Batch]:
    """The same of some units, each a row of the table."""
    batch = collate_units(table, units, sides)
    desirable = table.columns.get("label")
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
    micro = Micro(
        rows,
        len(batch.units),
        labels=None if desirable is None else to_device(desirable[batch.units] != 0, device),
        reference=None if reference is None else reference[batch.units].to(device),
    )
    return micro, batch


# ---- Random streams

_MASK = (1 << 63) - 1
_TORCH = "torch's default generator"


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """The seed of a random stream, e.g. for the dropout of the micro batch that begins at a global
    sequence index.
    """
    material = hashlib.sha256(f"unisono {name} {seed} {index}".encode()).digest()
    return int.from_bytes(material[:8], "big") & _MASK


def seed_torch(seed: int, name: str, index: int = 0) -> None:
    """Seeds torch's global generators, CPU and GPU, with the seed of a random stream."""
    value = stream_seed(seed, name, index)
    # Not torch.manual_seed: it formats the call stack once for each kind of device that is absent,
    # about 1 ms, and this is in every forward.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)


def embedding_noise(
    alpha: float,
    *,
    seed: int,
    places: Sequence[int],
    tokens: Sequence[int],
    lengths: Sequence[int],
    hidden_size: int,
    device: torch.device,
) -> torch.Tensor:
    """(T, E) float32: noise for the embeddings of some sequences, uniform within ±alpha / √(tokens
    of the row · E) (NEFTune, arXiv:2310.05914).

    Each sequence has a random stream of its own, by its place in the order, so its noise does not
    depend on micro batches and ranks.

    Args:
        alpha: scale of the noise.
        seed: of the run.
        places: of the sequences in the endless stream.
        tokens: of each sequence.
        lengths: tokens of each row of these sequences.
        hidden_size: E.
        device: the computation's; on another kind of device the noise is different.
    """
    noise = torch.empty(sum(tokens), hidden_size, device=device)
    for place, part in zip(places, noise.split(list(tokens)), strict=True):
        generator = torch.Generator(device)
        generator.manual_seed(stream_seed(seed, "embedding noise", place))
        part.uniform_(-1.0, 1.0, generator=generator)
    rows = torch.tensor(lengths, device=device)
    scale = alpha / (rows * hidden_size).sqrt()
    return noise.mul_(scale.repeat_interleave(rows)[:, None])


class GeneratorWatch:
    """Detects draws from Python's, NumPy's and (if unisono does not use it) torch's global random
    generator.

    unisono seeds its own streams before each use, so a run resumes exactly. Code that draws from a
    global generator, such as a model's own Python code, is not resumed exactly, and the user should
    know.
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


@dataclass
class TrainState:
    """The state that changes during training, apart from the trained weights and the optimizer.

    Attributes:
        step: optimizer steps done.
        tokens: input tokens seen, padding excluded, over all ranks.
        loss_tokens: tokens that counted in the loss.
        loss: the loss of the last step.
        skipped: the latest steps that were skipped because loss or gradient was NaN or infinite.
        best_loss: the best value so far of eval_loss, or of the metric that checkpoint.best names.
        best_step: the step with that value.
        evals_since_best: evaluations since then.
        evaluation_due: whether the step still has to be evaluated.
        eval: figures for result.json: loss_before, exact_match_before, loss, exact_match, and those
            of the objective.
    """

    step: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    loss: float | None = None
    skipped: list[int] = field(default_factory=list)
    best_loss: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    evaluation_due: bool = False
    eval: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The state as it is written to state.json of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "TrainState":
        """The state that to_json wrote."""
        return cls(**value)


class StepSnapshots(Protocol):
    """Keeps finished steps in memory; see train.memory_snapshots."""

    def prepare(self, run: "Run", *, step_time_s: float) -> int | None:
        """Decides before the first step which steps are kept: every n-th; None if none.

        All ranks must call it.
        """

    def publish(self, run: "Run", line: dict[str, Any], *, step_time_s: float | None = None) -> None:
        """Keeps the present state, with the line that is about to be written to metrics.jsonl.

        All ranks must call it.
        """


@dataclass
class Run:
    """Everything the training loop works with.

    Built by train.setup; all decisions are in the plan.
    """

    plan: RunPlan
    place: RankPlace
    group: Group
    files: RunDir
    report: Reporter
    beats: Beats
    device: torch.device
    forward: Forward
    optimizers: Optimizers
    gradient_sync: GradientSync
    sharded: ShardedRoot | None
    """Set if every rank holds a shard of each weight."""
    objective: Objective
    data: TrainingData
    eval_table: TokenTable | None
    state: TrainState
    store: CheckpointStore | None
    """Set on rank 0 only, like metrics and tracker: there is one writer."""
    metrics: MetricsWriter | None
    tracker: Trackers | None
    stop: StopRequest
    generator_watch: GeneratorWatch
    saver: Saver
    """Saves in the background while training continues."""
    pictures: "PictureLoader | None" = None
    """Loads the pictures of the tables' rows; None for text."""
    sampler: "Sampler | None" = None
    """Draws sample pictures; set on rank 0 of a run on pictures."""
    root_id: tuple[int, int] | None = None
    """Device and inode of the run's directory; None until it has been read."""
    front_messages: FrontMessages | None = None
    """Set on rank 0 of a sharded run: the front reports here what the other ranks have written."""
    saved_step: int | None = None
    """The step of the newest checkpoint that this process has written or resumed from. Known to
    rank 0.
    """
    save_failure: StorageFailed | None = None
    """Why the newest save failed; None after one that succeeded. Known to rank 0."""
    begun_step: int | None = None
    """The step of the newest save that was started; the same on all ranks that write."""
    save_is_read: bool = True
    """Whether the newest save is known to have copied its tensors on every rank; the same on all
    ranks.
    """
    storage: StorageWatch | None = None
    """Reports storage that does not respond; set while the run is active."""
    snapshots: "StepSnapshots | None" = None
    """Set if the run trains an adapter."""

    reference: dict[Split, torch.Tensor] = field(default_factory=dict)
    """The reference's log-probabilities of each split, (rows of the table, 2) float32; empty
    without a reference.
    """

    places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Sharded tensors by name: the global shape, and the offsets of this rank's part."""

    agreed_stop: Outcome | None = None
    """With several ranks: the stop request known to all of them, from the last sum of a step or an
    evaluation.
    """

    @property
    def stopping(self) -> Outcome | None:
        """Why the run is stopping, if it is; all ranks stop after the same step."""
        return self.stop.outcome if self.group.world_size == 1 else self.agreed_stop

    @property
    def where(self) -> str:
        """This rank and its host, for messages."""
        return self.place.label if self.group.world_size > 1 else f"rank 0 ({self.plan.host})"

    @property
    def evaluation(self) -> EvaluationBatches | None:
        """The evaluation rows, distributed over the ranks."""
        if self.eval_table is None:
            return None
        ranks = {"rank": self.group.rank, "world_size": self.group.world_size}
        return EvaluationBatches(self.eval_table, self.plan.micro_batch, **ranks)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.forward.loaded.tokenizer


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's global shape, and the offsets of this rank's part in it."""


@dataclass(frozen=True)
class Contents:
    """Everything that this rank would save.

    Attributes:
        groups: parts by group: `trainable`, and `optimizer-NAME` for each optimizer.
        values: present values for state.json: `train` (TrainState), `optimizer` (everything but
            tensors, by optimizer), `kernels` (see model.layers.has_kernels), and of an adapter
            `base` (what it was trained on).
    """

    groups: dict[str, list[Part]]
    values: dict[str, Any]


def contents_of(run: Run) -> Contents:
    """The tensors that this rank would save now: rank 0 the replicated tensors, and every rank its
    parts of sharded tensors.
    """
    groups = {"trainable": _parts(run, dict(run.forward.loaded.trainable))}
    numbers: dict[str, Any] = {}
    for name, part in run.optimizers.parts.items():
        tensors, numbers[name] = optimizer_tensors(part, run.optimizers.names[name])
        groups[f"optimizer-{name}"] = _parts(run, tensors)
    values: dict[str, Any] = {
        "train": run.state.to_json(),
        "optimizer": numbers,
        "kernels": has_kernels(run.plan.dtype, run.device),
    }
    if run.plan.config.adapter is not None:
        values["base"] = base_of(run)
    return Contents(groups, values)


def base_of(run: Run) -> dict[str, Any]:
    """What an adapter is trained on: the digest of the model's files, how they are quantized, and
    the digest of the quantized weights.
    """
    model = run.plan.model
    return {
        "model": model.digest,
        "quantized": model.quantized,
        "double": model.quantized_double,
        **({"embeddings": True} if model.quantized_embeddings else {}),
        "weights": run.forward.loaded.quantized_digest,
    }


def _parts(run: Run, tensors: Tensors) -> list[Part]:
    found = []
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            shape, offsets = _place(run, name, value)
            local = value.to_local()
            if local.numel():  # a rank may have no part of a small tensor
                found.append(Part(name, local, shape, offsets))
        elif run.group.is_main or run.sharded is None:
            found.append(Part(name, value, tuple(value.shape), (0,) * value.ndim))
    return found


def _place(run: Run, name: str, tensor: DTensor) -> Place:
    """The part's place according to torch.distributed.checkpoint's planner.

    It never changes, so it is computed once.
    """
    known = run.places.get(name)
    if known is None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, is_coordinator=True)
        (item,) = planner.create_local_plan().items
        assert item.tensor_data is not None
        known = run.places[name] = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
    return known
