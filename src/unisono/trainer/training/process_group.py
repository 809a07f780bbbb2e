"""The only owner of the process group: opens it, sums and broadcasts over it, leaves notes, and
closes it once, in bounded time.

One rank is `Alone`: no group, no store, no socket. Several are `Ranks`. No other module of unisono
uses torch.distributed's default group.
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

from unisono.base.torch_internals import let_gloo_finish
from unisono.guard.watch import Beats

CLOSE_LIMIT_S = 15.0
# The front detects a stall long before this. This limit ends ranks whose front is gone.
_PATIENCE = timedelta(minutes=30)
_JOIN_LIMIT = timedelta(minutes=5)  # a slow resolver makes torch's store take seconds for each rank
_BACKLOG = 4096
# 4 MiB: of less, gloo's sum takes about as long as the two sums of one number around one in memory.
_SHARED_ELEMENTS = 1 << 20
_AT_ONCE = 1 << 16  # elements added up at a time: 256 KiB of each rank fit into a core's cache


class Group(Protocol):
    """The ranks of a run.

    All ranks must call every method at the same point, except those of notes, which any thread may
    call.
    """

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

    def shared(self, elements: int, *, owners: Sequence[int]) -> list[torch.Tensor]:
        """Zeros (elements,), float32, of each owner, in memory that all ranks share; empty if they
        do not.

        All ranks must call it.
        """

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

    def shared(self, elements: int, *, owners: Sequence[int]) -> list[torch.Tensor]:
        """Zeros."""
        return [torch.zeros(elements) for _ in owners]

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
    """The listening socket of torch's store, bound by rank 0 before its port is reported, so no
    port is guessed.
    """

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
            name: of the group. A restart uses a different name, so that no process of the old group
                can join.
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
        self._memories = 0
        self._summed_in_memory: dict[tuple[int, int], list[torch.Tensor]] = {}
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
        buffers = self._summed_in_memory.get(_key_of(tensor), ())
        # In shared memory sums of the size are barriers: first all gradients are there, at the end
        # all parts are added up.
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
        """Refuses what the ranks did not all contribute, as gloo does by the size of what it
        receives; the words are those of torch.
        """
        if summed.tolist() != [size * self.world_size]:
            raise RuntimeError(
                f"Detected mismatch between collectives on ranks: rank {self.rank} sums {size:,} elements in"
                " shared memory, another rank does not"
            )

    def buffer(self, elements: int) -> torch.Tensor:
        """Zeros (elements,), float32, for such sums. All ranks must call it.

        On a CPU, ranks of one host share the memory of large ones, so that a sum is two reads and
        two writes of each element instead of a transfer over a socket.
        """
        buffers = self.shared(elements, owners=range(self.world_size)) if elements >= _SHARED_ELEMENTS else []
        if not buffers:
            return torch.zeros(elements, device=self.device)
        own = buffers[self.rank]
        self._summed_in_memory[_key_of(own)] = buffers
        return own

    def shared(self, elements: int, *, owners: Sequence[int]) -> list[torch.Tensor]:
        """Zeros (elements,), float32, of each owner, in memory that all ranks share; empty if they
        do not.

        All ranks must call it.

        They do on CPUs of one host, unless they are in containers that do not see each other's
        processes.
        """
        if self.device.type != "cpu":
            return []
        self._memories += 1
        key = f"memory/{self._memories}"
        fd = None
        if self.rank in owners:
            fd, address = _new_memory(4 * elements)
            self._notes.set(f"{key}/{self.rank}", address)
        self.barrier()
        addresses = [self._notes.get(f"{key}/{rank}").decode() for rank in owners]
        found = [_memory_at(address, 4 * elements) for address in addresses]
        buffers = [torch.frombuffer(memory, dtype=torch.float32) for memory in found if memory is not None]
        are_missing = self.any(len(buffers) < len(owners))
        if fd is not None:
            os.close(fd)  # all have mapped it
        return [] if are_missing else buffers

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
        # Without the device NCCL uses the current one, and hangs if that belongs to a different
        # rank.
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


def room_of(tensor: torch.Tensor) -> int:
    """Elements of its room in a buffer of several: each begins at a multiple of 64 of them, for
    vectorized kernels.
    """
    return -(-tensor.numel() // 64) * 64


def _key_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _new_memory(size: int) -> tuple[int | None, str]:
    """Anonymous memory of `size` bytes, all zero, and an address by which other processes find it;
    an empty one if there is none.

    Anonymous (memfd_create(2)): nothing is left of it when its processes are gone, however they
    end.
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
    """The memory at an address; None if this process does not see it, as on a different host or in
    a different container.
    """
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
    """Replaces a rank's part of all buffers, each (n,), by their sum in the order of the ranks.

    The parts of all ranks are the buffers.
    """
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
        orderly: whether the run ended normally. After a failure the group is not closed: other
            ranks may be gone.
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
