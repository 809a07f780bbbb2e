"""The exceptions for users, and errors of the storage.

The class defines the exit code, the instance holds the problems.
"""

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Self

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.text import one_line, plain, show_bytes

FULL = (errno.ENOSPC, errno.EDQUOT)
_OPEN_FILES = (errno.EMFILE, errno.ENFILE)
_DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_BROKEN = (
    errno.EIO,
    errno.ENXIO,
    errno.ENODEV,
    errno.EREMOTEIO,
    errno.EBADMSG,
    errno.EUCLEAN,
    errno.ENOLCK,
    errno.ESTALE,
    errno.EROFS,
)
"""Together with those above: numbers that concern files even if the error has no path, e.g. from
write(2), fsync(2) and mmap(2).
"""
_OF_A_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
"""Only a path from the user is too long or a link loop."""
_OF_ACCESS = (errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENXIO)
# safetensors is written in Rust, and has the errno only in its message.
_IN_TEXT = re.compile(r"\bos error (\d+)\b")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: what it is, where it is, why it is an error, and how to fix it.

    Each field is one line.
    """

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def lines(self) -> list[str]:
        """Returns up to four plain lines for a terminal."""
        lines = [f"error: {one_line(self.what)}"]
        for label, text in (("where", self.where), ("why", self.why), ("fix", self.fix)):
            if text:
                lines.append(f"  {label + ':':<6} {one_line(text)}")
        return lines


class UnisonoError(Exception):
    """The base class of errors for users: one or more problems, shown without a traceback.

    Attributes:
        exit_code: exit code of a program that ends with this error.
        problems: all problems that were found, not only the first.
        verdict: the error as a Verdict, if its cause is in the catalogue.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *problems: Problem, verdict: Verdict | None = None) -> None:
        self.problems = problems
        self.verdict = verdict
        # Python shows the text as it is.
        super().__init__(plain("; ".join(problem.what for problem in problems)))

    @classmethod
    def of(
        cls, what: str, *, where: str = "", why: str = "", fix: str = "", verdict: Verdict | None = None
    ) -> Self:
        """Makes an error with one problem."""
        return cls(Problem(what, where, why, fix), verdict=verdict)

    def lines(self) -> list[str]:
        """Returns all problems as plain lines."""
        return [plain(line) for problem in self.problems for line in problem.lines()]

    def to_json(self) -> dict[str, object]:
        """Returns the exit code, the problems and the verdict as a JSON object."""
        verdict = self.verdict.to_json() if self.verdict else None
        return {
            "exit_code": self.exit_code,
            "problems": [asdict(p) for p in self.problems],
            "verdict": verdict,
        }


class UsageError(UnisonoError):
    """The command or call is invalid, or not possible now. Nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """The config was refused."""


class DataError(UsageError):
    """The data were refused: a file, a row or a template."""


class ModelError(UsageError):
    """The model or its tokenizer was refused: missing files, wrong shapes, unknown type."""


class Disagreed(UnisonoError):  # noqa: N818 - named for what happened
    """Ranks or nodes disagree, or one is missing or refused to start. Nothing was trained.

    Attributes:
        already_shown: whether the verdict has already been shown, before waiting for the other
            nodes.
    """

    exit_code = 3
    already_shown: bool = False


class UnfitError(UnisonoError):
    """The machine is not fit for the run, or storage failed."""

    exit_code = 6


class IntegrityError(UnisonoError):
    """A file is damaged, or an intact checkpoint is needed and there is none."""

    exit_code = 7


class EndedByVerdict(UnisonoError):  # noqa: N818 - named for what happened
    """A verdict stopped the run while its ranks were alive."""

    exit_code = 4


class RankDied(UnisonoError):  # noqa: N818 - named for what happened
    """A rank failed: exception, signal or out of memory."""

    exit_code = 5


# ---- errors of the storage


def error_number(error: BaseException) -> int | None:
    """The errno of a failed file operation; None if the exception has none."""
    if isinstance(error, OSError):
        return error.errno if isinstance(error.errno, int) else None
    match = _IN_TEXT.search(str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(match[1]) if match else None


def storage_words(error: BaseException) -> str:
    """The system's message, e.g. "File too large"."""
    number = error_number(error)
    words = error.strerror if isinstance(error, OSError) else None
    # pyarrow wraps the system's message.
    if words and number is not None and "Detail: [errno" in words:
        return os.strerror(number)
    return words or (os.strerror(number) if number is not None else str(error))


def is_full(error: BaseException) -> bool:
    """Whether the disk or a quota is full."""
    return error_number(error) in FULL


def file_size_limit() -> int | None:
    """The largest file that this process may write, in bytes (`ulimit -f`); None: no limit."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def storage_reason(error: BaseException) -> str:
    """Why a file could not be read or written, in one sentence; with the value of a limit."""
    number = error_number(error)
    if _is_too_large(error):
        limit = file_size_limit()
        if limit is None:
            return "the file system does not allow files of this size"
        return f"the file size limit is {limit} bytes ({show_bytes(limit)}, `ulimit -f`)"
    if number in _OPEN_FILES:
        return (
            f"the open file limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (`ulimit -n`), or the"
            " limit of the system is reached"
        )
    if number in FULL:
        return "the disk or the quota is full"
    if number == errno.EROFS:
        return "the file system is read-only, as it was mounted or after a device error"
    if _has_no_room_for_files(error):
        return "that directory does not take new files"
    if number in _DENIED:
        return "this user has no write permission there"
    if number in (errno.EEXIST, errno.ENOTDIR):
        return "a file is where a directory is needed"
    if number in _MISSING:
        return "it was removed, renamed or replaced while it was used"
    return "the storage failed"


def _has_no_room_for_files(error: BaseException) -> bool:
    """Whether a file was not made because its directory is the kernel's, as /proc: a file system
    without blocks.
    """
    path = getattr(error, "filename", None)
    if path is None or error_number(error) not in (errno.ENOENT, errno.EACCES, errno.EPERM):
        return False
    try:
        return os.statvfs(Path(os.fsdecode(path)).parent).f_blocks == 0
    except OSError:
        return False


def storage_remedy(
    error: BaseException,
    *,
    full: str = "free space there, and run the same command again",
    else_: str = "",
) -> str:
    """How to fix it.

    Args:
        error: of a file operation.
        full: the answer for a full disk.
        else_: the answer if neither a limit nor a full disk is the cause; empty: by the error.
    """
    number = error_number(error)
    if _is_too_large(error) and file_size_limit() is not None:
        return (
            "raise the limit in the shell that starts the run: `ulimit -f unlimited` (in a service:"
            " LimitFSIZE=infinity; for all logins: fsize in limits.conf)"
        )
    if number in _OPEN_FILES:
        return "raise the limit in the shell that starts the run: `ulimit -n 65536`"
    if number in FULL:
        return full
    if else_:
        return else_
    if number == errno.EROFS:
        return (
            "name a directory that can be written, or mount that file system read-write (mount -o remount,rw)"
        )
    if number in (*_DENIED, errno.EEXIST, errno.ENOTDIR) or _has_no_room_for_files(error):
        return "name a directory in which you may create files"
    return "check that file system, and run the same command again"


def cache_remedy(error: BaseException) -> str:
    """How to fix it where a cache cannot be written; see `storage_remedy`."""
    return storage_remedy(
        error,
        full="free space there, or set XDG_CACHE_HOME to a disk with free space",
        else_="fix that file system, or set XDG_CACHE_HOME to a different place",
    )


def require_writable(folder: Path, *, where: str, why: str, fix: str) -> None:
    """Refuses a directory that cannot be made or used, by making a file in it, or in the nearest
    parent; nothing is left of it.

    Permissions alone do not show it: they allow root to write in /proc and on a file system that is
    read-only.

    Args:
        where: the key or option with its name.
        why: what would be in it.
        fix: what to set instead.

    Raises:
        UsageError: if no file can be made.
    """
    import tempfile  # not at the top: it loads a lot, and few processes need it

    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        kind = "a file" if there.exists() else "a broken link"
        raise UsageError.of(
            f"{there} is {kind}", where=where, why=why, fix=f"{fix}, or a path that does not exist"
        )
    try:
        with tempfile.TemporaryFile(dir=there):
            next(there.iterdir(), None)
    except OSError as error:
        what = f"{there} cannot be written: {storage_reason(error)}"
        raise UsageError.of(what, where=where, why=why, fix=storage_remedy(error, else_=fix)) from error


def _is_too_large(error: BaseException) -> bool:
    """Whether the system refused to grow a file; our own readers refuse large files with a
    different message.
    """
    return error_number(error) == errno.EFBIG and storage_words(error) == os.strerror(errno.EFBIG)


def storage_verdict(error: BaseException, problem: Problem, *, phase: str | None) -> Verdict | None:
    """The verdict on a limit, a full disk, or storage that became unwritable in a writing phase;
    None if the catalogue has no cause for it.
    """
    number = error_number(error)
    is_limit = number in _OPEN_FILES or (_is_too_large(error) and file_size_limit() is not None)
    name = "disk_full" if number in FULL else "ulimit" if is_limit else None
    if number in _DENIED and phase is not None:
        name = "storage_unfit"
    entry = find_cause(name) if name is not None else None
    if entry is None:
        return None
    return Verdict(
        cause=entry.id,
        when="during",
        summary=problem.what,
        phase=phase,
        evidence=(Evidence(where=problem.where, text=problem.why),),
        fix=tuple(dict.fromkeys((problem.fix, *entry.remedy))) if number in FULL else (problem.fix,),
    )


def storage_failure(error: BaseException) -> UnfitError | None:
    """The error for the user (exit code 6) if the storage caused an exception; None otherwise.

    An error with an absolute path concerns a file. Without one the errno decides: sockets, pipes
    and processes fail with different ones.
    """
    number = error_number(error)
    if number is None:
        return None
    path = str(getattr(error, "filename", None) or "")
    if not path.startswith("/") and number not in (errno.EFBIG, *FULL, *_OPEN_FILES, *_BROKEN):
        return None
    failed_use = "cannot be used" if path else "a file cannot be read or written"
    problem = Problem(
        f"{path} {failed_use}: {storage_words(error)}".strip(),
        path,
        storage_reason(error),
        storage_remedy(error),
    )
    return UnfitError(problem, verdict=storage_verdict(error, problem, phase=None))


@contextlib.contextmanager
def as_usage_error() -> Iterator[None]:
    """Turns an unusable path into a usage error, for code that runs before anything of the run
    exists.

    Raises:
        UsageError: in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        refusal = unusable_path(error, has_started=False)
        if refusal is None:
            raise
        raise refusal from error


def unusable_path(error: BaseException, *, has_started: bool) -> UsageError | None:
    """The error for the user (exit code 2) if a given path cannot be used; None for other
    errors.

    Args:
        error: uncaught in a process.
        has_started: whether the work already has its own files, which were usable when it began:
            then only a name that can never be used is the user's mistake.
    """
    path = getattr(error, "filename", None) if isinstance(error, OSError) else None
    if path is None or error_number(error) not in (_OF_A_NAME if has_started else (*_OF_A_NAME, *_OF_ACCESS)):
        return None
    return UsageError.of(
        f"a path cannot be used: {storage_words(error)}",
        where=str(path),
        fix="set a different path, or make this one usable",
    )
