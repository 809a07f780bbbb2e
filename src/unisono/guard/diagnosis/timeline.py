"""Draws the ranks of a run over time, for a terminal: one row a rank, the first cause marked.

Pure.
"""

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from unisono.base.text import one_line
from unisono.guard.diagnosis.run_facts import LogEvent, RunFacts

MOST_ROWS = 32
LEAST_WIDTH = 40
_LABEL_CHARS = 22
_LEAST_COLUMNS = 14
_SIGNS = {
    "fact": "-",
    "progress": "+",
    "warning": "w",
    "consequence": "~",
    "finished": "F",
    "error": "E",
    "death": "X",
}
_CAUSE = "#"
_WEIGHT = " -+w~FEX#"  # of two things in one cell the later one is shown
_COLOURS = {"#": "1;41;37", "X": "1;31", "E": "31", "~": "33", "w": "2;33", "F": "32", "+": "36", "-": "2"}
LEGEND = (
    "# first cause   X death   E error   ~ consequence   w warning   F finished   + progress   - something"
    " else"
)


@dataclass(slots=True)
class _Row:
    label: str
    host: str = ""
    rank: int | None = None
    events: list[tuple[float, LogEvent]] = field(default_factory=list)

    @property
    def marks(self) -> int:
        return sum(event.kind in ("error", "death") for _, event in self.events)


def draw(
    facts: RunFacts, *, first: str = "", ranks: Sequence[int] = (), width: int, colour: bool = False
) -> list[str]:
    """The lines of the drawing, none longer than `width` characters that are seen.

    Args:
        first: the place of the first cause, as `file:line`; empty: unknown.
        ranks: the culprits; their rows are always shown, and marked with `>`.
        colour: whether escape sequences may be used.
    """
    width = max(width, LEAST_WIDTH)
    timed, placed = _placed(facts)
    rows = _rows(facts, placed)
    if not rows:
        return [one_line("there is nothing that could be drawn", limit=width)]
    scales, notes = _scales(rows, timed=timed)
    shown, left = _chosen(rows, ranks, first)
    labels = max(len(row.label) for row in shown) + 2
    columns = max(width - labels - 2, _LEAST_COLUMNS)
    lines = _axis(scales, labels, columns, timed=timed)
    for row in shown:
        cells = _cells(row, scales[row.host], columns, first)
        mark = ">" if row.rank in ranks and row.rank is not None else " "
        lines.append(f"{mark}{row.label:<{labels - 1}}|{_coloured(cells) if colour else cells}|")
    if left:
        notes.append(f"and {left} more without errors")
    return [*lines, *(one_line(note, limit=width) for note in notes), *_wrapped(LEGEND, width)]


def _placed(facts: RunFacts) -> tuple[bool, list[tuple[float, LogEvent]]]:
    """All events with their places: times, where logs have them, else how far down their log they
    are (0 to 1).
    """
    by_source: dict[str, dict[int, LogEvent]] = defaultdict(dict)
    for event in facts.events:
        by_source[event.source][event.order] = event
    for source in facts.sources.values():
        for event in (*source.head[:1], *source.tail[-1:]):
            by_source[source.name].setdefault(event.order, event)
    timed = any(event.time is not None for events in by_source.values() for event in events.values())
    timeline = []
    for name, events in by_source.items():
        ordered = [events[order] for order in sorted(events)]
        length = max(facts.sources[name].bytes if name in facts.sources else 0, ordered[-1].order, 1)
        timeline += _with_times(ordered) if timed else [(event.order / length, event) for event in ordered]
    return timed, timeline


def _with_times(ordered: Sequence[LogEvent]) -> list[tuple[float, LogEvent]]:
    """A line without a time is as late as the last one above it that has one; the first ones as the
    next one below.
    """
    dated = [(index, event.time) for index, event in enumerate(ordered) if event.time is not None]
    if not dated:
        return []
    indices = [index for index, _ in dated]
    return [
        (dated[max(bisect_right(indices, index) - 1, 0)][1], event) for index, event in enumerate(ordered)
    ]


def _rows(facts: RunFacts, placed: Iterable[tuple[float, LogEvent]]) -> list[_Row]:
    rows: dict[int | str, _Row] = {}
    for number, rank_facts in sorted(facts.ranks.items()):
        rows[number] = _Row(_label(f"rank {number}", rank_facts.host), rank_facts.host or "", number)
    for position, event in placed:
        source = facts.sources.get(event.source)
        rank = event.rank if event.rank is not None else source.rank if source else None
        host = event.who.host or (source.host if source else None) or ""
        key: int | str = rank if rank is not None else event.source
        if key not in rows:
            label = (
                _label(f"rank {rank}", host) if rank is not None else _narrow(event.source)[-_LABEL_CHARS:]
            )
            rows[key] = _Row(label, host, rank)
        rows[key].host = rows[key].host or host
        rows[key].events.append((position, event))
    return list(rows.values())


def _label(name: str, host: str | None) -> str:
    return _narrow(f"{name} {host}" if host else name)[:_LABEL_CHARS]


def _narrow(text: str) -> str:
    """The text with one column a character: a wide one would shift its row."""
    return one_line(text).encode("ascii", "replace").decode()


def _scales(rows: Sequence[_Row], *, timed: bool) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """From when to when each host's rows are drawn: one scale for all, unless their clocks cannot
    be compared.
    """
    if not timed:
        note = "no line has a time: a row shows how far down its log a line is, so rows cannot be compared"
        return dict.fromkeys((row.host for row in rows), (0.0, 1.0)), [note]
    spans: dict[str, tuple[float, float]] = {}
    for row in rows:
        places = [position for position, _ in row.events]
        if places:
            low, high = spans.get(row.host, (min(places), max(places)))
            spans[row.host] = (min(low, *places), max(high, *places))
    hosts = [host for host in spans if host]
    whole = (min(low for low, _ in spans.values()), max(high for _, high in spans.values()))
    if len(hosts) < 2:
        return {row.host: whole for row in rows}, []
    if _overlap(list(spans.values())):
        return {row.host: whole for row in rows}, [f"the clocks of {len(hosts)} hosts are taken as they are"]
    note = (
        "the times of the hosts do not overlap (other clocks or time zones): each host has its own scale, so"
        " columns of two hosts cannot be compared"
    )
    return {row.host: spans.get(row.host, whole) for row in rows}, [note]


def _overlap(spans: Sequence[tuple[float, float]]) -> bool:
    return max(low for low, _ in spans) <= min(high for _, high in spans)


def _chosen(rows: Sequence[_Row], ranks: Sequence[int], first: str) -> tuple[list[_Row], int]:
    """The rows that are shown, in their order, and how many are not."""
    if len(rows) <= MOST_ROWS:
        return list(rows), 0

    def worth(row: _Row) -> tuple[bool, bool, int]:
        return row.rank in ranks, any(event.where == first for _, event in row.events), row.marks

    best = sorted(range(len(rows)), key=lambda index: (*(-int(part) for part in worth(rows[index])), index))[
        :MOST_ROWS
    ]
    return [rows[index] for index in sorted(best)], len(rows) - MOST_ROWS


def _axis(scales: dict[str, tuple[float, float]], labels: int, columns: int, *, timed: bool) -> list[str]:
    spans = set(scales.values())
    if not timed or len(spans) != 1:
        return []
    low, high = next(iter(spans))
    begin, end = _clock(low), f"{_clock(high)} (+{high - low:.0f} s)"
    if len(begin) + len(end) + 1 > columns:
        end = _clock(high)
    if len(begin) + len(end) + 1 > columns:
        return []
    return [f"{'':<{labels}} {begin}{'':<{max(columns - len(begin) - len(end), 1)}}{end}"]


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _cells(row: _Row, scale: tuple[float, float], columns: int, first: str) -> str:
    low, high = scale
    length = high - low
    if not row.events:
        return f"{'  no line of its own':<{columns}}"[:columns]
    cells = [" "] * columns
    points = [
        min(max(int((position - low) / length * (columns - 1)), 0), columns - 1) if length > 0 else 0
        for position, _ in row.events
    ]
    for point in range(min(points, default=0), max(points, default=-1) + 1):
        cells[point] = "-"
    for point, (_, event) in zip(points, row.events, strict=True):
        sign = _CAUSE if event.where == first else _SIGNS[event.kind]
        if _WEIGHT.index(sign) > _WEIGHT.index(cells[point]):
            cells[point] = sign
    return "".join(cells)


def _coloured(cells: str) -> str:
    out, last = [], ""
    for cell in cells:
        code = _COLOURS.get(cell, "")
        if code != last:
            out.append(f"\x1b[0{';' if code else ''}{code}m")
            last = code
        out.append(cell)
    return "".join(out) + ("\x1b[0m" if last else "")


def _wrapped(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for part in text.split("   "):
        longer = f"{line}   {part}" if line else part
        line, done = (longer, "") if len(longer) <= width else (part, line)
        lines += [done] if done else []
    return [*lines, line]
