"""Metrics to TensorBoard, if the config asks for it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.background import BackgroundThread
from unisono.errors import ConfigError
from unisono.events import Reporter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_CLOSE_S = 5.0


class TensorboardWriter:
    """Writes scalars to event files, aside: training waits for none of it. On resume, points after `purge_step` of an earlier start are hidden."""

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
        self._aside = BackgroundThread("tensorboard", self._tell)
        self._aside.do(partial(self._open, SummaryWriter, purge_step))

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """One point of each curve; values that are None are left out."""
        self._aside.do(partial(self._add, step, values))

    def close(self) -> None:
        """Writes what is left, if the disk takes it soon."""
        self._aside.do(self._end)
        self._aside.finish(_CLOSE_S)

    def _open(self, writer: type["SummaryWriter"], purge_step: int | None) -> None:
        self._writer = writer(str(self._directory), purge_step=purge_step)

    def _add(self, step: int, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def _end(self) -> None:
        self._writer.close()

    def _tell(self, why: str) -> None:
        self._report.warning(
            "tensorboard",
            f"TensorBoard's curves end here ({self._directory}): {why}; metrics.jsonl has them, and training goes on",
            fix="check that file system",
        )
