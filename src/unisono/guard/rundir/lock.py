"""The lock of a run's directory: one start at a time, and the lock of a dead holder is taken
over.

flock decides between processes on one kernel; it ends with its holder, even after kill -9. Some
file systems keep flock local to a node. So the holder also writes its host into the file and sends
heartbeats: a separate process touches the file every few seconds, since storage may hang. A start
that gets a lock with the name of a different host waits for heartbeats before it takes the lock
over.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from unisono.base.causes import Verdict
from unisono.base.errors import Problem, UsageError
from unisono.base.files import kind_of, make_private_dir, parse_json
from unisono.base.text import one_line
from unisono.guard.facts.storage import responds

BEAT_S = 5.0
_BEATS_OF_PATIENCE = 3
_LAST_BEAT_S = 5.0
_END_POLL_S = 0.05
_WRITING_S = 1.0  # a holder writes its name immediately after locking


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock: host, process, nonce, time (UTC, ISO 8601), and the port of its
    rendezvous (0: none).
    """

    host: str
    pid: int
    nonce: str
    since: str
    port: int = 0

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {one_line(self.host, limit=100)}, since {one_line(self.since, limit=40)}"
        )


class LockTaken(UsageError):  # noqa: N818 - named for what happened
    """A running process holds the lock.

    Attributes:
        holder: if it has written its name.
    """

    def __init__(self, *problems: Problem, verdict: Verdict | None = None) -> None:
        super().__init__(*problems, verdict=verdict)
        self.holder: Holder | None = None


class RunLock:
    """The lock at `path`. Held from acquire to release, or until the process exits."""

    def __init__(self, path: Path, *, beat_s: float = BEAT_S) -> None:
        self.path = path
        self._beat_s = beat_s
        self._fd: int | None = None
        self._holder: Holder | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(
        self, host: str, pid: int, *, port: int = 0, on_wait: Callable[[str], None] | None = None
    ) -> str | None:
        """Takes the lock; a missing directory is created.

        Returns a message if it was the lock of a dead holder.

        Args:
            port: of the rendezvous with other nodes; 0 without any.
            on_wait: called once with a message if checking a holder on a different node takes time.

        Raises:
            LockTaken: if a running process holds it.
            UsageError: if it cannot be opened or locked.
        """
        assert self._fd is None, "already held"
        make_private_dir(self.path.parent)
        try:
            fd = self._lock_file()
        except OSError as error:
            raise self._unusable(error) from error
        try:
            earlier = _parse(os.pread(fd, 4096, 0))
            if earlier is not None and earlier.host != host:
                self._wait_for_beats(fd, earlier, on_wait)
            since = datetime.now(UTC).isoformat(timespec="seconds")
            self._holder = Holder(host, pid, secrets.token_hex(8), since, port)
            _write(fd, self._holder)
        except BaseException as error:  # raised again, without the lock
            os.close(fd)
            if isinstance(error, OSError) and error.filename is None:  # of pwrite and fsync
                error.filename = str(self.path)
            raise
        self._fd = fd
        self._ended.clear()
        self._thread = threading.Thread(target=self._beat, name="run.lock", daemon=True)
        self._thread.start()
        return f"took over the lock of {earlier}, which has ended" if earlier is not None else None

    def keep(self) -> bool:
        """Checks that the file at the path is the held lock, and takes it again if it was removed;
        returns whether it was.

        Raises:
            LockTaken: if a different start has taken it meanwhile.
            FileNotFoundError: if the directory is gone.
            OSError: from the file system, or if something else is in its place.
        """
        assert self._fd is not None, "not held"
        assert self._holder is not None
        if self.is_in_place():
            return False
        try:
            fd = self._lock_file()
        except LockTaken as taken:
            if taken.holder is not None and taken.holder.nonce == self._holder.nonce:
                # The file system was remounted, and treats our lock as a different one.
                return False
            raise
        _write(fd, self._holder)
        os.close(self._fd)
        self._fd = fd
        return True

    def is_in_place(self) -> bool:
        """Whether the file at the path is the one that is locked."""
        return self._fd is not None and _is_at(self._fd, self.path)

    def is_held(self) -> bool:
        """Whether the directory still has this lock, even after a remount."""
        return self.is_in_place() or self.names_us()

    def names_us(self) -> bool:
        """Whether the file at the path has our name, even with a different inode, e.g. after a
        remount.
        """
        try:
            holder = _parse(self.path.read_bytes()[:4096])
        except FileNotFoundError:
            return False
        return holder is not None and holder == self._holder

    def release(self) -> None:
        """Releases the lock and removes the file, unless the storage does not respond.

        A second call does nothing.
        """
        if self._fd is None:
            return
        self._ended.set()
        assert self._thread is not None
        self._thread.join(_LAST_BEAT_S)
        # If the storage does not respond, touching the file would hang, too; the lock ends with the
        # process.
        if self._thread.is_alive() or not self._storage_responds():
            return
        # On read-only storage the file stays; the lock ends with the descriptor, and the next start
        # takes it over.
        with contextlib.suppress(OSError):
            if _is_at(self._fd, self.path):  # the directory may have been renamed with it
                self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _storage_responds(self) -> bool:
        try:
            return responds(self.path, limit_s=_LAST_BEAT_S)
        except OSError:  # no process can be started: not a word about the storage
            return False

    def _lock_file(self) -> int:
        """The open, locked file at the path; retried if a holder removes it between open and
        lock.
        """
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _wait_for_name(fd)
                os.close(fd)
                raise _taken(self.path, holder) from None
            except OSError:
                os.close(fd)
                raise
            if _is_at(fd, self.path):
                return fd
            os.close(fd)

    def _open(self) -> int:
        """The open file, created if missing.

        Raises:
            OSError: if it is not a regular file, or cannot be opened.
        """
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(self.path))
        return fd

    def _unusable(self, error: OSError) -> UsageError:
        """The refusal of a start. An error of flock names no file."""
        if error.filename is None:
            return UsageError.of(
                f"{self.path} cannot be locked: {error.strerror}",
                where="output_dir",
                why="without a lock two runs could write into one directory",
                fix="set output_dir to a directory on a file system with locks (flock)",
            )
        return UsageError.of(
            f"the lock {self.path} cannot be used: {error.strerror}",
            where="output_dir",
            why="without a lock two runs could write into one directory",
            fix=(
                "if no run is using the directory, remove what is in the lock's place (rm -r"
                f" {shlex.quote(str(self.path))}), or set a different output_dir"
            ),
        )

    def _wait_for_beats(self, fd: int, earlier: Holder, on_wait: Callable[[str], None] | None) -> None:
        """Watches for heartbeats of a holder on a different node, by our clock and not by its
        clock.
        """
        patience_s = self._beat_s * _BEATS_OF_PATIENCE
        if on_wait is not None:
            on_wait(
                f"{self.path.name} belongs to {earlier}: checking for {patience_s:.0f} s whether it is alive"
            )
        first = _beat_of(fd)
        limit = time.monotonic() + patience_s
        while time.monotonic() < limit:
            time.sleep(min(0.1, self._beat_s / 4))
            if _beat_of(fd) != first:
                raise _taken(self.path, earlier)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            # Storage may be unavailable for a while; flock remains. So may descriptors or
            # processes: a start on a different host must not take the lock because one beat could
            # not be made.
            with contextlib.suppress(OSError):
                responds(self.path, limit_s=None)


def read_holder(path: Path) -> Holder | None:
    """The running holder of a lock, or None if it is free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # cannot be held
        os.close(fd)
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _wait_for_name(fd) or Holder("an unknown host", 0, "", "")
    except OSError:
        return _parse(os.pread(fd, 4096, 0))
    finally:
        os.close(fd)
    return None


def watched_holder(path: Path) -> Holder | None:
    """The running holder, found without touching the lock: for an observer that looks again and
    again, and must never be in the way of a start.

    A holder on a different host, or in a different container, counts as running as long as its
    heartbeats come.
    """
    holder = recorded_holder(path)
    if holder is None:
        return None
    try:
        seen = path.stat()
    except OSError:
        return None
    if _is_locked(seen):
        return holder
    if holder.host == os.uname().nodename and not Path(f"/proc/{holder.pid}").exists():
        return None
    return holder if time.time() - seen.st_mtime < BEAT_S * _BEATS_OF_PATIENCE else None


def _is_locked(seen: os.stat_result) -> bool:
    """Whether the kernel lists an exclusive flock of a file."""
    inode = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(words[1:2] == ["FLOCK"] and inode in words for words in map(str.split, lines))


def recorded_holder(path: Path) -> Holder | None:
    """The holder written in a lock file, running or not; None without one."""
    fd = _open_existing(path)
    if fd is None:
        return None
    try:
        return _parse(os.pread(fd, 4096, 0))
    except OSError:
        return None
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_if_ended(path: Path, holder: Holder, *, limit_s: float, watch_s: float = 0.0) -> Iterator[bool]:
    """Yields whether `holder` has ended and its lock was not taken over; then nobody can take it
    within the context.

    The file is unchanged.

    For a process of the holder's run that records how the run ended.

    Args:
        holder: as recorded in the file while it ran.
        limit_s: how long to wait for its end: the kernel closes connections and locks of an exiting
            process one by one.
        watch_s: how long to watch for heartbeats, if only the lock shows the end, since locks may
            be local to a node.
    """
    fd = _open_existing(path)
    if fd is None:
        yield False
        return
    try:
        yield _has_ended(fd, path, holder, limit_s=limit_s, watch_s=watch_s)
    finally:
        os.close(fd)


def _has_ended(fd: int, path: Path, holder: Holder, *, limit_s: float, watch_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > limit:
                return False
            time.sleep(_END_POLL_S)
        except OSError:
            return False
    if _parse(os.pread(fd, 4096, 0)) != holder:  # a different start has taken it
        return False
    first, limit = _beat_of(fd), time.monotonic() + watch_s
    while time.monotonic() < limit:
        time.sleep(_END_POLL_S)
        if _beat_of(fd) != first:
            return False
    return _is_at(fd, path)


def _open_existing(path: Path) -> int | None:
    """Opens the file; never creates it, and never blocks on a pipe."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None


def _wait_for_name(fd: int) -> Holder | None:
    """The holder's name; waits briefly, since it may be about to be written."""
    limit = time.monotonic() + _WRITING_S
    while True:
        holder = _parse(os.pread(fd, 4096, 0))
        if holder is not None or time.monotonic() > limit:
            return holder
        time.sleep(0.01)


def _parse(data: bytes) -> Holder | None:
    try:
        value = parse_json(data)
        return Holder(
            str(value["host"]),
            int(value["pid"]),
            str(value["nonce"]),
            str(value["since"]),
            int(value.get("port", 0)),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _write(fd: int, holder: Holder) -> None:
    body = {"schema": 1, **asdict(holder)}
    data = (json.dumps(body) + "\n").encode()
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
    os.fsync(fd)


def _beat_of(fd: int) -> tuple[int, bytes]:
    return os.fstat(fd).st_mtime_ns, os.pread(fd, 4096, 0)


def _is_at(fd: int, path: Path) -> bool:
    ours = os.fstat(fd)
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _taken(path: Path, holder: Holder | None) -> LockTaken:
    error = LockTaken.of(
        f"a run in {path.parent} is active: {holder or '(owner unknown)'}",
        where=str(path),
        why="two runs in one directory would destroy each other's work",
        fix=(
            f"wait for it, or end it (kill {holder.pid} on {one_line(holder.host)}), or set a different"
            " output_dir"
            if holder
            else "wait for it, or set a different output_dir"
        ),
    )
    error.holder = holder
    return error
