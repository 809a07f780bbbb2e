"""Sends files and buffers of a node to the head's disk, over the control channel. `file_receiver` is the head's side.

A node:                                                     The head:

    sender = FileSender(link)                               places = {"shard": place}   # Offer -> Path, or raises Refused
    sender.send(path, {"kind": "shard", ...}, content)      with FileReceiver(server, places):
    sender.send(buffer, {"kind": "snapshot", ...})              for event in server.receive(...):
    select([..., sender.fileno()], ...)                             match event:
    for outcome in sender.outcomes(): ...                               case FileReceived(label=..., path=..., error=...): ...

`label["kind"]` says which rule at the head decides where it goes; the rest of the label is for that rule. A file is at the
head under its name only when it is there whole, synced, with the size and the XXH3-128 digest that the sender gave; until
then it is `.NAME.part` beside it, which goes away with whatever goes wrong. Every end is reported to both sides: to the sender by
a TransferOutcome, the head's front by a FileReceived among its events, which comes before any message that the sender sends after its Outcome.

    node → head   offer: id, size, digest, label
    head → node   more: so many pieces may come                              no room, no such place: done, with the reason
    node → head   pieces, each of at most PIECE_BYTES
    head → node   more: 1, for each piece that is written
    node → head   sent                                                       withdraw: it cannot be read after all
    head → node   done, with the reason if it is not there                   at any time

So at most WINDOW pieces of a file are on their way, and what else the channel carries (beats, an abort, a verdict) waits for
4 MiB at the most. The head takes AT_ONCE files at the same time; further offers wait. A node sends one after the other.
Nothing here waits in the thread of a front: reading, digesting, writing and syncing have threads of their own.
"""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from unisono.control.channel_ends import NodeLink
from unisono.control.connection import Inbox
from unisono.control.protocol import PIECE_BYTES, Body, Malformed, Piece

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_ID = (1 << 32) - 1


Buffer = bytes | memoryview


class OfferRefused(Exception):  # noqa: N818 - named for what happened to the offer
    """A file is refused. The text says why."""


@dataclass(frozen=True, slots=True)
class Content:
    """Size and XXH3-128 digest (hex) of a file or buffer."""

    bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, data: Buffer) -> Self:
        """Size and digest of a buffer."""
        return cls(memoryview(data).nbytes, xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True)
class Offer:
    """A node's offer of a file.

    Attributes:
        transfer: number of the transfer on its connection.
        label: description; `kind` is a str, the rest is checked by the rule of that kind.
    """

    node_rank: int
    host: str
    transfer: int
    content: Content
    label: dict[str, Any]

    def to_body(self) -> Body:
        """A frame's body; the sender is known from the connection."""
        size, digest = self.content.bytes, self.content.xxh3_128
        return {"t": "offer", "id": self.transfer, "bytes": size, "xxh3_128": digest, "label": self.label}

    @classmethod
    def from_body(cls, body: Body, *, node_rank: int, host: str) -> Self:
        """Reads an offer.

        Raises:
            Malformed: if it is invalid.
        """
        match body:
            case {
                "t": "offer",
                "id": int() as number,
                "bytes": int() as size,
                "xxh3_128": str() as digest,
                "label": {"kind": str(), **_rest} as label,
            } if 0 <= number <= _MAX_ID and 0 <= size < 1 << 63 and _DIGEST.fullmatch(digest):
                return cls(node_rank, host, number, Content(size, digest), label)
        raise Malformed("sent an invalid offer of a file")


Source = Path | bytes | memoryview
_CLOSING_S = 2.0


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a transfer ended.

    Attributes:
        transfer: number from `send`.
        seconds: duration without waiting in the queue.
        error: why it failed; empty if it did not.
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


class FileSender:
    """Sends files and buffers to the head. One per link at a time; close it before the link."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended: Inbox[TransferOutcome] = Inbox()
        self._changed = threading.Condition()
        self._number = link.next_transfer
        self._sending = -1
        self._may_send = 0
        self._done: str | None = None
        self._lost = ""
        link.set_file_handler(self._on_body)
        self._thread = threading.Thread(target=self._work, name="unisono.transfers", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, source: Source, label: dict[str, Any], content: Content | None = None) -> int:
        """Queues a transfer and returns its number. Its end is one TransferOutcome.

        Args:
            source: a file, or a buffer, which must not change until the outcome.
            label: what it is; `kind` says which rule at the head takes it.
            content: size and digest as known by its writer; None: computed from the source.
        """
        with self._changed:
            number = self._number
            self._number += 1
            self._link.next_transfer = self._number
        self._jobs.put(_Job(number, source, label, content))
        return number

    def outcomes(self) -> list[TransferOutcome]:
        """Outcomes since the last call."""
        return self._ended.take(0)

    def fileno(self) -> int:
        """A descriptor that is readable while outcomes wait."""
        return self._ended.fileno()

    def close(self, why: str = "this node has ended the start") -> None:
        """Ends active and queued transfers; their outcomes can still be taken."""
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()
        self._jobs.put(None)
        self._thread.join(_CLOSING_S)  # a disk that does not answer is left behind
        self._ended.close()

    def _on_body(self, body: Body) -> None:
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
            except (OSError, OfferRefused) as problem:
                error = _error_text(problem)
                if self._done is None:  # the head has not ended it
                    self._link.send_of_file({"t": "withdraw", "id": job.number, "why": error})
            self._ended.put(TransferOutcome(job.number, job.label, size, time.monotonic() - began, error))

    def _carry(self, job: _Job, held: "_OpenSource", size: int) -> None:
        content = job.content or held.content()
        if size != content.bytes:
            raise OfferRefused(f"it has {size} bytes, {content.bytes} were written")
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
            raise OfferRefused(self._done or self._lost or "the head has ended it before it was sent")


class _OpenSource:
    """A source, opened."""

    def __init__(self, fd: int | None, buffer: memoryview) -> None:
        self._fd = fd
        self._buffer = buffer

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly `size` bytes from `offset`.

        Raises:
            Refused: if there is less.
        """
        data = self._buffer[offset : offset + size] if self._fd is None else os.pread(self._fd, size, offset)
        if len(data) != size:
            raise OfferRefused(f"it ends after {offset + len(data)} bytes")
        return data

    def content(self) -> Content:
        """Size and digest of the whole source."""
        if self._fd is None:
            return Content.of(self._buffer)
        digest, offset = xxhash.xxh3_128(), 0
        while data := os.pread(self._fd, PIECE_BYTES, offset):
            digest.update(data)
            offset += len(data)
        return Content(offset, digest.hexdigest())


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[tuple[_OpenSource, int]]:
    """The source, and its size in bytes."""
    if not isinstance(source, Path):
        buffer = memoryview(source).cast("B")
        yield _OpenSource(None, buffer), buffer.nbytes
        return
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield _OpenSource(fd, memoryview(b"")), os.fstat(fd).st_size
    finally:
        os.close(fd)


def _error_text(problem: OSError | OfferRefused) -> str:
    if isinstance(problem, OSError):
        place = f"{problem.filename}: " if problem.filename else ""
        return f"{place}it cannot be read: {problem.strerror or problem}"
    return str(problem)
