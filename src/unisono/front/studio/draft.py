"""A config while it is edited: from the form or as YAML, ours or LLaMA-Factory's; what is wrong
with it, by key.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unisono.base.errors import ConfigError, Problem, UnisonoError
from unisono.front.studio.form import METHODS, kinds
from unisono.front.studio.problems import shown_problem
from unisono.jobs.runs.config_file import read_translation
from unisono.trainer.config import apply_overrides, build_config
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces, parse_yaml

NAME = "train.yaml"
MOST_CHARACTERS = 256 << 10
_MAIN = {"model": "model.path", "data": "data.train"}
"""Sections whose absence is that of one key."""


@dataclass(frozen=True)
class ConfigDraft:
    """A config that may be unfinished.

    Attributes:
        values: as a YAML file would have them.
        text: the YAML.
        problems: of the config, with the key that each is about, or an empty one.
        notes: what was translated from a file of another tool.
        config: None if there are problems.
    """

    values: dict[str, Any]
    text: str
    problems: list[tuple[str, Problem]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: RunConfig | None = None

    @property
    def method(self) -> str:
        """`lora`, `qlora` or `full`."""
        if self.values.get("adapter", {}) is None:
            return "full"
        model = self.values.get("model")
        return "qlora" if isinstance(model, dict) and model.get("quantize") else "lora"

    def to_json(self) -> dict[str, Any]:
        """What the page shows."""
        return {
            "values": _flat(self.values),
            "text": self.text,
            "method": self.method,
            "problems": [{"key": key, **shown_problem(problem)} for key, problem in self.problems],
            "notes": self.notes,
        }


def read_draft(text: str) -> ConfigDraft:
    """The config in a text, which stays as it is if it is ours; a file of LLaMA-Factory is
    translated.

    Raises:
        ConfigError: if it is too long.
    """
    if len(text) > MOST_CHARACTERS:
        raise ConfigError.of(
            f"the text has more than {MOST_CHARACTERS >> 10} Ki characters", fix="shorten it"
        )
    try:
        values, lines = parse_yaml(text, name=NAME) if text.strip() else ({}, {})
        if not {*values} <= {*RunConfig.model_fields} and (translated := _translated(text)) is not None:
            return translated
    except UnisonoError as error:
        return ConfigDraft({}, text, [("", problem) for problem in error.problems])
    return _judged(values, text, lines)


def draft_of(values: dict[str, Any]) -> ConfigDraft:
    """The config with these values, as YAML in the order of the schema."""
    text = dumped(values)
    return _judged(values, text, parse_yaml(text, name=NAME)[1] if values else {})


def changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those of the form laid over them.

    Args:
        changes: texts by dotted key; an empty text: the default. `method`: one of METHODS.

    Raises:
        ConfigError: if a text is not YAML, for keys that hold more than text.
    """
    for key, value in _with_method(changes).items():
        if isinstance(value, str) and value.strip():
            words = value if _takes_yaml(key, value) else json.dumps(value, ensure_ascii=False)
            values, wrong = apply_overrides(values, (f"{key}={words}",), KeyPlaces({}, NAME))
            if wrong:
                raise ConfigError(*wrong)
        elif value is None or value == {}:
            values = {**values, key: value} if value is None else _without_null(values, key)
        else:
            values = _without(values, key.split("."))
    return _in_order(values)


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """The values by dotted key, each as the text of its field."""
    if key and (key in kinds() or not isinstance(value, dict)):
        return {_MAIN.get(key, key): _shown(value)}
    return {
        name: text
        for part, one in value.items()
        for name, text in _flat(one, f"{key}.{part}" if key else str(part)).items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _with_method(changes: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in changes.items() if key in kinds() and isinstance(value, str)}
    return {**known, **METHODS.get(str(changes.get("method")), {})}


def _takes_yaml(key: str, value: str) -> bool:
    """Whether a text of the form is read as YAML: numbers and lists are, but no paths and words."""
    kind = kinds()[key]
    return kind in ("switch", "number") or (kind == "yaml" and not re.match(r"[~./\w-]+[/.]\w", value))


def _without_null(values: dict[str, Any], key: str) -> dict[str, Any]:
    return _without(values, [key]) if values.get(key, {}) is None else values


def _without(values: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The values without a key, and without sections that are empty then."""
    head, *rest = path
    inner = values.get(head)
    if rest and isinstance(inner, dict) and (left := _without(inner, rest)):
        return {**values, head: left}
    if rest and not isinstance(inner, dict):
        return values
    return {name: value for name, value in values.items() if name != head}


def _in_order(values: dict[str, Any]) -> dict[str, Any]:
    """The values in the order of the schema; a model that is only a path is not a section."""
    model = values.get("model")
    if isinstance(model, dict) and {*model} == {"path"}:
        values = {**values, "model": model["path"]}
    names = [name for name in RunConfig.model_fields if name in values]
    return {name: values[name] for name in [*names, *(name for name in values if name not in names)]}


def dumped(values: Mapping[str, Any]) -> str:
    """The values as YAML."""
    if not values:
        return ""
    text: str = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100)
    return text


def _judged(values: dict[str, Any], text: str, lines: dict[KeyPath, int]) -> ConfigDraft:
    try:
        loaded = build_config(values, lines=lines, name=NAME)
    except ConfigError as error:
        return ConfigDraft(values, text, [(_key_of(problem, lines), problem) for problem in error.problems])
    return ConfigDraft(values, text, config=loaded.config)


def _key_of(problem: Problem, lines: dict[KeyPath, int]) -> str:
    """The key that a problem is about: the innermost one in its line, else the first in its
    words.
    """
    match = re.search(r":(\d+)$", problem.where)
    keys = [path for path, line in lines.items() if match and line == int(match[1])]
    named = ".".join(str(part) for part in max(keys, key=len)) if keys else ""
    if named not in kinds():
        words = re.findall(r"[a-z_]+(?:\.[a-z_]+)*", problem.what)
        named = next((word for word in words if word in kinds() or word in _MAIN), named)
    return _MAIN.get(named, named)


def _translated(text: str) -> ConfigDraft | None:
    """A file of another tool in our terms; None if it is not one."""
    with tempfile.TemporaryDirectory(prefix="unisono-studio-") as folder:
        path = Path(folder) / "pasted.yaml"
        path.write_text(text, encoding="utf-8")
        translation = read_translation(path)
    if translation is None:
        return None
    draft = draft_of(_in_order(dict(translation.config)))
    problems = [
        Problem(**{name: value.replace(f"{folder}/", "") for name, value in asdict(one).items()})
        for one in [*translation.problems, *translation.refusals("train")]
    ]
    notes = [note.replace(f"{folder}/", "") for note in translation.notes()]
    return ConfigDraft(
        draft.values,
        draft.text,
        [*(("", problem) for problem in problems), *draft.problems],
        notes,
        None if problems else draft.config,
    )
