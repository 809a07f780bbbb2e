"""What the front tells a rank: lines on stdin, read in a thread of their own, since saves wait for some of them."""

import functools
import json
import os
import queue
import threading
from typing import Any

Message = dict[str, Any]

_STDIN = 0


class FrontLine:
    """Messages of the front, each kept by its kind until somebody asks for it."""

    def __init__(self) -> None:
        shards: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._of_kind: dict[str, queue.SimpleQueue[Message]] = {
            "go": queue.SimpleQueue(), "shard_written": shards, "shard_moves": shards,
        }  # fmt: skip
        self._over = threading.Event()
        threading.Thread(target=self._read, name="front-line", daemon=True).start()

    def next(self, kind: str, *, timeout_s: float) -> Message | None:
        """The next message of a kind; None if there is none in time."""
        try:
            return self._of_kind[kind].get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wait_for(self, kind: str) -> Message | None:
        """The next message of a kind; None if the front ends the line before it."""
        while not self._over.is_set():
            message = self.next(kind, timeout_s=0.1)
            if message is not None:
                return message
        return self.next(kind, timeout_s=0.0)

    def _read(self) -> None:
        # Not through sys.stdin: a thread that waits in its buffer's lock aborts the process when Python ends.
        rest = b""
        while chunk := os.read(_STDIN, 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take(line)
        self._over.set()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # torn by the front's death
        known = self._of_kind.get(str(message.get("kind"))) if isinstance(message, dict) else None
        if known is not None:
            known.put(message)


@functools.cache
def front_line() -> FrontLine:
    """The one reader of this process's stdin."""
    return FrontLine()
