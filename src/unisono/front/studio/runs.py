"""The runs below the studio's directories, with what can be done with each."""

import json
from pathlib import Path
from typing import Any

from unisono.base.errors import UsageError
from unisono.base.files import read_object
from unisono.front.board.server import Board
from unisono.front.studio.folders import Folders
from unisono.front.studio.problems import shown_problems
from unisono.front.studio.run_queue import RecordedStart, RunQueue
from unisono.guard.rundir import RunDir

_MOST_SHOWN = 100
_SHOWN = (
    "state",
    "stopped_by",
    "step",
    "total_steps",
    "loss",
    "eval_loss",
    "seconds_left",
    "model",
    "wall_time_s",
)


def folders_with_runs(folders: Folders) -> list[Path]:
    """Where runs are looked for."""
    return [path for root in folders.roots for path in (root / "runs", root)]


def run_rows(board: Board, queue: RunQueue) -> list[dict[str, Any]]:
    """The latest runs, and starts that have no run yet, newest first."""
    runs = [(name, run.root) for name, run in list(board.runs.items()) if run.root.is_dir()]
    rows = [_row(board, name, root) for name, root in runs]
    known = {row["path"]: row for row in rows}
    for start in {one.output_dir: one for one in queue.starts if one.state != "cancelled"}.values():
        problems = start.result.get("problems") or []
        if start.output_dir not in known and (start.state != "ended" or problems):
            known[start.output_dir] = _row_of(start)
            rows.append(known[start.output_dir])
        if row := known.get(start.output_dir):
            row |= {"start": start.state, "start_id": start.id, "problems": shown_problems(problems)}
            row["time"] = max(row["time"], start.asked)
            row["state"] = "queued" if start.state == "queued" else row["state"]
    return sorted(rows, key=lambda row: -row["time"])[:_MOST_SHOWN]


def _row_of(start: RecordedStart) -> dict[str, Any]:
    """A start that has no run yet, or never had one."""
    return {
        "name": Path(start.output_dir).name,
        "path": start.output_dir,
        "time": start.asked,
        "is_run": False,
        "state": "refused" if start.state == "ended" else start.state,
    }


def _row(board: Board, name: str, root: Path) -> dict[str, Any]:
    status = json.loads(board.show(name, "status", {}) or b"{}")
    run = RunDir(root)
    has_result = any((root / part).is_dir() for part in ("adapter", "model"))
    written = max((_time_of(path) for path in (run.metrics, run.result, run.plan)), default=0.0)
    return {
        "name": name,
        "path": str(root),
        "is_run": True,
        "time": written,
        "has_config": (root / "config.yaml").is_file(),
        "has_result": has_result,
        "steps": _steps_of(run),
        "duration": _config_of(root).get("duration"),
        **{key: status.get(key) for key in _SHOWN},
    }


def _steps_of(run: RunDir) -> list[int]:
    """The steps of its checkpoints, latest first."""
    names = [path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*")]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _config_of(root: Path) -> dict[str, Any]:
    try:
        config = read_object(RunDir(root).plan).get("config")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def run_root(board: Board, name: str) -> Path:
    """The directory of a run.

    Raises:
        UsageError: if there is no such run.
    """
    if name not in board.runs:
        board.search()
    run = board.runs.get(name)
    if run is None:
        raise UsageError.of(f"there is no run {name!r}", fix="reload the page")
    return run.root.absolute()


def base_model(root: Path) -> str | None:
    """The model that a run began with, as its config names it."""
    model = _config_of(root).get("model")
    path = model.get("path") if isinstance(model, dict) else model
    return path if isinstance(path, str) else None
