"""The sum of a step's gradients over the ranks: for one rank, for replicas, for shards."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.run_plan import has_one_backward
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.sharding import ShardedRoot
from unisono.trainer.training.step_sums import size_of_step

_BUCKET_ELEMENTS = 8 << 20  # 32 MiB of float32


class GradientSync(Protocol):
    """The part of a step that sums gradients over the ranks."""

    @property
    def needs_equal_rounds(self) -> bool:
        """Whether every rank must run the same number of forwards and backwards."""

    def begin(self) -> None:
        """Called before the first micro batch."""

    def note_pictures(self) -> None:
        """Called before the forward of a micro batch that counts and has pictures."""

    def before_last_backward(self) -> None:
        """Called before this rank's last backward."""

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Called after it: gradients and `scalars` (float32) become the sums over all ranks.

        All ranks must call it.
        """

    def wait_for_own_part(self) -> None:
        """Waits until this rank's own part is computed, if that can be determined.

        The caller waits for the device next.
        """

    def wait_and_time(self) -> float:
        """Called after the wait for the device: seconds spent only waiting for the other ranks'
        gradients.
        """


class NoSync:
    """One rank: its gradients are those of the global batch.

    Args:
        products: parameters whose gradients may stay in the dtype of the product that computed
            them, until the update: they have one backward in a step.
    """

    needs_equal_rounds = False

    def __init__(self, products: Iterable[torch.nn.Parameter] = ()) -> None:
        self._products = list(products)
        for parameter in self._products:
            parameter.grad_dtype = None  # any; see `model.layers.own_gradient`
            parameter.register_hook(partial(_before_autograd_adds, parameter))

    def begin(self) -> None:
        """Drops their gradients."""
        for parameter in self._products:
            parameter.grad = None

    def note_pictures(self) -> None:
        """Does nothing: what pictures reach has a gradient, and else it has none."""

    def before_last_backward(self) -> None:
        """Does nothing."""

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """The scalars unchanged."""
        return scalars

    def wait_for_own_part(self) -> None:
        """Does nothing."""

    def wait_and_time(self) -> float:
        """Zero seconds."""
        return 0.0


def _before_autograd_adds(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Makes the gradient float32: autograd would add to it in place, in bfloat16.

    Called without a gradient where there is nothing to add.
    """
    if gradient is not None:
        parameter.grad = None if parameter.grad is None else parameter.grad.to(parameter.dtype)


class Stopwatch:
    """Seconds between two points of the program, or of the device's stream if there is one."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        )
        self._times = [0.0, 0.0]

    def mark(self, end: int) -> None:
        """Records the begin (0) or the end (1)."""
        if self._events is None:
            self._times[end] = time.perf_counter()
        else:
            self._events[end].record()

    def wait_for_begin(self) -> None:
        """Waits until the stream has reached the begin."""
        if self._events is not None:
            self._events[0].synchronize()

    def seconds(self) -> float:
        """Seconds between the two; the device must have finished."""
        if self._events is None:
            return self._times[1] - self._times[0]
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


@dataclass
class _Bucket:
    """Some gradients in one flat buffer, summed by one collective."""

    flat: torch.Tensor
    members: list[int]
    """Indices of its parameters."""
    missing: int = 0
    """How many of these the last backward has not reached yet."""
    wait: Callable[[], object] | None = None


@dataclass
class ReplicaSync:
    """Every rank holds all weights ("ddp"): gradients are in float32 buffers of fixed layout,
    summed once per step.

    Buffers are summed in the same order on all ranks, those of the last layers first, as backward
    reaches them; all but the last buffer may be summed during backward. The last one carries the
    step's scalars, and for each parameter whether any rank has a gradient for it: the optimizer
    skips a parameter that no rank reached, as it does on one rank. So an adapter needs one
    collective per step.
    """

    group: Group
    device: torch.device
    parameters: list[torch.nn.Parameter]
    scalars: int
    """Numbers of the step that are summed with the gradients."""
    needs_equal_rounds: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self.parameters)
        self._bucket_of: list[int] = [0] * len(self.parameters)
        self._tail = torch.empty(0)
        self._lay_out()
        self._reached = [0.0] * len(self.parameters)
        self._launched = 0
        self._last = False
        self._watch = Stopwatch(self.device)
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self._noting(index))

    def begin(self) -> None:
        """Drops the gradients: the first of a step is copied into its buffer, which costs less than
        adding it to zeros.
        """
        for bucket in self._buckets:
            bucket.missing, bucket.wait = len(bucket.members), None
        for parameter in self.parameters:
            parameter.grad = None
        self._reached = [0.0] * len(self.parameters)
        self._launched, self._last = 0, False

    def note_pictures(self) -> None:
        """Does nothing: the ranks tell each other for each parameter."""

    def before_last_backward(self) -> None:
        """From now on a buffer is complete when backward has reached all its parameters."""
        self._last = True

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Sums the remaining buffers, and waits for all."""
        for parameter, view, reached in zip(self.parameters, self._views, self._reached, strict=True):
            if not reached:
                parameter.grad = view.zero_()
        self._tail[: self.scalars] = scalars
        self._tail[self.scalars :] = torch.tensor(self._reached)
        self._watch.mark(0)
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
        self._watch.mark(1)
        return self._tail[: self.scalars]

    def wait_for_own_part(self) -> None:
        """Keeps this rank's own compute time out of the time spent waiting for the others."""
        self._watch.wait_for_begin()

    def wait_and_time(self) -> float:
        """Removes gradients that no rank has computed; gives the seconds spent waiting."""
        for parameter, count in zip(self.parameters, self._tail[self.scalars :].tolist(), strict=True):
            if count == 0:
                parameter.grad = None
        return self._watch.seconds()

    def _lay_out(self) -> None:
        offsets: dict[int, int] = {}
        size, members = 0, list[int]()
        for index in reversed(range(len(self.parameters))):
            need = _room_of(self.parameters[index])
            if members and size + need > _BUCKET_ELEMENTS:
                self._add_bucket(size, members, offsets)
                size, members = 0, []
            offsets[index] = size
            size += need
            members.append(index)
        self._add_bucket(size + self.scalars + len(self.parameters), members, offsets)
        self._tail = self._buckets[-1].flat[size:]

    def _add_bucket(self, size: int, members: list[int], offsets: dict[int, int]) -> None:
        flat = torch.zeros(size, device=self.device)
        for index in members:
            parameter = self.parameters[index]
            assert parameter.dtype == torch.float32, "what is trained is float32"
            self._views[index] = flat[offsets[index] :][: parameter.numel()].view(parameter.shape)
            self._bucket_of[index] = len(self._buckets)
        self._buckets.append(_Bucket(flat, members))

    def _noting(self, index: int) -> Callable[[torch.Tensor], None]:
        def reached(parameter: torch.Tensor) -> None:
            if not self._reached[index]:
                assert parameter.grad is not None
                parameter.grad = self._views[index].copy_(parameter.grad)
            self._reached[index] = 1.0
            if self._last:
                self._buckets[self._bucket_of[index]].missing -= 1
                self._launch(len(self._buckets) - 1)

        return reached

    def _launch(self, limit: int) -> None:
        """Starts the sums of the buffers before `limit`, in order; before the end of backward only
        if they are complete.
        """
        everything = limit == len(self._buckets)
        while self._launched < limit and (everything or self._buckets[self._launched].missing == 0):
            bucket = self._buckets[self._launched]
            bucket.wait = self.group.begin_sum(bucket.flat)
            self._launched += 1


def _room_of(tensor: torch.Tensor) -> int:
    """Elements of its room in a buffer of several: each begins at a multiple of 64 of them, for
    vectorized kernels.
    """
    return -(-tensor.numel() // 64) * 64


@dataclass
class ShardSync:
    """Every rank holds a shard of each weight ("fsdp"): backward itself sums gradients into the
    shards.

    `wait_and_time` measures the sum of the scalars alone: the rest overlaps with forward and
    backward.
    """

    group: Group
    device: torch.device
    root: ShardedRoot
    gathers_late: bool
    """Whether gradients are so small (an adapter's) that each rank keeps them unsharded until the
    last micro batch.
    """
    of_pictures: list[torch.nn.Parameter] = field(default_factory=list)
    """Parameters that pictures alone reach; a step without any leaves them as they are."""
    needs_equal_rounds: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.device)
        self._pictures = torch.zeros(1, device=self.device)

    def note_pictures(self) -> None:
        """Notes that this rank's gradients of them count."""
        self._pictures.fill_(1.0)

    def begin(self) -> None:
        """Turns off sums in the backward passes before the last, if gradients are gathered late."""
        self._pictures = torch.zeros(1, device=self.device)
        self.root.reduce_gradients(now=not self.gathers_late)

    def before_last_backward(self) -> None:
        """Turns on sums in the backward pass."""
        self.root.reduce_gradients(now=True)

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Sums the scalars; backward has summed the gradients."""
        summed = torch.cat([scalars, self._pictures])
        self._watch.mark(0)
        self.group.sum(summed)
        self._watch.mark(1)
        self._pictures = summed[-1:]
        return summed[:-1]

    def wait_for_own_part(self) -> None:
        """Does nothing: forward and backward also wait for the other ranks, and the two cannot be
        distinguished.
        """

    def wait_and_time(self) -> float:
        """Removes gradients of 0 that no picture has reached; gives the seconds spent on the sum of
        the scalars.
        """
        if self.of_pictures and not float(self._pictures):
            for parameter in self.of_pictures:
                parameter.grad = None
        return self._watch.seconds()


def gradient_sync_of(
    plan: RunPlan,
    group: Group,
    device: torch.device,
    loaded: LoadedModel,
    sharded: ShardedRoot | None,
    *,
    metrics: int,
) -> GradientSync:
    """The way gradients are summed over the ranks."""
    if sharded is not None:
        late = plan.config.adapter is not None
        of_pictures = [loaded.trainable[name] for name in loaded.of_pictures]
        return ShardSync(group, device, sharded, gathers_late=late, of_pictures=of_pictures)
    if not plan.mesh.gradient_axes:
        one_backward = has_one_backward(
            plan.config, micro=plan.micro_batch, global_batch=plan.global_batch, world_size=1
        )
        return NoSync(loaded.trainable.values() if one_backward else ())
    parameters = list(loaded.trainable.values())
    scalars = size_of_step(group.world_size, metrics=metrics)
    return ReplicaSync(group, device, parameters, scalars=scalars)
