"""The messages that a rank or a task sends its front: one JSON object a line, on a pipe.

Kinds, and the fields that each carries beside `kind` and `time` (UTC, seconds):

    phase       phase, text; done, total (optional; units of work inside the phase)
    ready       facts: what only the worker knows before step 1 (parameters, attention, memory, resume)
    step        one line of metrics.jsonl; of other ranks than 0 the step alone
    eval        step, eval_loss, and more figures
    sample      step, prompt, text
    checkpoint  step, path, bytes, seconds, blocking_s (of which training stood still)
    shard_written  step, temporary, files, error: this rank's part of a checkpoint is on its disk, or why not
    shard_moves step, temporary: this rank's part is on its way, and makes progress; from time to time, while it is not there
    shards_over step, temporary: rank 0 waits for no part of this checkpoint (any more)
    digest      step, digest, arithmetic: of the weights that a rank trains, and what decides how it rounds
    asked       signal: its name; somebody sent it to the rank itself, or its front did
    warning     code, text, fix
    token       text: a piece of an answer, as it comes          (generate, chat)
    answer      text, tokens, ended: an answer, whole             (chat)
    refused_turn  text, fix: why a turn has no answer             (chat)
    refused     exit_code, problems, verdict          what UnisonoError.to_json gives
    crashed     exit_code, error, traceback, peer_lost    an exception nobody foresaw; peer_lost: another rank's death made it
    kept        cost_s, step_time_s, bytes, every     what keeping an adapter's step in memory costs: medians of the first steps, and the memory;
                                                      every n-th step is kept from here on, null: none
    rank_report report: RankReport.to_json()          what a rank of several holds; then it waits for `go` on stdin
    result      whatever the task or the run has to hand over; the last message
"""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from unisono.background import BackgroundThread
from unisono.files import parse_json
from unisono.text import one_line

Message = dict[str, Any]
Show = Callable[[Message], None]
"""What a front does with a message: a line on the screen, of JSON, or of a test."""

_PEER_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "NCCL communicator was aborted",
    "remote process exited",
)
_OWN_TEXTS = ("failed to listen", "EADDRINUSE")
"""What torch raises in the same classes, of this rank alone."""
_CLOSE_S = 2.0


class Reporter:
    """Sends messages to the front, and keeps them in a file of events where one is given. Reporting never raises.

    The front hears first, and does not wait for the file: a disk that hangs silences nobody.
    Without a front (`python -m unisono.worker plan.json` under pdb) messages become plain lines on `fallback`.
    """

    def __init__(
        self, fd: int | None, *, fallback: TextIO | None = None, log_path: str | None = None
    ) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # a save reports from a thread of its own
        self._fallback = fallback
        self._log = _EventsLog(log_path, self._log_failed) if log_path else None

    def send(self, kind: str, **fields: Any) -> None:
        """Sends one message. A front that is gone, or a full disk, is not the sender's death."""
        message = {"kind": kind, "time": time.time(), **fields}
        # Half of a surrogate pair, which a row may hold, is no UTF-8.
        data = (json.dumps(message, ensure_ascii=False) + "\n").encode(errors="replace")
        with self._lock:
            if self._fd is not None:
                self._write(data)
            elif self._fallback is not None:
                self._fallback.write(_as_text(message) + "\n")
                self._fallback.flush()
        if self._log is not None and kind != "step":
            self._log.keep(data)

    def close(self) -> None:
        """Waits a little for the file of events. The process's end is near."""
        if self._log is not None:
            self._log.finish()

    def phase(self, name: str, text: str, *, done: int | None = None, total: int | None = None) -> None:
        """Says which phase has begun, or how far it is."""
        self.send("phase", phase=name, text=text, done=done, total=total)

    def warning(self, code: str, text: str, *, fix: str = "") -> None:
        """Says what a person should know, without stopping."""
        self.send("warning", code=code, text=text, fix=fix)

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            _write_all(self._fd, data)
        except OSError:
            self._fd = None  # the front is gone; PDEATHSIG or its lock will end us

    def _log_failed(self, why: str) -> None:
        assert self._log is not None
        self.send(
            "warning",
            code="events_log",
            where=self._log.path,
            fix="look at that file system",
            text=f"this rank's messages are not kept in {self._log.path} from here on: {why}; they are shown all the same",
        )


class _EventsLog:
    """The file of events; it is opened and written aside."""

    def __init__(self, path: str, on_trouble: Callable[[str], None]) -> None:
        self.path = path
        self._fd: int | None = None
        self._aside = BackgroundThread("events-log", on_trouble)

    def keep(self, data: bytes) -> None:
        """Has a line written."""
        self._aside.do(partial(self._write, data))

    def finish(self) -> None:
        """Waits until all lines are written, if that takes no time."""
        self._aside.finish(_CLOSE_S)

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644
            )
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                data = (
                    b"\n" + data
                )  # an earlier start was killed in the middle of a line, which takes no other with it
        _write_all(self._fd, data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _as_text(message: Message) -> str:
    shown = {k: v for k, v in message.items() if k not in ("kind", "time") and v not in (None, "")}
    return f"[{message['kind']}] " + one_line(", ".join(f"{k}={v}" for k, v in shown.items()), limit=400)


def read_message(line: str) -> Message | None:
    """The message of one line, or None for a torn or foreign line."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def say(show: Show, text: str) -> None:
    """A line for people."""
    show({"kind": "note", "time": time.time(), "text": text})


# ---- what the message `crashed` says


def describe_crash(error: BaseException) -> dict[str, Any]:
    """What the message `crashed` says: `error`, `where`, `traceback`, `peer_lost`."""
    return {
        "error": one_line(f"{type(error).__name__}: {error}"),
        "where": _place_of(error),
        "traceback": "".join(traceback.format_exception(error)),
        "peer_lost": is_peer_loss(error),
    }


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception is the consequence of another rank's death, as torch, gloo and NCCL tell it.

    Errors of the same words that no collective has raised (a download, a pipe of one's own) are not.
    """
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _PEER_ERRORS:
            return not any(text in str(seen) for text in _OWN_TEXTS)
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _PEER_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _place_of(error: BaseException) -> str:
    """file:line where the exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
