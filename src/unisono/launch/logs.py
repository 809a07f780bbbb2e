"""Merges what the ranks of a run printed with what they told, in the order of time."""

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unisono.errors import UsageError
from unisono.events import read_message
from unisono.rundir.layout import RunDir
from unisono.text import one_line

_NAME = "-rank-"


@dataclass(frozen=True, slots=True, order=True)
class LogLine:
    """One line: `printed` by a rank, or `told` as an event.

    Attributes:
        time: UTC, seconds; of a printed line the moment at which the front saw the log grow past it; 0: not known.
    """

    time: float
    rank: int
    order: int
    host: str = field(compare=False)
    source: Literal["printed", "told"] = field(compare=False)
    text: str = field(compare=False)

    @property
    def label(self) -> str:
        """Who it is from."""
        return (
            f"rank {self.rank}{' ' + self.host if self.host else ''}{' *' if self.source == 'told' else ''}"
        )


def merged_logs(root: Path) -> Iterator[LogLine]:
    """All lines of all ranks, in time; lines of one file stay in their order.

    Raises:
        UsageError: if the directory is no run, or has no logs.
    """
    run = RunDir(root)
    printed = sorted(run.log("HOST", 0).parent.glob(f"*{_NAME}*.log"))
    told = sorted(run.events(0).parent.glob("rank-*.jsonl"))
    if not printed and not told:
        raise UsageError.of(
            f"{root} has no logs", where=str(root), why="there is neither logs/ nor events/ with anything in it",
            fix="give the output_dir of a run that has been started",
        )  # fmt: skip
    return heapq.merge(*(_printed(path) for path in printed), *(_told(path) for path in told))


def _printed(path: Path) -> Iterator[LogLine]:
    """A rank's log. Its lines carry no time; the file of sizes beside it says when it had grown so far."""
    host, _, rank = path.stem.rpartition(_NAME)
    sizes = _sizes(path.with_suffix(".times"))
    place, now = 0, 0.0
    with path.open("rb") as file:
        for order, line in enumerate(file):
            place += len(line)
            while sizes and sizes[0][1] < place:
                sizes.pop(0)
            now = max(now, sizes[0][0] if sizes else now)
            yield LogLine(
                now, _number(rank), order, host, "printed", line.decode("utf-8", "replace").rstrip("\n")
            )


def _told(path: Path) -> Iterator[LogLine]:
    rank = _number(path.stem.rpartition("-")[2])
    now = 0.0
    with path.open(encoding="utf-8", errors="replace") as file:
        for order, line in enumerate(file):
            message = read_message(line)
            if message is None:  # torn by a kill
                continue
            now = max(now, float(message.get("time") or 0.0))
            yield LogLine(now, rank, order, "", "told", _as_text(message))


def _sizes(path: Path) -> list[tuple[float, int]]:
    """(time, bytes) as the front noted them; empty where there is no such file."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            when, size = json.loads(line)
            found.append((float(when), int(size)))
        except (ValueError, TypeError):
            continue  # torn by a kill
    return found


def _as_text(message: dict[str, Any]) -> str:
    shown = {
        k: v for k, v in message.items() if k not in ("kind", "time", "traceback") and v not in (None, "")
    }
    return one_line(f"{message['kind']}: " + ", ".join(f"{name} {value}" for name, value in shown.items()))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
