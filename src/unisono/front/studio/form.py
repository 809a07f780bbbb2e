"""The fields of the form: every key of the schema, with what it takes and what it means."""

import functools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from unisono.base.locale import chinese
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import NamesFile, Section
from unisono.trainer.config.yaml_file import section_in
from unisono.trainer.readers.axolotl.axolotl_keys import KEYS as AXOLOTL_KEYS
from unisono.trainer.readers.llamafactory.keys import KEYS as LLAMAFACTORY_KEYS
from unisono.trainer.readers.sd_scripts.keys import KEYS as SD_SCRIPTS_KEYS
from unisono.trainer.readers.trl.trl_keys import KEYS as TRL_KEYS

FIRST = (
    "model.path", "data.train", "data.eval", "duration", "optim.lr", "batch.global", "batch.micro",
    "data.max_length", "data.packing", "adapter.rank", "adapter.alpha", "optim.schedule", "optim.warmup",
    "output_dir",
)  # fmt: skip
"""Keys that everybody sets, in the order of the form; all others are folded."""
FIRST_OF = {
    "dpo": ("preference.beta",), "orpo": ("preference.beta",), "simpo": ("preference.beta",),
    "kto": ("preference.beta",), "grpo": ("rewards", "rollout.group", "rollout.max_new_tokens"),
    "diffusion": ("data.resolution",),
}  # fmt: skip
"""Keys that are shown, too, by objective."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {}, "model.quantize": ""},
    "qlora": {"adapter": {}, "model.quantize": "nf4"},
    "full": {"adapter": None, "model.quantize": ""},
}
"""What is trained, and the values that say so: None: null; a mapping: a section; empty: the
default.
"""


@functools.cache
def form() -> dict[str, Any]:
    """The form in both languages, for the page."""
    return {
        "fields": list(_fields(RunConfig)),
        "first": FIRST,
        "first_of": FIRST_OF,
        "methods": list(METHODS),
    }


@functools.cache
def kinds() -> dict[str, str]:
    """What each key takes, by key: see `_kind_of`."""
    return {field["key"]: field["kind"] for field in form()["fields"]}


def _fields(section: type[Section], prefix: str = "") -> Iterator[dict[str, Any]]:
    translate = _chinese()
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = section_in(field.annotation)
        if inner is not None and _is_only_section(field.annotation):
            assert issubclass(inner, Section)
            yield from _fields(inner, f"{key}.")
            continue
        default = field.get_default(call_default_factory=True)
        text = field.description or ""
        yield {
            "key": key,
            "kind": _kind_of(field.annotation),
            "choices": _choices_of(field.annotation),
            "default": None if default is PydanticUndefined else _plain(default),
            "required": field.is_required(),
            "path": NamesFile.of(field) is not None,
            "help": {"en": text, "zh": translate(text)},
            "names": _other_names().get(key, []),
        }


@functools.cache
def _other_names() -> dict[str, list[str]]:
    """What other tools call our keys, by key, from the tables of their readers."""
    names: dict[str, set[str]] = {}
    for table in (LLAMAFACTORY_KEYS, AXOLOTL_KEYS, TRL_KEYS, SD_SCRIPTS_KEYS):
        for name, key in table.items():
            for ours in table.get(key.same_as, key).ours.split(", "):
                names.setdefault(ours, set()).add(name)
    return {ours: sorted(theirs) for ours, theirs in names.items()}


@functools.cache
def _chinese() -> Any:
    return chinese()


def _members(annotation: Any) -> list[Any]:
    """The types of a union, without bounds and null."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for member in get_args(annotation) for one in _members(member)]
    return [] if annotation is type(None) else [annotation]


def _is_only_section(annotation: Any) -> bool:
    """Whether a key holds a section or null: its own keys are the fields."""
    members = _members(annotation)
    return len(members) == 1 and isinstance(members[0], type) and issubclass(members[0], Section)


def _kind_of(annotation: Any) -> str:
    """`switch`, `choice`, `number`, `text`, or `yaml` for everything else, e.g. lists."""
    members = _members(annotation)
    if members == [bool]:
        return "switch"
    words = [word for one in members for word in get_args(one)]
    if words and all(get_origin(one) is Literal for one in members) and {*map(type, words)} == {str}:
        return "choice"
    if members and all(one in (int, float) for one in members):
        return "number"
    return "text" if members == [str] else "yaml"


def _choices_of(annotation: Any) -> list[str]:
    """The words among what a key takes."""
    words = [word for one in _members(annotation) if get_origin(one) is Literal for word in get_args(one)]
    return [word for word in dict.fromkeys(words) if isinstance(word, str)]


def _plain(value: Any) -> Any:
    """A default as JSON; a section as its values."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json", by_alias=True)
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
