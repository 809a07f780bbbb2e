"""The config as it is kept: its paths absolute, so that it means the same from every directory."""

import glob
import os
from pathlib import Path
from typing import Any

import yaml

from unisono import __version__
from unisono.config import RunConfig


def with_absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    """The same config with every path absolute. Hub ids, URLs and `builtin:` names stay as they are.

    A name is taken for a path when something is there under it, seen from `base`.
    """
    body = config.model_dump(mode="json", by_alias=True)
    for section, key in (("model", "path"), ("model", "tokenizer"), ("data", "template"), ("data", "eval")):
        body[section][key] = _absolute(body[section][key], base)
    body["data"]["train"] = _absolute_sources(body["data"]["train"], base)
    body["output_dir"] = str(_joined(config.output_dir, base))
    return RunConfig.model_validate(body)


def config_yaml(config: RunConfig, *, command: str) -> str:
    """The text of config.yaml: runnable as it is."""
    body = config.model_dump(mode="json", by_alias=True)
    return (
        f"# Written by unisono {__version__}: everything that was asked for, defaults included.\n"
        f"# Run it again with: {command}\n"
        + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=110)
    )


def _absolute_sources(train: Any, base: Path) -> Any:
    if isinstance(train, list):
        return [
            {**entry, "path": _absolute(entry["path"], base)}
            if isinstance(entry, dict)
            else _absolute(entry, base)
            for entry in train
        ]
    return _absolute(train, base)


def _absolute(value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not value or "://" in value:
        return value
    path = _joined(value, base)
    there = path.exists() or (glob.has_magic(value) and _matches(path))
    return str(path) if there else value


def _joined(value: str, base: Path) -> Path:
    return Path(os.path.normpath(base / Path(value).expanduser()))


def _matches(pattern: Path) -> bool:
    """Whether a glob pattern finds anything."""
    return next(glob.iglob(str(pattern), recursive=True), None) is not None  # noqa: PTH207 - Path.glob takes no absolute pattern
