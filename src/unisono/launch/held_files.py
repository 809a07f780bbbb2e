"""Files that living ranks write, held open by their front: one that is removed keeps its content, and gets what its rank still writes."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.files import make_private_dir, whole_file
from unisono.plan import RankPlace
from unisono.rundir import RunDir

_CHUNK_BYTES = 1 << 20


class HeldFiles:
    """The growing files of a run's directory: metrics, and logs, events and TensorBoard files of this node's ranks."""

    def __init__(self, run: RunDir, places: Sequence[RankPlace]) -> None:
        self._run, self._places = run, places
        self._fds: dict[Path, int] = {}

    def __bool__(self) -> bool:
        """Whether any file is held."""
        return bool(self._fds)

    def hold(self) -> None:
        """Opens the files that exist and are not held yet."""
        for path in self._paths():
            if path not in self._fds:
                with contextlib.suppress(OSError):  # nothing was written there yet
                    self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def restore(self) -> None:
        """Writes each file to its path again, unless what is there is as long.

        Raises:
            OSError: from the file system.
        """
        for path, fd in self._fds.items():
            if not path.exists() or os.fstat(fd).st_size > path.stat().st_size:
                if path.parent != self._run.root:
                    make_private_dir(path.parent)
                mode = stat.S_IMODE(os.fstat(fd).st_mode)  # logs may hold secrets
                with whole_file(path, mode=mode) as temporary, temporary.open("wb") as copy:
                    _copy(fd, copy.fileno())

    def close(self) -> None:
        """Holds nothing any more."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _paths(self) -> Iterator[Path]:
        yield self._run.metrics
        for place in self._places:
            log = self._run.log(place.host, place.rank)
            yield from (log, log.with_suffix(".times"), self._run.events(place.rank))
        if self._run.tensorboard.is_dir():
            yield from self._run.tensorboard.iterdir()


def _copy(source: int, target: int) -> None:
    offset = 0
    while chunk := os.pread(source, _CHUNK_BYTES, offset):
        offset += len(chunk)
        while chunk:
            chunk = chunk[os.write(target, chunk) :]
