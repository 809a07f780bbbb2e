"""What reaches a rank from its front: signals to stop, and messages on stdin."""

import functools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

Outcome = Literal["preempted", "interrupted"]

EXIT_CODES: dict[Outcome, int] = {"preempted": 75, "interrupted": 130}
_OUTCOMES: dict[int, Outcome] = {
    signal.SIGTERM: "preempted",
    signal.SIGUSR1: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGINT: "interrupted",
}
_AGAIN_AFTER_S = 1.0

_FLAGS: tuple[Outcome, Outcome] = ("preempted", "interrupted")


def flags_of(outcome: Outcome | None) -> list[float]:
    """A wish to stop as two numbers, which are summed over the ranks."""
    return [float(outcome == flag) for flag in _FLAGS]


def outcome_of(flags: Sequence[float]) -> Outcome | None:
    """What all ranks stop for, from the sums; a person at a keyboard is heard before a scheduler."""
    preempted, interrupted = flags
    return "interrupted" if interrupted else "preempted" if preempted else None


class StopRequest:
    """What a signal asked for. Installed once, in the main thread of a worker.

    Attributes:
        outcome: preempted (SIGTERM, SIGUSR1, SIGHUP) or interrupted (SIGINT), once one has come.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self._training = False
        self._tell: Callable[[str], None] | None = None
        self._first_at: float | None = None

    def install(self, tell: Callable[[str], None] | None) -> None:
        """Takes over the signals. They are heard in a thread, also while the main one waits in a collective or for a disk.

        Args:
            tell: is told the name of each signal; None where there is no front to count them.
        """
        self._tell = tell
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in _OUTCOMES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
                signal.signal(number, _handled_by_the_thread)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(read_end,), daemon=True, name="signals").start()

    def training_begins(self) -> None:
        """From now on there is something to save, and a signal waits for the end of the step."""
        self._training = True

    def _listen(self, fd: int) -> None:
        while numbers := os.read(fd, 64):
            for number in numbers:
                if number in _OUTCOMES:
                    self._heard(signal.Signals(number))

    def _heard(self, number: signal.Signals) -> None:
        outcome = _OUTCOMES[number]
        if self._training and self.outcome != "interrupted":  # a person is heard before a scheduler
            self.outcome = outcome
        if self._tell is not None:
            self._tell(number.name)
        if not self._training or (self._tell is None and self._is_second()):
            os._exit(EXIT_CODES[outcome])  # nothing of this start is worth keeping

    def _is_second(self) -> bool:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        return now - self._first_at >= _AGAIN_AFTER_S


def _handled_by_the_thread(*_: object) -> None:
    """Python writes the number into the pipe before it comes to this."""


Message = dict[str, Any]

_STDIN = 0


class FrontMessages:
    """Messages of the front, each kept by its kind until somebody asks for it."""

    def __init__(self) -> None:
        shards: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._of_kind: dict[str, queue.SimpleQueue[Message]] = {
            "go": queue.SimpleQueue(),
            "shard_written": shards,
            "shard_moves": shards,
        }
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
def front_messages() -> FrontMessages:
    """The one reader of this process's stdin."""
    return FrontMessages()
