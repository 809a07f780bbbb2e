"""The logs of this node's ranks while they grow: lines with a known signature become events (never
a verdict), and growth is recorded with its time.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from unisono.base.causes import Evidence, Verdict
from unisono.base.causes.entries import Signature
from unisono.base.causes.signatures import LINE_LIMIT, find_signature, match_line
from unisono.base.errors import UnisonoError
from unisono.base.files import BackgroundThread
from unisono.base.messages import Message
from unisono.base.text import one_line, redact
from unisono.guard.places.ranks import RankPlace

_CLOSE_S = 1.0
# A thousandth of Python's memory. The process also opens the file: even that can hang. A file that
# a kill or a full disk has torn gets the end of its last line first, else the first new line would
# be lost with it. The shell drops a newline and NULs at the end of `$()`.
_APPEND = (
    "sh",
    "-c",
    'umask 077; [ ! -f "$1" ] || [ -z "$(tail -c 1 "$1")" ] || echo >> "$1"; exec cat >> "$1"',
    "sh",
)


class Appender:
    """Appends to one file, by a separate process.

    It starts with the first line, and ends with this process, as soon as its disk answers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def add(self, line: bytes) -> None:
        """Passes on a line of at most 4,096 bytes, without waiting.

        After an error nothing more is written.

        Raises:
            OSError: if the process has failed (e.g. its disk is full or gone), or takes no more.
        """
        if self._is_over:
            return
        try:
            os.write(self._pipe(), line)  # whole or not at all, up to PIPE_BUF
        except BlockingIOError:
            self._is_over = True
            raise OSError(None, "the storage does not answer") from None
        except BrokenPipeError:
            self._is_over = True
            raise OSError(None, self._last_stderr_line() or "the file cannot be written") from None

    def close(self) -> None:
        """Lets the process finish, if the disk answers within a second; else the rest is lost, and
        the process ends when the disk answers.
        """
        process, self._process, self._is_over = self._process, None, True
        if process is None:
            return
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stderr.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            threading.Thread(target=process.wait, name="reap", daemon=True).start()

    def _pipe(self) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                (*_APPEND, str(self._path)),
                bufsize=0,
                start_new_session=True,  # not ended by the terminal's Ctrl-C
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _last_stderr_line(self) -> str:
        """The last line of its stderr, which has the reason of the failure."""
        assert self._process is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        source = (self._process.stderr.read() or b"").decode(errors="replace").strip()
        return source.splitlines()[-1] if source else ""


CODE = "log_signature"
MOST_A_MINUTE = 20
KEPT_MATCHES = 8
_LOOK_BYTES = 64 << 10
_BEHIND_BYTES = 512 << 10
"""A log that grows faster than it is read is followed at its end; what lies between is not scanned,
and stays in the file.
"""
_SHOWN_CHARS = 300
_CITED_RANKS = 4
_CITED_MATCHES = 3
_REPORTED_KINDS = ("warning", "error", "death")
_REPORTED_ELSEWHERE = ("traceback", "exception", "python_error")
"""An exception that ends a rank is in its final message; one that does not is not reported."""


@dataclass(frozen=True, slots=True)
class LogMatch:
    """A line of a rank's log that matches a signature.

    Attributes:
        cause: of the catalogue, or None.
        text: the line, bounded, without control characters and without anything that looks like a
            secret.
        time: UTC, seconds: when it was seen.
    """

    rank: int
    signature: str
    cause: str | None
    text: str
    time: float

    def to_message(self) -> Message:
        """A warning for the screen."""
        entry = find_signature(self.signature)
        source = f" ({entry.source.partition(',')[0].partition(':')[0]})" if entry else ""
        return {
            "kind": "warning",
            "time": self.time,
            "code": CODE,
            "text": f"its log contains{source}: {self.text}",
            "fix": f"`unisono explain {self.cause}` describes the possible causes" if self.cause else "",
            "signature": self.signature,
            "cause": self.cause,
            "line": self.text,
        }


class LineSplitter:
    """Splits chunks of bytes into lines.

    A carriage return also ends a line, as in progress bars.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now. A line that is too long is given once, cut."""
        *whole, partial = data.replace(b"\r", b"\n").split(b"\n")
        lines = []
        for piece in whole:
            if not self._too_long:
                lines.append((self._rest + piece)[: 4 * LINE_LIMIT])
            self._rest, self._too_long = b"", False
        if not self._too_long:
            self._rest += partial
            if len(self._rest) > 4 * LINE_LIMIT:
                lines.append(self._rest[: 4 * LINE_LIMIT])
                self._rest, self._too_long = b"", True
        return [line.decode("utf-8", "replace") for line in lines if line]


class RateLimit:
    """At most so many events per minute, over all users."""

    def __init__(self, most: int = MOST_A_MINUTE, clock: Callable[[], float] = time.monotonic) -> None:
        self._times: deque[float] = deque(maxlen=most)
        self._clock = clock
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """Whether one more event may be reported now; if so, it is counted."""
        with self._lock:
            now = self._clock()
            if len(self._times) == self._times.maxlen and now - self._times[0] < 60:
                return False
            self._times.append(now)
            return True


class FollowedLog:
    """One rank's log, from its size at the start on. It is read in a thread that may hang."""

    def __init__(self, log: IO[bytes], rank: int, rate: RateLimit) -> None:
        """Starts at the current end: lines of an earlier start do not count.

        Args:
            log: open for reading; its position is not used.
            rate: limit of reported matches.
        """
        self._fd = log.fileno()
        self._rank = rank
        self._rate = rate
        self._lines = LineSplitter()
        self._place = os.fstat(self._fd).st_size
        self._seen: set[str] = set()
        self._pending: deque[Message] = deque()
        self._lock = threading.Lock()

    def grew(self, size: int) -> None:
        """Reads new bytes up to this size of the log.

        Raises:
            OSError: if the log cannot be read.
        """
        with self._lock:
            if size - self._place > _BEHIND_BYTES:
                self._place = size - _LOOK_BYTES
                self._lines = LineSplitter()
            while self._place < size:
                data = os.pread(self._fd, min(_LOOK_BYTES, size - self._place), self._place)
                if not data:  # it was truncated
                    self._place = size
                    return
                self._place += len(data)
                for line in self._lines.feed(data):
                    self._look_at(line)

    def take_matches(self) -> list[Message]:
        """Matches since the last call, as warnings."""
        matches = []
        while self._pending:
            matches.append(self._pending.popleft())
        return matches

    def _look_at(self, line: str) -> None:
        for signature in _reportable(match_line(line)):
            if signature.id not in self._seen and self._rate.allows():
                self._seen.add(signature.id)
                text = one_line(redact(line[:LINE_LIMIT]), limit=_SHOWN_CHARS)
                self._pending.append(
                    LogMatch(self._rank, signature.id, signature.cause, text, time.time()).to_message()
                )


def _reportable(matches: list[Signature]) -> list[Signature]:
    """The signature to report for a line: at most one, preferably with a cause."""
    reported = [one for one in matches if one.kind in _REPORTED_KINDS and one.id not in _REPORTED_ELSEWHERE]
    return sorted(reported, key=lambda one: one.cause is None)[:1]


class LogEvents:
    """A companion of the head: keeps the last matches of each rank of all nodes, as evidence."""

    def __init__(self, places: Sequence[RankPlace]) -> None:
        """Starts without matches.

        Args:
            places: of all ranks, in order.
        """
        self._places = places
        self._matches: dict[int, deque[LogMatch]] = defaultdict(lambda: deque(maxlen=KEPT_MATCHES))

    def on_message(self, rank: int, message: Message) -> None:
        """Takes a match."""
        if message["kind"] == "warning" and message.get("code") == CODE:
            cause = message.get("cause")
            match = LogMatch(
                rank,
                str(message.get("signature", "")),
                str(cause) if cause else None,
                str(message.get("line", "")),
                float(message["time"]),
            )
            self._matches[rank].append(match)

    def look(self) -> UnisonoError | None:
        """None: a line of a log does not end a run."""
        return None

    def finish(self) -> None:
        """Does nothing: there is nothing to release."""

    def matches(self, rank: int) -> list[LogMatch]:
        """The last matches of a rank, oldest first."""
        return list(self._matches[rank]) if rank in self._matches else []

    def cited(self, verdict: Verdict) -> Verdict:
        """The verdict with the last matches of its culprits as evidence.

        They do not change cause or ranks.
        """
        evidence = [
            Evidence(where=f"the log of {self._places[rank].label}", text=match.text)
            for rank in verdict.ranks[:_CITED_RANKS]
            for match in self.matches(rank)[-_CITED_MATCHES:]
        ]
        return verdict.model_copy(update={"evidence": (*verdict.evidence, *evidence)})


class LogTimes:
    """The times at which one log grew.

    A thread checks its size, and a separate process writes: the front never waits for a disk, not
    even at its end.
    """

    def __init__(self, log: IO[bytes], path: Path, *, grew: Callable[[int], None]) -> None:
        """Starts at the current size.

        Args:
            log: open until `close`.
            grew: gets the new size, in the thread; may raise OSError.
        """
        self._grew = grew
        self._log = log
        self._path = path.with_suffix(".times")
        self._appender = Appender(self._path)
        self._size = os.fstat(log.fileno()).st_size
        self._warnings: list[Message] = []
        self._thread = BackgroundThread("log-times", self._failed, most=1)

    def note(self) -> list[Message]:
        """Has the thread check the size, unless it still does; gives a warning, once, if that
        fails.
        """
        self._thread.do(self._look)
        warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        """Lets the last check finish, if the disk answers; then the log may be closed."""
        self._thread.finish(_CLOSE_S)
        self._appender.close()

    def _look(self) -> None:
        """Writes a line only if the log has grown."""
        size = os.fstat(self._log.fileno()).st_size
        if size == self._size:
            return
        self._size = size
        self._grew(size)
        self._appender.add(json.dumps([round(time.time(), 3), size]).encode() + b"\n")

    def _failed(self, why: str) -> None:
        text = (
            f"{self._path} is no longer written: {why}; `unisono logs` merges this rank's log less precisely,"
            " and the run continues"
        )
        self._warnings.append(
            {
                "kind": "warning",
                "time": time.time(),
                "code": "log_times",
                "text": text,
                "fix": "check that file system",
            }
        )
