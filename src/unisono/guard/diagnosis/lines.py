"""Bytes of a log as lines: chunks that end at a line's end, the pieces of a line, the places that
may matter, and text without secrets.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from unisono.base.text import plain, redact

CHUNK_BYTES = 1 << 22
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is split into pieces of this size."""

_HEAD_BYTES, _NULS = 256, 0.25
"""Share of zero bytes in its head: UTF-16 or UTF-32 without a byte order mark."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_PIECES = re.compile(
    r"\r|\x1b\[[0-9;]{0,8}[A-HJKf]"  # the cursor moved: a new piece
    # A progress bar may be followed by different output.
    r"|(?<=it/s\])(?=[^\s,|])|(?<=s/it\])(?=[^\s,|])"
    # Two ranks may have written at the same time.
    r"|(?<=.)(?=\[rank\d{1,6}\]:)|(?<=[\]s%}])(?=\[[EWF] ProcessGroup)"
)

_LONGEST_PREFIX = 400
_COLOR_CODE = re.compile(r"\x1b\[[0-9;]{0,12}m")
_BARE = re.compile(
    r"(?:\S{1,80} {1,12}\| |\[[^\]\s]{1,120}\](?:<std\w{3}>)?:? ?|\([^)\n]{1,160}\) |[\w.-]{1,63}:"
    r" ?|\[?20\d\d[-/]\d\d[-/]\d\d[T ]\S{8,36} |20\d\d-\d\d-\d\d[T ]\S{8,20}\s|std(?:err|out) [FP]"
    r" |[\w.-]{1,63}\t|> ){1,4}"
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


def read_chunks(stream: BinaryIO) -> Iterator[Chunk]:
    """The log in chunks of about CHUNK_BYTES, each ending at a line's end.

    A corrupt stream (.gz) ends at the error.
    """
    partial, offset, line = b"", 0, 1
    block = _read(stream)
    while block and len(block) < _HEAD_BYTES and (more := _read(stream)):
        block += more  # the same head decides, whatever the sizes of the reads
    head = block[:_HEAD_BYTES]
    wide = head[:2] in _UTF16 or head.count(0) > _NULS * len(head)
    while True:
        over = not block
        if wide:
            block = block.replace(b"\x00", b"")  # UTF-16 of what is mostly ASCII: enough for words
        data = partial + block
        end = len(data) if over else _end(data)
        if end:
            yield Chunk(data[:end], offset, line)
            line += data.count(b"\n", 0, end)
            offset += end
        partial = data[end:]
        if over:
            return
        block = _read(stream)


def _read(stream: BinaryIO) -> bytes:
    """The next bytes; empty if the stream is over or corrupt: bytes before the error are kept."""
    try:
        return stream.read(CHUNK_BYTES)
    except (EOFError, OSError, ValueError, ArithmeticError):
        return b""


def _end(data: bytes) -> int:
    """The end of the last complete line of `data`; a line that is too long may end anywhere."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return end if end or len(data) < LONGEST_LINE_BYTES else len(data)


def split_pieces(text: str, unwrap: Callable[[str], str | None] = lambda _: None) -> list[str]:
    """The parts of a line that were written at different moments or by different ranks.

    Args:
        unwrap: the text without what a collector puts before every line of this log; None: it does
            not bear it.
    """
    if not (
        text.find("[rank", 1) >= 0
        or "it/s]" in text
        or "s/it]" in text
        or "ProcessGroup" in text
        or "\x1b[" in text
        or "\r" in text
    ):
        return [text] if text else []  # nothing of _PIECES is in it
    if text.endswith("}") and '{"' in text[:_LONGEST_PREFIX] and _is_object(text):
        return [text]  # of a log collector: parsed later
    pieces: list[str] = []
    for piece in _PIECES.split(text):
        if pieces and (
            _is_bare(pieces[-1])
            or ((bare := unwrap(pieces[-1])) is not None and (not bare or _is_bare(bare)))
        ):
            pieces[-1] += piece
        elif piece:
            pieces.append(piece)
    return pieces


def _is_object(text: str) -> bool:
    """Whether a line is a JSON object, possibly after a collector's prefixes."""
    before, _, _ = text.partition('{"')
    return not before or _is_bare(before)


def _is_bare(piece: str) -> bool:
    """Whether it is only the prefix of a collector or launcher."""
    return len(piece) < _LONGEST_PREFIX and _BARE.fullmatch(_COLOR_CODE.sub("", piece)) is not None


OFTEN = 400
"""Occurrences in a log up to which a string of low weight is matched everywhere."""
OFTEN_STRONG = 10_000
"""Occurrences up to which a string of errors is matched everywhere."""
TAIL_BYTES = 1 << 13
SAMPLES, SAMPLE_BYTES = 4, 512
"""Samples of a chunk in which frequent strings are still matched."""
EDGE_KEPT = 60
"""Number of first and last matches in a chunk of a frequent error string."""
_DFA_BYTES = 64 << 20

_Find = Callable[[bytes, int, int], Iterator[Any]]


@dataclass(slots=True)
class _Often:
    """Frequent strings."""

    weak: frozenset[bytes] = frozenset()
    strong: frozenset[bytes] = frozenset()


class Prefilter:
    """Finds relevant places in the chunks of one log, in order."""

    def __init__(self, strong: Iterable[str], weak: Iterable[str]) -> None:
        self._strong = _encoded(frozenset(strong))
        self._weak = _encoded(frozenset(weak)) - self._strong
        self._often = _Often()
        self._seen: Counter[bytes] = Counter()

    def hits(self, chunk: bytes) -> list[int]:
        """Positions of matches in the chunk, ascending."""
        offsets = self._rare(chunk)
        if self._often.strong:
            offsets += self._edges(chunk)
        if self._often.weak:
            offsets += self._sampled(chunk)
        return sorted(set(offsets))

    def is_often(self, word: bytes) -> bool:
        """Whether a string was so frequent that no longer all its matches are given."""
        return word in self._often.strong or word in self._often.weak

    def _rare(self, chunk: bytes) -> list[int]:
        """All matches of strings that are not frequent; continues with the remaining strings if one
        becomes frequent.
        """
        offsets: list[int] = []
        start = 0
        while start >= 0:
            left = (self._strong - self._often.strong) | (self._weak - self._often.weak)
            start = self._until_often(_finder(left), chunk, start, offsets) if left else -1
        return offsets

    def _until_often(self, find: _Find, chunk: bytes, start_at: int, offsets: list[int]) -> int:
        seen, strong = self._seen, self._strong
        for match in find(chunk, start_at, len(chunk)):
            start = match.start()
            offsets.append(start)
            word = match[0]
            seen[word] += 1
            if seen[word] >= (OFTEN_STRONG if word in strong else OFTEN):
                self._set_often(word)
                return start + 1
        return -1

    def _set_often(self, word: bytes) -> None:
        if word in self._strong:
            self._often.strong |= {word}
        else:
            self._often.weak |= {word}

    def _edges(self, chunk: bytes) -> list[int]:
        find = _finder(self._often.strong)
        first = [match.start() for match in islice(find(chunk, 0, len(chunk)), EDGE_KEPT)]
        last: list[int] = []
        length = TAIL_BYTES
        while len(first) == EDGE_KEPT and len(last) < EDGE_KEPT and length < 4 * len(chunk):
            begin = max(len(chunk) - length, first[-1])
            last = [match.start() for match in find(chunk, begin, len(chunk))][-EDGE_KEPT:]
            length *= 4
        return [*first, *last]

    def _sampled(self, chunk: bytes) -> list[int]:
        find = _finder(self._often.weak)
        tail = max(0, len(chunk) - TAIL_BYTES)
        begins = range(0, tail, max(tail // SAMPLES, 1 << 16)) if tail else ()
        windows = [*((begin, min(begin + SAMPLE_BYTES, tail)) for begin in begins), (tail, len(chunk))]
        return [match.start() for begin, end in windows for match in find(chunk, begin, end)]


@functools.lru_cache(maxsize=8)
def _encoded(words: frozenset[str]) -> frozenset[bytes]:
    return frozenset(word.encode() for word in words)


@functools.lru_cache(maxsize=64)
def _finder(words: frozenset[bytes]) -> _Find:
    """A search for any of these strings. Of two with the same beginning, the longer comes first."""
    pattern = b"|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))
    try:
        import re2
    except ImportError:
        return re.compile(pattern).finditer
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # bytes: a log may hold anything
    options.never_capture = True
    options.log_errors = False
    options.max_mem = _DFA_BYTES
    finder: _Find = re2.compile(pattern, options).finditer
    return finder


class Hints:
    """Finds which of some strings a text holds, by one pass over the text instead of one for each
    string.
    """

    def __init__(self, words: Iterable[str]) -> None:
        """Takes the strings."""
        self._words = _encoded(frozenset(words))
        # Of those that begin at one place the longest is found; the others are its beginnings.
        self._beginnings = {
            word: tuple(other.decode() for other in self._words if word.startswith(other))
            for word in self._words
        }

    def held(self, text: str) -> tuple[str, ...]:
        """The strings in the text; one may be given several times."""
        data, find = text.encode("utf-8", "surrogatepass"), _finder(self._words)
        match = next(find(data, 0, len(data)), None)
        words: tuple[str, ...] = ()
        while match is not None:
            words += self._beginnings[match[0]]
            match = next(find(data, match.start() + 1, len(data)), None)
        return words


SHOWN_CHARS = 600
_TORN_COLOR_CODE = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m")
"""The rest of a terminal color code without its first character: attached to a secret it would hide
it.
"""
_KEY_BODY = re.compile(r"^\s*[A-Za-z0-9+/]{60,}={0,2}\s*$")


@functools.lru_cache(maxsize=256)  # a line of a short log is in its head, in its tail, and between
def shown(text: str) -> str:
    """The line for display: without secrets, of limited length."""
    limit = 4 * SHOWN_CHARS
    flat = plain(text[:limit]).rstrip()
    if len(text) > limit:
        flat = flat.rpartition(" ")[0] or flat  # a truncated token would no longer be recognized
    flat = redacted(flat)
    return flat if len(flat) <= SHOWN_CHARS else flat[: SHOWN_CHARS - 1] + "…"


def redacted(text: str) -> str:
    """The text without control characters and secrets."""
    flat = _TORN_COLOR_CODE.sub("", plain(text))
    if _KEY_BODY.match(flat):  # a line of a private key, or another block of base64
        return "…"
    return redact(flat)


def redacted_json(value: Any) -> Any:
    """The JSON value with all strings redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redacted_json(inner) for key, inner in value.items()}
    return [redacted_json(inner) for inner in value] if isinstance(value, list | tuple) else value
