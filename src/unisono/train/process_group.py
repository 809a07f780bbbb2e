"""The one owner of the process group: it opens it, sums and broadcasts over it, leaves notes, and closes it once, in bounded time.

One rank is `Alone`: no group, no store, no socket. Several are `Ranks`. Nothing else in unisono names torch.distributed's group.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.gloo import let_gloo_finish
from unisono.watch import Beats

CLOSE_LIMIT_S = 15.0
# The front judges who is stuck, and long before this; it is what ends ranks whose front is gone, too.
_PATIENCE = timedelta(minutes=30)
_JOIN_LIMIT = timedelta(minutes=5)  # a slow resolver makes torch's store take seconds for each rank
_BACKLOG = 4096


class Group(Protocol):
    """The ranks of a run. Every method is for all ranks, at the same place of the program, but those of notes: they are for any thread."""

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only writer."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` the sum of all ranks', on all ranks to the same bits."""

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begins that; what it gives waits for the end."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` rank 0's."""

    def any(self, statement: bool) -> bool:  # noqa: FBT001 - a predicate reads best so
        """Whether it is true on any rank."""

    def barrier(self) -> None:
        """Waits until all ranks are here."""

    def figures(self, summed: torch.Tensor) -> list[float]:
        """What a sum has given, (n,); on a GPU it is here that the others are waited for."""

    def leave_note(self, note: str) -> None:
        """Leaves a note that any rank may look for."""

    def has_note(self, note: str) -> bool:
        """Whether some rank has left it; False, too, where rank 0 is gone."""


class Alone:
    """One rank: nothing to wait for."""

    rank = 0
    world_size = 1
    is_main = True

    def sum(self, tensor: torch.Tensor) -> None:
        """It is the sum."""

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """It is the sum."""
        del tensor
        return lambda: None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """It is rank 0's."""

    def any(self, statement: bool) -> bool:  # noqa: FBT001
        """Itself."""
        return statement

    def barrier(self) -> None:
        """All are here."""

    def figures(self, summed: torch.Tensor) -> list[float]:
        """Its numbers."""
        return list(summed.tolist())

    def leave_note(self, note: str) -> None:
        """There is nobody to read it."""

    def has_note(self, note: str) -> bool:
        """There is nobody to leave one."""
        del note
        return False


class Listener:
    """The socket on which torch's store will wait; bound by rank 0 before anybody is told its port, so no port is guessed."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.host = host
        self.port: int = self._socket.getsockname()[1]

    def store(self) -> dist.Store:
        """torch's store on this socket."""
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
    """Several ranks, joined by torch's process group. The device is bound already."""

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
        """Joins the others. All ranks must.

        Args:
            name: of the group. A restart has another, and nothing of the old one can join it.
            rank: of this process.
            world_size: all ranks.
            device: that is bound.
            store: host and port of rank 0's store.
            listener: rank 0's.
            beats: are told of every collective.
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
        """How many ranks torch has brought together."""
        return dist.get_world_size()

    def sum(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` the sum of all ranks', on all ranks to the same bits."""
        self._beats.begin_collective("all_reduce", tensor.numel())
        with self._beats.waiting():
            dist.all_reduce(tensor)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begins that; what it gives waits for the end."""
        self._beats.begin_collective("all_reduce", tensor.numel())
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None

        def wait() -> None:
            with self._beats.waiting():
                work.wait()

        return wait

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Makes `tensor` rank 0's."""
        self._beats.begin_collective("broadcast", tensor.numel())
        with self._beats.waiting():
            dist.broadcast(tensor, 0)

    def any(self, statement: bool) -> bool:  # noqa: FBT001
        """Whether it is true on any rank."""
        count = torch.tensor(int(statement), device=self.device)
        self.sum(count)
        return self.figures(count.view(1)) != [0]

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        # Without its device NCCL takes the current one, and hangs where that is another's.
        self._beats.begin_collective("barrier", 0)
        with self._beats.waiting():
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def figures(self, summed: torch.Tensor) -> list[float]:
        """What a sum has given, (n,); on a GPU it is here that the others are waited for."""
        if summed.device.type == "cpu":
            return list(summed.tolist())
        with self._beats.waiting():
            return list(summed.tolist())

    def leave_note(self, note: str) -> None:
        """Leaves a note that any rank may look for."""
        self._notes.set(note, "")

    def has_note(self, note: str) -> bool:
        """Whether some rank has left it; False, too, where rank 0 is gone."""
        try:
            return bool(self._notes.check([note]))
        except RuntimeError:  # the main thread learns it from its collective
            return False


def world_mesh(device: torch.device, world_size: int) -> DeviceMesh:
    """All ranks in a row, for weights that are sharded over them. All ranks must call it."""
    return DeviceMesh(device.type, list(range(world_size)))


def backend_of(device: torch.device) -> str:
    """torch's name for what carries collectives between such devices."""
    return "nccl" if device.type == "cuda" else "gloo"


def close_group(*, in_peace: bool) -> bool:
    """Closes the process group if there is one; False if it stays open, and then only leaving the process ends it.

    Closing twice is once. What counts has been written and told before.

    Args:
        in_peace: the run has ended as it should. After a failure nothing is tried: the others may be gone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    if not in_peace:
        return False
    let_gloo_finish()
    closing = threading.Thread(target=dist.destroy_process_group, daemon=True, name="close-group")
    closing.start()
    closing.join(CLOSE_LIMIT_S)
    return not closing.is_alive()
