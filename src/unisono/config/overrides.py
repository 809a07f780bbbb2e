"""Lays `key.sub=value` of the command line over what a file says."""

import re
from typing import Any

from unisono.config.places import COMMAND_LINE, Places
from unisono.config.yaml_file import KeyPath, parse_value
from unisono.errors import ConfigError, Problem


def lay_over(
    raw: dict[str, Any], overrides: tuple[str, ...], places: Places
) -> tuple[dict[str, Any], list[Problem]]:
    """The mapping with all overrides in it, later ones over earlier ones, and what is wrong with them."""
    problems: list[Problem] = []
    raw = _with_named_model(raw)
    for text in overrides:
        try:
            key, value = _parse(text)
            raw = _with_named_model(_replaced(raw, key, value, text))
            places.override(key)
        except ConfigError as error:
            problems += error.problems
    return raw, problems


def _with_named_model(raw: dict[str, Any]) -> dict[str, Any]:
    """`model: NAME` written out, so that `model.dtype=…` can be laid over it."""
    return {**raw, "model": {"path": raw["model"]}} if isinstance(raw.get("model"), str) else raw


def _parse(text: str) -> tuple[KeyPath, Any]:
    dotted, equals, value_text = text.partition("=")
    parts = dotted.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError.of(
            f"{text!r} is no override", where=COMMAND_LINE, fix="write key.sub=value, as in optim.lr=1e-4"
        )
    return tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in parts), parse_value(
        value_text, name=COMMAND_LINE
    )


def _replaced(base: Any, key: KeyPath, value: Any, text: str) -> Any:
    """`base` with the value at `key`; sections on the way are made where there are none."""
    if not key:
        return value
    head, *rest = key
    if isinstance(base, list):
        if not isinstance(head, int) or head >= len(base):
            raise ConfigError.of(
                f"{text!r} does not fit: there is a list of {len(base)} items",
                where=COMMAND_LINE,
                fix=f"name an item by its number, 0 to {len(base) - 1}",
            )
        return [
            _replaced(item, tuple(rest), value, text) if i == head else item for i, item in enumerate(base)
        ]
    inner = base if isinstance(base, dict) else {}
    name = str(head)
    return {**inner, name: _replaced(inner.get(name), tuple(rest), value, text)}
