"""Finds, in megabytes of log, the places that may mean something: one pass of google-re2 over whole chunks, or of `re` where it is not installed.

A log may be full of lines that mean little: bars, steps, NCCL's INFO. So each string is looked for only until it has been seen often. From then
on it counts at the end of each chunk and in a few samples before; a string of errors still counts at its first and last places in each chunk.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

OFTEN = 400
"""So many times in a log a string of little weight counts everywhere."""
OFTEN_STRONG = 10_000
"""The same for strings of errors."""
TAIL_BYTES = 1 << 13
SAMPLES, SAMPLE_BYTES = 4, 512
"""Where in a chunk strings still count that are seen often."""
EDGE_KEPT = 60
"""Of a string of errors that is seen often: so many first and last places in a chunk."""
_DFA_BYTES = 64 << 20

_Find = Callable[[bytes, int, int], Iterator[Any]]


@dataclass(slots=True)
class _Often:
    """Strings that were seen often."""

    weak: frozenset[bytes] = frozenset()
    strong: frozenset[bytes] = frozenset()


class Prefilter:
    """Looks through the chunks of one log, in their order.

    Args:
        strong: strings of lines that tell of failures.
        weak: strings of lines that tell of anything else.
    """

    def __init__(self, strong: Iterable[str], weak: Iterable[str]) -> None:
        self._strong = frozenset(hint.encode() for hint in strong)
        self._weak = frozenset(hint.encode() for hint in weak) - self._strong
        self._often = _Often()
        self._seen: Counter[bytes] = Counter()

    def hits(self, chunk: bytes) -> list[int]:
        """Where in the chunk something stands that may matter, ascending."""
        found = self._rare(chunk)
        if self._often.strong:
            found += self._edges(chunk)
        if self._often.weak:
            found += self._sampled(chunk)
        return sorted(set(found))

    def _rare(self, chunk: bytes) -> list[int]:
        """All places of strings that are not seen often; begins anew, from where it is, with those that are left."""
        found: list[int] = []
        place = 0
        while place >= 0:
            left = (self._strong - self._often.strong) | (self._weak - self._often.weak)
            place = self._until_often(_finder(left), chunk, place, found) if left else -1
        return found

    def _until_often(self, find: _Find, chunk: bytes, place: int, found: list[int]) -> int:
        seen, strong = self._seen, self._strong
        for match in find(chunk, place, len(chunk)):
            start = match.start()
            found.append(start)
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


@functools.lru_cache(maxsize=64)
def _finder(words: frozenset[bytes]) -> _Find:
    """What finds any of these strings. The longer of two that begin alike comes first."""
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
    found: _Find = re2.compile(pattern, options).finditer
    return found
