"""Config files as people write them: YAML with the line of each key, and in plain words what a key
takes.

Input beyond any sensible config is rejected early.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from unisono.base.errors import ConfigError, Problem
from unisono.base.files import decode_text, fault_of, open_given, read_given
from unisono.base.text import nearest

KeyPath = tuple[str | int, ...]
_LIMIT_BYTES = 256_000  # pure-Python YAML parses about 50 kB per second; a config has a few kB
_LIMIT_DEPTH = 20
_LIMIT_NODES = 20_000  # a "billion laughs" file is small and expands beyond any memory
_LIMIT_INTEGER = 2**63
NO_VARIABLES = "variables are not expanded in a config, so that it means the same on every machine"


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without dates, so that `output_dir: 2026-11-21` is text, and without endless
    integers.
    """


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _construct_integer(loader: _StrictLoader, node: yaml.ScalarNode) -> int:
    try:
        value = loader.construct_yaml_int(node)
    except ValueError as error:  # `0x`, or more digits than Python reads
        raise yaml.constructor.ConstructorError(None, None, "not a valid integer", node.start_mark) from error
    if abs(value) >= _LIMIT_INTEGER:
        raise yaml.constructor.ConstructorError(None, None, "number too large", node.start_mark)
    return value


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


@dataclass
class _Walk:
    """The results of a walk through the nodes."""

    name: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    twice: list[Problem] = field(default_factory=list)
    nodes: int = 0


def read_yaml(path: Path) -> tuple[dict[str, object], dict[KeyPath, int]]:
    """The mapping in the file, and the line (from 1) of each key path.

    Raises:
        ConfigError: if the file is missing, not YAML, not a mapping, or has a duplicate key.
    """
    _refuse_rows(path)
    try:
        with open_given(path) as file:
            data = file.read(_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if len(data) > _LIMIT_BYTES:
        raise ConfigError.of(
            f"{path} is not a config: it has more than {_LIMIT_BYTES:,} bytes",
            where=str(path),
            fix="pass the YAML file of the run; data belongs in separate files, listed in data.train",
        )
    text = decode_text(data, str(path))
    if not isinstance(text, str):
        fault, where = text
        raise ConfigError.of(fault.what, where=where, why=fault.why, fix=fault.fix)
    if path.suffix.lower() == ".json":
        text = text.replace("\t", " ")  # YAML reads JSON but for tabs, which JSON has only between values
    return parse_yaml(text, name=str(path))


def read_config_text(path: Path) -> str:
    """The text of a config that other machines are to read.

    Raises:
        ConfigError: if it cannot be read again, e.g. because it is a pipe.
    """
    text = read_given(path, str(path), most_bytes=_LIMIT_BYTES)
    if isinstance(text, str):
        return text
    fault, where = text
    raise ConfigError.of(fault.what, where=where, why=fault.why, fix=fault.fix)


def _unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    fault = fault_of(path, str(path))
    if fault is None or path.is_fifo():
        why = getattr(error, "strerror", None) or str(error)
        return ConfigError.of(
            f"{path} cannot be read", where=str(path), why=why, fix="pass a UTF-8 text file"
        )
    fix = _or_nearest_file(path) if fault.is_missing else fault.fix
    return ConfigError.of(fault.what, where=str(path), why=fault.why, fix=fix)


_OF_ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")


def _refuse_rows(path: Path) -> None:
    """Refuses what has the name of a file of rows, or is a run's directory, with the command that
    is meant.
    """
    if path.suffix.lower() in _OF_ROWS and path.is_file():
        raise ConfigError.of(
            f"{path} is not a config",
            where=str(path),
            why=f"a {path.suffix} file holds rows",
            fix=f"write a config for them: `unisono init --data {shlex.quote(str(path))} --out train.yaml`",
        )
    if (path / "plan.json").is_file() and (path / "config.yaml").is_file():
        raise ConfigError.of(
            f"{path} is a run's directory", where=str(path), fix=f"pass its config: {path / 'config.yaml'}"
        )


def _or_nearest_file(path: Path) -> str:
    fix = "check the path, or create a config with `unisono init`"
    if "=" in path.name:
        return (
            "pass the config before KEY=VALUE, e.g. `unisono train train.yaml optim.lr=1e-4`; `unisono init`"
            " creates one"
        )
    try:
        names = [
            item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml", ".json", ".toml")
        ]
    except OSError:
        return fix
    near = nearest(path.name, names)
    return f"did you mean {path.with_name(near)}? Or {fix}" if near else fix


def parse_yaml(text: str, *, name: str) -> tuple[dict[str, object], dict[KeyPath, int]]:
    """Like read_yaml, but from text; `name` is the file name in messages."""
    value, lines = _parse(text, name=name, what="the config")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        kind = "empty" if value is None else f"a {type(value).__name__}"
        why = "one of its keys is not text" if isinstance(value, dict) else f"it is {kind}"
        raise ConfigError.of(
            "the config is not a mapping of keys to values",
            where=name,
            why=why,
            fix="start from `unisono init`",
        )
    return value, lines


def parse_value(text: str, *, name: str) -> Any:
    """The value of an override, e.g. `1e-4`, `[q_proj, v_proj]` or `null`; nothing is the empty
    string.

    Raises:
        ConfigError: if it is not YAML.
    """
    return _parse(text, name=name, what=f"the value {text!r}")[0] if text else ""


def _parse(text: str, *, name: str, what: str) -> tuple[Any, dict[KeyPath, int]]:
    fix = (
        "put the value in quotes"
        if what != "the config"
        else "fix the line; text with `: ` or ` #` needs quotes"
    )
    try:
        loader = _StrictLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            walk = _Walk(name)
            _collect(node, (), walk)
            if walk.twice:
                raise ConfigError(*walk.twice)
            return loader.construct_document(node), walk.lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        why = str(error.problem or error)
        if what == "the config" and mark and any("${" in line for line in text.splitlines()[mark.line :][:1]):
            why = NO_VARIABLES
            fix = (
                "write the value, or remove the key and use KEY=VALUE on the command line, where the shell"
                " expands it"
            )
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        where, why = f"{name}:{line}", f"a character that YAML does not allow: U+{error.character:04X}"
    except RecursionError:
        where, why = name, f"it is nested deeper than {_LIMIT_DEPTH} levels"
    except (yaml.YAMLError, ValueError) as error:
        where, why = name, str(error)
    location = where if what == "the config" else name  # the line within an override is of no use
    raise ConfigError.of(f"{what} is not valid YAML", where=location, why=why, fix=fix)


def _collect(node: yaml.Node, path: KeyPath, walk: _Walk) -> None:
    """Records the lines of all keys below a node; follows aliases as often as they occur, like the
    construction of the value.
    """
    walk.nodes += 1
    if len(path) > _LIMIT_DEPTH or walk.nodes > _LIMIT_NODES:
        raise ConfigError.of(
            f"the config is nested deeper than {_LIMIT_DEPTH} levels, or has more than {_LIMIT_NODES:,}"
            " values",
            where=f"{walk.name}:{node.start_mark.line + 1}",
            fix="no config key is this deep; write values out instead of repeating them with * and &",
        )
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            walk.lines[(*path, index)] = item.start_mark.line + 1
            _collect(item, (*path, index), walk)
    elif isinstance(node, yaml.MappingNode):
        _collect_mapping(node, path, walk)


def _collect_mapping(node: yaml.MappingNode, path: KeyPath, walk: _Walk) -> None:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        word = key.value if isinstance(key, yaml.ScalarNode) else "?"
        if word in seen:
            problem = Problem(
                f"duplicate key {word!r}",
                f"{walk.name}:{line}",
                f"it is also on line {seen[word]}",
                "remove one",
            )
            walk.twice.append(problem)
        seen[word] = line
        walk.lines[(*path, word)] = line
        _collect(value, (*path, word), walk)


COMMAND_LINE = "command line"


class KeyPlaces:
    """The place where each key was set: `train.yaml:7` or `command line`."""

    def __init__(self, lines: dict[KeyPath, int], name: str) -> None:
        self._name = name
        self._places = {key: f"{name}:{line}" for key, line in lines.items()}

    @classmethod
    def of_origins(cls, origins: Mapping[str, str], name: str) -> Self:
        """The places of dotted keys, e.g. `optim.lr`: `x.yaml:7`, for a config that was translated
        from the file `name`.
        """
        places = cls({}, name)
        places._places = {
            tuple(int(part) if part.isdigit() else part for part in key.split(".")): location
            for key, location in origins.items()
        }
        return places

    def of(self, key: KeyPath) -> str:
        """The place of a key, or of the nearest enclosing section, or the file."""
        for end in range(len(key), 0, -1):
            location = self._places.get(key[:end])
            if location is not None:
                return location
        return self._name

    def override(self, key: KeyPath) -> None:
        """Records that the command line set this key and replaced everything below it."""
        self._places = {
            known: location for known, location in self._places.items() if known[: len(key)] != key
        }
        for end in range(1, len(key) + 1):
            self._places.setdefault(key[:end], COMMAND_LINE)

    def dotted(self) -> dict[str, str]:
        """The places of values (not of sections), with keys like `batch.micro`."""
        sections = {key[:-1] for key in self._places if isinstance(key[-1], str)}
        return {
            ".".join(map(str, key)): location for key, location in self._places.items() if key not in sections
        }


_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True, slots=True)
class Takes:
    """In the annotation of a field: what it takes, if its type alone does not say it.

    Attributes:
        text: for people.
        words: those among it that may be misspelled.
    """

    text: str
    words: tuple[str, ...] = ()


def describe_field(field: FieldInfo) -> str:
    """The values that a field accepts, e.g. `a whole number of at least 1 or null`."""
    return describe(field.annotation, field.metadata)


def describe(annotation: Any, metadata: list[Any] | None = None) -> str:
    """The values that a type accepts; `metadata` has the bounds and `Takes`, that pydantic stores
    beside it.
    """
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return describe(inner, [*(metadata or []), *more])
    extra = _flat(metadata or [])
    texts = [item.text for item in extra if isinstance(item, Takes)]
    if texts:
        return texts[0]
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(describe(member) for member in get_args(annotation))
    return _describe_one(annotation) + _bounds(extra)


def _describe_one(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        words = [f"`{word}`" for word in arguments]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is list:
        return f"a list (each: {describe(arguments[0])})"
    if origin is dict:
        return "a mapping of text to text"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section (keys: {', '.join(keys_of(annotation))})"
    return _PLAIN.get(annotation, "a value")


def words_in(annotation: Any) -> list[str]:
    """The words allowed by any Literal in a type."""
    words: list[Any] = []
    for argument in get_args(annotation):
        words += words_in(argument) or [argument]
    return [word for word in words if isinstance(word, str)]


def _flat(metadata: list[Any]) -> list[Any]:
    """The metadata with the bounds of each Field(…) inside Annotated."""
    return [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bounds(metadata: list[Any]) -> str:
    words = []
    for item in metadata:
        if isinstance(item, Ge):
            words.append(f"of at least {_number(item.ge)}")
        elif isinstance(item, Gt):
            words.append(f"above {_number(item.gt)}")
        elif isinstance(item, Le):
            words.append(f"at most {_number(item.le)}")
        elif isinstance(item, Lt):
            words.append(f"below {_number(item.lt)}")
        elif isinstance(item, MinLen):
            words.append("that is not empty")
    return f" {' and '.join(words)}" if words else ""


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def keys_of(section: type[BaseModel]) -> list[str]:
    """The keys of a section as they appear in a config."""
    return [field.alias or name for name, field in section.model_fields.items()]


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also as a member of a union or as items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (section_in(inner) for inner in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key below a section, dotted: `optim`, `optim.lr`, …."""
    keys = []
    for name, known in section.model_fields.items():
        key = f"{prefix}{known.alias or name}"
        inner = section_in(known.annotation)
        keys += [key, *(all_keys(inner, f"{key}.") if inner else [])]
    return keys
