"""Metrics for TensorBoard, when `track: [tensorboard]` asks for them."""

from pathlib import Path

from unisono.errors import ConfigError


class TensorboardWriter:
    """Writes scalars to event files. On resume, points after `purge_step` of an earlier start are hidden."""

    def __init__(self, directory: Path, *, purge_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError.of(
                "TensorBoard is not installed",
                where="track",
                why=str(error),
                fix="pip install 'unisono[track]', or set track: []",
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """One point of each curve; values that are None are left out."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
