"""The table of a fire drill, for people."""

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.drill.drills import Drill
from unisono.drill.judging import Row
from unisono.text import one_line

_COLUMNS = ("fault", "want", "named", "who", "name, s", "end, s", "left behind", "")
_WIDTH = 150  # where there is no terminal, lines are not wrapped to one


def lines(rows: Sequence[Row], *, width: int | None = None) -> list[str]:
    """The table, then what is not right, then a summary."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, justify="right" if title.endswith(", s") else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    file = io.StringIO()
    Console(file=file, width=width or _WIDTH, no_color=True).print(table)
    text = [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]
    return [*text, *_complaints(rows), _summary(rows)]


def in_one_line(row: Row) -> str:
    """One row, as it comes."""
    if row.skipped is not None:
        return f"skipped: {one_line(row.skipped)}"
    *_, name_s, end_s, left, word = _cells(row)
    named = f"named {row.named}, {_who(row)}, after {name_s} s" if row.named else "nothing named"
    return f"{word}: {named}; ended after {end_s} s; left behind: {left}"


def table_of(drills: Sequence[Drill]) -> list[str]:
    """What there is, for `--list`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("fault", "what happens", "what must be named", "within, s"):
        table.add_column(title)
    for drill in drills:
        want = " or ".join(drill.want) or "nothing"
        table.add_row(drill.fault, drill.text, want, f"{drill.limit_s:g}" if drill.want else "")
    file = io.StringIO()
    Console(file=file, width=_WIDTH, no_color=True).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def _cells(row: Row) -> tuple[str, ...]:
    if row.skipped is not None:
        return row.fault, row.want or "nothing", "", "", "", "", "", "skipped"
    return (
        row.fault, row.want or "nothing", row.named or "nothing", _who(row), _seconds(row.named_after_s), _seconds(row.ended_after_s),
        str(len(row.left_behind)) if row.left_behind else "nothing", "right" if row.is_good else "WRONG",
    )  # fmt: skip


def _who(row: Row) -> str:
    ranks = [f"rank {rank}" for rank in row.ranks]
    return ", ".join(ranks or [one_line(host) for host in row.hosts]) or "nobody"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _complaints(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        if row.skipped is not None:
            found.append(f"{row.fault} was skipped: {one_line(row.skipped)}")
        if row.why:
            found.append(f"{row.fault}: {one_line(row.why)}")
        found += [f"{row.fault} left behind: {one_line(item)}" for item in row.left_behind]
        found += [f"{row.fault}, stderr: {one_line(line)}" for line in row.trouble.splitlines() if line]
    return found


def _summary(rows: Sequence[Row]) -> str:
    tried = [row for row in rows if row.skipped is None]
    right = sum(row.is_good for row in tried)
    return f"{right} of {len(tried)} faults were named rightly and left nothing behind; {len(rows) - len(tried)} were skipped"
