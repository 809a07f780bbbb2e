"""The rank of a run, as what makes its rows and measures its answers needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.base.events import Reporter
from unisono.guard.watch import Beats
from unisono.trainer.batches.source import StopRequested
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.front_io import StopRequest, flags_of
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.weights import write_adapter_of


@dataclass(frozen=True)
class RunRank:
    """The rank as a source of batches needs it; see `batches.source.SourceRank`."""

    group: Group
    plan: RunPlan
    device: torch.device
    directory: Path
    report: Reporter
    beats: Beats
    loaded: LoadedModel
    stop: StopRequest

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

    def write_adapter(self, directory: Path | None) -> None:
        """Writes the present adapter."""
        if directory is not None:
            directory.mkdir()
        write_adapter_of(self.loaded, self.plan, directory)

    @property
    def stop_flags(self) -> Sequence[float]:
        """Its stop request."""
        return flags_of(self.stop.outcome)

    def enter(self, phase: str, *, done: int = 0, total: int = 0) -> None:
        """Tells the watch what the rank does, or that it made progress."""
        self.beats.enter(phase, done=done, total=total)

    def end_if_stopped(self) -> None:
        """Raises StopRequested once there is a stop request."""
        if self.stop.outcome is not None:
            raise StopRequested

    def show(self, phase: str, text: str, *, done: int | None = None, total: int | None = None) -> None:
        """Shows people what the rank does, for which others may wait."""
        rank = self.rank
        shown = text if self.world_size == 1 else f"rank {rank}: {text}"
        self.report.send(
            {"kind": "phase", "phase": phase, "text": shown, "done": done, "total": total, "of_rank": rank}
        )

    def warn(self, code: str, text: str, *, fix: str = "") -> None:
        """Shows people a warning."""
        self.report.warning(code, text, fix=fix)
