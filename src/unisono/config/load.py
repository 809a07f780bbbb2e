"""From a YAML file and `key.sub=value` overrides to a RunConfig, or to all that is wrong with them at once."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.config.complaints import complaints
from unisono.config.overrides import lay_over
from unisono.config.places import Places
from unisono.config.schema import RunConfig
from unisono.config.secrets import find_secrets
from unisono.config.yaml_file import KeyPath, read_yaml
from unisono.errors import ConfigError, Problem


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where each of its values was written."""

    config: RunConfig
    path: Path | None
    origins: dict[str, str]
    """Key, as `batch.micro`: `train.yaml:7` or `command line`. Keys at their default are not in it."""


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> LoadedConfig:
    """Reads a config file; each override is `key.sub=value`, the value in YAML.

    Raises:
        ConfigError: with every problem that was found.
    """
    raw, lines = read_yaml(path)
    return build_config(raw, lines=lines, name=str(path), path=path, overrides=overrides)


def build_config(
    raw: dict[str, Any],
    *,
    lines: dict[KeyPath, int],
    name: str,
    path: Path | None = None,
    overrides: tuple[str, ...] = (),
) -> LoadedConfig:
    """Checks a mapping that was read from `name`, with overrides laid over it.

    Raises:
        ConfigError: with every problem that was found.
    """
    places = Places(lines, name)
    raw, problems = lay_over(raw, overrides, places)
    secrets = find_secrets(raw, places)
    problems += secrets.values()
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        others = complaints(error, raw, places)
        problems += [problem for key, found in others.items() if key not in secrets for problem in found]
        # Without the cause: pydantic's own text would repeat the values, secrets among them.
        raise ConfigError(*sorted(problems, key=_line)) from None
    if problems:
        raise ConfigError(*sorted(problems, key=_line))
    return LoadedConfig(config, path, places.dotted())


def _line(problem: Problem) -> float:
    """The line of a problem, so that they can be mended from top to bottom; what has no line comes last."""
    found = re.search(r":(\d+)$", problem.where)
    return int(found[1]) if found else math.inf
