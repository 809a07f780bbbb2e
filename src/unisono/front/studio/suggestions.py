"""What the form offers before anything is typed: models, and a name for the next run."""

import os
from typing import Any

from unisono.front.board.server import Board
from unisono.front.studio.folders import Folders
from unisono.front.studio.runs import base_model

_DEEPEST = 3
_MOST = 30
_SKIPPED = ("runs", "studio", "checkpoints", "node_modules", "__pycache__")


def suggestions(board: Board, folders: Folders) -> dict[str, Any]:
    """Models of earlier runs, those in the directories, and the one that is always there."""
    recent = [base_model(run.root) for run in list(board.runs.values())[-_MOST:]]
    names = [*(name for name in reversed(recent) if name), *_models_below(folders), "builtin:tiny"]
    return {"models": list(dict.fromkeys(names))[:_MOST], "output_dir": _next_output(folders)}


def _models_below(folders: Folders) -> list[str]:
    """Directories with a model: a config.json beside weights."""
    names: list[str] = []
    for root in folders.roots:
        for folder, inner, files in os.walk(root):
            depth = os.path.relpath(folder, root).count(os.sep)
            inner[:] = [one for one in inner if not one.startswith(".") and one not in _SKIPPED][:100]
            if depth >= _DEEPEST or len(names) >= _MOST:
                inner.clear()
            if "config.json" in files and any(one.endswith((".safetensors", ".bin")) for one in files):
                names.append(folders.shown(type(root)(folder)))
    return names


def _next_output(folders: Folders) -> str:
    number = 1
    while (folders.first / "runs" / f"run-{number}").exists():
        number += 1
    return f"runs/run-{number}"
