"""A rank that calls another collective than the others do."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from unisono.plan import RunPlan
from unisono.train.faults.marking import mark, struck
from unisono.train.group import Group
from unisono.watch import Beats


def among(group: Group, plan: RunPlan, beats: Beats) -> Group:
    """other_collective and other_shape: the group as this rank will use it. Beats record what is really called."""
    if "other_collective" in plan.faults or "other_shape" in plan.faults:
        return _Odd(group, plan, beats)
    return group


class _Odd:
    """A group whose sum is another operation, once."""

    def __init__(self, group: Group, plan: RunPlan, beats: Beats) -> None:
        self._group, self._plan, self._beats = group, plan, beats
        self.rank, self.world_size, self.is_main = group.rank, group.world_size, group.is_main

    def sum(self, tensor: torch.Tensor) -> None:
        self._group.sum(self._instead(tensor))

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        return self._group.begin_sum(self._instead(tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor)

    def any(self, statement: bool) -> bool:  # noqa: FBT001 - as of the group
        return self._group.any(statement)

    def barrier(self) -> None:
        self._group.barrier()

    def figures(self, summed: torch.Tensor) -> list[float]:
        return self._group.figures(summed)

    def leave_note(self, note: str) -> None:
        self._group.leave_note(note)

    def has_note(self, note: str) -> bool:
        return self._group.has_note(note)

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is summed in place of `tensor`; before that another collective may come."""
        step = self._beats.step
        if struck(self._plan, "other_collective", self.rank, step) is not None:
            mark(self._plan, self.rank)
            self._beats.begin_collective("all_gather", tensor.numel())
            with self._beats.waiting():
                dist.all_gather([torch.empty_like(tensor) for _ in range(self.world_size)], tensor)
        if struck(self._plan, "other_shape", self.rank, step) is not None:
            mark(self._plan, self.rank)
            return torch.cat([tensor, tensor.new_zeros(1)])
        return tensor
