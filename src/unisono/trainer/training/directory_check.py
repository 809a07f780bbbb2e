"""Whether the run's directory is still where it was: a run ends if it was removed, renamed or
replaced.
"""

from unisono.base.errors import Problem
from unisono.guard.facts import identity_of
from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.writer import StorageFailed


class DirectoryCheck:
    """Compares the lock in the run's directory with the one that was there at the start.

    The lock stays in the directory from the start to the end of a run, so if it is missing, or a
    different start's, the directory no longer belongs to this run.
    """

    def __init__(self, files: RunDir) -> None:
        self._root, self._lock = files.root, files.lock
        self._identity = identity_of(self._lock)
        self._is_lost = False
        self._holder = self._lock.read_bytes() if self._identity is not None else b""

    def is_lost(self) -> bool:
        """Whether the directory is gone, or was before.

        Never so for a rank started without a lock.
        """
        if self._is_lost or self._identity is None:
            return self._is_lost
        try:
            identity = identity_of(self._lock)
            if identity == self._identity:
                return False
            if identity is None or self._lock.read_bytes() != self._holder:
                self._is_lost = True
                return True
        except OSError:  # storage that fails for a moment says nothing about what is there
            return False
        self._identity = identity  # the file system was mounted again
        return False

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
