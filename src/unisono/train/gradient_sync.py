"""How the gradients of a step become those of the global batch, on one rank, on replicas, on shards.

Each micro batch's loss is divided by the loss tokens of the *global* batch, so gradients of ranks add up, as those of micro batches do; a
rank without a micro batch adds zeros. Why not torch's DDP: docs/decisions/0009.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from unisono.model.sharding import ShardedRoot
from unisono.train.process_group import Group

_BUCKET_ELEMENTS = 8 << 20  # 32 MiB of float32
_ALIGNED = 64  # elements at which each gradient begins, so that kernels may read several at once


FIXED_SCALARS = 3  # the loss, and two stop requests


def scalars_of_a_step(world_size: int) -> int:
    """Numbers of a step that are summed over the ranks beside the gradients: the fixed ones, and one for each rank."""
    return FIXED_SCALARS + world_size


class GradientSync(Protocol):
    """What a step does beside its forwards and backwards."""

    @property
    def keeps_pace(self) -> bool:
        """Whether every rank must make as many forwards and backwards as the others."""

    def begin(self) -> None:
        """Before the first micro batch."""

    def last_comes(self) -> None:
        """Before the last backward of this rank's."""

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """After it: gradients and `scalars` (float32) become the sums over all ranks. All ranks must call it."""

    def wait_for_own(self) -> None:
        """Waits until this rank's own part is computed, where that can be told; the device is waited for next in any case."""

    def settle(self) -> float:
        """After the device was waited for: seconds that were spent on nothing but waiting for the others' gradients."""


class NoSync:
    """One rank: its gradients are the global batch's."""

    keeps_pace = False

    def begin(self) -> None:
        """Nothing."""

    def last_comes(self) -> None:
        """Nothing."""

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """What came."""
        return scalars

    def wait_for_own(self) -> None:
        """All is its own."""

    def settle(self) -> float:
        """None."""
        return 0.0


class Stopwatch:
    """Seconds between two places of the program, or of the device's stream where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        )
        self._times = [0.0, 0.0]

    def mark(self, end: int) -> None:
        """Notes the begin (0) or the end (1)."""
        if self._events is None:
            self._times[end] = time.perf_counter()
        else:
            self._events[end].record()

    def wait_for_begin(self) -> None:
        """Waits until the stream has come to the begin."""
        if self._events is not None:
            self._events[0].synchronize()

    def seconds(self) -> float:
        """Between the two; the device must have been waited for."""
        if self._events is None:
            return self._times[1] - self._times[0]
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


@dataclass
class _Bucket:
    """Some gradients in one flat buffer, which is summed as a whole."""

    flat: torch.Tensor
    members: list[int]
    """Indices of its parameters."""
    missing: int = 0
    """Of these, how many the last backward has not reached yet."""
    wait: Callable[[], object] | None = None


@dataclass
class ReplicaSync:
    """Every rank holds all weights ("ddp"): gradients lie in float32 buffers of fixed layout, summed once a step.

    Buffers go in the same order on all ranks, the last layers' first, as backward reaches them; all but the last buffer may go while
    backward is still at work. The last one carries the step's scalars, and for each parameter whether anybody has a gradient for it: one
    that nobody reached is left alone by the optimizer, as on one rank. So an adapter has one collective a step.
    """

    group: Group
    device: torch.device
    parameters: list[torch.nn.Parameter]
    scalars: int
    """Numbers of the step that are summed beside the gradients."""
    keeps_pace: bool = field(default=False, init=False)

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
        """Gradients begin at zero, in the buffers."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing, bucket.wait = len(bucket.members), None
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view
        self._reached = [0.0] * len(self.parameters)
        self._launched, self._last = 0, False

    def last_comes(self) -> None:
        """From now on a buffer is whole when backward has reached all in it."""
        self._last = True

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Sums what has not been summed yet, and waits."""
        self._tail[: self.scalars] = scalars
        self._tail[self.scalars :] = torch.tensor(self._reached)
        self._watch.mark(0)
        self._launch(len(self._buckets))
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
        self._watch.mark(1)
        return self._tail[: self.scalars]

    def wait_for_own(self) -> None:
        """So that time which this rank's device computes is not taken for waiting for the others."""
        self._watch.wait_for_begin()

    def settle(self) -> float:
        """Takes gradients away that no rank has made; gives the seconds of waiting."""
        for parameter, count in zip(self.parameters, self._tail[self.scalars :].tolist(), strict=True):
            if count == 0:
                parameter.grad = None
        return self._watch.seconds()

    def _lay_out(self) -> None:
        offsets: dict[int, int] = {}
        size, members = 0, list[int]()
        for index in reversed(range(len(self.parameters))):
            need = -(-self.parameters[index].numel() // _ALIGNED) * _ALIGNED
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
            del parameter
            self._reached[index] = 1.0
            if self._last:
                self._buckets[self._bucket_of[index]].missing -= 1
                self._launch(len(self._buckets) - 1)

        return reached

    def _launch(self, limit: int) -> None:
        """Begins the sums of buffers before `limit`, in order; those of the last step's backward only if they are whole."""
        everything = limit == len(self._buckets)
        while self._launched < limit and (everything or self._buckets[self._launched].missing == 0):
            bucket = self._buckets[self._launched]
            bucket.wait = self.group.begin_sum(bucket.flat)
            self._launched += 1


@dataclass
class ShardSync:
    """Every rank holds a part of each weight ("fsdp"): backward itself sums gradients into the parts.

    `settle` counts the scalars' sum alone: the rest is hidden in forward and backward.
    """

    group: Group
    device: torch.device
    root: ShardedRoot
    gathers_late: bool
    """Gradients are so small (an adapter's) that each rank keeps its own, whole, until the last micro batch."""
    keeps_pace: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.device)

    def begin(self) -> None:
        """Nothing is summed before it must be."""
        self.root.reduce_gradients(now=not self.gathers_late)

    def last_comes(self) -> None:
        """Now everything is summed."""
        self.root.reduce_gradients(now=True)

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Only the scalars are left to be summed."""
        self._watch.mark(0)
        self.group.sum(scalars)
        self._watch.mark(1)
        return scalars

    def wait_for_own(self) -> None:
        """Nothing: forward and backward wait for the others, too, and which of it is its own nobody can tell."""

    def settle(self) -> float:
        """Seconds of the scalars' sum."""
        return self._watch.seconds()
