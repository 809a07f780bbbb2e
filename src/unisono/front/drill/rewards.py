"""Rewards of drills, as a user's file: fine at first, then one that fails on every answer.

All calls of a run are counted in a file, so that the ranks of a step fail together.
"""

import os
import time
from pathlib import Path
from typing import Any

_FINE_CALLS = 40


def hangs(completions: list[str], folder: list[str], **_: Any) -> list[float]:
    """Never returns."""
    if _fails(Path(folder[0])):
        time.sleep(3600.0)
    return [float(len(answer)) for answer in completions]


def raises(completions: list[str], folder: list[str], **_: Any) -> list[float]:
    """Raises an exception."""
    if _fails(Path(folder[0])):
        raise ValueError("this answer cannot be read")
    return [float(len(answer)) for answer in completions]


def length(completions: list[str], **_: Any) -> list[float]:
    """Never fails."""
    return [float(len(answer)) for answer in completions]


def _fails(folder: Path) -> bool:
    """Whether the reward fails from this call on; the first time is recorded."""
    file = os.open(folder / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, b".")
        calls = os.fstat(file).st_size
    finally:
        os.close(file)
    if calls <= _FINE_CALLS:
        return False
    mark = folder / "marks" / "rank-00000"
    if not mark.exists():
        mark.write_text(f"{time.monotonic_ns()}\n")
    return True
