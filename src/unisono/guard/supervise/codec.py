"""Dataclasses as JSON objects, on the way from one of our processes to another.

A message has its `kind`, too, a class variable; a reader ignores kinds that only a newer version
has.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

Kind = TypeVar("Kind")


def encode(value: Any) -> dict[str, object]:
    """A dataclass as a JSON object."""
    encoded: dict[str, object] = _adapter(value.__class__).dump_python(value, mode="json", by_alias=True)
    return encoded


def decode(kind: type[Kind], value: Mapping[str, object]) -> Kind:
    """Reads what `encode` gave.

    Raises:
        ValueError: if a field is missing or of another type.
    """
    schema: Any = kind
    decoded: Kind = _adapter(schema).validate_python(value)
    return decoded


def encode_message(message: Any) -> dict[str, object]:
    """A message as an object for `json.dumps`."""
    # Not in mode "json", which makes null of a loss that is infinite.
    return {"kind": message.kind, **_adapter(message.__class__).dump_python(message)}


def decode_message(value: Mapping[str, object], union: Any) -> Any:
    """Reads a message; None for a kind that is not in the union.

    Raises:
        KeyError, TypeError, ValueError: if its fields cannot be read.
    """
    kind = _kinds(union).get(str(value.get("kind")))
    if kind is None:
        return None
    names = {field.name for field in fields(kind)}
    return decode(kind, {name: value[name] for name in names & value.keys()})


@cache
def _kinds(union: Any) -> Mapping[str, Any]:
    return {one.kind: one for one in union.__args__}


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    return TypeAdapter(kind)
