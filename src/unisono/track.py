"""Metrics to TensorBoard, if the config asks for it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import ConfigError
from unisono.events import Reporter
from unisono.files import BackgroundThread

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_CLOSE_S = 5.0


class TensorboardWriter:
    """Writes scalars to event files in the background. On resume, points of the earlier process after `purge_step` are hidden."""

    def __init__(self, directory: Path, report: Reporter, *, purge_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError.of(
                "TensorBoard is not installed",
                where="track",
                why=str(error),
                fix="pip install 'unisono[track]', or set track: []",
            ) from error
        self._directory = directory
        self._report = report
        self._background = BackgroundThread("tensorboard", self._warn)
        self._background.do(partial(self._open, SummaryWriter, purge_step))

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Adds one point to each curve; None values are skipped."""
        self._background.do(partial(self._add, step, values))

    def close(self) -> None:
        """Writes the remaining points, if the disk accepts them within a few seconds."""
        self._background.do(self._end)
        self._background.finish(_CLOSE_S)

    def _open(self, writer: type["SummaryWriter"], purge_step: int | None) -> None:
        self._writer = writer(str(self._directory), purge_step=purge_step)

    def _add(self, step: int, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def _end(self) -> None:
        self._writer.close()

    def _warn(self, why: str) -> None:
        self._report.warning(
            "tensorboard",
            f"TensorBoard's curves end here ({self._directory}): {why}; metrics.jsonl has the figures, and training continues",
            fix="check that file system",
        )
