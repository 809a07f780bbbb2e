"""What can be wrong with a checkpoint that is read, and with the storage that one is written to."""

import contextlib
import shutil
from pathlib import Path

from unisono.causes import Evidence, Verdict, find_cause
from unisono.errors import Problem, UnfitError
from unisono.storage_errors import error_number, is_full, reason, remedy, storage_verdict, words
from unisono.units import show_bytes


class StorageFailed(UnfitError):  # noqa: N818 - named for what happened, as RankDied is
    """A checkpoint could not be written; what was there before is untouched.

    Attributes:
        path: where it should have been.
    """

    def __init__(self, *problems: Problem, path: Path, verdict: Verdict | None = None) -> None:
        super().__init__(*problems, verdict=verdict)
        self.path = path


class StorageFull(StorageFailed):
    """There is not enough room for a checkpoint.

    Attributes:
        needed_bytes: the size of the checkpoint.
        free_bytes: what was free for it.
    """

    def __init__(self, path: Path, *, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        missing = show_bytes(self.missing_bytes)
        problem = Problem(
            f"no room for checkpoint {path.name}: {missing} ({self.missing_bytes} bytes) are missing", str(path),
            f"it needs {show_bytes(needed_bytes)} in {path.parent}, and {show_bytes(free_bytes)} are free",
            f"free {missing} there, or lower checkpoint.keep; the older checkpoints are as they were",
        )  # fmt: skip
        super().__init__(problem, path=path, verdict=disk_full(problem, phase="save"))

    @property
    def missing_bytes(self) -> int:
        """How much more room it takes, in bytes."""
        return max(1, self.needed_bytes - self.free_bytes)


def disk_full(problem: Problem, *, phase: str) -> Verdict:
    """The verdict on a disk that has no room for what a problem tells of; which node's disk it is who knows the rank adds."""
    known = find_cause("disk_full")
    return Verdict(
        cause="disk_full", when="during", summary=problem.what, phase=phase, evidence=(Evidence(where=problem.where, text=problem.why),),
        fix=(problem.fix, *(known.remedy if known else ())),
    )  # fmt: skip


def free_bytes(directory: Path) -> int:
    """Free bytes where `directory` is."""
    return shutil.disk_usage(directory).free


def storage_trouble(error: BaseException, target: Path, temporary: Path) -> StorageFailed | None:
    """What an exception of a write means for the user; None if it is not the storage's doing. Removes what was written."""
    if isinstance(error, StorageFailed):
        error.path = target
        return None
    if error_number(error) is None and not isinstance(error, OSError):
        return None
    if is_full(error):
        with contextlib.suppress(OSError):  # a directory that is gone as well cannot be measured
            written = sum(file.stat().st_size for file in temporary.glob("*")) if temporary.exists() else 0
            shutil.rmtree(temporary, ignore_errors=True)
            free = free_bytes(_existing(target.parent))
            return StorageFull(target, needed_bytes=max(written, free) + 1, free_bytes=free)
    problem = Problem(
        f"checkpoint {target.name} cannot be written: {words(error)}", str(getattr(error, "filename", None) or target), reason(error),
        remedy(error, else_="fix it, or set output_dir to a different one; the older checkpoints are as they were"),
    )  # fmt: skip
    return StorageFailed(problem, path=target, verdict=storage_verdict(error, problem, phase="save"))


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
