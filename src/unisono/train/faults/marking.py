"""When a fault strikes whom, and the note of the moment."""

import contextlib
import time
from pathlib import Path
from typing import Any

from unisono.plan import RunPlan


def mark(plan: RunPlan, rank: int, *, again: bool = False) -> None:
    """Leaves the moment for who times the drill. The first one counts, unless `again`."""
    directory = plan.faults.get("marks")
    if directory is None:
        return
    path = Path(directory) / f"rank-{rank:05d}"
    now = f"{time.monotonic_ns()}\n"
    if again:
        path.write_text(now)
        return
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(now)


def struck(plan: RunPlan, name: str, rank: int, step: int) -> dict[str, Any] | None:
    """The fault of this name, if it strikes this rank at this step."""
    fault: dict[str, Any] | None = plan.faults.get(name)
    if fault is None or (fault["rank"], fault["step"]) != (rank, step):
        return None
    return fault
