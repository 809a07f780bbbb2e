"""A run that is ready to train: its parts, its state, and what a checkpoint of it holds."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from unisono.base.events import Reporter
from unisono.guard.places.ranks import RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import MetricsWriter
from unisono.guard.watch import Beats
from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.source import BatchSource
from unisono.trainer.batches.table import EvaluationRows
from unisono.trainer.checkpoint.state import OptimizerValues, RunValues, Tensors, optimizer_tensors
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.writer import StorageFailed
from unisono.trainer.families.family import Sampler
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.layers import has_kernels
from unisono.trainer.objectives.objective import Objective
from unisono.trainer.objectives.signs import SignCounts
from unisono.trainer.plan import RunPlan
from unisono.trainer.track import Trackers
from unisono.trainer.training.answer_metrics import AnswerMetrics
from unisono.trainer.training.directory_check import DirectoryCheck
from unisono.trainer.training.front_io import FrontMessages, Outcome, StopRequest, StorageWatch
from unisono.trainer.training.gradient_sync import GradientSync
from unisono.trainer.training.hooks import RunHook
from unisono.trainer.training.optim import Optimizers
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.saver import RankTensor, Saver
from unisono.trainer.training.sharding import ShardedRoot

# ---- Random streams

_TORCH = "torch's default generator"


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
        names = [
            name for name, value in now.items() if value != self._seen[name] and name not in self._reported
        ]
        self._seen = now
        self._reported.update(names)
        return names

    def _fingerprints(self) -> dict[str, int]:
        state: Any = np.random.get_state()
        fingerprints = {
            "python's random": hash(random.getstate()),
            "numpy.random": hash((state[1].tobytes(), state[2])),
        }
        if not self._torch_is_used:
            fingerprints[_TORCH] = _torch_state()
        return fingerprints


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
        idle_experts: for how many steps an expert had no token, as `layer.expert`; without those
            that had one in the last step.
        starved_layers: layers whose starved experts were reported.
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
    idle_experts: dict[str, int] = field(default_factory=dict)
    starved_layers: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """The state as it is written to state.json of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "TrainState":
        """The state that to_json wrote."""
        return cls(**value)


class StepSnapshots(Protocol):
    """Keeps finished steps in memory; see memory_snapshots. All ranks must call its methods."""

    def prepare(self, run: "Run", *, step_time_s: float) -> int | None:
        """Decides before the first step which steps are kept: every n-th; None if none."""

    def publish(self, run: "Run", line: dict[str, float], *, step_time_s: float | None = None) -> None:
        """Keeps the present state, with the line that is about to be written to metrics.jsonl."""


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
    source: BatchSource
    evaluation: EvaluationRows | None
    state: TrainState
    store: CheckpointStore | None
    """Set on rank 0 only, like metrics and tracker: there is one writer."""
    metrics: MetricsWriter | None
    tracker: Trackers | None
    stop: StopRequest
    generator_watch: GeneratorWatch
    saver: Saver
    """Saves in the background while training continues."""
    answer_metrics: AnswerMetrics | None = None
    """Set if the config has `eval.metrics` and answers can be generated."""
    sampler: Sampler | None = None
    """Draws sample pictures; set on rank 0 of a run on pictures."""
    sign_counts: SignCounts = field(default_factory=SignCounts)
    hooks: Sequence[RunHook] = ()
    """Set by drills and tests; empty in production."""
    directory_check: DirectoryCheck | None = None
    """Set on rank 0, and on the ranks of a node with a directory of its own."""
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
            tensors, by optimizer), `kernels` (see model.layers.has_kernels), `batches` (the
            source's, if it has any), and of an adapter `base` (what it was trained on).
    """

    groups: dict[str, list[RankTensor]]
    values: RunValues


def contents_of(run: Run) -> Contents:
    """The tensors that this rank would save now: rank 0 the replicated tensors, and every rank its
    parts of sharded tensors.
    """
    groups = {"trainable": _parts(run, dict(run.forward.loaded.trainable))}
    numbers: dict[str, OptimizerValues] = {}
    for name, part in run.optimizers.parts.items():
        tensors, numbers[name] = optimizer_tensors(part, run.optimizers.names[name])
        groups[f"optimizer-{name}"] = _parts(run, tensors)
    values: RunValues = {
        "train": run.state.to_json(),
        "optimizer": numbers,
        "kernels": has_kernels(run.plan.dtype, run.device),
    }
    if state := run.source.state():
        values["batches"] = state
    if run.plan.config.adapter is not None:
        values["base"] = base_of(run)
    return Contents(groups, values)


def base_of(run: Run) -> dict[str, str | bool | None]:
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


def _parts(run: Run, tensors: Tensors) -> list[RankTensor]:
    parts = []
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            shape, offsets = _place(run, name, value)
            local = value.to_local()
            if local.numel():  # a rank may have no part of a small tensor
                parts.append(RankTensor(name, local, shape, offsets))
        elif run.group.is_main or run.sharded is None:
            parts.append(RankTensor(name, value, tuple(value.shape), (0,) * value.ndim))
    return parts


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
