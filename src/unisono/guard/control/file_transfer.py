"""Transfers of files and buffers of a node to the head's disk, over the control channel: both
ends.

A node:

    sender = FileSender(link)
    sender.send(path, {"kind": "shard", ...}, content)
    sender.send(buffer, {"kind": "snapshot", ...})
    select([..., sender.fileno()], ...)
    for outcome in sender.outcomes(): ...

The head:

    places = {"shard": place}   # Offer -> (directory, name)
    with FileReceiver(server, places):
        for event in server.receive(...):
            match event:
                case FileReceived(label=..., path=..., error=...): ...

`label["kind"]` says which rule at the head decides where it goes; the rest of the label is for that
rule. A file is at the head under its name only when it is there whole, synced, with the size and
the XXH3-128 digest that the sender gave; until then it is `.NAME.part` beside it, which goes away
with whatever goes wrong. Every end is reported to both sides: to the sender by a TransferOutcome,
the head's front by a FileReceived among its events, which comes before any message that the sender
sends after its Outcome.

    node → head   offer: id, size, digest, label
    head → node   more: so many pieces may come; done, with the reason, if there is no room or rule
    node → head   pieces, each of at most PIECE_BYTES
    head → node   more: 1, for each piece that is written
    node → head   sent; withdraw if it cannot be read after all
    head → node   done, with the reason if it is not there; at any time

So at most WINDOW pieces of a file are on their way, and what else the channel carries (beats, an
abort, a verdict) waits for 4 MiB at the most. The head takes AT_ONCE files at the same time;
further offers wait. A node sends one after the other. Nothing here waits in the thread of a front:
reading, digesting, writing and syncing have threads of their own. The head accepts offered files by
rules, writes them, and verifies their digests.
"""

import contextlib
import os
import queue
import re
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from unisono.base.files import path_below
from unisono.base.text import one_line, show_bytes, show_seconds
from unisono.guard.control.channel_ends import HeadServer, NodeLink
from unisono.guard.control.connection import FileReceived, Inbox
from unisono.guard.control.head import IncomingConnection
from unisono.guard.control.protocol import PIECE_BYTES, Body, Malformed, Piece
from unisono.guard.facts.storage import responds

WINDOW = 8
"""Maximum pieces of a file in flight."""
AT_ONCE = 8
"""Maximum concurrent files over all nodes; others wait. Limits memory, with WINDOW, to 32 MiB."""
PER_NODE = 2
"""Maximum concurrent files of one node, so that no node blocks the others."""
MAX_OPEN = 64
"""Maximum active and waiting files of one node; a node that offers more is disconnected."""
SILENT_S = 120.0
"""Maximum silence in a transfer before it is given up, so that its slot is free again."""
SYNC_BYTES = 32 << 20
"""Bytes between syncs, so that a slow disk slows down the pieces instead of causing one long wait
at the end.
"""
_CLOSING_S = 2.0
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
    label: dict[str, object]

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
                "label": dict() as label,
            } if (
                isinstance(label.get("kind"), str)
                and 0 <= number <= _MAX_ID
                and 0 <= size < 1 << 63
                and _DIGEST.fullmatch(digest)
            ):
                return cls(node_rank, host, number, Content(size, digest), label)
        raise Malformed("sent an invalid offer of a file")


Source = Path | bytes | memoryview


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a transfer ended.

    Attributes:
        transfer: number from `send`.
        seconds: duration without waiting in the queue.
        error: why it failed; empty if it did not.
    """

    transfer: int
    label: dict[str, object]
    bytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    source: Source
    label: dict[str, object]
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

    def send(self, source: Source, label: dict[str, object], content: Content | None = None) -> int:
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
                case {"t": "more", "id": self._sending, "pieces": int() as pieces}:
                    self._may_send += pieces
                case {"t": "done", "id": self._sending, "why": str() as why}:
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
        prefix = f"{problem.filename}: " if problem.filename else ""
        return f"{prefix}it cannot be read: {problem.strerror or problem}"
    return str(problem)


class _StopReason(str):
    """Why a transfer ends early."""

    __slots__ = ()


class _Incoming:
    """One incoming file. `granted`: number of pieces that its sender may still send."""

    def __init__(self, caller: IncomingConnection, offer: Offer) -> None:
        self.caller = caller
        self.offer = offer
        self.items: queue.SimpleQueue[Piece | _StopReason | None] = queue.SimpleQueue()
        self.granted = 0
        self.lock = threading.Lock()
        self.began = time.monotonic()

    def grant(self, pieces: int) -> None:
        """Allows more pieces."""
        with self.lock:
            self.granted += pieces

    def take(self, piece: Piece) -> None:
        """In the channel's thread.

        Raises:
            Malformed: if more arrives than was granted.
        """
        with self.lock:
            if not self.granted:
                raise Malformed("sent more of a file than was requested")
            self.granted -= 1
        self.items.put(piece)


PlacementRule = Callable[[Offer], tuple[Path, str]]
"""The target of an offered file: a directory that exists and that is not a link, and the name in
it. Called in a thread of the transfer. Raises Refused where it may not go anywhere.
"""


class FileReceiver:
    """Receives files until `close`; also a context manager. One per server at a time.

    Attributes:
        moved: when the last piece of any file was written, in monotonic seconds; before the first,
            when it began.
    """

    def __init__(
        self, server: HeadServer, places: Mapping[str, PlacementRule], *, silent_s: float = SILENT_S
    ) -> None:
        """Begins.

        Args:
            server: the head's end of the channel. Each end of a file is an Arrived among its
                events.
            places: by the label's `kind`.
            silent_s: see SILENT_S.
        """
        self.moved = time.monotonic()
        self._server = server
        self._places = dict(places)
        self._silent_s = silent_s
        self._lock = threading.Lock()
        self._known: dict[tuple[IncomingConnection, int], _Incoming] = {}
        self._open: Counter[IncomingConnection] = Counter()
        self._taken: Counter[IncomingConnection] = Counter()
        self._waiting: deque[_Incoming] = deque()
        self._threads: set[threading.Thread] = set()
        server.take_files(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, why: str = "the head has ended this start of the ranks") -> None:
        """Ends all transfers. No partial file is left."""
        self._server.take_files(None)
        with self._lock:
            threads, transfers = list(self._threads), list(self._known.values())
            waiting = list(self._waiting)
            self._waiting.clear()
        for incoming in transfers:
            incoming.items.put(_StopReason(why))
        for incoming in waiting:
            self._end(incoming, None, why)
        limit = time.monotonic() + _CLOSING_S
        for thread in threads:
            # A thread whose disk does not answer is left behind.
            thread.join(max(0.0, limit - time.monotonic()))

    def receive(self, caller: IncomingConnection, item: Body | Piece) -> None:
        """A frame of a file transfer. Runs in the channel's thread."""
        if isinstance(item, Piece):
            incoming = self._known.get((caller, item.transfer))
            if incoming is not None:
                incoming.take(item)
            return
        if item["t"] == "offer":
            self._offered(caller, item)
            return
        number = item["id"]
        incoming = self._known.get((caller, number)) if isinstance(number, int) else None
        if incoming is not None:
            why = one_line(str(item.get("why", "")), limit=500)
            incoming.items.put(None if item["t"] == "sent" else _StopReason(why))

    def drop(self, caller: IncomingConnection) -> None:
        """The end of a connection. Runs in the channel's thread."""
        with self._lock:
            dropped = [incoming for (of, _), incoming in self._known.items() if of is caller]
        for incoming in dropped:
            incoming.items.put(_StopReason("its node is gone"))

    def _offered(self, caller: IncomingConnection, body: Body) -> None:
        assert caller.hello is not None
        offer = Offer.from_body(body, node_rank=caller.hello.node_rank, host=caller.hello.host)
        incoming = _Incoming(caller, offer)
        with self._lock:
            if (caller, offer.transfer) in self._known:
                raise Malformed("offered a file twice under one number")
            if self._open[caller] >= MAX_OPEN:
                raise Malformed(f"offered a file while {MAX_OPEN} of its files wait")
            self._known[caller, offer.transfer] = incoming
            self._open[caller] += 1
            self._waiting.append(incoming)
            self._start_next()

    def _start_next(self) -> None:
        """Starts the first waiting file whose node is below its limit. Needs the lock."""
        if len(self._threads) >= AT_ONCE:
            return
        for incoming in self._waiting:
            if self._taken[incoming.caller] < PER_NODE:
                self._waiting.remove(incoming)
                self._taken[incoming.caller] += 1
                thread = threading.Thread(
                    target=self._work, args=(incoming,), name="unisono.receive", daemon=True
                )
                self._threads.add(thread)
                thread.start()
                return

    def _work(self, incoming: _Incoming) -> None:
        """The thread of one file. Frees its slot in any case."""
        try:
            self._take(incoming)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                _subtract(self._taken, incoming.caller)
                self._start_next()

    def _take(self, incoming: _Incoming) -> None:
        path, why = None, "the head has failed on it: see its log"
        try:
            path, why = self._keep(incoming), ""
        except OfferRefused as error:
            why = str(error)
        except OSError as error:
            why = f"{error.filename or 'it'} cannot be written on the head's node: {error.strerror or error}"
        finally:
            self._end(incoming, path, why)

    def _keep(self, incoming: _Incoming) -> Path:
        """Writes the pieces; returns the path of the complete file."""
        offer = incoming.offer
        destination = self._places.get(str(offer.label["kind"]))
        if destination is None:
            raise OfferRefused(f"the head does not accept files of kind {offer.label['kind']!r:.40}")
        try:
            folder, name = destination(offer)
            path = path_below(folder, name, parts=1)
        except (KeyError, TypeError) as error:
            raise OfferRefused("the head cannot read what kind of file it is") from error
        except ValueError as error:
            raise OfferRefused(str(error)) from error
        # Waited for in a process of its own: a thread that hangs in the kernel would keep the front
        # from ending.
        responds(path.parent, limit_s=None)
        with _part_of(path, offer.content.bytes) as (fd, finish):
            self._more(incoming, WINDOW)
            try:
                content = self._write(incoming, fd)
            except OSError as error:
                error.filename = str(path)
                raise
            if content != offer.content:
                raise OfferRefused(_difference(offer, content))
            os.fsync(fd)
            finish()
        return path

    def _write(self, incoming: _Incoming, fd: int) -> Content:
        digest, size, most = xxhash.xxh3_128(), 0, incoming.offer.content.bytes
        while (item := self._next_of(incoming)) is not None:
            if isinstance(item, _StopReason):
                raise OfferRefused(item)
            if item.offset != size or size + len(item.data) > most:
                raise OfferRefused("its pieces are not contiguous, or exceed the offered size")
            _write_all(fd, item.data)
            digest.update(item.data)
            size += len(item.data)
            if size // SYNC_BYTES > (size - len(item.data)) // SYNC_BYTES:
                os.fdatasync(fd)
            self.moved = time.monotonic()
            self._more(incoming, 1)
        return Content(size, digest.hexdigest())

    def _next_of(self, incoming: _Incoming) -> Piece | _StopReason | None:
        try:
            return incoming.items.get(timeout=self._silent_s)
        except queue.Empty:
            return _StopReason(f"no part of it has arrived for {show_seconds(self._silent_s)}")

    def _more(self, incoming: _Incoming, pieces: int) -> None:
        incoming.grant(pieces)
        self._server.reply(incoming.caller, {"t": "more", "id": incoming.offer.transfer, "pieces": pieces})

    def _end(self, incoming: _Incoming, path: Path | None, why: str) -> None:
        """Reports the end to both sides; to the front first, since the sender's next message
        follows.
        """
        offer = incoming.offer
        with self._lock:
            if self._known.pop((incoming.caller, offer.transfer), None) is not None:
                _subtract(self._open, incoming.caller)
        seconds = time.monotonic() - incoming.began
        size, digest = offer.content.bytes, offer.content.xxh3_128
        self._server.post(FileReceived(offer.node_rank, offer.label, path, size, digest, seconds, why))
        self._server.reply(incoming.caller, {"t": "done", "id": offer.transfer, "why": why})


def _subtract(counts: Counter[IncomingConnection], caller: IncomingConnection) -> None:
    """Decrements a count and removes it at zero."""
    counts[caller] -= 1
    if not counts[caller]:
        del counts[caller]


@contextlib.contextmanager
def _part_of(path: Path, size: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """Creates `.NAME.part` beside `path`; yields its descriptor and a function that renames it to
    `path`.

    Removed if not renamed.

    Raises:
        Refused: if the directory is not there, or is a link; if the name is taken, or there is no
            room.
        OSError: if it cannot be created.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise OfferRefused(f"the head no longer waits for it: {path.parent} is not there") from None
    part = f".{path.name}.part"
    try:
        if _is_in(folder, path.name):
            raise OfferRefused(f"{path} is there already")
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OfferRefused(_no_room(path, size, free))
        fd = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        try:
            yield fd, lambda: os.rename(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):  # it has got its name
                os.unlink(part, dir_fd=folder)
    finally:
        os.close(folder)


def _is_in(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write_all(fd: int, data: bytes | memoryview) -> None:
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


def _no_room(path: Path, size: int, free: int) -> str:
    return (
        f"no room on the head's node: {show_bytes(size)} are needed in {path.parent}, and {show_bytes(free)}"
        " are free"
    )


def _difference(offer: Offer, content: Content) -> str:
    if content.bytes != offer.content.bytes:
        return f"{content.bytes} bytes of {offer.content.bytes} arrived"
    return (
        f"it has changed since node {offer.node_rank} ({offer.host}) wrote it: digest {content.xxh3_128}"
        f" arrived, {offer.content.xxh3_128} was written; that node's disk or memory cannot be trusted"
    )
