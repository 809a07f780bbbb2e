"""The keys of LLaMA-Factory and of Hugging Face's TrainingArguments, as `llamafactory_keys.toml` lists them, and how a value is read."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from unisono.text import nearest, one_line

Fate = Literal["carried", "translated", "ignored", "refused"]


@dataclass(frozen=True)
class Key:
    """One key; the file explains the fields."""

    name: str
    group: str
    type: str = "any"
    words: tuple[str, ...] = ()
    default: Any = None
    null: bool = False
    fate: Fate = "ignored"
    ours: str = ""
    needs: str = ""
    verbs: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()
    note: str = ""
    same_as: str = ""


def _read_table() -> dict[str, Key]:
    text = resources.files("unisono.config").joinpath("llamafactory_keys.toml").read_text(encoding="utf-8")
    groups: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)
    return {name: _key(name, group, found) for group, keys in groups.items() for name, found in keys.items()}


def _key(name: str, group: str, found: dict[str, Any]) -> Key:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return Key(name, group, **fields)


KEYS: dict[str, Key] = _read_table()
"""By name, in the order of LLaMA-Factory's classes."""


class Values(Mapping[str, Any]):
    """The value of each key: the file's, or LLaMA-Factory's default.

    Attributes:
        given: the file's.
        places: of each given key: `x.yaml:7`, or the command line.
        name: of the file.
    """

    def __init__(self, given: Mapping[str, Any], places: Mapping[str, str], name: str) -> None:
        self.given, self.places, self.name = given, places, name

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else KEYS[key].default

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)

    def is_set(self, key: str) -> bool:
        """Whether the file gives it another value than the default."""
        return key in self.given and self.given[key] != KEYS[key].default

    def place(self, key: str) -> str:
        """Where a key is set, or the file."""
        return self.places.get(key, self.name)


def convert(key: Key, value: Any) -> Any:
    """A value as its key has it: numbers also from text (`1e-4`), lists also from text with commas.

    Raises:
        ValueError: if the key does not take it, in plain words.
    """
    if value is None and key.null:
        return None
    if key.words:
        return _word(key, value)
    return _READERS[key.type](value)


def _word(key: Key, value: Any) -> str:
    if value is False and "no" in key.words:  # YAML reads `no` as false
        return "no"
    if isinstance(value, str) and value in key.words:
        return value
    near = nearest(value, list(key.words)) if isinstance(value, str) else None
    asked = f"; did you mean `{near}`?" if near else ""
    raise ValueError(f"must be one of {', '.join(key.words)}, got {_shown(value)}{asked}")


def _shown(value: Any) -> str:
    return one_line(repr(value), limit=60)


def _bool(value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"must be true or false, got {_shown(value)}")


def _float(value: Any) -> float:
    try:
        number = (
            float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        )
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"must be a number, got {_shown(value)}")
    return number


def _int(value: Any) -> int:
    try:
        number = _float(value)
    except ValueError:
        number = 0.5
    if number != int(number):
        raise ValueError(f"must be a whole number, got {_shown(value)}")
    return int(number)


def _text(value: Any) -> str:
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise ValueError(f"must be text, got {_shown(value)}")


def _list(value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    names = [_text(item).strip() for item in items]
    return [name for name in names if name]


def _numbers(value: Any) -> list[float]:
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [_float(item) for item in items]


def _number(value: Any) -> int | float:
    number = _float(value)
    return int(number) if number == int(number) else number


def _any(value: Any) -> Any:
    return value


def _mapping(value: Any) -> dict[str, Any]:
    """A mapping, or one as JSON text, as transformers takes it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"must be a mapping, got {_shown(value)}") from None
    if isinstance(value, dict):
        return value
    raise ValueError(f"must be a mapping, got {_shown(value)}")


_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": _bool, "int": _int, "float": _float, "text": _text, "list": _list, "numbers": _numbers, "number": _number, "any": _any,
    "mapping": _mapping,
}  # fmt: skip
