"""Shards weights over ranks with FSDP2 (`torch.distributed.fsdp.fully_shard`): a group for each layer and one for the rest.

A layer's weights are unsharded only while the layer runs. Weights outside of layers (embedding, last norm, head) belong to the root, and are
unsharded while the root's forward runs; so everything that uses weights must run inside it. Of quantized weights the packed values are sharded,
as they are; their scales are not: every rank has them all.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.model.load import LoadedModel
from unisono.model.quantization import keep_scales


class RootModule(torch.nn.Module):
    """The root: its forward calls a function, so that the chunked head sees unsharded weights, too."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, use: Callable[[], Any]) -> Any:
        """The result of `use`."""
        return use()


def shard_model(loaded: LoadedModel, mesh: DeviceMesh) -> "ShardedRoot":
    """Shards the model's weights over the ranks of a mesh, layer by layer, and moves them to the mesh's device.

    Gradients are summed over the ranks, not averaged: each loss is already divided by the global number of loss tokens. All ranks must call
    it; every rank holds the full model before.
    """
    keep_scales(loaded.model, torch.device(mesh.device_type))
    root = RootModule(loaded.model)
    for layer in _layers(loaded.base):
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    loaded.collect_trainable()
    return ShardedRoot(root)


class ShardedRoot:
    """The operations of a sharded model that training needs beside its loss."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def reduce_gradients(self, *, now: bool) -> None:
        """Sets whether the next backward passes sum gradients over the ranks; if not, each rank accumulates its own, unsharded."""
        self.module.set_requires_gradient_sync(now)

    def reshard(self) -> None:
        """Frees the root's unsharded weights, which a forward without a backward leaves, before an update makes them stale."""
        self.module.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that may be sharded. If it is, all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_on_one_rank(tensor: torch.Tensor, *, keep: bool) -> torch.Tensor | None:
    """The full tensor of one that may be sharded, in host memory, on the rank that keeps it; None on the others.

    The rank that keeps it needs memory for the result, every other rank and each device for one rank's part. If it is sharded, all ranks
    must call it.

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
    """The rows of each rank, as torch.chunk and DTensor distribute them; the last ranks may have fewer, or none."""
    share = -(-rows // world_size)
    return [slice(min(r * share, rows), min((r + 1) * share, rows)) for r in range(world_size)]


def sharded_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, a full tensor on every rank, sharded like `parameter`; unchanged if that is not sharded or the shapes differ."""
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
