"""Runs as one file."""

from pathlib import Path
from typing import Any

from unisono.board.follow import FollowedRun, find_runs
from unisono.board.page import file_html
from unisono.board.regions import REGIONS, harmless, show_region

_POINTS_OF_ALL = 40_000
"""Over all runs and about twelve curves of each, at most so many points: a few megabytes."""


def runs_file(paths: list[Path], *, key: bytes) -> tuple[list[dict[str, str]], str]:
    """The names and paths of the runs, and the text of the file."""
    named = find_runs(paths)
    points = max(200, min(2_000, _POINTS_OF_ALL // max(1, len(named))))
    runs: list[dict[str, Any]] = []
    for name, root in named:
        run = FollowedRun(name, root)
        run.look()
        regions = {region: show_region(run, region, {"points": str(points)}, key=key) for region in REGIONS}
        runs.append({"name": harmless(name), "path": harmless(str(root)), "regions": regions})
    return [{"name": name, "path": str(root)} for name, root in named], file_html({"schema": 1, "runs": runs})
