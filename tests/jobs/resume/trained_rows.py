"""Which rows a run trained on, as its ranks wrote them down themselves before each forward
(`write_rows` of worker/injected_faults).
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Row = tuple[str, str]
"""A row's id, and the digest of its tokens."""
Rows = dict[int, list[Row]]
"""By step, the rows of all ranks, sorted: within a step there is no order, since the gradient is
one sum.
"""


def rows_of(folder: Path) -> Rows:
    """The rows of each step as it stands, which is as it was made last.

    Args:
        folder: where the ranks wrote them down: of one start, or with a folder in it for each
            start, as `start_folder` gives.

    Raises:
        AssertionError: if an attempt at a step, also one that a kill cut short, took other rows
            than that which stands.
    """
    attempts: dict[int, dict[Any, Counter[Row]]] = defaultdict(lambda: defaultdict(Counter))
    for line in _lines(folder):
        attempt = (line["start"], line["epoch"])
        own = attempts[line["step"]].pop(attempt, Counter())  # the newest comes last
        attempts[line["step"]][attempt] = own + Counter((name, digest) for name, digest in line["rows"])
    stand = {step: list(of_step.values())[-1] for step, of_step in sorted(attempts.items())}
    for step, of_step in attempts.items():
        for attempt, taken in of_step.items():
            assert taken <= stand[step], f"step {step}: {attempt} took other rows"
    return {step: sorted(taken.elements()) for step, taken in stand.items()}


def each_equally_often(rows: Rows) -> bool:
    """Whether no row came twice before all had come once, and so on: none is lost, none
    repeated.
    """
    often = Counter(row for of_step in rows.values() for row in of_step)
    return max(often.values()) - min(often.values()) <= 1


def worlds(folder: Path) -> list[int]:
    """The numbers of ranks with which the run was made, in turn."""
    found = [int(line["world_size"]) for line in _lines(folder)]
    return [world for at, world in enumerate(found) if at == 0 or world != found[at - 1]]


def start_folder(folder: Path, number: int) -> Path:
    """Where the ranks of all nodes of one start write; there is one now.

    The front of each node is another process, so that none of them tells one start from the next.
    """
    made = folder / f"start-{number:04d}"
    made.mkdir(parents=True)
    return made


def _lines(folder: Path) -> list[dict[str, Any]]:
    """All whole lines in the order of their times, each with its `start`."""
    lines = [
        {**json.loads(text), "start": file.parent.name}
        for file in folder.rglob("rank-*.jsonl")
        for text in file.read_text().rpartition("\n")[0].splitlines()
    ]
    return sorted(lines, key=lambda line: float(line["time"]))
