"""The memory in which the ranks of this node keep their newest step. It has no name, so nothing of it can be left behind."""

import contextlib
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Self

from unisono.checkpoint.snapshot import StepSnapshot, read_slots
from unisono.plan import RunPlan

_REPLICAS = 2  # a copy of rank 0 for the case that its memory is damaged; more would only cost memory


class KeptMemory:
    """One piece of memory for each rank that keeps its steps: the front's own, inherited by the rank. Use it as a context."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        for rank in ranks:
            with contextlib.suppress(
                OSError
            ):  # no file descriptors left, or no such call here: then nothing is kept
                self._fds[rank] = os.memfd_create(f"unisono-rank-{rank}", os.MFD_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the memory back. What `read` gave keeps its own."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    @property
    def ranks(self) -> Sequence[int]:
        """Those that have memory."""
        return sorted(self._fds)

    def fd(self, rank: int) -> int | None:
        """For the rank's process; None if it keeps nothing."""
        return self._fds.get(rank)

    def read(self, rank: int) -> tuple[list[StepSnapshot], list[str]]:
        """What the rank, which has ended, has kept, newest first; and what is wrong with the rest."""
        content = self.content(rank)
        return read_slots(content) if content is not None else ([], [])

    def content(self, rank: int) -> memoryview | None:
        """All of the rank's memory; None where nothing was written to it."""
        size = os.fstat(self._fds[rank]).st_size
        return memoryview(mmap.mmap(self._fds[rank], size, prot=mmap.PROT_READ)) if size else None


def keeping_ranks(plan: RunPlan, node_rank: int) -> list[int]:
    """The ranks of a node that keep their steps.

    Of an adapter's run those who together hold all of its state: all where it is sharded, else the first ones of the head's node. What
    is trained without an adapter is too large for it.
    """
    if plan.config.adapter is None:
        return []
    places = [place.rank for place in plan.on_node(node_rank)]
    if plan.strategy == "fsdp":
        return places
    return places[:_REPLICAS] if node_rank == 0 else []
