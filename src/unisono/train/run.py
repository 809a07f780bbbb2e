"""The parts of a run that is ready to train, put together once from its plan."""

from dataclasses import dataclass
from typing import Any

import torch

from unisono.checkpoint.store import CheckpointStore
from unisono.data.table import TokenTable
from unisono.events import Reporter
from unisono.model.forward import Forward
from unisono.plan import RunPlan
from unisono.rundir import RunDir
from unisono.rundir.metrics import MetricsWriter
from unisono.track.tensorboard import TensorboardWriter
from unisono.train.batches import TrainingData
from unisono.train.optim import Optimizers
from unisono.train.state import TrainState
from unisono.train.stop import StopRequest
from unisono.train.streams import GlobalStateWatch


@dataclass
class Run:
    """Everything the loop works with. Made by train.setup; nothing here decides anything again."""

    plan: RunPlan
    files: RunDir
    report: Reporter
    device: torch.device
    forward: Forward
    optimizers: Optimizers
    data: TrainingData
    eval_table: TokenTable | None
    state: TrainState
    store: CheckpointStore
    metrics: MetricsWriter
    board: TensorboardWriter | None
    stop: StopRequest
    watch: GlobalStateWatch
    saved_step: int | None = None
    """The step of the newest checkpoint that this start has written or begun from."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that came with the model."""
        return self.forward.loaded.tokenizer
