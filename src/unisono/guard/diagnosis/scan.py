"""Reads one log: which lines mean something.

Flat memory: of each kind of event of each rank the first and the last are kept.
"""

import codecs
import functools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import BinaryIO

from unisono.base.causes.entries import read_table
from unisono.base.causes.signatures import LINE_LIMIT, all_signatures, compiled, match_hints
from unisono.base.text import plain
from unisono.guard.diagnosis.line_prefixes import (
    LOOK_CHARS,
    CollectorPrefix,
    find_rank,
    find_style,
    find_time,
    find_year,
    split_prefix,
    unwrap_json,
    who_is_file,
)
from unisono.guard.diagnosis.lines import (
    SHOWN_CHARS,
    Chunk,
    Hints,
    Prefilter,
    read_chunks,
    shown,
    split_pieces,
)
from unisono.guard.diagnosis.process_ends import Tracebacks
from unisono.guard.diagnosis.run_facts import NO_ORIGIN, EventKind, LogEvent, Origin, Traceback


@dataclass(frozen=True, slots=True)
class Mark:
    """A kind of line that states a fact.

    Attributes:
        hints: strings of which the line must hold one.
        pattern: searched in the line without its prefixes; its groups are the fields.
        kind: "fact", or a more specific kind, e.g. "progress".
    """

    id: str
    hints: tuple[str, ...]
    pattern: str
    kind: str = "fact"


MARKS = tuple(Mark(**row) for row in read_table(Path(__file__).with_name("marks.toml"))["marks"])


FIRST_KEPT, LAST_KEPT = 60, 60
"""Events kept of one signature and one rank in one log."""
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

_MARKS_BY_HINT: dict[str, list[int]] = {}
for _number, _mark in enumerate(MARKS):
    for _hint in _mark.hints:
        _MARKS_BY_HINT.setdefault(_hint, []).append(_number)
_HINTS = Hints({*_MARKS_BY_HINT, *(hint for one in all_signatures() for hint in one.hints)})
STRONG = frozenset({*_SECTIONS, *(h for s in all_signatures() if s.kind != "progress" for h in s.hints)})
WEAK = frozenset(
    {
        *(h for m in MARKS for h in m.hints),
        *(h for s in all_signatures() if s.kind == "progress" for h in s.hints),
    }
)


_NO_FIELDS: Mapping[str, str] = {}


@dataclass(slots=True)
class Scanned:
    """The contents of one log.

    Attributes:
        lines: how many; bytes: how long.
        who: whose log it is, by its name.
        events: in order.
        tracebacks: in the order of their ends.
        head: its first lines; tail: its last ones.
    """

    name: str
    lines: int = 0
    bytes: int = 0
    who: Origin = field(default_factory=Origin)
    events: list[LogEvent] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    head: list[LogEvent] = field(default_factory=list)
    tail: list[LogEvent] = field(default_factory=list)


def scan(name: str, stream: BinaryIO) -> Scanned:
    """Reads a log to its end."""
    reader = _LogScanner(name)
    for chunk in read_chunks(stream):
        reader.take(chunk)
    return reader.done()


class _Kept:
    """The first and the last events of one kind."""

    def __init__(self) -> None:
        self.first: list[Callable[[], LogEvent]] = []
        self.last: deque[Callable[[], LogEvent]] = deque(maxlen=LAST_KEPT)

    def add(self, event: Callable[[], LogEvent]) -> None:
        """Takes one; it is made once it is known to stay."""
        (self.first if len(self.first) < FIRST_KEPT else self.last).append(event)


class _LogScanner:
    """Takes the chunks of one log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._out = Scanned(name, who=who_is_file(name))
        self._kept: dict[tuple[str, int | None], _Kept] = {}
        self._tracebacks = Tracebacks()
        self._prefilter = Prefilter(STRONG, WEAK)
        self._year: int | None = None
        self._style: str | None = None
        self._inner_style = ""
        self._section: int | None = None
        self._wrapping = CollectorPrefix()
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
        hits = self._prefilter.hits(data)
        are_often = self._prefilter.is_often(_HEADER)
        for start, end in _segments(data, hits, self._tracebacks, are_often=are_often):
            line, counted = line + data.count(b"\n", counted, start), start
            self._look(data[start:end], chunk.offset + start, line)
        self._keep_tail(chunk)

    def done(self) -> Scanned:
        out = self._out
        events = [make() for kept in self._kept.values() for make in (*kept.first, *kept.last)]
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
        inner = [unwrap_json(text) for text in lines]
        self._style = find_style(
            [
                one
                for text, unwrapped in zip(lines, inner, strict=True)
                for one in (unwrapped[1] if unwrapped else [text])
            ]
        )
        self._wrapping.learn(data, self._style)
        self._inner_style = find_style(
            [
                bare
                for text in lines
                if (bare := self._wrapping.off(split_prefix(text, style=self._style)[1])) is not None
            ]
        )
        self._year = next((year for text in lines if (year := find_year(text))), None)
        self._out.head = self._edge(b"\n".join(head), 1, 0)[:EDGE_LINES]

    def _edge(self, data: bytes, line: int, offset: int) -> list[LogEvent]:
        events = []
        for raw in data.split(b"\n"):
            for piece, order in _pieces(raw, offset, self._wrapping):
                who, text = self._split(piece)
                if text.strip():
                    events.append(self._event(piece, line, order, who, "line", "fact", year=self._year))
            line += 1
            offset += len(raw) + 1
        return events

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

    def _look_at(
        self, piece: str, order: int, line: int, *, of: Origin = NO_ORIGIN, around: str = ""
    ) -> None:
        if self._year is None:
            self._year = find_year(piece)
        who, message = self._split(piece)
        if not message.strip():
            return
        if of is not NO_ORIGIN:
            who = replace(who, rank=of.rank if who.rank is None else who.rank, host=who.host or of.host)
        if who.rank is None and (named := find_rank(message)) is not None and self._names_itself(message):
            who = replace(who, rank=named)
        if " global rank " in message and (section := _SECTION.search(message)):
            self._section = int(section["rank"]) if section["edge"] == "Begin" else None
        if who.rank is None and self._section is not None:
            who = replace(who, rank=self._section)
        bare = self._wrapping.off(split_prefix(piece, style=self._style or "")[1])
        around = around or (piece if bare is not None else "")
        # The text is kept until the end of the log.
        text = (piece if bare is None else bare)[: 4 * SHOWN_CHARS + 1]
        make = functools.partial(
            self._event, text, line, order, who, year=self._year, around=around[:LOOK_CHARS]
        )
        key = f"{who.rank}/{who.local_rank}/{who.pid}/{who.host}"
        self._tracebacks.feed(key, message, order, make)
        rank = who.rank if who.rank is not None else who.local_rank
        for match in _matches(message[:LINE_LIMIT]):
            kept = self._kept.get((match[0], rank))
            if kept is None:
                kept = self._kept[match[0], rank] = _Kept()
            kept.add(functools.partial(make, *match))

    def _split(self, piece: str) -> tuple[Origin, str]:
        """Whom the prefixes of a line name, and the line without them and without what a collector
        put before it.
        """
        who, text = split_prefix(piece, style=self._style or "")
        bare = self._wrapping.off(text)
        if bare is None:
            return who, text
        inner, text = split_prefix(bare, style=self._inner_style)
        return _joined(inner, who), text

    @staticmethod
    def _names_itself(text: str) -> bool:
        """Whether a rank in the words of a line is the one that speaks: torch's and trainers' own
        lines.
        """
        return "[Rank " in text or "Rank " in text[:160] or "rank" in text[:60]

    def _event(
        self,
        piece: str,
        line: int,
        order: int,
        who: Origin,
        signature: str = "exception",
        kind: EventKind = "error",
        cause: str | None = None,
        fields: Mapping[str, str] = _NO_FIELDS,
        *,
        year: int | None,
        around: str = "",
    ) -> LogEvent:
        """The event of a line; its time may be in what is `around` it."""
        time = find_time(piece, year=year)
        if time is None and around:
            time = find_time(around, year=year)
        return LogEvent(self._name, line, order, signature, kind, cause, shown(piece), who, time, fields)


def _segments(
    data: bytes, offsets: list[int], tracebacks: Tracebacks, *, are_often: bool
) -> Iterator[tuple[int, int]]:
    """The lines that are looked at, as (start, end): those with a hit, and all while a traceback is
    open.

    Args:
        are_often: whether there are so many tracebacks that their beginnings are no hits, except
            for the first and the last in the chunk: others are left out, and the line before one of
            these tells whether Python only reports it.
    """
    begin = 0
    while begin < len(data):
        if not tracebacks.waiting:
            index = bisect_left(offsets, begin)
            if index == len(offsets):
                return
            start = _start(data, offsets[index])
            if are_often and data.find(_HEADER, start, _line_end(data, start)) >= 0:
                start = _start(data, max(0, start - 1))
            begin = max(begin, start)
        end = _line_end(data, begin)
        if are_often and data.find(_HEADER, begin, end) >= 0 and not _has_hit(offsets, begin, end):
            tracebacks.leave()
        else:
            yield begin, end
        begin = end + 1


_HEADER = b"Traceback (most recent call last)"


def _has_hit(offsets: list[int], start: int, end: int) -> bool:
    index = bisect_left(offsets, start)
    return index < len(offsets) and offsets[index] < end


def _start(data: bytes, offset: int) -> int:
    return data.rfind(b"\n", 0, offset) + 1


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    return len(data) if end < 0 else end


def _pieces(raw: bytes, offset: int, wrapping: CollectorPrefix) -> Iterator[tuple[str, int]]:
    """The pieces of a line, each with its place in the log."""
    if not offset:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    for part in raw.split(b"\r"):
        if part:
            text = part[: 4 * LINE_LIMIT].decode("utf-8", "replace")
            for number, piece in enumerate(split_pieces(text, wrapping.off)):
                yield (plain(piece) if "\x1b" in piece else piece), offset + number
        offset += len(part) + 1


def _inner(piece: str) -> tuple[Origin, list[str]] | None:
    """Whom a line that is a JSON object names and its message's lines, also within another and
    behind a collector's prefixes.
    """
    if '{"' not in piece[:_OBJECT_CHARS]:
        return None
    who, text = (NO_ORIGIN, piece) if piece.startswith('{"') else split_prefix(piece)
    unwrapped = unwrap_json(text) if text.startswith('{"') else None
    if unwrapped is None:
        return None
    inside = (
        unwrap_json(unwrapped[1][0]) if len(unwrapped[1]) == 1 and unwrapped[1][0].startswith('{"') else None
    )
    named, lines = inside or unwrapped
    outer = unwrapped[0] if inside else NO_ORIGIN
    rank = next((one.rank for one in (named, outer, who) if one.rank is not None), None)
    return replace(named, rank=rank, host=named.host or outer.host or who.host), lines


def _joined(inner: Origin, outer: Origin) -> Origin:
    """Whom both name; the inner one counts where they differ."""
    if inner == NO_ORIGIN:
        return outer
    given = {name: value for name in _WHO if (value := getattr(inner, name)) is not None}
    return replace(outer, **given)


_WHO = tuple(one.name for one in fields_of(Origin))
_Match = tuple[str, EventKind, str | None, Mapping[str, str]]


@functools.lru_cache(maxsize=256)  # several ranks print the same
def _matches(head: str) -> tuple[_Match, ...]:
    """Id, kind, cause and fields of each signature and then of each mark that matches a line."""
    hints = _HINTS.held(head)
    matches: list[_Match] = [
        (one.id, one.kind, one.cause, _fields(compiled(one.pattern).search(head)))
        for one in match_hints(head, hints)
    ]
    for number in sorted({number for hint in hints for number in _MARKS_BY_HINT.get(hint, ())}):
        mark = MARKS[number]
        if match := compiled(mark.pattern).search(head):
            kind: EventKind = mark.kind  # type: ignore[assignment]
            matches.append((mark.id, kind, None, _fields(match)))
    return tuple(matches)


def _fields(match: re.Match[str] | None) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None} if match else {}
