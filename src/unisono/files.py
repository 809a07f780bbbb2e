"""Writes files atomically, and reads them within limits: regular files only, of bounded size and depth. For callers that must not wait: a thread.

Anyone with write access to a run's directory can replace a small file by a named pipe, a gigabyte or a thousand brackets.
So unisono opens all files there with this module: no call waits for a writer, and a rejected file raises OSError or ValueError.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20
"""Limit for a file that is read completely."""
MOST_LINE_BYTES = 1 << 20
"""Limit for a line; a longer one is read in pieces."""
MOST_DEPTH = 100
"""Nesting limit of JSON. Nothing that unisono writes has a tenth of it."""

WRITER_S = 5.0
"""How long to wait for the writer of a named pipe."""
_WRITER_POLL_S = 0.05
_TOO_DEEP = f"it has more than {MOST_DEPTH} levels of nested lists and objects"
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def fsync_dir(path: Path) -> None:
    """Makes renames and new files in the directory survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it is then synced and renamed to `path`, or removed on an error.

    Raises:
        OSError: from the file system.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield temporary
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        fsync_dir(path.parent)
    except BaseException as error:  # Ctrl-C leaves no temporary file either; raised again
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # e.g. from write or fsync
            error.filename = str(path)
        raise


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes `text` to `path` atomically."""
    with whole_file(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Writes `value` as indented JSON atomically. Floats round-trip exactly."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode=mode)


def open_plain(path: Path) -> io.BufferedReader:
    """A regular file, opened for reading. It never blocks, not even on a named pipe.

    Raises:
        OSError: from the file system, or because the path is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _refuse_other_kinds(path, os.fstat(fd).st_mode)
        return os.fdopen(fd, "rb")
    except BaseException:  # raised again, after closing the file
        os.close(fd)
        raise


def open_given(path: Path) -> io.BufferedReader:
    """A file given by the user, opened for reading: a regular file, or a pipe with a writer, e.g. `<(…)`.

    The caller must limit how much it reads from a pipe.

    Raises:
        OSError: from the file system, or because it is a different kind of file; while reading, if no writer opens a named pipe
            within WRITER_S.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return open_plain(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return io.BufferedReader(_Pipe(fd, path))


class _Pipe(io.RawIOBase):
    """The reading end of a named pipe. It waits WRITER_S for a writer, and then for data as long as the writer exists."""

    def __init__(self, fd: int, path: Path) -> None:
        self._file = os.fdopen(fd, "rb", buffering=0)
        self._path = path
        self._limit = time.monotonic() + WRITER_S
        self._has_writer = False

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def readinto(self, buffer: Any) -> int:
        while True:
            count = self._file.readinto(buffer)
            if count is None:  # a writer without data yet
                self._has_writer = True
                select.select([self._file], [], [])
            elif count or self._has_writer:
                self._has_writer = True
                return count
            elif time.monotonic() > self._limit:
                raise OSError(errno.EINVAL, "it is a named pipe without a writer", str(self._path))
            else:
                time.sleep(_WRITER_POLL_S)

    def close(self) -> None:
        self._file.close()
        super().close()


def _refuse_other_kinds(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))


def kind_of(mode: int) -> str:
    """The kind of a file that is not regular, by its `st_mode`: a directory, a named pipe."""
    if stat.S_ISDIR(mode):
        return "a directory"
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most_bytes` bytes.

    Raises:
        OSError: if it is larger, not a regular file, or unreadable.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
        if size > most_bytes or len(data) > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
        return data


def read_text(path: Path, *, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """The content of a UTF-8 text file.

    Raises:
        OSError: like `read_bytes`.
        ValueError: if it is not UTF-8.
    """
    return read_bytes(path, most_bytes=most_bytes).decode("utf-8", errors)


def iterate_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file with their line ends; a line above MOST_LINE_BYTES comes in pieces.

    Raises:
        OSError: like `open_plain`, at the first line.
    """
    with open_plain(path) as file:
        while line := file.readline(MOST_LINE_BYTES):
            yield line


def parse_json(text: str | bytes) -> Any:
    """The JSON value of a text.

    Raises:
        ValueError: if it is not JSON, or nested deeper than MOST_DEPTH.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(_TOO_DEEP)
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return value


def read_json(path: Path) -> Any:
    """The JSON value in the file.

    Raises:
        OSError: from the file system, or if it is not a regular file, or larger than MOST_BYTES.
        ValueError: if it is not JSON, or nested too deeply.
    """
    return parse_json(read_text(path))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; empty if the file is missing, truncated, or holds a different value."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def objects_of(value: Any) -> list[dict[str, Any]]:
    """The objects in a JSON list, in order; empty for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def make_private_dir(path: Path) -> None:
    """Creates the directory and its parents; the directory itself gets mode 0700."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


Work = Callable[[], object]

_REPORTED_AFTER_S = 5.0


# ---- file operations for callers that must not wait


class BackgroundThread:
    """Runs work soon, or not at all if the disk fails or hangs; callers never wait, and a failure is reported once.

    The thread is a daemon: work that is not done when the process exits stays undone.

    Attributes:
        thread_id: the kernel's id of the thread; 0 before the first work.
    """

    def __init__(
        self, name: str, on_failure: Callable[[str], None] = lambda _: None, *, most: int = 1000
    ) -> None:
        """Starts no thread yet.

        Args:
            name: of the thread, as shown by process viewers.
            on_failure: called once, from any thread, when work fails or does not finish.
            most: limit of the queue; further work is dropped.
        """
        self.thread_id = 0
        self._name = name
        self._on_failure = on_failure
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._since: float | None = None  # when the current work began
        self._dropped = 0
        self._is_reported = self._is_over = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        return self._since is None and not self._waiting

    def do(self, work: Work) -> bool:
        """Queues work; False if it is dropped. Never waits for the disk."""
        with self._changed:
            taken = not self._is_over and len(self._waiting) < self._most
            if taken:
                self._waiting.append(work)
                self._changed.notify_all()
            else:
                self._dropped += 1
            if self._thread is None and taken:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            since = self._since
        if since is not None and (idle_s := time.monotonic() - since) > _REPORTED_AFTER_S:
            self._report(f"the storage has not responded for {idle_s:.0f} s")
        return taken

    def finish(self, limit_s: float) -> bool:
        """Waits until all work is done, at most `limit_s` seconds; False if some is left. More work may follow."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.is_idle, limit_s)
        if not done:
            self._report(
                f"the storage does not respond, and {self._dropped + len(self._waiting) + 1} writes are lost"
            )
        return done

    def _run(self) -> None:
        self.thread_id = threading.get_native_id()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                work, self._since = self._waiting.popleft(), time.monotonic()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the edge of the thread: reported, and the thread takes no more work
                self._give_up(error)
            finally:
                with self._changed:
                    self._since = None
                    self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        """Stops after a failure, e.g. a full disk: writes after a gap are of little use."""
        with self._changed:
            self._is_over = True
            self._dropped += 1 + len(self._waiting)
            self._waiting.clear()
        self._report((isinstance(error, OSError) and error.strerror) or repr(error))

    def _report(self, why: str) -> None:
        with self._changed:
            first, self._is_reported = not self._is_reported, True
        if first:
            self._on_failure(why)
