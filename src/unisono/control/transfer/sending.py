"""A node's side: reads files, one after the other, and sends them in pieces as the head asks for more."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from unisono.control.frames import PIECE_BYTES, Body, Piece
from unisono.control.inbox import Inbox
from unisono.control.link import NodeLink
from unisono.control.transfer.content import Content, Offer, Refused

Source = Path | bytes | memoryview
_CLOSING_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transfer ended.

    Attributes:
        transfer: what `send` gave.
        label: as it was given.
        bytes: how many there were to send.
        seconds: from its turn to its end.
        error: why it is not at the head, for people; empty if it is.
    """

    transfer: int
    label: dict[str, Any]
    bytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    source: Source
    label: dict[str, Any]
    content: Content | None


class Transfers:
    """Sends files and buffers to the head. There is one of it for a link at a time; `close` it before the link."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: Inbox[Outcome] = Inbox()
        self._changed = threading.Condition()
        self._number = link.next_transfer
        self._sending = -1
        self._may_send = 0
        self._done: str | None = None
        self._lost = ""
        link.hear_of_files(self._heard)
        self._thread = threading.Thread(target=self._work, name="unisono.transfers", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, source: Source, label: dict[str, Any], content: Content | None = None) -> int:
        """Sends it after those that wait; returns at once with its number. Its end is one Outcome.

        Args:
            source: a file, or a buffer, which must stay as it is until the Outcome.
            label: what it is; `kind` says which rule at the head takes it.
            content: size and digest as its writer knows them; None: they are taken from the source when its turn comes.
        """
        with self._changed:
            number = self._number
            self._number += 1
            self._link.next_transfer = self._number
        self._jobs.put(_Job(number, source, label, content))
        return number

    def outcomes(self) -> list[Outcome]:
        """Those that have ended since the last call."""
        return self._ended.take(0)

    def fileno(self) -> int:
        """Readable while outcomes wait."""
        return self._ended.fileno()

    def close(self, why: str = "this node has ended the start") -> None:
        """Ends what is under way and what waits; their outcomes can still be taken."""
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()
        self._jobs.put(None)
        self._thread.join(_CLOSING_S)  # a disk that does not answer is left behind
        self._ended.close()

    def _heard(self, body: Body) -> None:
        """In the channel's thread."""
        with self._changed:
            match body:
                case {"t": "gone", "why": why}:
                    self._lost = self._lost or f"the head is gone: {why}"
                case {"t": "more", "id": self._sending, "pieces": pieces}:
                    self._may_send += pieces
                case {"t": "done", "id": self._sending, "why": why}:
                    self._done = why
                case _:
                    pass  # of a transfer that has ended here
            self._changed.notify_all()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            with self._changed:
                self._sending, self._may_send, self._done = job.number, 0, None
            error, size = "", job.content.bytes if job.content else 0
            try:
                with _opened(job.source) as (held, size):
                    self._carry(job, held, size)
            except (OSError, Refused) as problem:
                error = _words(problem)
                if self._done is None:  # the head has not ended it
                    self._link.send_of_file({"t": "withdraw", "id": job.number, "why": error})
            self._ended.put(Outcome(job.number, job.label, size, time.monotonic() - began, error))

    def _carry(self, job: _Job, held: "_Held", size: int) -> None:
        content = job.content or held.content()
        if size != content.bytes:
            raise Refused(f"it has {size} bytes, {content.bytes} were written")
        with self._changed:
            self._raise_if_over()
        offer = Offer(0, "", job.number, content, job.label)
        self._link.send_of_file(offer.to_body())
        for offset in range(0, size, PIECE_BYTES):
            self._wait_for_more()
            data = held.read(offset, min(PIECE_BYTES, size - offset))
            self._link.send_of_file(Piece(job.number, offset, data))
        self._link.send_of_file({"t": "sent", "id": job.number})
        self._wait_for_end()

    def _wait_for_more(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._may_send > 0 or self._is_over())
            self._raise_if_over()
            self._may_send -= 1

    def _wait_for_end(self) -> None:
        with self._changed:
            self._changed.wait_for(self._is_over)
            if self._done != "":
                self._raise_if_over()

    def _is_over(self) -> bool:
        return self._done is not None or bool(self._lost)

    def _raise_if_over(self) -> None:
        if self._done is not None or self._lost:
            raise Refused(self._done or self._lost or "the head has ended it before it was sent")


class _Held:
    """A source, opened."""

    def __init__(self, fd: int | None, buffer: memoryview) -> None:
        self._fd = fd
        self._buffer = buffer

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly so much from there.

        Raises:
            Refused: if there is less.
        """
        data = self._buffer[offset : offset + size] if self._fd is None else os.pread(self._fd, size, offset)
        if len(data) != size:
            raise Refused(f"it ends after {offset + len(data)} bytes")
        return data

    def content(self) -> Content:
        """Size and digest, read through."""
        if self._fd is None:
            return Content.of(self._buffer)
        digest, offset = xxhash.xxh3_128(), 0
        while data := os.pread(self._fd, PIECE_BYTES, offset):
            digest.update(data)
            offset += len(data)
        return Content(offset, digest.hexdigest())


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[_Held, int]]:
    """The source, and its size in bytes."""
    if not isinstance(source, Path):
        buffer = memoryview(source).cast("B")
        yield _Held(None, buffer), buffer.nbytes
        return
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _Held(fd, memoryview(b"")), os.fstat(fd).st_size
    finally:
        os.close(fd)


def _words(problem: OSError | Refused) -> str:
    if isinstance(problem, OSError):
        place = f"{problem.filename}: " if problem.filename else ""
        return f"{place}it cannot be read: {problem.strerror or problem}"
    return str(problem)
