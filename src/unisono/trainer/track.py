"""Writes metrics to TensorBoard, Weights & Biases and SwanLab if the config requests it."""

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from unisono.base.errors import ConfigError
from unisono.base.events import Reporter
from unisono.base.files import BackgroundThread

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_CLOSE_S = 5.0


class Tracker(Protocol):
    """Where curves go."""

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Adds one point to each curve; None values are skipped."""

    def close(self) -> None:
        """Ends the curves."""


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Adds one point to each curve of each tracker."""
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def close(self) -> None:
        """Ends the curves of each tracker."""
        for tracker in self._trackers:
            tracker.close()


class TensorboardWriter:
    """Writes scalars to event files in the background.

    On resume, points of the earlier process after `purge_step` are hidden.
    """

    def __init__(self, directory: Path, report: Reporter, *, purge_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError.of(
                "TensorBoard is not installed",
                where="track",
                why=str(error),
                fix="pip install tensorboard, or set track: []",
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
            f"TensorBoard's curves end here ({self._directory}): {why}; metrics.jsonl has the figures, and"
            " training continues",
            fix="check that file system",
        )


_SERVICES = {"wandb": "Weights & Biases", "swanlab": "SwanLab"}


class ServiceWriter:
    """Sends scalars to Weights & Biases or SwanLab in the background; their own variables (WANDB_…,
    SWANLAB_…) say where, and with which key.

    A resumed run continues its curves: they have the run's id.
    """

    def __init__(
        self,
        service: Literal["wandb", "swanlab"],
        directory: Path,
        report: Reporter,
        *,
        name: str,
        run_id: str,
    ) -> None:
        try:
            self._package: Any = importlib.import_module(service)
        except ImportError as error:
            raise ConfigError.of(
                f"{_SERVICES[service]} is not installed",
                where="track",
                why=str(error),
                fix=f"pip install {service}, or remove {service} from `track`",
            ) from error
        self._service = service
        self._report = report
        self._background = BackgroundThread(service, self._warn)
        self._background.do(partial(self._open, directory, name, run_id))

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Adds one point to each curve; None values are skipped."""
        given = {name: value for name, value in values.items() if value is not None}
        self._background.do(partial(self._add, step, given))

    def close(self) -> None:
        """Sends the remaining points, if the service accepts them within a few seconds."""
        self._background.do(self._end)
        self._background.finish(_CLOSE_S)

    def _open(self, directory: Path, name: str, run_id: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if self._service == "wandb":
            self._run = self._package.init(name=name, id=run_id, resume="allow", dir=str(directory))
        else:
            self._run = self._package.init(
                experiment_name=name, id=run_id, resume="allow", logdir=str(directory)
            )

    def _add(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def _end(self) -> None:
        self._run.finish()

    def _warn(self, why: str) -> None:
        self._report.warning(
            self._service,
            f"the curves of {_SERVICES[self._service]} end here: {why}; metrics.jsonl has the figures, and"
            " training continues",
            fix=f"check the network and the key of {_SERVICES[self._service]}",
        )
