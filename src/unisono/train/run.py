"""A run that is ready to train: its parts, its state, and what a checkpoint of it holds."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from unisono.checkpoint.state import Tensors, optimizer_tensors
from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.writer import StorageFailed
from unisono.data.token_table import TokenTable
from unisono.events import Reporter
from unisono.model.forward import Forward
from unisono.model.sharding import ShardedRoot
from unisono.plan import RankPlace, RunPlan
from unisono.rundir import RunDir
from unisono.rundir.records import MetricsWriter
from unisono.track import TensorboardWriter
from unisono.train.front_io import FrontMessages, Outcome, StopRequest
from unisono.train.gradient_sync import GradientSync
from unisono.train.optim import Optimizers
from unisono.train.process_group import Group
from unisono.train.saver import Part, Saver
from unisono.train.step_inputs import EvaluationBatches, GeneratorWatch, TrainingData
from unisono.train.storage_watch import StorageWatch
from unisono.watch import Beats


@dataclass
class TrainState:
    """The only thing that changes during training, beside the trained weights and the optimizer.

    Attributes:
        step: optimizer steps done.
        tokens: input tokens seen, padding excluded, over all ranks.
        loss_tokens: tokens that counted in the loss.
        loss: of the last step.
        skipped: steps whose loss or gradient was not a number and that changed nothing.
        best_loss: the smallest eval_loss so far.
        best_step: the step that it was measured at.
        evals_since_best: evaluations since then.
        evaluation_due: whether the step is to be evaluated and has not been yet.
        eval: the figures for result.json: loss_before, exact_match_before, loss, exact_match.
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
        """For state.json of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "TrainState":
        """Reads what to_json wrote."""
        return cls(**value)


class StepSnapshots(Protocol):
    """Keeps steps in memory; see train.memory_snapshots."""

    def prepare(self, run: "Run", *, step_time_s: float) -> int | None:
        """Decides before the first step which steps will be kept: each n-th one; None where none is. All ranks must call it."""

    def publish(self, run: "Run", line: dict[str, Any], *, step_time_s: float | None = None) -> None:
        """Keeps the state as it is now, with a line that is about to be written to metrics.jsonl. All ranks must call it."""


@dataclass
class Run:
    """Everything the loop works with. Made by train.setup; nothing here decides anything again."""

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
    """Where every rank holds a part of each weight."""
    data: TrainingData
    eval_table: TokenTable | None
    state: TrainState
    store: CheckpointStore | None
    """Rank 0's, as are metrics and tracker: there is one writer."""
    metrics: MetricsWriter | None
    tracker: TensorboardWriter | None
    stop: StopRequest
    generator_watch: GeneratorWatch
    saver: Saver
    """Where saves go on while training does."""
    root_id: tuple[int, int] | None = None
    """Device and inode of the run's directory; None before it was looked at."""
    front_messages: FrontMessages | None = None
    """Rank 0's, of sharded ranks: what the others have written."""
    saved_step: int | None = None
    """The step of the newest checkpoint that this start has written or begun from. Known to rank 0."""
    save_failure: StorageFailed | None = None
    """Why the newest save was no checkpoint; None after one that was. Known to rank 0."""
    begun_step: int | None = None
    """The step of the newest save that was begun; the same on all ranks that write."""
    save_is_read: bool = True
    """Whether all ranks know that the newest save has copied what it saves on each of them; the same on all."""
    storage: StorageWatch | None = None
    """Names storage that does not answer; while the run goes on."""
    snapshots: "StepSnapshots | None" = None
    """Of an adapter's run."""

    places: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Of sharded tensors, by name: the whole shape, and the offsets of this rank's part."""

    agreed_stop: Outcome | None = None
    """Of several ranks: the wish that all of them have heard of, in the last sum of a step or an evaluation."""

    @property
    def stopping(self) -> Outcome | None:
        """What the run stops for, on all ranks after the same step."""
        return self.stop.outcome if self.group.world_size == 1 else self.agreed_stop

    @property
    def where(self) -> str:
        """Who this is, for people."""
        return self.place.label if self.group.world_size > 1 else f"rank 0 ({self.plan.host})"

    @property
    def evaluation(self) -> EvaluationBatches | None:
        """The evaluation rows, dealt over the ranks."""
        if self.eval_table is None:
            return None
        ranks = {"rank": self.group.rank, "world_size": self.group.world_size}
        return EvaluationBatches(self.eval_table, self.plan.micro_batch, **ranks)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that came with the model."""
        return self.forward.loaded.tokenizer


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's whole shape, and the offsets of this rank's part in it."""


@dataclass(frozen=True)
class Contents:
    """All that this rank would save.

    Attributes:
        groups: parts by group: `trainable`, and `optimizer-NAME` for each optimizer.
        values: for state.json, as they are now: `train` (TrainState) and `optimizer` (what is no tensor, by optimizer).
    """

    groups: dict[str, list[Part]]
    values: dict[str, Any]


def contents_of(run: Run) -> Contents:
    """What this rank would save now. Of several ranks rank 0 has what is whole everywhere, and each its parts of what is sharded."""
    groups = {"trainable": _parts(run, dict(run.forward.loaded.trainable))}
    numbers: dict[str, Any] = {}
    for name, part in run.optimizers.parts.items():
        tensors, numbers[name] = optimizer_tensors(part, run.optimizers.names[name])
        groups[f"optimizer-{name}"] = _parts(run, tensors)
    return Contents(groups, {"train": run.state.to_json(), "optimizer": numbers})


def _parts(run: Run, tensors: Tensors) -> list[Part]:
    found = []
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            shape, offsets = _place(run, name, value)
            local = value.to_local()
            if local.numel():  # a rank may have nothing of a small tensor
                found.append(Part(name, local, shape, offsets))
        elif run.group.is_main or run.sharded is None:
            found.append(Part(name, value, tuple(value.shape), (0,) * value.ndim))
    return found


def _place(run: Run, name: str, tensor: DTensor) -> Place:
    """As torch.distributed.checkpoint's own planner places the part. It stays, so it is asked once."""
    known = run.places.get(name)
    if known is None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, is_coordinator=True)
        (item,) = planner.create_local_plan().items
        assert item.tensor_data is not None
        known = run.places[name] = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
    return known
