"""What Ray says of a lost node: the driver hears it, and leaves it in the folder of the head's front, which has lost that node's connection."""

import time
from collections.abc import Callable
from pathlib import Path

from unisono.causes import Verdict
from unisono.files import read_json

_PATIENCE_S = 3.0
"""Ray tells of an actor that it has ended within a second; of a node that is gone only after a quarter of a minute, for which a verdict does not wait."""
_POLL_S = 0.05


def loss_file(folder: str | Path, node_rank: int) -> str:
    """Where it lies."""
    return f"{folder}/lost-{node_rank}.json"


class LossesTold:
    """The head's side of it; a launch.witness."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Looks into a folder of the head's front."""
        self._folder = folder
        self._clock = clock

    def of_lost(self, node_rank: int) -> tuple[Verdict, float] | None:
        """What Ray says of a node, waited for a bounded time, and how long that was."""
        began = self._clock()
        while True:
            found = _read(Path(loss_file(self._folder, node_rank)))
            waited_s = self._clock() - began
            if found is not None:
                return found, waited_s
            if waited_s > _PATIENCE_S:
                return None
            time.sleep(_POLL_S)


def _read(path: Path) -> Verdict | None:
    """A file that is not there, or not whole yet, is none."""
    try:
        return Verdict.from_json(read_json(path))
    except (FileNotFoundError, ValueError):
        return None
