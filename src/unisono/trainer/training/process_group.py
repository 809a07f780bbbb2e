"""The only owner of the process group: opens it, sums and broadcasts over it, leaves notes, and
closes it once, in bounded time.

One rank is `Alone`: no group, no store, no socket. Several are `Ranks`. No other module of unisono
uses torch.distributed's default group.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.base.torch_internals import let_gloo_finish
from unisono.guard.watch import Beats
from unisono.trainer.plan import Mesh

CLOSE_LIMIT_S = 15.0
# The front detects a stall long before this. This limit ends ranks whose front is gone.
_PATIENCE = timedelta(minutes=30)
_JOIN_LIMIT = timedelta(minutes=5)  # a slow resolver makes torch's store take seconds for each rank
_BACKLOG = 4096


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
        host, port = store
        if listener is not None:
            base = listener.store()
        else:
            base = dist.TCPStore(
                host, port, None, is_master=False, timeout=_JOIN_LIMIT, wait_for_workers=False
            )
        self._notes = dist.PrefixStore(f"notes/{name}", base)
        extra: dict[str, torch.device] = {"device_id": device} if device.type == "cuda" else {}
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
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._beats.waiting():
                work.wait()

        return wait

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


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """The device mesh of all ranks with the axes of the plan's mesh, for sharded weights. All ranks
    must call it.
    """
    ranks = torch.arange(mesh.world_size).view(*mesh.axes.values())
    return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(mesh.axes))


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
