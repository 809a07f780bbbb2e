"""A log's bytes on their way: how far they are read, and where to stop. A compressed file may hold a thousand times what it shows."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

LEAST_UNPACKED_BYTES = 1 << 30
MOST_RATIO = 200
"""Of what a compressed log unpacks to; real ones stay below 100."""
MOST_PIPED_BYTES = 1 << 34
"""Of a pipe with a name, as of `<(…)`. One that never ends is not read for ever; stdin is, until a person ends it."""


@dataclass(slots=True)
class Watched:
    """A stream that says how far it is, and ends where its limit is.

    Attributes:
        stream: what is read.
        packed_bytes: its size on the disk; 0: unknown.
        on_read: called with the number of bytes read from the disk so far, and of those that came of it.
        is_pipe: whether it comes from a pipe with a name, and so is not read past MOST_PIPED_BYTES.
        given_bytes: so many were given on.
        cut: it was ended at the limit.
        damage: what is wrong with a compressed one; it ended there.
    """

    stream: BinaryIO
    packed_bytes: int
    on_read: Callable[[int, int], None]
    is_pipe: bool = False
    given_bytes: int = 0
    cut: bool = False
    damage: str = ""

    def read(self, size: int) -> bytes:
        """The next bytes; none where the stream, or what is read of it, ends.

        Raises:
            OSError: if it cannot be read.
        """
        if self.is_pipe and self.given_bytes >= MOST_PIPED_BYTES:
            self.cut = True
            return b""
        packed = getattr(self.stream, "fileobj", None)  # of a gzip.GzipFile
        data = self.stream.read(size) if packed is None else self._unpacked(size)
        self.given_bytes += len(data)
        self.on_read(packed.tell() if packed is not None else self.given_bytes, self.given_bytes)
        return data

    def _unpacked(self, size: int) -> bytes:
        """As much as there is before the limit, or before the damage: GzipFile.read would throw that away."""
        parts: list[bytes] = []
        wanted = size
        while wanted > 0 and not self.damage:
            if self.given_bytes + size - wanted >= max(LEAST_UNPACKED_BYTES, MOST_RATIO * self.packed_bytes):
                self.cut = True
                break
            try:
                part = self.stream.read1(wanted)  # type: ignore[attr-defined]
            except (OSError, EOFError, zlib.error) as error:
                self.damage = str(error)
                break
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)
