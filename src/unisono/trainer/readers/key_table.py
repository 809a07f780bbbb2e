"""The keys of a tool, as its `keys.toml` lists them; how a value is read; and our config, as it is
filled key by key.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any

from unisono.base.errors import Problem
from unisono.base.files import parse_json
from unisono.base.text import nearest, one_line
from unisono.trainer.config.translation import Fate


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
    zero: str = ""
    level: str = ""


class KeyTable(Mapping[str, Key]):
    """The keys of a tool by name, from `keys.toml` in its package.

    It is read when a key is looked up.

    Args:
        words: choices of keys that a table of ours has.
    """

    def __init__(self, package: str, *, words: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._package, self._words = package, words or {}

    @cached_property
    def _keys(self) -> dict[str, Key]:
        text = resources.files(self._package).joinpath("keys.toml").read_text(encoding="utf-8")
        groups: dict[str, dict[str, dict[str, object]]] = tomllib.loads(text)
        keys = {name: _key(name, group, key) for group, keys in groups.items() for name, key in keys.items()}
        return keys | {name: replace(keys[name], words=words) for name, words in self._words.items()}

    def __getitem__(self, name: str) -> Key:
        return self._keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _key(name: str, group: str, entry: Mapping[str, object]) -> Key:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return Key(name, group, **fields)


class Values(Mapping[str, Any]):
    """The value of each key: the file's, or the tool's default.

    Attributes:
        given: the file's.
        places: of each given key: `x.yaml:7`, or the command line.
        name: of the file.
        table: the keys of the tool that the file is for.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        places: Mapping[str, str],
        name: str,
        table: Mapping[str, Key],
    ) -> None:
        self.given, self.places, self.name, self.table = given, places, name, table

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else self.table[key].default

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def is_set(self, key: str) -> bool:
        """Whether the file gives it another value than the default."""
        return key in self.given and self.given[key] != self.table[key].default

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
    hint = f"; did you mean `{near}`?" if near else ""
    raise ValueError(f"must be one of {', '.join(key.words)}, got {_shown(value)}{hint}")


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


def _mapping(value: Any) -> dict[str, object]:
    """A mapping, or one as JSON text, as transformers takes it."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            raise ValueError(f"must be a mapping, got {_shown(value)}") from None
    if isinstance(value, dict):
        return value
    raise ValueError(f"must be a mapping, got {_shown(value)}")


_READERS: dict[str, Callable[[Any], Any]] = {
    "bool": _bool, "int": _int, "float": _float, "text": _text, "list": _list, "numbers": _numbers,
    "number": _number, "any": _any, "mapping": _mapping,
}  # fmt: skip


class Draft:
    """Our config, as it is filled key by key.

    Attributes:
        values: of the file.
        name: of the file.
        verb: what it is for.
        config: in our schema; `?` for what is required and missing.
        origins: our dotted key: where the value comes from.
        names: our dotted key: the key of the file.
        fates: of keys whose fate depends on values, with a note.
    """

    def __init__(self, values: Values, name: str, *, verb: str, tool: str) -> None:
        self.values, self.name, self.verb, self.tool = values, name, verb, tool
        self.config: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.fates: dict[str, tuple[Fate, str]] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []

    def drop(self, *ours: str) -> None:
        """Takes keys back, e.g. since an override of ours says the same in another way."""
        for key in ours:
            section, _, name = key.partition(".")
            del self.config[section][name], self.origins[key]

    def put(self, ours: str, value: Any, *keys: str) -> None:
        """Sets one of our keys; `keys` are those of the file that decide it, the first given one is
        its origin.
        """
        *sections, last = ours.split(".")
        target = self.config
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
        given = next((key for key in keys if key in self.values.given), None)
        default = f"{self.name}: {self.tool}'s default"
        self.origins[ours] = self.values.places[given] if given else default
        if given:
            self.names[ours] = given

    def put_if_set(self, ours: str, key: str) -> None:
        """Carries a value that is not the tool's default."""
        if self.values.is_set(key):
            self.put(ours, self.values[key], key)

    def refuse(self, key: str, why: str, fix: str) -> None:
        """A problem with the value of a key that has other values that are fine."""
        value = self.values[key]
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        where = self.values.place(key)
        self.problems.append(Problem(f"`{key}: {shown}` is not available", where, why, fix))
        self.fates[key] = ("refused", fix)

    def ignore(self, key: str, note: str) -> None:
        """Marks a key that has no effect beside the others of this file."""
        self.fates[key] = ("ignored", note)
