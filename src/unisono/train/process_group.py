"""The only owner of the process group: opens it, sums and broadcasts over it, leaves notes, and closes it once, in bounded time; and weights sharded over it.

One rank is `Alone`: no group, no store, no socket. Several are `Ranks`. No other module of unisono uses torch.distributed's default group.

Weights are sharded with FSDP2 (`torch.distributed.fsdp.fully_shard`): a group for each layer and one for the rest. A layer's weights are
unsharded only while the layer runs, except for the last layers, see `KEPT_WHOLE_BYTES`. Weights outside of layers (embedding, last norm, head) belong to the root, and are unsharded while the
root's forward runs; so everything that uses weights must run inside it. Of quantized weights the packed values are sharded, as they are; their
scales are not: every rank has them all.

Frozen weights that would be whole between forward and backward (those outside of layers, and the last layers) are not sharded: they never
change, so a rank that has them needs no other's, and a shard beside the whole weight would only take memory. An adapter on such a layer
belongs to the root, whose weights are gathered once in a step, in one collective.
"""

import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.errors import ModelError
from unisono.model.load import LoadedModel
from unisono.model.quantization import keep_scales
from unisono.plan.run_plan import KEPT_WHOLE_BYTES
from unisono.text import one_line
from unisono.torch_internals import let_gloo_finish
from unisono.watch import Beats

CLOSE_LIMIT_S = 15.0
# The front detects a stall long before this. This limit ends ranks whose front is gone.
_PATIENCE = timedelta(minutes=30)
_JOIN_LIMIT = timedelta(minutes=5)  # a slow resolver makes torch's store take seconds for each rank
_BACKLOG = 4096
# 4 MiB: of less, gloo's sum takes about as long as the two sums of one number around one in memory.
_SHARED_ELEMENTS = 1 << 20
_AT_ONCE = 1 << 16  # elements added up at a time: 256 KiB of each rank fit into a core's cache


class Group(Protocol):
    """The ranks of a run. All ranks must call every method at the same point, except those of notes, which any thread may call."""

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only writer."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks, bit-identical on all ranks."""

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Starts such a sum; gives a function that waits for its end."""

    def buffer(self, elements: int) -> torch.Tensor:
        """Zeros (elements,), float32, for such sums. All ranks must call it."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by that of rank 0."""

    def any(self, statement: bool) -> bool:  # noqa: FBT001 - a predicate reads best so
        """Whether it is true on any rank."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def figures(self, summed: torch.Tensor) -> list[float]:
        """The values of a sum, (n,); on a GPU this waits for the other ranks."""

    def leave_note(self, note: str) -> None:
        """Leaves a note that any rank can look for."""

    def has_note(self, note: str) -> bool:
        """Whether some rank has left the note; also False if rank 0 is gone."""


class Alone:
    """The group of a single rank: every collective is a no-op."""

    rank = 0
    world_size = 1
    is_main = True

    def sum(self, tensor: torch.Tensor) -> None:
        """Does nothing."""

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Does nothing."""
        del tensor
        return lambda: None

    def buffer(self, elements: int) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(elements)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Does nothing."""

    def any(self, statement: bool) -> bool:  # noqa: FBT001
        """The statement."""
        return statement

    def barrier(self) -> None:
        """Does nothing."""

    def figures(self, summed: torch.Tensor) -> list[float]:
        """The tensor's values."""
        return list(summed.tolist())

    def leave_note(self, note: str) -> None:
        """Does nothing: there is no other rank."""

    def has_note(self, note: str) -> bool:
        """False: there is no other rank."""
        del note
        return False


class Listener:
    """The listening socket of torch's store, bound by rank 0 before its port is reported, so no port is guessed."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    def store(self) -> dist.Store:
        """Opens torch's store on this socket."""
        return dist.TCPStore(
            self.host,
            self.port,
            None,
            is_master=True,
            timeout=_JOIN_LIMIT,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )


class Ranks:
    """Several ranks, joined by torch's process group. The device must be bound already."""

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        store: tuple[str, int],
        listener: Listener | None,
        beats: Beats | None = None,
    ) -> None:
        """Joins the other ranks. All ranks must call it.

        Args:
            name: of the group. A restart uses a different name, so that no process of the old group can join.
            rank: of this process.
            world_size: number of ranks.
            device: the bound device.
            store: host and port of rank 0's store.
            listener: on rank 0, the socket of the store.
            beats: every collective is recorded here.
        """
        assert not dist.is_initialized(), "the process group has one owner"
        self.rank, self.world_size, self.device = rank, world_size, device
        self._beats = beats or Beats()
        self._shared: dict[tuple[int, int], list[torch.Tensor]] = {}
        host, port = store
        if listener is not None:
            base = listener.store()
        else:
            base = dist.TCPStore(
                host, port, None, is_master=False, timeout=_JOIN_LIMIT, wait_for_workers=False
            )
        self._notes = dist.PrefixStore(f"notes/{name}", base)
        extra: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            backend_of(device),
            store=dist.PrefixStore(f"unisono/{name}", base),
            rank=rank,
            world_size=world_size,
            timeout=_PATIENCE,
            **extra,
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only writer."""
        return self.rank == 0

    @property
    def joined(self) -> int:
        """The number of ranks in torch's group."""
        return dist.get_world_size()

    def sum(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks, bit-identical on all ranks."""
        self._beats.begin_collective("all_reduce", tensor.numel())
        with self._beats.waiting():
            dist.all_reduce(tensor)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Starts such a sum; gives a function that waits for its end."""
        self._beats.begin_collective("all_reduce", tensor.numel())
        buffers = self._shared.get(_key_of(tensor), ())
        # In shared memory sums of the size are barriers: first all gradients are there, at the end all parts are added up.
        size = torch.tensor([tensor.numel()])
        work = dist.all_reduce(size if buffers else tensor, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._beats.waiting():
                work.wait()
            if buffers:
                self._require_size(size, tensor.numel())
                add_up(buffers, self.rank)
                again = torch.tensor([tensor.numel()])
                with self._beats.waiting():
                    dist.all_reduce(again)
                self._require_size(again, tensor.numel())

        return wait

    def _require_size(self, summed: torch.Tensor, size: int) -> None:
        """Refuses what the ranks did not all contribute, as gloo does by the size of what it receives; the words are those of torch."""
        if summed.tolist() != [size * self.world_size]:
            raise RuntimeError(
                f"Detected mismatch between collectives on ranks: rank {self.rank} sums {size:,} elements in shared memory, another rank does not"
            )

    def buffer(self, elements: int) -> torch.Tensor:
        """Zeros (elements,), float32, for such sums. All ranks must call it.

        On a CPU, ranks of one host share the memory of large ones, so that a sum is two reads and two writes of each element instead of a
        transfer over a socket.
        """
        if self.device.type != "cpu" or elements < _SHARED_ELEMENTS:
            return torch.zeros(elements, device=self.device)
        fd, address = _new_memory(4 * elements)
        key = f"memory/{len(self._shared)}"
        self._notes.set(f"{key}/{self.rank}", address)
        self.barrier()
        addresses = [self._notes.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]
        found = [_memory_at(address, 4 * elements) for address in addresses]
        buffers = [torch.frombuffer(memory, dtype=torch.float32) for memory in found if memory is not None]
        are_missing = self.any(len(buffers) < self.world_size)
        if fd is not None:
            os.close(fd)  # all have mapped it
        if are_missing:
            return torch.zeros(elements)
        own = buffers[self.rank]
        self._shared[_key_of(own)] = buffers
        return own

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by that of rank 0."""
        self._beats.begin_collective("broadcast", tensor.numel())
        with self._beats.waiting():
            dist.broadcast(tensor, 0)

    def any(self, statement: bool) -> bool:  # noqa: FBT001
        """Whether it is true on any rank."""
        count = torch.tensor(int(statement), device=self.device)
        self.sum(count)
        return self.figures(count.view(1)) != [0]

    def barrier(self) -> None:
        """Waits for all ranks."""
        # Without the device NCCL uses the current one, and hangs if that belongs to a different rank.
        self._beats.begin_collective("barrier", 0)
        with self._beats.waiting():
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def figures(self, summed: torch.Tensor) -> list[float]:
        """The values of a sum, (n,); on a GPU this waits for the other ranks."""
        if summed.device.type == "cpu":
            return list(summed.tolist())
        with self._beats.waiting():
            return list(summed.tolist())

    def leave_note(self, note: str) -> None:
        """Leaves a note that any rank can look for."""
        self._notes.set(note, "")

    def has_note(self, note: str) -> bool:
        """Whether some rank has left the note; also False if rank 0 is gone."""
        try:
            return bool(self._notes.check([note]))
        except RuntimeError:  # rank 0 is gone; the main thread learns it from its next collective
            return False


def _key_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _new_memory(size: int) -> tuple[int | None, str]:
    """Anonymous memory of `size` bytes, all zero, and an address by which other processes find it; an empty one if there is none.

    Anonymous (memfd_create(2)): nothing is left of it when its processes are gone, however they end.
    """
    name = f"unisono-{secrets.token_hex(8)}"
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or refused
        return None, ""
    try:
        os.posix_fallocate(fd, 0, size)  # now: a page that is missing later would end the process
    except OSError:
        os.close(fd)
        return None, ""
    return fd, f"/proc/{os.getpid()}/fd/{fd}:{name}"


def _memory_at(address: str, size: int) -> mmap.mmap | None:
    """The memory at an address; None if this process does not see it, as on a different host or in a different container."""
    path, _, name = address.partition(":")
    try:
        if not name or str(Path(path).readlink()) != f"/memfd:{name} (deleted)":
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(fd, size)
    except OSError:
        return None
    finally:
        os.close(fd)


def add_up(buffers: Sequence[torch.Tensor], rank: int) -> None:
    """Replaces a rank's part of all buffers, each (n,), by their sum in the order of the ranks. The parts of all ranks are the buffers."""
    parts = [buffer.tensor_split(len(buffers))[rank].split(_AT_ONCE) for buffer in buffers]
    for blocks in zip(*parts, strict=True):
        total = blocks[0].clone()
        for block in blocks[1:]:
            total += block
        for block in blocks:
            block.copy_(total)


def world_mesh(device: torch.device, world_size: int) -> DeviceMesh:
    """A one-dimensional device mesh of all ranks, for sharded weights. All ranks must call it."""
    return DeviceMesh(device.type, list(range(world_size)))


def backend_of(device: torch.device) -> str:
    """The name of torch's backend for collectives on such a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def close_group(*, orderly: bool) -> bool:
    """Closes the process group if there is one; False if it stays open until the process exits.

    A second call does nothing. All results have been written and reported before.

    Args:
        orderly: whether the run ended normally. After a failure the group is not closed: other ranks may be gone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    if not orderly:
        return False
    let_gloo_finish()
    closing = threading.Thread(target=dist.destroy_process_group, daemon=True, name="close-group")
    closing.start()
    closing.join(CLOSE_LIMIT_S)
    return not closing.is_alive()


class RootModule(torch.nn.Module):
    """The root: its forward calls a function, so that the chunked head sees unsharded weights, too."""

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
    """Reduce-scatter for gloo, whose own is an all-reduce of a copy: each rank gets the others' parts of its shard, and adds them up.

    That is a third of the CPU seconds for two ranks and 4 MiB, and the sum is in the order of the ranks.
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
    """All-gather for two ranks over gloo, in place: half of the CPU seconds of its own, which goes through a buffer."""

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
    """Shards the model's weights over the ranks of a mesh, layer by layer, and moves them to the mesh's device.

    Gradients are summed over the ranks, not averaged: each loss is already divided by the global number of loss tokens. All ranks must call
    it; every rank holds the full model before.

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
    """The operations of a sharded model that training needs beside its loss."""

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
        """Sets whether the next backward passes sum gradients over the ranks; if not, each rank accumulates its own, unsharded."""
        if now == self._reduces:
            return
        self._reduces = now
        for group in self._groups:  # torch's own recursion would walk through all modules, twice in a step
            group.set_requires_gradient_sync(now, recurse=False)

    def reshard(self) -> None:
        """Frees the unsharded weights that a forward without a backward leaves, before an update makes them stale."""
        for group in self._groups:
            group.reshard()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
