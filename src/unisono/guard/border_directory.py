"""Where a guarded program's traces are: the border in memory, while it runs; and the run's directory, which stays."""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.causes import Verdict
from unisono.errors import UsageError
from unisono.events import Show
from unisono.facts.path_monitor import Identity, PathMonitor, identity_of
from unisono.files import make_private_dir, read_object
from unisono.guard.program_ranks import ProgramDir
from unisono.rundir.lock import LockTaken, RunLock
from unisono.rundir.records import Outcome

_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it, 0700, with a name that nobody can guess
HELD = "held"
"""A file in it, locked by all that need it. A number of a process would say nothing to one in another container."""
_OUTCOMES: dict[int, Outcome] = {
    2: "refused",
    3: "disagreed",
    4: "stalled",
    5: "died",
    6: "unfit",
    7: "corrupt",
    75: "preempted",
    130: "interrupted",
}


def border_folder() -> tuple[Path, int]:
    """A new, private folder in memory, and what holds it; where there is no /dev/shm, among temporary files.

    It is held as long as the descriptor is open, and its keeper holds it, too.
    """
    base = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    _remove_left(base)
    while True:
        folder = base / f"unisono-{os.getuid()}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_SH)
        if (folder / HELD).exists():
            return folder, held
        os.close(held)  # another front took it for one that nobody holds, in the moment before the lock


@contextmanager
def border() -> Iterator[Path]:
    """The same, for as long as it is entered. Its keeper removes it, too, so that a front that is killed leaves none."""
    folder, held = border_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left(base: Path) -> None:
    """Removes folders of fronts that were killed together with their keepers, as where a container ends."""
    for folder in base.glob(f"unisono-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it is held, or being made, or of a version that holds none
            held = os.open(folder / HELD, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def run_dir(output_dir: str, *, is_head: bool, host: str, port: int = 0) -> tuple[ProgramDir, RunLock]:
    """The run's directory, made; and its lock, which the head holds from here on.

    Args:
        output_dir: as it was typed; empty: `runs/run-<UTC time>-<pid>`.
        is_head: whether this is node 0; other nodes may find what node 0 has put there.
        host: this node's name.
        port: on which the head meets the other nodes; 0 where there are none.

    Raises:
        UsageError: if there is something else in it, a living run holds it, or it cannot be made.
    """
    name = output_dir or f"runs/run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    path = Path(name).expanduser().absolute()
    run = ProgramDir(path)
    lock = RunLock(run.lock)
    try:
        if is_head:
            if not run.lock.exists():  # else who holds it is the better word
                _refuse_used(run)
            lock.acquire(host, os.getpid(), port=port)
            _refuse_used(run)  # two starts at once have both found it empty
        make_private_dir(run.log("", 0).parent)
    except UsageError:
        lock.release()
        raise
    except OSError as error:
        lock.release()
        raise UsageError.of(
            f"{path} cannot be made: {error.strerror}", where="--output-dir", fix="give another --output-dir"
        ) from error
    return run, lock


def _refuse_used(run: ProgramDir) -> None:
    """Another node of the same job may have made its folder of logs already, where all nodes have one disk."""
    path, logs = run.root, run.log("", 0).parent
    if not path.exists() or (
        path.is_dir() and all(_is_of_this_start(one, run, logs) for one in path.iterdir())
    ):
        return
    raise UsageError.of(
        f"{path} exists and is not empty",
        where="--output-dir",
        why="what an earlier run has left there is not overwritten",
        fix="give another --output-dir, or none: then each run has its own below runs/",
    )


def _is_of_this_start(one: Path, run: ProgramDir, logs: Path) -> bool:
    return one == run.lock or (one == logs and one.is_dir() and not any(one.iterdir()))


class FolderWatch:
    """Notices that the head's directory is removed, renamed or replaced while the program runs, and makes it again.

    Attributes:
        is_lost: another directory, or another start, has its place: nothing is written there any more.
    """

    def __init__(self, run: ProgramDir, lock: RunLock, show: Show, write_plan: Callable[[], object]) -> None:
        """Begins to watch.

        Args:
            run: the directory.
            lock: of it, held.
            show: is told what is done about it.
            write_plan: writes what is written before the program starts.
        """
        self.is_lost = False
        self._run, self._lock, self._show, self._write_plan = run, lock, show, write_plan
        self._root = identity_of(run.root)
        self._watch = PathMonitor((run.root, run.lock))

    def look(self) -> None:
        """Acts on what has changed since the last look. Never waits where nothing has."""
        found = self._watch.news()
        if found is not None and not self.is_lost:
            self._judge(found[0].identity, found[0].now_at)

    def settle(self) -> None:
        """The last look, before it is written how the program ended."""
        self._watch.close()
        with contextlib.suppress(OSError):  # storage that fails fails the writing, too
            if not self.is_lost:
                self._judge(identity_of(self._run.root), None)

    def _judge(self, root: Identity | None, now_at: str | None) -> None:
        path = self._run.root
        what = f"{path} was {f'renamed to {now_at}' if now_at else 'removed'} while the program runs"
        try:
            if root is None:
                path.mkdir(mode=0o700, parents=True)
                self._make_whole(f"{what}: it is made again, and the program's log with it")
            elif root != self._root and not self._lock.names_us():
                self._lose(
                    f"another directory was put in the place of {path}: the log and the result of this run are not written there"
                )
            elif not self._lock.is_in_place():
                self._make_whole(
                    f"{self._run.lock} was removed while the program runs: the directory is locked again"
                )
        except LockTaken as taken:
            self._lose(f"{what}, and another start has taken its place: {taken.holder}")
        except OSError as error:
            self._lose(f"{what}, and cannot be made again: {error.strerror} ({error.filename})")

    def _make_whole(self, what: str) -> None:
        self._lock.keep()
        make_private_dir(self._run.log("", 0).parent)
        self._root = identity_of(self._run.root)
        if not self._run.plan.exists():
            self._write_plan()
        self._watch.close()
        self._watch = PathMonitor((self._run.root, self._run.lock))
        self._warn(what)

    def _lose(self, what: str) -> None:
        self.is_lost = True
        self._warn(what)

    def _warn(self, what: str) -> None:
        fix = "end a run first (Ctrl-C), then remove or rename its directory"
        self._show(
            {"kind": "warning", "time": time.time(), "code": "output_removed", "text": what, "fix": fix}
        )


def is_head_directory(run: ProgramDir, run_id: str) -> bool:
    """Whether this node's directory is the head's: then the head writes what is there once."""
    return read_object(run.plan).get("run_id") == run_id


def outcome_of(exit_code: int, verdict: Verdict | None, *, stopped: str = "") -> Outcome:
    """The word of result.json. A program's own exit codes mean what the program wants."""
    if verdict is not None:
        return _OUTCOMES.get(exit_code, "failed")
    if stopped:
        return "interrupted" if stopped == "SIGINT" else "preempted"
    return "completed" if exit_code == 0 else "failed"
