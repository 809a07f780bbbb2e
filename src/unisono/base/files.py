"""Writes files atomically, and reads them within limits: regular files only, of bounded size and
depth.

For callers that must not wait: a thread.

Anyone with write access to a run's directory can replace a small file by a named pipe, a gigabyte
or a thousand brackets. So unisono opens all files there with this module: no call waits for a
writer, and a rejected file raises OSError or ValueError.

Of files that users give it checks whether a path is a readable file, and the encoding of its text.
Text is read as UTF-8 only (a byte order mark is accepted). UTF-16 and regional encodings are
detected and rejected with the command that converts the file: a wrong guess would silently train on
wrong characters, and one encoding keeps lines, digests and error positions the same for every tool
that reads the file.
"""

import contextlib
import errno
import io
import json
import os
import re
import secrets
import select
import shlex
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

MOST_BYTES = 256 << 20
"""Limit for a file that is read completely."""
SETTINGS_BYTES = 16 << 20
"""Limit of a file of settings: JSON may need fifty times its size in memory.

The largest of a model has some hundred kilobytes.
"""
TEMPLATE_BYTES = 1_000_000
"""Limit of a chat template. The longest in use have about ten thousand."""
SOURCE_BYTES = 1 << 20
"""Limit of TOML, which is parsed slowly, and of the user's Python code.

Its syntax tree needs two hundred times its size in memory.
"""
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
HEAD_BYTES = 4096
SAMPLE_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 18  # a gigabyte of log is read in a fourth of the time that it takes in 8 KiB

_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_CONTENTS = (
    (b"\x1f\x8b", "gzip", "gunzip -c {0} > {1}"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc {0} > {1}"),
    (b"BZh", "bzip2", "bunzip2 -c {0} > {1}"),
    (b"\xfd7zXZ\x00", "xz", "xz -dc {0} > {1}"),
    (b"PK\x03\x04", "zip (or Excel)", ""),
    (b"PAR1", "Parquet", ""),
    (b"ARROW1", "Arrow", ""),
    (b"%PDF", "PDF", ""),
    (b"SQLite format 3", "SQLite", ""),
    (b"\x89HDF", "HDF5", ""),
    (b"\xd0\xcf\x11\xe0", "old Excel or Word", ""),
)
_GIVEN_KINDS = (
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
# The most frequent letters of the languages of each encoding. Wrongly decoded text has few of them.
_FREQUENT = {
    "GB18030": "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过",
    "BIG5": "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過",
    "SHIFT_JIS": "のにはをたがでてとしれさるいもなこらまかうありすっよ、。ーンス",
    "EUC-JP": "のにはをたがでてとしれさるいもなこらまかうありすっよ、。ーンス",
    "EUC-KR": "이다는에을가의고하지를은로한사어기도서리나자시인대",
    "WINDOWS-1251": "оеаинтсрвлкмдпуяызьбгчйхжшюцщэфё",
    "WINDOWS-1252": "éèàùâêîôûçäöüßñáíóúåæø¿¡«»’‘“”–—…€°",
}
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\\]|^[A-Za-z]:")
_MOST_PART_BYTES, _MOST_NAME_BYTES = 255, 1024
_HIGH = re.compile(rb"[\x80-\xff]+")
_LEAST_CHARACTERS = 4
_LEAST_SHARE = {"WINDOWS-1251": 0.95, "WINDOWS-1252": 0.9, "SHIFT_JIS": 0.3, "EUC-JP": 0.3}
_LONG_RUN = 3.0  # adjacent bytes above ASCII: Cyrillic words, not single letters among Latin ones
_SHARE = 0.12  # of Chinese or Korean text: measured 0.2 to 0.4 if right, under 0.03 if wrong


def path_below(root: Path, name: object, *, parts: int = 32) -> Path:
    """`root / name` for a name that a hub, another machine or a downloaded file gave.

    Looks at the name, not at the disk.

    Args:
        root: the directory.
        name: a relative path with slashes.
        parts: how many parts it may have; 1: a file directly in `root`.

    Raises:
        ValueError: if the name is absolute, leads upwards, or is not one that every file system
            takes.
    """
    text = name if isinstance(name, str) else ""
    words, why = text.split("/"), ""
    if not {"", ".", ".."}.isdisjoint(words):
        why = "is not a relative path without `..`"
    elif _NOT_IN_NAMES.search(text):
        why = "has a control character, a backslash or a drive"
    elif len(words) > parts:
        why = "is in another directory" if parts == 1 else f"has more than {parts} parts"
    elif len(text.encode()) > _MOST_NAME_BYTES or any(
        len(word.encode()) > _MOST_PART_BYTES for word in words
    ):
        why = "is longer than a file system takes"
    if why:
        raise ValueError(f"the name {str(name)[:80]!r} {why}")
    return root.joinpath(*words)


def fsync_dir(path: Path) -> None:
    """Makes renames and new files in the directory survive a power failure."""
    _fsync(path)


def fsync_tree(directory: Path) -> None:
    """Makes a directory with everything below it survive a power failure."""
    for path in (*directory.rglob("*"), directory):
        _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it is then synced and renamed to `path`, or removed on
    an error.

    Raises:
        OSError: from the file system.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield temporary
        _fsync(temporary)
        temporary.replace(path)
        fsync_dir(path.parent)
    except BaseException as error:  # Ctrl-C leaves no temporary file either; raised again
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        # Without a name: e.g. from write or fsync. A temporary name tells nobody anything.
        if isinstance(error, OSError) and str(error.filename) in ("None", str(temporary)):
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
        return io.BufferedReader(io.FileIO(fd), _BUFFER_BYTES)
    except BaseException:  # raised again, after closing the file
        os.close(fd)
        raise


def open_given(path: Path) -> io.BufferedReader:
    """A file given by the user, opened for reading: a regular file, or a pipe with a writer, e.g.
    `<(…)`.

    The caller must limit how much it reads from a pipe.

    Raises:
        OSError: from the file system, or because it is a different kind of file; while reading, if
            no writer opens a named pipe within WRITER_S.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return open_plain(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return io.BufferedReader(_Pipe(fd, path))


class _Pipe(io.RawIOBase):
    """The reading end of a named pipe.

    It waits WRITER_S for a writer, and then for data as long as the writer exists.
    """

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
    """The lines of a regular file with their line ends; a line above MOST_LINE_BYTES comes in
    pieces.

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


def read_object(path: Path, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in the file; empty if it is missing, truncated, or holds another value."""
    try:
        value = parse_json(read_text(path, most_bytes=most_bytes))
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
    """Runs work soon, or not at all if the disk fails or hangs; callers never wait, and a failure
    is reported once.

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
        """Waits until all work is done, at most `limit_s` seconds; False if some is left.

        More work may follow.
        """
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
            except Exception as error:  # noqa: BLE001
                # At the edge of the thread the error is reported; the thread takes no more work.
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


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem with a file as a whole: what, why, and the fix."""

    what: str
    why: str
    fix: str
    is_missing: bool = False
    is_directory: bool = False


def expand(text: str) -> Path:
    """The path given by the user, with `~` expanded if possible."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)  # the file is then reported missing under the given name


def fault_of(path: Path, name: str) -> Fault | None:
    """Why a path cannot be read as a file, checked without opening it, since a pipe without a
    writer would block.

    Args:
        path: on this machine.
        name: as given by the user.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            why = f"it is a symbolic link to {path.readlink()}, which does not exist"
            return Fault(f"there is no file {name}", why, "fix the link, or pass the file itself")
        why = "relative paths start at the working directory"
        return Fault(f"there is no file {name}", why, "check the path", is_missing=True)
    except (OSError, ValueError) as error:
        return _unseen(name, error)
    if stat.S_ISREG(mode):
        return None
    kind = next((words for is_kind, words in _GIVEN_KINDS if is_kind(mode)), "not a regular file")
    if stat.S_ISDIR(mode):
        return Fault(f"{name} is a directory", "a file is required", "pass a file in it", is_directory=True)
    why = "only regular files can be read, since they are read twice: for the digest and for the content"
    return Fault(f"{name} is {kind}", why, "write its content to a file, and pass that file")


def _unseen(name: str, error: OSError | ValueError) -> Fault:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ELOOP:
        return Fault(f"{name} is a symbolic link loop", "", "pass the file itself")
    detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
    fix = "check the permissions of the directories on its path" if code == errno.EACCES else "check the path"
    return Fault(f"{name} cannot be read", detail, fix)


def foreign_contents(head: bytes, name: str) -> Fault | None:
    """Why a file is not UTF-8 text, if its first bytes show it for certain; None otherwise.

    Args:
        head: up to HEAD_BYTES from its beginning.
        name: as given by the user.
    """
    for magic, kind, command in _CONTENTS:
        if head.startswith(magic):
            suffix = PurePath(name).suffix
            fix = "use the matching suffix" if kind in ("Parquet", "Arrow") else "save its rows as text"
            if command:
                fix = "decompress it: " + command.format(
                    shlex.quote(name), shlex.quote(_beside(name, "unpacked"))
                )
            return Fault(
                f"{name} is not text", f"its first bytes are from {kind}, not from a {suffix} file", fix
            )
    encoding = encoding_of(head)
    if encoding is not None:
        return Fault(f"{name} is {encoding} text", "text is read as UTF-8 only", conversion(name, encoding))
    nuls = head.count(0)
    if nuls > len(head) // 2:
        why = f"{nuls} of its first {len(head)} bytes are zero"
        return Fault(f"{name} is not text", why, "write the file again: a copy or download may have failed")
    return None


def encoding_of(head: bytes) -> str | None:
    """`UTF-16` or `UTF-32`, by the byte order mark or the positions of zeros in the first bytes;
    else None.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    whole = head[: len(head) // 4 * 4]
    if len(whole) < 4 or 0 not in whole:
        return None
    zeros = [whole[i::4].count(0) * 4 / len(whole) for i in range(4)]
    # European letters and the syntax of JSON and CSV are below U+0100; a few characters may be
    # above.
    for name, empty in (
        ("UTF-32LE", (1, 2, 3)),
        ("UTF-32BE", (0, 1, 2)),
        ("UTF-16LE", (1, 3)),
        ("UTF-16BE", (0, 2)),
    ):
        others = [zeros[i] for i in range(4) if i not in empty]
        if min(zeros[i] for i in empty) >= 0.1 and max(others) <= 0.02:
            return name
    return None


def guess_encoding(sample: bytes) -> str | None:
    """The likely encoding of text that is not UTF-8; None if uncertain.

    UTF-8 with a few broken bytes counts as uncertain.

    Args:
        sample: some of its bytes, at best whole lines.
    """
    text = sample.decode("utf-8", "surrogateescape")
    broken = sum(1 for c in text if "\udc80" <= c <= "\udcff")
    whole = sum(1 for c in text if c > "\x7f") - broken
    if broken < _LEAST_CHARACTERS or whole > broken:
        return None
    encodings = [name for name, letters in _FREQUENT.items() if _fits(sample, name, letters)]
    return encodings[0] if len(encodings) == 1 else None


def _fits(sample: bytes, encoding: str, letters: str) -> bool:
    text = sample[:SAMPLE_BYTES].decode(encoding, "replace").lower()
    beyond = Counter(c for c in text if c > "\x7f")
    total, wrong = beyond.total(), beyond.get("\ufffd", 0)
    if total < _LEAST_CHARACTERS or wrong > 1:  # one may be cut at the end of the sample
        return False
    runs = [len(run) for run in _HIGH.findall(sample[:SAMPLE_BYTES])]
    if encoding.startswith("WINDOWS") and (sum(runs) / len(runs) >= _LONG_RUN) != (
        encoding == "WINDOWS-1251"
    ):
        return False
    return sum(beyond[c] for c in letters) >= _LEAST_SHARE.get(encoding, _SHARE) * total


def conversion(name: str, encoding: str) -> str:
    """The command that converts a file to UTF-8, and how to use the copy."""
    if "://" in name:
        return f"convert it from {encoding} to UTF-8 where it is stored"
    copy = _beside(name, "utf8")
    return (
        f"convert it: iconv -f {encoding} -t UTF-8 {shlex.quote(name)} > {shlex.quote(copy)}, and name {copy}"
    )


def _beside(name: str, word: str) -> str:
    path = PurePath(name)
    stem = path.name.removesuffix(path.suffix)
    return str(path.with_name(f"{stem}.{word}{path.suffix}"))


def place_of(data: bytes, position: int) -> tuple[int, int]:
    """The line, and the byte within it, both from 1, of a position in a file."""
    return data.count(b"\n", 0, position) + 1, position - data.rfind(b"\n", 0, position)


def decode_text(data: bytes, name: str) -> str | tuple[Fault, str]:
    """The text of a UTF-8 file; or the fault and its place: `FILE` or `FILE:LINE:BYTE`."""
    fault = foreign_contents(data[:HEAD_BYTES], name)
    if fault is not None:
        return fault, name
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The error's position does not count the mark.
        shift = 3 if data.startswith(b"\xef\xbb\xbf") else 0
        line, byte = place_of(data, error.start + shift)
        where = f"{name}:{line}:{byte}"
        return not_utf8(name, data[error.start + shift], data[:SAMPLE_BYTES]), where


def read_given(path: Path, name: str, *, most_bytes: int) -> str | tuple[Fault, str]:
    """The text of a UTF-8 file given by the user; or the fault and its place: `FILE` or
    `FILE:LINE:BYTE`.

    Args:
        path: on this machine; a regular file.
        name: as given by the user.
        most_bytes: a larger file is not read.
    """
    fault = fault_of(path, name)
    if fault is not None:
        return fault, name
    try:
        return decode_text(read_bytes(path, most_bytes=most_bytes), name)
    except OSError as error:
        why = error.strerror or str(error)
        return Fault(f"{name} cannot be read", why, "check the file and its permissions"), name


def not_utf8(name: str, byte: int, sample: bytes) -> Fault:
    """The fault of text with an invalid UTF-8 byte, with its likely encoding."""
    guess = guess_encoding(sample)
    fix = "save the file as UTF-8" if guess is None else conversion(name, guess)
    likely = f"; the text looks like {guess}" if guess else ""
    return Fault(f"{name} is not UTF-8", f"byte {byte:#04x} is not valid there{likely}", fix)
