"""Cases from Ray Train on CPU, in a network namespace of their own."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Want, case, neutral, run, squeeze
from tests.guard.diagnosis.making.spaces import NET, nodes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = "made: ray 2.60, torch 2.13 CPU (gloo); paths and hosts rewritten"


def fit(base: Path, name: str, want: Want, place: int, limit_s: float = 150, **env: str) -> dict[str, object]:
    work = base / name
    with nodes(1) as fronts:
        text = run(
            [*fronts[0], sys.executable, str(PROGRAMS / "ray_fit.py")],
            {"OUT": str(work / "results"), "HOME": str(work), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
            | env,
            work,
            limit_s,
        )
    text = (
        neutral(text, place, work, "train.py")
        .replace("ray_fit.py", "train.py")
        .replace(f"{NET}.1", "10.0.3.11")
    )
    rows = [r for r in text.splitlines() if "PlacementGroupCleaner" not in r]
    return case(
        name,
        want,
        {"driver.log": squeeze("\n".join(re.sub(r"/tmp/dgm-\w+", "/data", r) for r in rows) + "\n", 18_000)},
        SOURCE,
    )


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them."""
    yield (
        "r-exc",
        lambda: fit(base, "r-exc", Want("user_code_error", 1, evidence="attention_mask"), 0, MODE="exc"),
    )
    yield (
        "r-kill",
        lambda: fit(
            base,
            "r-kill",
            Want("ray_worker_died", 2, also=("rank_died_first", "host_oom_killed")),
            1,
            MODE="kill",
            WORKERS="3",
            BAD_RANK="2",
        ),
    )
    yield (
        "r-exit",
        lambda: fit(
            base,
            "r-exit",
            Want("ray_worker_died", 0, also=("rank_died_first",)),
            2,
            MODE="exit",
            BAD_RANK="0",
        ),
    )
    yield "r-ok", lambda: fit(base, "r-ok", Want("healthy"), 3)
    yield "r-cpus", lambda: fit(base, "r-cpus", Want("ray_resources_unsatisfiable"), 4, 60, WORKERS="6")
    yield (
        "r-destroy",
        lambda: fit(
            base,
            "r-destroy",
            Want(
                "process_group_destroyed_twice",
                evidence="Process group cannot be None",
                also=("user_code_error",),
            ),
            0,
            MODE="destroy",
        ),
    )
