"""Sends messages from a rank or a task to its front, one JSON object per line on a pipe, and makes
the content of the message `crashed`.

`base.messages` lists their kinds.
"""

import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO, TypedDict

from unisono.base.files import BackgroundThread
from unisono.base.messages import Message, fields_of
from unisono.base.text import one_line

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
"""Messages of the same torch exceptions that concern this rank alone."""
_CLOSE_S = 2.0


class Reporter:
    """Sends messages to the front, and appends them to an events file if one is given.

    Reporting never raises.

    The front comes first and does not wait for the file, so that a hung disk does not delay
    messages. Without a front (`python -m unisono.worker plan.json` under pdb) messages become plain
    lines on `fallback`.
    """

    def __init__(
        self, fd: int | None, *, fallback: TextIO | None = None, log_path: str | None = None
    ) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # a save reports from its own thread
        self._fallback = fallback
        self._log = _EventsLog(log_path, self._log_failed) if log_path else None

    def send(self, message: Message) -> None:
        """Sends one message, with the time. A missing front or a full disk does not raise."""
        body = {"kind": message["kind"], "time": time.time(), **fields_of(message)}
        # A lone surrogate, which a row may contain, has no UTF-8 encoding.
        data = (json.dumps(body, ensure_ascii=False) + "\n").encode(errors="replace")
        with self._lock:
            if self._fd is not None:
                self._write(data)
            elif self._fallback is not None:
                self._fallback.write(_as_text(body) + "\n")
                self._fallback.flush()
        if self._log is not None and message["kind"] != "step":
            self._log.keep(data)

    def close(self) -> None:
        """Waits briefly for the events file, before the process exits."""
        if self._log is not None:
            self._log.finish()

    def phase(self, name: str, text: str, *, done: int | None = None, total: int | None = None) -> None:
        """Reports the beginning or the progress of a phase."""
        self.send({"kind": "phase", "phase": name, "text": text, "done": done, "total": total})

    def warning(self, code: str, text: str, *, fix: str = "") -> None:
        """Reports a warning."""
        self.send({"kind": "warning", "code": code, "text": text, "fix": fix})

    def _write(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            _write_all(self._fd, data)
        except OSError:
            self._fd = None  # the front is gone; PDEATHSIG or its lock will end this process

    def _log_failed(self, why: str) -> None:
        assert self._log is not None
        self.send(
            {
                "kind": "warning",
                "code": "events_log",
                "where": self._log.path,
                "fix": "check that file system",
                "text": f"this rank's messages are no longer written to {self._log.path}: {why}; they are still shown",
            }
        )


class _EventsLog:
    """The events file; a background thread opens and writes it."""

    def __init__(self, path: str, on_failure: Callable[[str], None]) -> None:
        self.path = path
        self._fd: int | None = None
        self._writer = BackgroundThread("events-log", on_failure)

    def keep(self, data: bytes) -> None:
        """Queues a line."""
        self._writer.do(partial(self._write, data))

    def finish(self) -> None:
        """Waits briefly until all lines are written."""
        self._writer.finish(_CLOSE_S)

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644
            )
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                # An earlier start was killed in the middle of a line: keep that line apart.
                data = b"\n" + data
        _write_all(self._fd, data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _as_text(message: Mapping[str, object]) -> str:
    shown = {k: v for k, v in message.items() if k not in ("kind", "time") and v not in (None, "")}
    return f"[{message['kind']}] " + one_line(", ".join(f"{k}={v}" for k, v in shown.items()), limit=400)


# ---- what the message `crashed` says


class Crash(TypedDict):
    """The fields of the message `crashed`."""

    error: str
    where: str
    traceback: str
    peer_lost: bool


def describe_crash(error: BaseException) -> Crash:
    """What the message `crashed` says of an exception."""
    return {
        "error": one_line(f"{type(error).__name__}: {error}"),
        "where": _place_of(error),
        "traceback": "".join(traceback.format_exception(error)),
        "peer_lost": is_peer_loss(error),
    }


_FRAME = re.compile(r'^ +File "(.+)", line (\d+)', re.MULTILINE)


def own_frame(text: str, code: Mapping[str, str]) -> str:
    """Name and file:line of the innermost frame of the user's own code in a traceback or a stack by
    faulthandler.

    Empty if there is none.

    Args:
        code: see `RunPlan.own_code`.
    """
    frames = _FRAME.findall(text)
    if "(most recent call first)" not in text:
        frames.reverse()
    return next(
        (f"{name}, {file}:{line}" for file, line in frames for part, name in code.items() if part in file), ""
    )


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception results from the failure of a different rank, according to the messages
    of torch, gloo and NCCL.

    Errors with the same words that no collective raised (a download, an own pipe) do not count.
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
