"""The head's side of file transfers: accepts offered files by rules, writes them, and verifies their digests."""

import contextlib
import os
import queue
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import xxhash

from unisono.control.channel_ends import HeadServer
from unisono.control.connection import FileReceived
from unisono.control.file_sender import Content, Offer, OfferRefused
from unisono.control.head import IncomingConnection
from unisono.control.protocol import Body, Malformed, Piece
from unisono.text import one_line, show_bytes, show_seconds

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
"""Bytes between syncs, so that a slow disk slows down the pieces instead of causing one long wait at the end."""
_CLOSING_S = 2.0

PlacementRule = Callable[[Offer], Path]
"""The target of an offered file: a path in a directory that exists and that is not a link. Called in a thread of the transfer.
Raises Refused where it may not go anywhere."""


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


class FileReceiver:
    """Receives files until `close`; also a context manager. One per server at a time.

    Attributes:
        moved: when the last piece of any file was written, in monotonic seconds; before the first, when it began.
    """

    def __init__(
        self, server: HeadServer, places: Mapping[str, PlacementRule], *, silent_s: float = SILENT_S
    ) -> None:
        """Begins.

        Args:
            server: the head's end of the channel. Each end of a file is an Arrived among its events.
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
            threads, known = list(self._threads), list(self._known.values())
            waiting = list(self._waiting)
            self._waiting.clear()
        for incoming in known:
            incoming.items.put(_StopReason(why))
        for incoming in waiting:
            self._end(incoming, None, why)
        limit = time.monotonic() + _CLOSING_S
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))  # one whose disk does not answer is left behind

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
        incoming = self._known.get((caller, item["id"]))
        if incoming is not None:
            why = one_line(str(item.get("why", "")), limit=500)
            incoming.items.put(None if item["t"] == "sent" else _StopReason(why))

    def drop(self, caller: IncomingConnection) -> None:
        """The end of a connection. Runs in the channel's thread."""
        with self._lock:
            found = [incoming for (of, _), incoming in self._known.items() if of is caller]
        for incoming in found:
            incoming.items.put(_StopReason("its node is gone"))

    def _offered(self, caller: IncomingConnection, body: Body) -> None:
        assert caller.hello is not None
        offer = Offer.from_body(body, node_rank=caller.hello.node_rank, host=caller.hello.host)
        incoming = _Incoming(caller, offer)
        with self._lock:
            if (caller, offer.transfer) in self._known:
                raise Malformed("offered a file twice under one number")
            if self._open[caller] >= MAX_OPEN:
                raise Malformed(f"offered a file while {MAX_OPEN} of its own wait")
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
        place = self._places.get(offer.label["kind"])
        if place is None:
            raise OfferRefused(f"the head does not accept files of kind {offer.label['kind']!r:.40}")
        try:
            path = place(offer)
        except (KeyError, TypeError, ValueError) as error:
            raise OfferRefused("the head cannot read what kind of file it is") from error
        if ".." in path.parts or not path.name.isprintable():
            raise OfferRefused("its name is none of a file")
        with _part_of(path, offer.content.bytes) as (fd, finish):
            self._more(incoming, WINDOW)
            try:
                found = self._write(incoming, fd)
            except OSError as error:
                error.filename = str(path)
                raise
            if found != offer.content:
                raise OfferRefused(_difference(offer, found))
            os.fsync(fd)
            finish()
        return path

    def _write(self, incoming: _Incoming, fd: int) -> Content:
        digest, size, most = xxhash.xxh3_128(), 0, incoming.offer.content.bytes
        while (item := self._next_of(incoming)) is not None:
            if isinstance(item, _StopReason):
                raise OfferRefused(item)
            if item.offset != size or size + len(item.data) > most:
                raise OfferRefused("its pieces do not follow each other, or are more than was offered")
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
        """Reports the end to both sides; to the front first, since the sender's next message follows."""
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
    """Creates `.NAME.part` beside `path`; yields its descriptor and a function that renames it to `path`. Removed if not renamed.

    Raises:
        Refused: if the directory is not there, or is a link; if the name is taken, or there is no room.
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
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _no_room(path: Path, size: int, free: int) -> str:
    return f"no room on the head's node: {show_bytes(size)} are needed in {path.parent}, and {show_bytes(free)} are free"


def _difference(offer: Offer, found: Content) -> str:
    if found.bytes != offer.content.bytes:
        return f"{found.bytes} bytes of {offer.content.bytes} arrived"
    return (
        f"it has changed after node {offer.node_rank} ({offer.host}) wrote it: digest {found.xxh3_128} arrived,"
        f" {offer.content.xxh3_128} was written; that node's disk or memory is not to be trusted"
    )
