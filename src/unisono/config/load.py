"""From a YAML file and `key.sub=value` overrides to a RunConfig, or to all that is wrong with them at once."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from unisono.config.schema import RunConfig
from unisono.config.yaml_file import KeyPath, read_yaml
from unisono.errors import ConfigError, Problem
from unisono.text import nearest, one_line

_CREDENTIALS = re.compile(r"^[a-z][a-z0-9+.-]*://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(token|secret|password|passwd|api_?key|access_?key)", re.IGNORECASE)


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
    places = {_dotted(key): f"{name}:{line}" for key, line in lines.items()}
    problems: list[Problem] = []
    if isinstance(raw.get("model"), str):  # so that `model.dtype=…` can be laid over `model: NAME`
        raw = {**raw, "model": {"path": raw["model"]}}
    for override in overrides:
        raw = _override(raw, override, places, problems)
    _refuse_secrets(raw, "", places, problems)
    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        problems += [_problem(found, places, name) for found in error.errors(include_url=False)]
    if problems or config is None:
        raise ConfigError(*_without_echo(problems))
    return LoadedConfig(config, path, places)


def _dotted(key: KeyPath) -> str:
    return ".".join(map(str, key))


def _override(
    raw: dict[str, Any], text: str, places: dict[str, str], problems: list[Problem]
) -> dict[str, Any]:
    key, equals, value_text = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        problems.append(
            Problem(
                f"{text!r} is no override", "command line", "", "write key.sub=value, as in optim.lr=1e-4"
            )
        )
        return raw
    try:
        value = yaml.safe_load(value_text) if value_text else ""
    except yaml.YAMLError as error:
        problems.append(
            Problem(
                f"the value of {text!r} is not valid YAML", "command line", one_line(str(error)), "quote it"
            )
        )
        return raw
    places[".".join(parts)] = "command line"
    return _laid_over(raw, parts, value)


def _laid_over(base: Any, parts: list[str], value: Any) -> dict[str, Any]:  # noqa: ANN401 - YAML values
    inner = base if isinstance(base, dict) else {}
    head, *rest = parts
    return {**inner, head: _laid_over(inner.get(head), rest, value) if rest else value}


def _refuse_secrets(value: Any, key: str, places: dict[str, str], problems: list[Problem]) -> None:  # noqa: ANN401
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_secrets(inner, f"{key}.{name}" if key else str(name), places, problems)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_secrets(inner, f"{key}.{index}", places, problems)
    elif isinstance(value, str) and _CREDENTIALS.match(value):
        problems.append(
            Problem(
                f"{key} holds a URL with a user name and a password", places.get(key, ""),
                "a config is kept with the results and shown to others",
                "leave them out, and set them in the environment that the storage's package reads (for s3: AWS_ACCESS_KEY_ID …)",
            )
        )  # fmt: skip
    elif (
        isinstance(value, str)
        and value
        and _SECRET_KEY.search(key.rpartition(".")[2])
        and key != "model.tokenizer"
    ):
        problems.append(
            Problem(
                f"{key} looks like a secret", places.get(key, ""), "a config is kept with the results and shown to others",
                "remove it, and set it in the environment (for the hub: HF_TOKEN)",
            )
        )  # fmt: skip


def _problem(found: Any, places: dict[str, str], name: str) -> Problem:  # noqa: ANN401 - pydantic's ErrorDetails
    location = tuple(part for part in found["loc"] if not _is_union_tag(part))
    key = _dotted(location)
    where = _where(location, places, name)
    if found["type"] == "extra_forbidden":
        known = _keys_of(location[:-1])
        near = nearest(str(location[-1]), known)
        fix = f"did you mean `{near}`?" if near else f"known keys here: {', '.join(known)}"
        return Problem(f"unknown key `{key}`", where, "", fix)
    if found["type"] == "missing":
        return Problem(f"the key `{key}` is missing", where, "it has no default", f"add `{key}`")
    if found["type"] == "value_error":
        text = one_line(str(found["ctx"]["error"]))
        return Problem(text if not key else f"{key}: {text}", where)
    shown = (
        "" if isinstance(found["input"], dict | list) else f", got {one_line(repr(found['input']), limit=60)}"
    )
    return Problem(f"{key}: {one_line(found['msg'])}{shown}", where, "", _type_fix(found))


def _type_fix(found: Any) -> str:  # noqa: ANN401
    if found["type"] == "literal_error":
        expected = found["ctx"]["expected"]
        near = nearest(str(found["input"]), re.findall(r"'([^']*)'", expected))
        return f"did you mean `{near}`?" if near else f"one of {expected}"
    return ""


def _is_union_tag(part: str | int) -> bool:
    """Whether pydantic put this into a location to say which member of a union it tried."""
    return isinstance(part, str) and bool(
        re.search(r"[\[(]|^(str|int|float|bool|none|function-|literal|SourceSection$)", part)
    )


def _where(location: tuple[str | int, ...], places: dict[str, str], name: str) -> str:
    for end in range(len(location), 0, -1):
        place = places.get(_dotted(location[:end]))
        if place:
            return place
    return name


def _keys_of(location: tuple[str | int, ...]) -> list[str]:
    """The keys that the section at a location knows."""
    section: type[BaseModel] | None = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section else None
        section = _section_in(field.annotation) if field else None
    if section is None:
        return []
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - a type form
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _section_in(inner)
        if found is not None:
            return found
    return None


def _without_echo(problems: list[Problem]) -> list[Problem]:
    """One problem a place: a union that fails says so once for each of its members."""
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        kept.setdefault((problem.where, problem.what.partition(":")[0]), problem)
    return list(kept.values())
