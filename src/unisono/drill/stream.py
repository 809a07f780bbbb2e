"""A front that a drill has started: what it says and when, and its certain end."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

_KILLED_S = 10.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class Line:
    """A JSON line, and when it came, in seconds of the monotonic clock."""

    at: float
    message: dict[str, Any]


class Front:
    """A context; at its end the process is gone, whatever it was doing."""

    def __init__(self, words: Sequence[str], *, node: int, cwd: Path, environment: dict[str, str]) -> None:
        self.node = node
        self.ended_at: float | None = None
        self.returncode: int | None = None
        self._lines: list[Line] = []
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            list(words), cwd=cwd, env=environment, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def lines(self) -> list[Line]:
        """What it has said so far."""
        return list(self._lines)

    @property
    def errors(self) -> list[str]:
        """The last lines that it wrote to stderr, where nothing is expected."""
        return self._errors[-_TAIL_LINES:]

    def has_ended(self) -> bool:
        """Whether the process has ended, and all that it said is read."""
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
            self.returncode = self._process.returncode
            for reader in self._readers:
                reader.join(_KILLED_S)
        return self.ended_at is not None

    def kill(self) -> None:
        """Ends it with all in its session; its ranks end with it."""
        if self.has_ended():
            return
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_KILLED_S)
        self.has_ended()

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            at = time.monotonic()
            try:
                message = json.loads(text)
            except ValueError:
                self._errors.append(text.rstrip())
                continue
            if isinstance(message, dict):
                self._lines.append(Line(at, message))
        stream.close()

    def _read_errors(self, stream: IO[str]) -> None:
        self._errors.extend(text.rstrip() for text in stream)
        stream.close()
