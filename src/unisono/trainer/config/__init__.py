"""The configuration of a run: its schema, and the loader that rejects unknown keys.

From the mapping in a YAML file, or a translated file of another tool, and `key.sub=value` overrides
to a RunConfig, or to all that is wrong with them at once.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.base.errors import ConfigError, Problem
from unisono.trainer.config.problems import find_secrets, find_variables, problems_of
from unisono.trainer.config.schema import RunConfig, config_digest
from unisono.trainer.config.translation import Translation, Verb
from unisono.trainer.config.yaml_file import COMMAND_LINE, KeyPath, KeyPlaces, parse_value

__all__ = [
    "LoadedConfig",
    "RunConfig",
    "build_config",
    "config_digest",
    "config_of",
]


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where each of its values was set."""

    config: RunConfig
    path: Path | None
    origins: dict[str, str]
    """Key, e.g. `batch.micro`: `train.yaml:7` or `command line`. Keys at their default are
    omitted.
    """
    translation: Translation | None = None
    """What was read from a file of another tool; None: the file is ours."""


def config_of(translation: Translation, *, path: Path | None = None, verb: Verb = "train") -> LoadedConfig:
    """The config of a translated file, with the overrides of our own keys applied.

    Raises:
        ConfigError: with all problems of the file, in the names of its keys.
    """
    places = KeyPlaces.of_origins(translation.origins, translation.name)
    problems = [*translation.problems, *translation.refusals(verb)]
    if translation.lacks_config:
        raise ConfigError(*sorted(problems, key=_line))
    try:
        loaded = _build(
            translation.config, places, path=path, overrides=translation.our_overrides, problems=problems
        )
    except ConfigError as error:
        raise ConfigError(*translation.in_its_names(error.problems)) from None
    return LoadedConfig(loaded.config, path, loaded.origins, translation)


def build_config(
    raw: dict[str, object],
    *,
    lines: dict[KeyPath, int],
    name: str,
    path: Path | None = None,
    overrides: tuple[str, ...] = (),
) -> LoadedConfig:
    """Validates a mapping that was read from `name`, with overrides applied.

    Raises:
        ConfigError: with all problems found.
    """
    return _build(raw, KeyPlaces(lines, name), path=path, overrides=overrides, problems=[])


def _build(
    raw: dict[str, object],
    places: KeyPlaces,
    *,
    path: Path | None,
    overrides: tuple[str, ...],
    problems: list[Problem],
) -> LoadedConfig:
    raw, wrong = apply_overrides(raw, overrides, places)
    refused = find_variables(raw, places) | find_secrets(raw, places)
    problems = [*problems, *wrong, *refused.values()]
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        others = problems_of(error, raw, places)
        problems += [problem for key, of_key in others.items() if key not in refused for problem in of_key]
        # Without the cause: pydantic's message would repeat the values, including secrets.
        raise ConfigError(*sorted(problems, key=_line)) from None
    if problems:
        raise ConfigError(*sorted(problems, key=_line))
    return LoadedConfig(config, path, places.dotted())


def _line(problem: Problem) -> float:
    """The line of a problem, for sorting; problems without a line come last."""
    match = re.search(r":(\d+)$", problem.where)
    return int(match[1]) if match else math.inf


# ---- overrides


def apply_overrides(
    raw: dict[str, object], overrides: tuple[str, ...], places: KeyPlaces
) -> tuple[dict[str, object], list[Problem]]:
    """The mapping with all overrides applied in order, and the problems with them."""
    problems: list[Problem] = []
    raw = _with_model_section(raw)
    for text in overrides:
        try:
            key, value = _parse_override(text)
            raw = _with_model_section(_replaced(raw, key, value, text))
            places.override(key)
        except ConfigError as error:
            problems += error.problems
    return raw, problems


def _with_model_section(raw: dict[str, object]) -> dict[str, object]:
    """`model: NAME` as a section, so that `model.dtype=…` can be applied."""
    return {**raw, "model": {"path": raw["model"]}} if isinstance(raw.get("model"), str) else raw


def _parse_override(text: str) -> tuple[KeyPath, Any]:
    dotted, equals, value_text = text.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError.of(
            f"{text!r} is not a valid override",
            where=COMMAND_LINE,
            fix="write key.sub=value, e.g. optim.lr=1e-4",
        )
    return tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in parts), parse_value(
        value_text, name=COMMAND_LINE
    )


def _replaced(base: Any, key: KeyPath, value: Any, text: str) -> Any:
    """A copy of `base` with the value at `key`; missing sections are created."""
    if not key:
        return value
    head, *tail = key
    if isinstance(base, list):
        if not isinstance(head, int) or head >= len(base):
            raise ConfigError.of(
                f"{text!r} does not match: it is a list of {len(base)} items",
                where=COMMAND_LINE,
                fix=f"use the index of an item, 0 to {len(base) - 1}",
            )
        return [
            _replaced(item, tuple(tail), value, text) if i == head else item for i, item in enumerate(base)
        ]
    inner = base if isinstance(base, dict) else {}
    name = str(head)
    return {**inner, name: _replaced(inner.get(name), tuple(tail), value, text)}
