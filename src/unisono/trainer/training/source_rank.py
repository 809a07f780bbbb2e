"""The rank of a run, as a source of batches needs it that generates its rows."""

from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.base.events import Reporter
from unisono.guard.watch import Beats
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.process_group import Group


@dataclass(frozen=True)
class RunRank:
    """See `batches.source.SourceRank`."""

    group: Group
    plan: RunPlan
    device: torch.device
    directory: Path
    report: Reporter
    beats: Beats

    @property
    def rank(self) -> int:
        """Its number."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.group.world_size

    def sum(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks."""
        self.group.sum(tensor)

    def figures(self, summed: torch.Tensor) -> list[float]:
        """The values of a sum."""
        return self.group.figures(summed)

    def enter(self, phase: str, *, done: int = 0, total: int = 0) -> None:
        """Tells the watch what the rank does, or that it made progress."""
        self.beats.enter(phase, done=done, total=total)

    def show(self, phase: str, text: str, *, done: int | None = None, total: int | None = None) -> None:
        """Shows people what the rank does."""
        self.report.phase(phase, text, done=done, total=total)
