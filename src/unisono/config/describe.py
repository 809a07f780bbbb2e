"""Describes in plain words what a key takes, for error messages and the reference page."""

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True, slots=True)
class Takes:
    """In the annotation of a field: what it takes, if its type alone does not say it."""

    text: str


def describe_field(field: FieldInfo) -> str:
    """What a field takes, e.g. `a whole number of at least 1 or null`."""
    return describe(field.annotation, field.metadata)


def describe(annotation: Any, metadata: list[Any] | None = None) -> str:
    """What a type takes; `metadata` has the bounds and `Takes`, that pydantic stores beside it."""
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
    found = (section_in(inner) for inner in get_args(annotation))
    return next((section for section in found if section is not None), None)


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key below a section, dotted: `optim`, `optim.lr`, …."""
    keys = []
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = section_in(field.annotation)
        keys += [key, *(all_keys(inner, f"{key}.") if inner else [])]
    return keys
