"""Pauses that are part of a healthy run."""

import gc
import time
from collections.abc import Callable
from typing import Any

from unisono.plan import RunPlan

_SLICE_S = 0.5
_LITTER = 2_000_000
_litter: list[list[int]] = []  # kept over the run, as a large data set in Python objects is


def pause(
    plan: RunPlan, rank: int, step: int, *places: str, on_slice: Callable[[], object] | None = None
) -> None:
    """Does each pause that is due at one of these places.

    Args:
        plan: holds the pauses.
        rank: this one.
        step: that is worked on, evaluated or saved.
        places: the ways to pause that belong here.
        on_slice: progress is told by it, twice a second.
    """
    for wanted in plan.faults.get("pause", ()):
        if wanted["how"] in places and rank in wanted.get("ranks", (rank,)) and _is_due(wanted, step):
            _PAUSES[wanted["how"]](float(wanted["seconds"]), on_slice or (lambda: None))


def _is_due(wanted: dict[str, Any], step: int) -> bool:
    every = wanted.get("every")
    return step in wanted.get("steps", ()) or (every is not None and step % every == 0)


def _sleep(seconds: float, on_slice: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_S))
        on_slice()


def _work(seconds: float, on_slice: Callable[[], object]) -> None:
    """Compiles, which is Python's own native work."""
    source = "\n".join(f"x{i} = [{i}, {i} + x{i - 1}]" for i in range(1, 2000))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        compile(source, "<pause>", "exec")
        on_slice()


def _collect(seconds: float, on_slice: Callable[[], object]) -> None:
    """Full collections of many objects; each of them holds Python's lock."""
    if not _litter:
        _litter.extend([number] for number in range(_LITTER))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        gc.collect()
        on_slice()


_PAUSES: dict[str, Callable[[float, Callable[[], object]], None]] = {
    "sleep": _sleep, "work": _work, "collect": _collect, "evaluate": _sleep, "sync": _sleep, "save": _sleep,
}  # fmt: skip
