"""Reads YAML and remembers on which line each key stands."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from unisono.errors import ConfigError, Problem

KeyPath = tuple[str | int, ...]
_LIMIT_BYTES = 4_000_000


class _Loader(yaml.SafeLoader):
    """Safe YAML; a key that occurs twice is an error, not a silent choice of the last."""


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The mapping in the file, and the line (from 1) of each key path.

    Raises:
        ConfigError: if the file is missing, not YAML, not a mapping, or says a key twice.
    """
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise ConfigError.of(
                f"{path} is no config: it has more than {_LIMIT_BYTES} bytes", where=str(path)
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError.of(
            f"there is no file {path}",
            where=str(path),
            fix="check the path, or make a config with `unisono init`",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(
            f"{path} cannot be read", where=str(path), why=str(error), fix="give a UTF-8 text file"
        ) from error
    return parse_yaml(text, name=str(path))


def parse_yaml(text: str, *, name: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """As read_yaml, from text; `name` stands for the file in messages."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            lines: dict[KeyPath, int] = {}
            twice: list[Problem] = []
            if node is not None:
                _collect(node, (), lines, twice, name, depth=0)
            if twice:
                raise ConfigError(*twice)
            value = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError.of(
            "the config is not valid YAML", where=where, why=str(error.problem or error), fix="mend the line"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError.of(
            "the config is not valid YAML", where=name, why=str(error), fix="mend the file"
        ) from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        kind = "empty" if value is None else type(value).__name__
        raise ConfigError.of(
            "the config is not a mapping of keys to values",
            where=name,
            why=f"it is {kind}",
            fix="start from `unisono init`",
        )
    return value, lines


def _collect(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], twice: list[Problem], name: str, *, depth: int
) -> None:
    if depth > 20:
        raise ConfigError.of(
            "the config is nested deeper than 20 levels", where=name, fix="no key of ours is so deep"
        )
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            _collect(item, (*path, index), lines, twice, name, depth=depth + 1)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Hashable, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        word = key.value if isinstance(key, yaml.ScalarNode) else "?"
        if word in seen:
            twice.append(
                Problem(
                    f"the key {word!r} stands twice",
                    f"{name}:{line}",
                    f"it also stands on line {seen[word]}",
                    "remove one",
                )
            )
        seen[word] = line
        lines[(*path, word)] = line
        _collect(value, (*path, word), lines, twice, name, depth=depth + 1)
