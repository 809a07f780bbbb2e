"""The parts of a run that is ready to train, put together once from its plan."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.writer import StorageFailed
from unisono.data.table import TokenTable
from unisono.events import Reporter
from unisono.model.forward import Forward
from unisono.model.shard import ShardedRoot
from unisono.plan import RankPlace, RunPlan
from unisono.rundir import RunDir
from unisono.rundir.metrics import MetricsWriter
from unisono.track.tensorboard import TensorboardWriter
from unisono.train.batches import EvaluationBatches, TrainingData
from unisono.train.exchange import Exchange
from unisono.train.front_line import FrontLine
from unisono.train.group import Group
from unisono.train.optim import Optimizers
from unisono.train.saver import Saver
from unisono.train.state import TrainState
from unisono.train.stop import Outcome, StopRequest
from unisono.train.storage_watch import StorageWatch
from unisono.train.streams import GlobalStateWatch
from unisono.watch import Beats


class KeepsSteps(Protocol):
    """Keeps steps in memory; see train.snapshot."""

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
    exchange: Exchange
    sharded: ShardedRoot | None
    """Where every rank holds a part of each weight."""
    data: TrainingData
    eval_table: TokenTable | None
    state: TrainState
    store: CheckpointStore | None
    """Rank 0's, as are metrics and board: there is one writer."""
    metrics: MetricsWriter | None
    board: TensorboardWriter | None
    stop: StopRequest
    watch: GlobalStateWatch
    saver: Saver
    """Where saves go on while training does."""
    root_id: tuple[int, int] | None = None
    """Device and inode of the run's directory; None before it was looked at."""
    front_line: FrontLine | None = None
    """Rank 0's, of sharded ranks: what the others have written."""
    saved_step: int | None = None
    """The step of the newest checkpoint that this start has written or begun from. Known to rank 0."""
    trouble: StorageFailed | None = None
    """Why the newest save was no checkpoint; None after one that was. Known to rank 0."""
    begun_step: int | None = None
    """The step of the newest save that was begun; the same on all ranks that write."""
    save_is_read: bool = True
    """Whether all ranks know that the newest save has copied what it saves on each of them; the same on all."""
    storage: StorageWatch | None = None
    """Names storage that does not answer; while the run goes on."""
    snapshots: "KeepsSteps | None" = None
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
