"""Sees a rank's log grow: notes when it had what size, beside the log, so that `unisono logs` can merge it in time, and has what is new read."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from unisono.aside import Aside
from unisono.events import Message
from unisono.launch.appending import Appender

_CLOSE_S = 1.0


class LogTimes:
    """The times of one log. Looking is done aside, and writing by a process of its own: the front waits for no disk, also not at its end."""

    def __init__(self, log: IO[bytes], path: Path, *, grew: Callable[[int], None]) -> None:
        """Begins with what is there.

        Args:
            log: open for as long as this is not closed.
            path: of the log.
            grew: is told the new size, aside as well; may raise OSError.
        """
        self._grew = grew
        self._log = log
        self._path = path.with_suffix(".times")
        self._appender = Appender(self._path)
        self._size = os.fstat(log.fileno()).st_size
        self._warnings: list[Message] = []
        self._aside = Aside("log-times", self._failed, most=1)

    def note(self) -> list[Message]:
        """Has a look taken, if the last one is over; gives a warning, once, where that does not work."""
        self._aside.do(self._look)
        warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        """Lets the last look come to its end, if the disk answers; then the log may be closed."""
        self._aside.finish(_CLOSE_S)
        self._appender.close()

    def _look(self) -> None:
        """A line is written only where the log has grown."""
        size = os.fstat(self._log.fileno()).st_size
        if size == self._size:
            return
        self._size = size
        self._grew(size)
        self._appender.add(json.dumps([round(time.time(), 3), size]).encode() + b"\n")

    def _failed(self, why: str) -> None:
        text = f"{self._path} is not kept from here on: {why}; `unisono logs` merges this rank's log less finely, and the run goes on"
        self._warnings.append(
            {"kind": "warning", "time": time.time(), "code": "log_times", "text": text, "fix": "look at that file system"}
        )  # fmt: skip
