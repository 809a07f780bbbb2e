"""Chunks of bytes that end where a line ends, and the pieces of a line: flat memory, whatever a file holds."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 1 << 22
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is cut into such pieces."""

_HEAD_BYTES, _NULS = 256, 0.25
"""So many zeros in its head: UTF-16 or UTF-32 without its mark."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_PIECES = re.compile(
    r"\r|\x1b\[[0-9;]{0,8}[A-HJKf]"  # the cursor went elsewhere: a new piece
    r"|(?<=it/s\])(?=[^\s,|])|(?<=s/it\])(?=[^\s,|])"  # a progress bar, and somebody else's words behind it
    r"|(?<=.)(?=\[rank\d{1,6}\]:)|(?<=[\]s%}])(?=\[[EWF] ProcessGroup)"  # two ranks wrote at once
)

_LONGEST_PREFIX = 400
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,12}m")
_BARE = re.compile(
    r"(?:\S{1,80} {1,12}\| |\[[^\]\s]{1,120}\](?:<std\w{3}>)?:? ?|\([^)\n]{1,160}\) |[\w.-]{1,63}: ?|\[?20\d\d[-/]\d\d[-/]\d\d[T ]\S{8,36} |20\d\d-\d\d-\d\d[T ]\S{8,20}\s|std(?:err|out) [FP] |[\w.-]{1,63}\t|> ){1,4}"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines of a log.

    Attributes:
        data: the bytes.
        offset: where they begin in the log, bytes.
        line: the number of the first line, from 1.
    """

    data: bytes
    offset: int
    line: int


def read_chunks(stream: BinaryIO, *, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """The log in chunks of about `size` bytes, each ending at a line's end. A stream that breaks off (a damaged .gz) ends there."""
    rest, offset, line = b"", 0, 1
    block = _read(stream, size)
    while block and len(block) < _HEAD_BYTES and (more := _read(stream, size)):
        block += more  # whatever the pieces in which it comes, it is judged by the same head
    head = block[:_HEAD_BYTES]
    wide = head[:2] in _UTF16 or head.count(0) > _NULS * len(head)
    while True:
        over = not block
        if wide:
            block = block.replace(b"\x00", b"")  # UTF-16 of what is mostly ASCII: enough for words
        data = rest + block
        end = len(data) if over else _end(data)
        if end:
            yield Chunk(data[:end], offset, line)
            line += data.count(b"\n", 0, end)
            offset += end
        rest = data[end:]
        if over:
            return
        block = _read(stream, size)


def _read(stream: BinaryIO, size: int) -> bytes:
    """The next bytes; none where the stream is over or damaged: what was unpacked before the damage is kept."""
    try:
        return stream.read(size)
    except (EOFError, OSError, ValueError, ArithmeticError):
        return b""


def _end(data: bytes) -> int:
    """Where the last whole line of `data` ends; a line that is too long ends anywhere."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return end if end or len(data) < LONGEST_LINE_BYTES else len(data)


def split_pieces(text: str, unwrap: Callable[[str], str | None] = lambda _: None) -> list[str]:
    """The parts of a line that were written at different moments or by different ranks.

    Args:
        text: the line.
        unwrap: the text without what a collector puts before every line of this log; None: it does not bear it.
    """
    if text.endswith("}") and '{"' in text[:_LONGEST_PREFIX] and _is_object(text):
        return [text]  # a collector's: what is in it is taken apart later
    pieces: list[str] = []
    for piece in _PIECES.split(text):
        if pieces and (_is_bare(pieces[-1]) or ((bare := unwrap(pieces[-1])) is not None and (not bare or _is_bare(bare)))):  # fmt: skip
            pieces[-1] += piece
        elif piece:
            pieces.append(piece)
    return pieces


def _is_object(text: str) -> bool:
    """Whether a line is a JSON object, perhaps behind a collector's prefixes."""
    before, _, _ = text.partition('{"')
    return not before or _is_bare(before)


def _is_bare(piece: str) -> bool:
    """Whether it is only what a collector or a launcher put before a rank's own prefix."""
    return len(piece) < _LONGEST_PREFIX and _BARE.fullmatch(_COLOUR.sub("", piece)) is not None
