"""Weights sharded over the ranks: with FSDP2, or in memory that the ranks of one host share.

FSDP2 (`torch.distributed.fsdp.fully_shard`) has a group for each layer and one for the rest. A
layer's weights are unsharded only while the layer runs, except for the last layers, see
`KEPT_WHOLE_BYTES`. Weights outside of layers (embedding, last norm, head) belong to the root, and
are unsharded while the root's forward runs; so everything that uses weights must run inside it. Of
quantized weights the packed values are sharded, as they are; their scales are not: every rank has
them all.

Frozen weights that would be whole between forward and backward (those outside of layers, and the
last layers) are not sharded: they never change, so a rank that has them needs no other's, and a
shard beside the whole weight would only take memory. An adapter on such a layer belongs to the
root, whose weights are gathered once in a step, in one collective.

Where all weights are trained on CPUs of one host, they are in shared memory: see `SharedWeights`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.base.errors import ModelError
from unisono.base.text import one_line
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.model.quantization import keep_scales
from unisono.trainer.plan.memory import KEPT_WHOLE_BYTES
from unisono.trainer.training.process_group import Group, backend_of, room_of, world_mesh


class Sharded(Protocol):
    """The operations of a sharded model that training needs beside its loss.

    All ranks must call each at the same point.
    """

    @property
    def module(self) -> Callable[[Callable[[], Any]], Any]:
        """Gives the result of a function, called where all weights are unsharded."""

    def begin_step(self) -> None:
        """Drops the sums of gradients."""

    def reduce_gradients(self, *, now: bool) -> None:
        """Sets whether the next backward passes must sum gradients over the ranks, or may leave it
        to a later one.
        """

    def finish_step(self) -> None:
        """Called after the last backward: the shards of the weights have the sums of their
        gradients.
        """

    def reshard(self) -> None:
        """Called after forwards without a backward: the model's parameters are shards."""


def shard_weights(loaded: LoadedModel, group: Group, device: torch.device) -> Sharded:
    """Shards the model's weights over the ranks of a group, in the way that suits device and
    weights.

    All ranks must call it.

    Gradients are summed over the ranks, not averaged: each loss is already divided by the global
    number of loss tokens. Every rank holds the full model before.

    Raises:
        ModelError: if weights are quantized, and this torch shards floating-point parameters only.
    """
    mesh = world_mesh(device, group.world_size)
    can_share = device.type == "cpu" and all(
        p.requires_grad and p.dtype == torch.float32 for p in loaded.model.parameters()
    )
    shared = SharedWeights.of(loaded, group, mesh) if can_share else None
    return shared or shard_model(loaded, mesh)


class RootModule(torch.nn.Module):
    """The root: its forward calls a function, so that the chunked head sees unsharded weights,
    too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, use: Callable[[], Any]) -> Any:
        """The result of `use`."""
        return use()


class _Fresh:
    """The memory of FSDP2's collectives: new for each."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor with any values."""
        return torch.empty(size, dtype=dtype, device=device)


class SumOfExchanged(_Fresh):
    """Reduce-scatter for gloo, whose own is an all-reduce of a copy: each rank gets the others'
    parts of its shard, and adds them up.

    That is a third of the CPU seconds for two ranks and 4 MiB, and the sum is in the order of the
    ranks.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001 - FSDP2's signature
    ) -> None:
        """input (ranks · n,) → output (n,)."""
        del op, async_op  # a sum, and FSDP2 waits for it
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(-1, output_tensor.numel()), 0, out=output_tensor)


class Broadcasts(_Fresh):
    """All-gather for two ranks over gloo, in place: half of the CPU seconds of its own, which goes
    through a buffer.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001
    ) -> None:
        """input (n,), this rank's part of the output → output (ranks · n,)."""
        del async_op
        for rank, part in enumerate(output_tensor.split(input_tensor.numel())):
            dist.broadcast(part, group=group, group_src=rank)


def shard_model(loaded: LoadedModel, mesh: DeviceMesh) -> "ShardedRoot":
    """Shards the model's weights over the ranks of a mesh with FSDP2, layer by layer, and moves
    them to the mesh's device.

    All ranks must call it; every rank holds the full model before.

    Raises:
        ModelError: if weights are quantized, and this torch shards floating-point parameters only.
    """
    device = torch.device(mesh.device_type)
    keep_scales(loaded.model, device)
    root = RootModule(loaded.model)
    room = KEPT_WHOLE_BYTES
    for layer in reversed(_layers(loaded.base)):
        room -= sum(parameter.nbytes for parameter in layer.parameters())
        if room < 0 or not _is_mostly_frozen(layer):
            _shard(layer, mesh=mesh, reshard_after_forward=room < 0)
    whole = {p for p in root.parameters() if not p.requires_grad and not isinstance(p, DTensor)}
    for tensor in (*whole, *root.buffers()):  # fully_shard does not move what it is to ignore
        if tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
    _shard(root, mesh=mesh, ignored_params=whole)
    loaded.collect_trainable()
    sharded = ShardedRoot(root)
    if backend_of(device) == "gloo":
        sharded.exchange_over_gloo(mesh.size())
    return sharded


def _is_mostly_frozen(layer: torch.nn.Module) -> bool:
    """Whether more bytes of it are frozen than trained, as under an adapter."""
    return sum(p.nbytes * (-1 if p.requires_grad else 1) for p in layer.parameters()) > 0


def _shard(module: torch.nn.Module, **how: Any) -> None:
    try:
        fully_shard(module, **how)
    except RuntimeError as error:  # torch 2.11 makes each shard a parameter with a gradient; 2.13 does not
        if all(parameter.is_floating_point() for parameter in module.parameters()):
            raise
        raise ModelError.of(
            f"torch {torch.__version__} cannot shard quantized weights",
            where="parallel.strategy: fsdp",
            why=one_line(str(error), limit=200),
            fix="install torch 2.13 or later, or set parallel.strategy: ddp",
        ) from error


class ShardedRoot:
    """The operations of a model sharded with FSDP2."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._reduces = True
        self._groups = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for group in self._groups:
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)

    def exchange_over_gloo(self, ranks: int) -> None:
        """Uses collectives that take fewer CPU seconds than gloo's own."""
        for group in self._groups:
            group.set_custom_reduce_scatter(SumOfExchanged())
            if ranks == 2:
                group.set_custom_all_gather(Broadcasts())

    def begin_step(self) -> None:
        """Does nothing: gradients are the optimizer's."""

    def finish_step(self) -> None:
        """Does nothing: backward has summed them."""

    def reduce_gradients(self, *, now: bool) -> None:
        """Sets whether the next backward passes sum gradients over the ranks; if not, each rank
        accumulates its own, unsharded.
        """
        if now == self._reduces:
            return
        self._reduces = now
        for group in self._groups:  # torch's own recursion would walk through all modules, twice in a step
            group.set_requires_gradient_sync(now, recurse=False)

    def reshard(self) -> None:
        """Frees the unsharded weights that a forward without a backward leaves, before an update
        makes them stale.
        """
        for group in self._groups:
            group.reshard()


_BUCKET_ELEMENTS = 2 << 20  # 8 MiB; at 12 M parameters 4 to 32 MiB were equally fast


@dataclass(frozen=True)
class _Bucket:
    """Some gradients that are summed together.

    Attributes:
        members: indices of their weights.
        copies: for each piece of a gradient and each rank's rows of it: the weight, the rows, and
            the place in this rank's slot.
        parts: what this rank adds up, in the order of the ranks: the places of its own rows in the
            slots of all.
        total: the sum, (n,).
    """

    members: list[int]
    copies: list[tuple[int, slice, torch.Tensor]]
    parts: list[torch.Tensor]
    total: torch.Tensor


class SharedWeights:
    """Weights that are all trained, in memory that the ranks of one host share; each rank updates
    its own rows, and keeps only their moments.

    Nothing is gathered, and with two ranks losses are bit for bit those of FSDP2, whose gathers,
    copies and work for each parameter are a fifth of a small model's step on a CPU. Outside of
    steps and forwards the model's parameters are shards, as with FSDP2: DTensors, here of rows of
    the shared memory.

    Backward sums gradients in buckets, in one order on all ranks. A rank copies its gradients of a
    bucket into one of two slots of its own, and when all ranks have done so, adds up its own rows.
    It waits for a bucket only before it fills the next one. When the ranks have met for a bucket,
    all of them have added up the one before, whose slot is the next to be filled; therefore the
    number of buckets is even.
    """

    @classmethod
    def of(cls, loaded: LoadedModel, group: Group, mesh: DeviceMesh) -> "SharedWeights | None":
        """Moves the model's weights to shared memory; None if the ranks have none.

        All ranks must call it.
        """
        parameters = list(loaded.model.parameters())
        cut = _cut(parameters, group.world_size)
        sizes = [
            sum(_elements(parameters[i], rows) for i, of_ranks in pieces for rows in of_ranks)
            for pieces in cut
        ]
        slots = [max(sizes[turn::2]) for turn in (0, 1)]
        memory = group.shared(sum(room_of(parameter) for parameter in parameters), owners=[0])
        buffers = group.shared(sum(slots), owners=range(group.world_size)) if memory else []
        if not buffers:
            return None
        own = SharedWeights(loaded, group, mesh, memory[0])
        own._lay_out(cut, [buffer.split(slots) for buffer in buffers])
        return own

    def __init__(self, loaded: LoadedModel, group: Group, mesh: DeviceMesh, memory: torch.Tensor) -> None:
        self._group = group
        self._mesh = mesh
        self._whole: list[torch.nn.Parameter] = []
        self._shards: list[torch.nn.Parameter] = []
        self._places: list[tuple[dict[str, Any], str, int]] = []
        indices: dict[torch.Tensor, int] = {}
        for module in loaded.model.modules():
            parameters: dict[str, Any] = module._parameters  # noqa: SLF001 - assigning an attribute takes ten times as long, in every step
            for name, parameter in parameters.items():
                if parameter is None:
                    continue
                if parameter not in indices:  # a tied weight has several places
                    indices[parameter] = len(indices)
                    size = room_of(parameter)
                    room, memory = memory.split([size, len(memory) - size])
                    self._move(parameter, room[: parameter.numel()].view(parameter.shape))
                self._places.append((parameters, name, indices[parameter]))
        self._is_whole = True
        self.reshard()
        loaded.collect_trainable()
        for index, whole in enumerate(self._whole):
            whole.grad_dtype = None  # any; see `model.layers.own_gradient`
            whole.register_hook(partial(self._before_autograd_adds, index))
            whole.register_post_accumulate_grad_hook(partial(self._after_autograd_added, index))
        self._buckets: list[_Bucket] = []
        self._buckets_of: list[list[int]] = [[] for _ in self._whole]
        self._gradients: dict[int, DTensor] = {}
        self._meeting: Callable[[], None] | None = None
        self._is_first_sum = True
        self._are_reached = [False] * len(self._whole)
        self._expects_backward = False

    def _move(self, parameter: torch.Tensor, whole: torch.Tensor) -> None:
        rows = _rows_of_ranks(len(whole), self._group.world_size)[self._group.rank]
        own = whole[rows]
        own.copy_(parameter.detach()[rows])
        self._whole.append(torch.nn.Parameter(whole))
        self._shards.append(torch.nn.Parameter(self._sharded(own, whole)))

    def _sharded(self, own: torch.Tensor, whole: torch.Tensor) -> DTensor:
        """A DTensor of the shape of a whole tensor, from this rank's rows."""
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _lay_out(self, cut: "list[list[_Piece]]", slots: list[tuple[torch.Tensor, ...]]) -> None:
        """Gives every piece of every gradient its place in the slots of each rank, and in the
        sums.
        """
        locals_of = [own_part(shard) for shard in self._shards]
        totals = torch.zeros(sum(local.numel() for local in locals_of))
        places = iter(totals.split([local.numel() for local in reversed(locals_of)]))
        for index, local in reversed(list(enumerate(locals_of))):
            self._gradients[index] = self._sharded(next(places).view(local.shape), self._whole[index])
        for number, pieces in enumerate(cut):
            turn = number % 2
            copies: list[tuple[int, slice, torch.Tensor]] = []
            parts: list[torch.Tensor] = []
            at = 0
            for rank in range(self._group.world_size):
                begin = at
                for index, of_ranks in pieces:
                    rest = self._whole[index].shape[1:]
                    size = _elements(self._whole[index], of_ranks[rank])
                    target = slots[self._group.rank][turn][at : at + size]
                    copies.append((index, of_ranks[rank], target.view(-1, *rest)))
                    at += size
                if rank == self._group.rank:
                    parts = [slot[turn][begin:at] for slot in slots]
            total, totals = totals.split([len(parts[0]), len(totals) - len(parts[0])])
            members = list(dict.fromkeys(index for index, _ in pieces))
            for index in members:
                self._buckets_of[index].append(number)
            self._buckets.append(_Bucket(members, copies, parts, total))
        self._begin_backward()

    @property
    def module(self) -> Callable[[Callable[[], Any]], Any]:
        """Gives the result of a function, called where all weights are whole, and up to date."""
        return self._within

    def _within(self, use: Callable[[], Any]) -> Any:
        if not self._is_whole:
            self._group.barrier()  # all ranks have updated their rows
            self._put(self._whole)
            self._is_whole = True
        if torch.is_grad_enabled():
            self._finish_backward()
            self._expects_backward = True
        return use()

    def begin_step(self) -> None:
        """Drops the sums of gradients."""
        self._finish_backward()
        self._is_first_sum = True
        self._are_reached = [False] * len(self._whole)

    def reduce_gradients(self, *, now: bool) -> None:
        """Does nothing: every backward sums gradients."""

    def finish_step(self) -> None:
        """Gives the shards the sums of their gradients; a weight that no rank's backward has
        reached gets none.
        """
        self._finish_backward()
        for index, shard in enumerate(self._shards):
            if self._are_reached[index] and shard.grad is None:
                shard.grad = self._gradients[index]
        self.reshard()

    def reshard(self) -> None:
        """Makes the model's parameters shards."""
        if self._is_whole:
            self._put(self._shards)
            self._is_whole = False

    def _put(self, parameters: list[torch.nn.Parameter]) -> None:
        for place, name, index in self._places:
            place[name] = parameters[index]

    # ---- Backward

    def _begin_backward(self) -> None:
        self._next = 0
        self._missing = [set(bucket.members) for bucket in self._buckets]

    def _before_autograd_adds(self, index: int, gradient: torch.Tensor | None) -> None:
        """Autograd would add up two gradients in bfloat16.

        It has nothing to add if the weight's own backward has put its gradient in place.
        """
        whole = self._whole[index]
        if gradient is None:
            self._reach(index)
        elif whole.grad is not None:
            whole.grad = whole.grad.to(whole.dtype)

    def _after_autograd_added(self, index: int, whole: torch.Tensor) -> None:
        del whole
        self._reach(index)

    def _reach(self, index: int) -> None:
        """The gradient of a weight is complete in this backward."""
        for number in self._buckets_of[index]:
            self._missing[number].discard(index)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._launch()

    def _launch(self) -> None:
        """Fills this rank's slot with the gradients of the next bucket."""
        self._meet()
        number, bucket = self._next, self._buckets[self._next]
        self._next += 1
        found = {index: self._whole[index].grad for index in bucket.members}
        for index, rows, target in bucket.copies:
            gradient = found[index]
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient[rows])
        for index in bucket.members:
            if self._buckets_of[index][-1] == number:
                self._whole[index].grad = None
        # Its own number first, so that ranks that are not at the same bucket notice it.
        notes = torch.tensor([float(number + 1), *(gradient is not None for gradient in found.values())])
        wait = self._group.begin_sum(notes)
        self._meeting = partial(self._add_up, number, notes, wait)

    def _meet(self) -> None:
        """Waits until all ranks have filled their slots for the last bucket, and adds up its
        rows.
        """
        if self._meeting is not None:
            meeting, self._meeting = self._meeting, None
            meeting()

    def _add_up(self, number: int, notes: torch.Tensor, wait: Callable[[], object]) -> None:
        wait()
        met, *counts = notes.tolist()
        if met != (number + 1) * self._group.world_size:
            raise RuntimeError(
                f"Detected mismatch between collectives on ranks: rank {self._group.rank} sums bucket"
                f" {number} of gradients, another rank does not"
            )
        bucket = self._buckets[number]
        for index, count in zip(bucket.members, counts, strict=True):
            self._are_reached[index] |= count > 0
        first, *others = bucket.parts
        total = bucket.total if self._is_first_sum else torch.empty_like(bucket.total)
        if others:
            torch.add(first, others[0], out=total)
        else:
            total.copy_(first)
        for part in others[1:]:
            total += part
        if not self._is_first_sum:
            bucket.total.add_(total)

    def _finish_backward(self) -> None:
        """Sums what the last backward has not reached; some rank's may have."""
        if not self._expects_backward:
            return
        self._expects_backward = False
        while self._next < len(self._buckets):
            self._launch()
        self._meet()
        self._is_first_sum = False
        self._begin_backward()


_Piece = tuple[int, list[slice]]
"""An index of a weight, and rows of it: for each rank, of those that it updates."""


def _cut(weights: list[torch.nn.Parameter], world_size: int) -> list[list[_Piece]]:
    """The pieces of each bucket, an even number of buckets, in the order in which backward reaches
    the weights; a large weight has several pieces.
    """
    buckets: list[list[_Piece]] = [[]]
    size = 0
    for index, weight in reversed(list(enumerate(weights))):
        count = -(-weight.numel() // _BUCKET_ELEMENTS)
        for number in range(count):
            of_ranks = [_share(rows, number, count) for rows in _rows_of_ranks(len(weight), world_size)]
            need = sum(_elements(weight, rows) for rows in of_ranks)
            if buckets[-1] and size + need > _BUCKET_ELEMENTS:
                buckets.append([])
                size = 0
            buckets[-1].append((index, of_ranks))
            size += need
    return buckets if len(buckets) % 2 == 0 else [*buckets, []]


def _share(rows: slice, number: int, count: int) -> slice:
    """The share with this number, of `count` shares of rows."""
    size = rows.stop - rows.start
    return slice(rows.start + size * number // count, rows.start + size * (number + 1) // count)


def _elements(weight: torch.Tensor, rows: slice) -> int:
    return (rows.stop - rows.start) * prod(weight.shape[1:])


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that may be sharded. If it is, all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_on_one_rank(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """The full tensor of one that may be sharded, in host memory, on the rank that keeps it; None
    on the others.

    The rank that keeps it needs memory for the result, every other rank and each device for one
    rank's part. If it is sharded, all ranks must call it.

    Args:
        tensor: the same tensor on all ranks.
        keep: whether this rank keeps the result.
    """
    if not isinstance(tensor, DTensor):
        return tensor.cpu() if keep else None
    if tensor.placements != (Shard(0),):
        full = tensor.full_tensor()
        return full.cpu() if keep else None
    group = tensor.device_mesh.get_group()
    local = tensor.to_local()
    found = torch.empty(tensor.shape, dtype=tensor.dtype) if keep else None
    for rank, rows in enumerate(_rows_of_ranks(len(tensor), dist.get_world_size(group))):
        window = found[rows] if found is not None else None
        part = local.contiguous() if rank == dist.get_rank(group) else window
        if part is None or part.device != local.device:
            part = local.new_empty((rows.stop - rows.start, *tensor.shape[1:]))
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)  # all ranks of the mesh
        if window is not None and part is not window:
            window.copy_(part)
    return found


def _rows_of_ranks(rows: int, world_size: int) -> list[slice]:
    """The rows of each rank, as torch.chunk and DTensor distribute them; the last ranks may have
    fewer, or none.
    """
    share = -(-rows // world_size)
    return [slice(min(r * share, rows), min((r + 1) * share, rows)) for r in range(world_size)]


def sharded_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, a full tensor on every rank, sharded like `parameter`; unchanged if that is not
    sharded or the shapes differ.
    """
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    local = value.to(parameter.device)
    return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _layers(base: Any) -> list[torch.nn.Module]:
    """The blocks that transformers does not split over devices; of nested blocks the outer one."""
    names = set(getattr(base, "_no_split_modules", None) or ())
    found: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in base.modules():
        if type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found
