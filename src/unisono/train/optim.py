"""Optimizers over named parameters, the learning rate schedule, and the sum of a step's gradients over the ranks: for one rank, for replicas, for shards."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from unisono.config.schema import OptimSection
from unisono.train.process_group import Group, ShardedRoot, own_part


class ShardAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's shards as plain tensors: element by element it is the same, and DTensor's dispatch costs more than the update.

    Parameters and states stay DTensors, so checkpoints do not change.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(own_part, tensors)
        return has_complex


@dataclass
class Optimizers:
    """One or two torch optimizers that step together.

    Attributes:
        parts: the optimizers by name, with the names of their parameters in order.
        settings: the config's hyperparameters for each parameter group: the full learning rate, weight decay, betas.
    """

    parts: dict[str, torch.optim.Optimizer]
    names: dict[str, list[str]]
    settings: dict[str, list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = {
            name: [
                {key: value for key, value in group.items() if key != "params"} for group in part.param_groups
            ]
            for name, part in self.parts.items()
        }

    def take_settings(self) -> None:
        """Restores the config's hyperparameters: a checkpoint brings its own, which may differ from the config in allowed ways."""
        for name, part in self.parts.items():
            for group, settings in zip(part.param_groups, self.settings[name], strict=True):
                group.update(settings)

    def set_factor(self, factor: float) -> None:
        """Scales every learning rate."""
        for name, part in self.parts.items():
            for group, settings in zip(part.param_groups, self.settings[name], strict=True):
                group["lr"] = settings["lr"] * factor

    def step(self, factor: torch.Tensor | None = None) -> None:
        """Makes one update with the gradients times `factor`. Small parameters are updated by one thread: torch would wake the others for each of them.

        Gradients in bfloat16 are float32 only while their own parameters are updated, and are dropped afterwards.
        """
        threads = torch.get_num_threads()
        try:
            for part in self.parts.values():
                torch.set_num_threads(1 if _has_small_parameters(part) else threads)
                _update(part, factor)
        finally:
            torch.set_num_threads(threads)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)


def build_optimizers(
    section: OptimSection,
    trainable: dict[str, torch.nn.Parameter],
    *,
    not_matrices: set[int],
    text_lr: float | None = None,
) -> Optimizers:
    """AdamW (arXiv:1711.05101), or Muon (Jordan et al., 2024) for the matrices and AdamW for the rest.

    Weight decay applies to matrices, not to norms and biases. The B matrices of an adapter may have a learning rate of their own (LoRA+,
    arXiv:2402.12354).

    Args:
        section: `optim` of the config.
        trainable: the parameters by name.
        not_matrices: ids of two-dimensional parameters that Muon is not for: embeddings and the head.
        text_lr: learning rate of the text encoders of an image model; None: the same.
    """
    muon = {
        n: p
        for n, p in trainable.items()
        if section.kind == "muon" and p.ndim == 2 and id(p) not in not_matrices
    }
    rest = {n: p for n, p in trainable.items() if n not in muon}
    parts: dict[str, torch.optim.Optimizer] = {}
    names: dict[str, list[str]] = {}
    if muon:
        parts["muon"] = torch.optim.Muon(
            list(muon.values()),
            lr=section.muon_lr,
            weight_decay=section.weight_decay,
            adjust_lr_fn="match_rms_adamw" if section.muon_scale == "adamw" else "original",
        )
        names["muon"] = list(muon)
    if rest:
        groups, names["adamw"] = _groups(section, rest, text_lr)
        parts["adamw"] = ShardAdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    return Optimizers(parts, names)


def _groups(
    section: OptimSection, parameters: dict[str, torch.nn.Parameter], text_lr: float | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """AdamW's parameter groups, and the names of their parameters in order."""
    plus = {n for n in parameters if section.lora_b_ratio != 1 and _LORA_B in n}
    text = {n for n in parameters if text_lr is not None and n.startswith(_TEXT) and n not in plus}
    decay, lr = section.weight_decay, section.lr
    kinds = [
        ([n for n, p in parameters.items() if p.ndim >= 2 and n not in plus | text], decay, lr),
        ([n for n in parameters if n in text], decay, text_lr or lr),
        ([n for n in parameters if n in plus], decay, lr * section.lora_b_ratio),
        ([n for n, p in parameters.items() if p.ndim < 2 and n not in plus], 0.0, lr),
    ]
    groups = [
        {"params": [parameters[n] for n in members], "weight_decay": decay, "lr": lr}
        for members, decay, lr in kinds
        if members
    ]
    return groups, [n for members, _, _ in kinds for n in members]


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, float32, as torch.nn.utils.get_total_norm gives it, for gradients in bfloat16, too.

    A norm depends on its own tensor alone, so it is the same for blocks of gradients, of which one at a time is float32.
    """
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms: list[torch.Tensor] = []
    for block in _blocks(gradients):
        # torch.nn.utils.get_total_norm uses it, too, but gives the norm of a block.
        norms += torch._foreach_norm([gradient.float() for gradient in block])  # noqa: SLF001
    return torch.linalg.vector_norm(torch.stack(norms))


def clipping_factor(norm: torch.Tensor, limit: float | None) -> torch.Tensor | None:
    """What clips a gradient of this norm to the norm `limit`, as torch.nn.utils.clip_grad_norm_; None without a limit."""
    return None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def _update(optimizer: torch.optim.Optimizer, factor: torch.Tensor | None) -> None:
    groups = optimizer.param_groups
    reached = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    if all(parameter.grad.dtype == parameter.dtype for parameter in reached):
        _scale([parameter.grad for parameter in reached], factor)
        optimizer.step()
        return
    try:
        for group in groups:
            for block in _blocks(group["params"]):
                optimizer.param_groups = [group | {"params": block}]
                _widen(block)
                _scale([parameter.grad for parameter in block if parameter.grad is not None], factor)
                optimizer.step()
                for parameter in block:
                    parameter.grad = None
    finally:
        optimizer.param_groups = groups


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor | None) -> None:
    if factor is not None and gradients:
        # On a GPU a few kernels for all; torch has no public name for it.
        torch._foreach_mul_([own_part(gradient) for gradient in gradients], factor)


def _widen(parameters: Iterable[torch.Tensor]) -> None:
    """Converts gradients to their parameter's dtype."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(parameter.dtype)


_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are converted at a time: 4 MiB stay in a processor's cache, and a GPU needs few kernels."""


def _blocks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, in lists of at most that many elements, or of one tensor."""
    block: list[torch.Tensor] = []
    for tensor in tensors:
        limit = _BLOCK_ELEMENTS.get(tensor.device.type, 1 << 20)
        if block and sum(t.numel() for t in block) + tensor.numel() > limit:
            yield block
            block = []
        block.append(tensor)
    if block:
        yield block


def _has_small_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of its parameters on a CPU takes a thread no longer than waking it, on average."""
    sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    return sum(sizes) < _ELEMENTS_OF_A_THREAD * len(sizes)


_ELEMENTS_OF_A_THREAD = 32768
_LORA_B = ".lora_B."  # in the names of peft's parameters
_TEXT = "text_encoder"  # the beginning of the names of the text encoders of an image model

Schedule = Literal["cosine", "linear", "constant", "wsd", "cosine_with_restarts", "polynomial"]

_WSD_DECAY = 0.2  # share of the run that is the decay of wsd (warmup, stable, decay: arXiv:2404.06395)


def lr_factor(
    step: int,
    *,
    total: int,
    warmup: int,
    schedule: Schedule,
    floor: float,
    start: int = 1,
    cycles: int = 1,
    power: float = 1.0,
) -> float:
    """The factor of the learning rate at an optimizer step: a pure function of the step, so resuming needs no state for it.

    With `start` 0 the formulas are those of transformers' `get_scheduler`, whose first step is at position 0.

    Args:
        step: from 1 to `total`.
        total: steps of the run.
        warmup: steps in which the factor rises, with `start` 1 from 1/(warmup + 1), with 0 from 0.
        schedule: the shape after the warmup.
        floor: the factor at the end.
        start: the position of step 1 in the schedule: 1, or 0.
        cycles: number of cosines of `cosine_with_restarts` (arXiv:1608.03983).
        power: exponent of `polynomial`.
    """
    place = step - 1 + start
    if place < warmup + start:
        return place / (warmup + start)
    done = (place - warmup) / max(1, total - warmup)  # 0 <= done <= 1
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "cosine_with_restarts":
            in_cycle = cycles * done % 1.0 if done < 1 else 1.0
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * in_cycle))
        case "polynomial":
            return floor + (1 - floor) * (1 - done) ** power
        case "wsd":
            return 1.0 if done <= 1 - _WSD_DECAY else floor + (1 - floor) * (1 - done) / _WSD_DECAY


_BUCKET_ELEMENTS = 8 << 20  # 32 MiB of float32
_ALIGNED = 64  # elements: each gradient begins at a multiple of it, for vectorized kernels


FIXED_SCALARS = 3  # the loss, and the two numbers of a stop request


def scalars_of_a_step(world_size: int, *, metrics: int) -> int:
    """Numbers of a step that are summed over the ranks beside the gradients: the fixed ones, one for each rank, two for each metric."""
    return FIXED_SCALARS + world_size + 2 * metrics


class GradientSync(Protocol):
    """The part of a step that sums gradients over the ranks."""

    @property
    def needs_equal_rounds(self) -> bool:
        """Whether every rank must run the same number of forwards and backwards."""

    def begin(self) -> None:
        """Called before the first micro batch."""

    def before_last_backward(self) -> None:
        """Called before this rank's last backward."""

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Called after it: gradients and `scalars` (float32) become the sums over all ranks. All ranks must call it."""

    def wait_for_own_part(self) -> None:
        """Waits until this rank's own part is computed, if that can be determined. The caller waits for the device next."""

    def wait_and_time(self) -> float:
        """Called after the wait for the device: seconds spent only waiting for the other ranks' gradients."""


class NoSync:
    """One rank: its gradients are those of the global batch.

    Args:
        products: parameters whose gradients may stay in the dtype of the product that computed them, until the update: they have one
            backward in a step.
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
    """Makes the gradient float32: autograd would add to it in place, in bfloat16. Called without a gradient where there is nothing to add."""
    if gradient is not None:
        _widen([parameter])


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
    """Every rank holds all weights ("ddp"): gradients are in float32 buffers of fixed layout, summed once per step.

    Buffers are summed in the same order on all ranks, those of the last layers first, as backward reaches them; all but the last buffer may
    be summed during backward. The last one carries the step's scalars, and for each parameter whether any rank has a gradient for it: the
    optimizer skips a parameter that no rank reached, as it does on one rank. So an adapter needs one collective per step.
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
        """Drops the gradients: the first of a step is copied into its buffer, which costs less than adding it to zeros."""
        for bucket in self._buckets:
            bucket.missing, bucket.wait = len(bucket.members), None
        for parameter in self.parameters:
            parameter.grad = None
        self._reached = [0.0] * len(self.parameters)
        self._launched, self._last = 0, False

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
        flat = self.group.buffer(size)
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
        """Starts the sums of the buffers before `limit`, in order; before the end of backward only if they are complete."""
        everything = limit == len(self._buckets)
        while self._launched < limit and (everything or self._buckets[self._launched].missing == 0):
            bucket = self._buckets[self._launched]
            bucket.wait = self.group.begin_sum(bucket.flat)
            self._launched += 1


@dataclass
class ShardSync:
    """Every rank holds a shard of each weight ("fsdp"): backward itself sums gradients into the shards.

    `wait_and_time` measures the sum of the scalars alone: the rest overlaps with forward and backward.
    """

    group: Group
    device: torch.device
    root: ShardedRoot
    gathers_late: bool
    """Whether gradients are so small (an adapter's) that each rank keeps them unsharded until the last micro batch."""
    needs_equal_rounds: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._watch = Stopwatch(self.device)

    def begin(self) -> None:
        """Turns off sums in the backward passes before the last, if gradients are gathered late."""
        self.root.reduce_gradients(now=not self.gathers_late)

    def before_last_backward(self) -> None:
        """Turns on sums in the backward pass."""
        self.root.reduce_gradients(now=True)

    def finish(self, scalars: torch.Tensor) -> torch.Tensor:
        """Sums the scalars; backward has summed the gradients."""
        self._watch.mark(0)
        self.group.sum(scalars)
        self._watch.mark(1)
        return scalars

    def wait_for_own_part(self) -> None:
        """Does nothing: forward and backward also wait for the other ranks, and the two cannot be distinguished."""

    def wait_and_time(self) -> float:
        """Seconds spent on the sum of the scalars."""
        return self._watch.seconds()
