"""Whether the run's directory is still where it was: a run ends if it was removed, renamed or
replaced.
"""

from unisono.base.errors import Problem
from unisono.base.files import BackgroundThread, read_bytes
from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.writer import StorageFailed

_RESPONSE_S = 0.2


class DirectoryCheck:
    """Compares the lock in the run's directory with the one that was there at the start.

    The lock stays in the directory from the start to the end of a run, and names that start. So if
    it is missing, or a different start's, the directory no longer belongs to this run.
    """

    def __init__(self, files: RunDir) -> None:
        self._root, self._lock = files.root, files.lock
        self._holder = read_bytes(self._lock) if self._lock.exists() else None
        self._is_lost = False
        self._looks = BackgroundThread("unisono.directory")

    def is_lost(self) -> bool:
        """Whether the directory is gone, or was before.

        Never so for a rank started without a lock. Storage that does not respond delays one step by
        0.2 s: until it does, what was seen last counts, and training continues.
        """
        if not self._is_lost and self._holder is not None and self._looks.is_idle:
            self._looks.do(self._look)
            self._looks.finish(_RESPONSE_S)
        return self._is_lost

    def _look(self) -> None:
        try:
            self._is_lost = read_bytes(self._lock) != self._holder
        except (FileNotFoundError, NotADirectoryError):
            self._is_lost = True
        except OSError:
            return  # storage that fails for a moment says nothing about what is there

    def require(self, step: int) -> None:
        """Refuses a save in a directory that is gone.

        Raises:
            StorageFailed: if it is.
        """
        if self.is_lost():
            problem = Problem(
                f"step {step} cannot be saved in {self._root}",
                str(self._root),
                "it was removed, renamed or replaced during the run",
                "do not move or remove a run's directory during training",
            )
            raise StorageFailed(problem, path=self._root)
