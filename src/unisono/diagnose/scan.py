"""Reads one log: which lines mean something. Flat memory: of each kind of event of each rank the first and the last are kept."""

import codecs
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from typing import BinaryIO

from unisono.causes.signature import compiled
from unisono.causes.signatures import LINE_LIMIT, SIGNATURES, match_line
from unisono.diagnose import identity, times
from unisono.diagnose.event import NOBODY, Event, EventKind, Who
from unisono.diagnose.facts import Traceback
from unisono.diagnose.lines import Chunk, read_chunks, split_pieces
from unisono.diagnose.marks import MARKS, Mark
from unisono.diagnose.prefilter import Prefilter
from unisono.diagnose.redact import shown
from unisono.diagnose.tracebacks import Tracebacks
from unisono.diagnose.unwrap import unwrap
from unisono.diagnose.wrapping import Wrapping
from unisono.text import plain

FIRST_KEPT, LAST_KEPT = 60, 60
"""Of the events of one signature and one rank in one log."""
EDGE_LINES = 40
"""Lines of the head and of the tail of a log that are kept."""
_TAIL_BYTES = 1 << 16
_STYLE_LINES = 60
_OBJECT_CHARS = 300
"""A collector's prefixes end within so many characters."""
_SECTIONS = (
    "Traceback (most recent call last)",
    "Exception ignored ",
    "Exception in thread",
    "Error in atexit",
    " global rank ",
)
"""What the lines below them are: a traceback, one that Python only reports, what one rank wrote."""
_SECTION = re.compile(r"-{4,} ?(?P<edge>Begin|End) global rank (?P<rank>\d{1,6}) STD")

_MARKS_BY_HINT = [(hint, mark) for mark in MARKS for hint in mark.hints]
STRONG = {*_SECTIONS, *(h for s in SIGNATURES.values() if s.kind != "progress" for h in s.hints)}
WEAK = {*(h for m in MARKS for h in m.hints), *(h for s in SIGNATURES.values() if s.kind == "progress" for h in s.hints)}  # fmt: skip


@dataclass(slots=True)
class Scanned:
    """What one log holds.

    Attributes:
        name: the log's.
        lines: how many; bytes: how long.
        who: whose log it is, by its name.
        events: in order.
        tracebacks: in the order of their ends.
        head: its first lines; tail: its last ones.
    """

    name: str
    lines: int = 0
    bytes: int = 0
    who: Who = field(default_factory=Who)
    events: list[Event] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    head: list[Event] = field(default_factory=list)
    tail: list[Event] = field(default_factory=list)


def scan(name: str, stream: BinaryIO) -> Scanned:
    """Reads a log to its end."""
    reader = _Reader(name)
    for chunk in read_chunks(stream):
        reader.take(chunk)
    return reader.done()


class _Kept:
    """The first and the last events of one kind."""

    def __init__(self) -> None:
        self.first: list[Event] = []
        self.last: deque[Event] = deque(maxlen=LAST_KEPT)

    def add(self, event: Event) -> None:
        (self.first if len(self.first) < FIRST_KEPT else self.last).append(event)


class _Reader:
    """Takes the chunks of one log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._out = Scanned(name, who=identity.who_is_file(name))
        self._kept: dict[tuple[str, int | None], _Kept] = {}
        self._tracebacks = Tracebacks()
        self._prefilter = Prefilter(STRONG, WEAK)
        self._year: int | None = None
        self._style: str | None = None
        self._inner_style = ""
        self._section: int | None = None
        self._wrapping = Wrapping()
        self._tail = b""
        self._tail_line = 1
        self._tail_offset = 0

    def take(self, chunk: Chunk) -> None:
        data = chunk.data
        if self._style is None:
            self._begin(data)
        else:
            self._wrapping.learn(data, self._style)
        self._out.bytes += len(data)
        self._out.lines = chunk.line + data.count(b"\n") - 1
        line, counted = chunk.line, 0
        for start, end in _segments(data, self._prefilter.hits(data), self._tracebacks):
            line, counted = line + data.count(b"\n", counted, start), start
            self._look(data[start:end], chunk.offset + start, line)
        self._keep_tail(chunk)

    def done(self) -> Scanned:
        out = self._out
        events = [event for kept in self._kept.values() for event in (*kept.first, *kept.last)]
        out.events = sorted(events, key=lambda event: event.order)
        out.tracebacks = self._tracebacks.done()
        line, offset = self._tail_line, self._tail_offset
        out.tail = self._edge(self._tail, line, offset)[-EDGE_LINES:]
        if self._tail and not self._tail.endswith(b"\n"):
            out.lines += 1
        return out

    def _begin(self, data: bytes) -> None:
        head = data[:_TAIL_BYTES].split(b"\n")[:_STYLE_LINES]
        lines = [plain(text.decode("utf-8", "replace")[:LINE_LIMIT]) for text in head]
        inner = [unwrap(text) for text in lines]
        self._style = identity.find_style([one for text, found in zip(lines, inner, strict=True) for one in (found[1] if found else [text])])  # fmt: skip
        self._wrapping.learn(data, self._style)
        self._inner_style = identity.find_style([bare for text in lines if (bare := self._wrapping.off(identity.split_prefix(text, style=self._style)[1])) is not None])  # fmt: skip
        self._year = next((year for text in lines if (year := times.find_year(text))), None)
        self._out.head = self._edge(b"\n".join(head), 1, 0)[:EDGE_LINES]

    def _edge(self, data: bytes, line: int, offset: int) -> list[Event]:
        found = []
        for raw in data.split(b"\n"):
            for piece, order in _pieces(raw, offset, self._wrapping):
                who, rest = self._split(piece)
                if rest.strip():
                    found.append(self._event("line", "fact", None, piece, line, order, who, {}))
            line += 1
            offset += len(raw) + 1
        return found

    def _keep_tail(self, chunk: Chunk) -> None:
        data = self._tail + chunk.data
        line, offset = (self._tail_line, self._tail_offset) if self._tail else (chunk.line, chunk.offset)
        if len(data) > _TAIL_BYTES:
            cut = data.find(b"\n", len(data) - _TAIL_BYTES) + 1 or len(data) - _TAIL_BYTES
            line, offset = line + data.count(b"\n", 0, cut), offset + cut
            data = data[cut:]
        self._tail, self._tail_line, self._tail_offset = data, line, offset

    def _look(self, raw: bytes, offset: int, line: int) -> None:
        for piece, order in _pieces(raw, offset, self._wrapping):
            inner = _inner(piece)
            if inner is None:
                self._look_at(piece, order, line)
                continue
            for number, text in enumerate(inner[1]):
                self._look_at(text, order + number, line, of=inner[0], around=piece)

    def _look_at(self, piece: str, order: int, line: int, *, of: Who = NOBODY, around: str = "") -> None:
        if self._year is None:
            self._year = times.find_year(piece)
        who, rest = self._split(piece)
        if not rest.strip():
            return
        who = replace(who, rank=of.rank if who.rank is None else who.rank, host=who.host or of.host)
        if who.rank is None and (named := identity.find_rank(rest)) is not None and self._names_itself(rest):
            who = replace(who, rank=named)
        if " global rank " in rest and (section := _SECTION.search(rest)):
            self._section = int(section["rank"]) if section["edge"] == "Begin" else None
        if who.rank is None and self._section is not None:
            who = replace(who, rank=self._section)
        bare = self._wrapping.off(identity.split_prefix(piece, style=self._style or "")[1])
        line_event = self._event("exception", "error", None, piece if bare is None else bare, line, order, who, {})  # fmt: skip
        around = around or (piece if bare is not None else "")
        if line_event.time is None and around:
            line_event = replace(line_event, time=times.find_time(around, year=self._year))
        key = f"{who.rank}/{who.local_rank}/{who.pid}/{who.host}"
        self._tracebacks.feed(key, rest, line_event)
        for signature in match_line(rest):
            found = compiled(signature.pattern).search(rest[:LINE_LIMIT])
            fields = {k: v for k, v in found.groupdict().items() if v is not None} if found else {}
            self._add(replace(line_event, signature=signature.id, kind=signature.kind, cause=signature.cause, fields=fields))  # fmt: skip
        for mark, fields in _marks(rest):
            kind: EventKind = mark.kind  # type: ignore[assignment]
            self._add(replace(line_event, signature=mark.id, kind=kind, cause=None, fields=fields))

    def _split(self, piece: str) -> tuple[Who, str]:
        """Whom the prefixes of a line name, and the line without them and without what a collector put before it."""
        who, rest = identity.split_prefix(piece, style=self._style or "")
        bare = self._wrapping.off(rest)
        if bare is None:
            return who, rest
        inner, rest = identity.split_prefix(bare, style=self._inner_style)
        return Who(*(own if own is not None else outer for own, outer in zip(astuple(inner), astuple(who), strict=True))), rest  # fmt: skip

    @staticmethod
    def _names_itself(rest: str) -> bool:
        """Whether a rank in the words of a line is the one that speaks: torch's and trainers' own lines."""
        return "[Rank " in rest or "Rank " in rest[:160] or "rank" in rest[:60]

    def _add(self, event: Event) -> None:
        key = (event.signature, event.who.rank if event.who.rank is not None else event.who.local_rank)
        self._kept.setdefault(key, _Kept()).add(event)

    def _event(
        self, signature: str, kind: EventKind, cause: str | None, piece: str, line: int, order: int, who: Who, fields: dict[str, str],
    ) -> Event:  # fmt: skip
        return Event(self._name, line, order, signature, kind, cause, shown(piece), who, times.find_time(piece, year=self._year), fields)  # fmt: skip


def _segments(data: bytes, offsets: list[int], tracebacks: Tracebacks) -> Iterator[tuple[int, int]]:
    """The lines that are looked at, as (start, end): those with a hit, and all while a traceback is open."""
    place = 0
    while place < len(data):
        if not tracebacks.waiting:
            index = bisect_left(offsets, place)
            if index == len(offsets):
                return
            place = max(place, _start(data, offsets[index]))
        end = _line_end(data, place)
        yield place, end
        place = end + 1


def _start(data: bytes, offset: int) -> int:
    return data.rfind(b"\n", 0, offset) + 1


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) if end < 0 else end


def _pieces(raw: bytes, offset: int, wrapping: Wrapping) -> Iterator[tuple[str, int]]:
    """The pieces of a line, each with its place in the log."""
    if not offset:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    for part in raw.split(b"\r"):
        if part:
            text = part[: 4 * LINE_LIMIT].decode("utf-8", "replace")
            for number, piece in enumerate(split_pieces(text, wrapping.off)):
                yield (plain(piece) if "\x1b" in piece else piece), offset + number
        offset += len(part) + 1


def _inner(piece: str) -> tuple[Who, list[str]] | None:
    """Whom a line that is a JSON object names and its message's lines, also within another and behind a collector's prefixes."""
    if '{"' not in piece[:_OBJECT_CHARS]:
        return None
    who, rest = (NOBODY, piece) if piece.startswith('{"') else identity.split_prefix(piece)
    found = unwrap(rest) if rest.startswith('{"') else None
    if found is None:
        return None
    inside = unwrap(found[1][0]) if len(found[1]) == 1 and found[1][0].startswith('{"') else None
    named, lines = inside or found
    outer = found[0] if inside else NOBODY
    rank = next((one.rank for one in (named, outer, who) if one.rank is not None), None)
    return replace(named, rank=rank, host=named.host or outer.host or who.host), lines


def _marks(text: str) -> Iterator[tuple[Mark, dict[str, str]]]:
    head = text[:LINE_LIMIT]
    for mark in dict.fromkeys(mark for hint, mark in _MARKS_BY_HINT if hint in head):
        found = compiled(mark.pattern).search(head)
        if found:
            yield mark, {name: value for name, value in found.groupdict().items() if value is not None}
