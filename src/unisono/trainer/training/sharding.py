"""Weights sharded over the ranks with FSDP2.

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
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.base.errors import ModelError
from unisono.base.text import one_line
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.model.multimodal import part_of, text_prefixes
from unisono.trainer.model.quantization import keep_scales
from unisono.trainer.plan.memory import KEPT_WHOLE_BYTES
from unisono.trainer.training.process_group import backend_of


class RootModule(torch.nn.Module):
    """The root: its forward calls a function, so that the chunked head sees unsharded weights,
    too.

    Attributes:
        layers: the sharded layers, and whether each is resharded after its forward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.layers: list[tuple[FSDPModule, bool]] = []

    def forward(self, use: Callable[[], Any], *, apart: bool = False) -> Any:
        """The result of `use`; `apart`: all layers stay whole meanwhile, so that a rank waits for
        no other, whatever each computes.
        """
        if not apart:
            return use()
        for layer, reshards in self.layers:
            layer.unshard()
            if reshards:
                layer.set_reshard_after_forward(False, recurse=False)
        try:
            return use()
        finally:
            for layer, reshards in self.layers:
                layer.reshard()
                if reshards:
                    layer.set_reshard_after_forward(True, recurse=False)


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

    All ranks must call it; every rank holds the full model before. Gradients are summed over the
    ranks, not averaged: each loss is already divided by the global number of loss tokens.

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
            assert isinstance(layer, FSDPModule)
            root.layers.append((layer, room < 0))
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
    gathered = torch.empty(tensor.shape, dtype=tensor.dtype) if keep else None
    for rank, rows in enumerate(_rows_of_ranks(len(tensor), dist.get_world_size(group))):
        window = gathered[rows] if gathered is not None else None
        part = local.contiguous() if rank == dist.get_rank(group) else window
        if part is None or part.device != local.device:
            part = local.new_empty((rows.stop - rows.start, *tensor.shape[1:]))
        if part.numel():
            dist.broadcast(part, group=group, group_src=rank)  # all ranks of the mesh
        if window is not None and part is not window:
            window.copy_(part)
    return gathered


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
    """The decoder's blocks that transformers (5.23: by no public name) does not split over devices;
    of nested blocks the outer one.

    Those of a vision part belong to the root, which all ranks enter in each forward: a rank whose
    rows have no picture does not run them.
    """
    text = text_prefixes(base)
    names = set(getattr(base, "_no_split_modules", None) or ())
    layers: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for path, module in base.named_modules():
        of_decoder = part_of(path, text) == "language"
        if of_decoder and type(module).__name__ in names and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    return layers
