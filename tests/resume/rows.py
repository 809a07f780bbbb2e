"""Which rows a run trained on, as its ranks wrote them down themselves before each forward (`write_rows` of train/faults)."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Row = tuple[str, str]
"""A row's id, and the digest of its tokens."""
Rows = dict[int, list[Row]]
"""By step, the rows of all ranks, sorted: within a step there is no order, since the gradient is one sum."""


def rows_of(folder: Path, *, nodes: int = 1) -> Rows:
    """The rows of each step as it stands, which is as it was made last.

    Args:
        folder: where the ranks wrote them down.
        nodes: of the run. The fronts of several are told from one another, and not from those of a start before: give one start.

    Raises:
        AssertionError: if an attempt at a step, also one that a kill cut short, took other rows than that which stands.
    """
    attempts: dict[int, dict[Any, Counter[Row]]] = defaultdict(lambda: defaultdict(Counter))
    for line in sorted(_lines(folder), key=lambda line: float(line["time"])):
        attempt = (line["front"] if nodes == 1 else None, line["epoch"])
        own = attempts[line["step"]].pop(attempt, Counter())  # the newest comes last
        attempts[line["step"]][attempt] = own + Counter((name, digest) for name, digest in line["rows"])
    stand = {step: list(of_step.values())[-1] for step, of_step in sorted(attempts.items())}
    for step, of_step in attempts.items():
        for attempt, taken in of_step.items():
            assert taken <= stand[step], f"step {step}: {attempt} took other rows"
    return {step: sorted(taken.elements()) for step, taken in stand.items()}


def each_equally_often(rows: Rows) -> bool:
    """Whether no row came twice before all had come once, and so on: none is lost, none repeated."""
    often = Counter(row for of_step in rows.values() for row in of_step)
    return max(often.values()) - min(often.values()) <= 1


def worlds(folder: Path) -> list[int]:
    """The numbers of ranks with which the run was made, in turn."""
    lines = sorted(_lines(folder), key=lambda line: float(line["time"]))
    found = [int(line["world_size"]) for line in lines]
    return [world for at, world in enumerate(found) if at == 0 or world != found[at - 1]]


def _lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("rank-*.jsonl"))
    whole = [file.read_text().rpartition("\n")[0] for file in files]
    return [json.loads(line) for text in whole for line in text.splitlines()]
