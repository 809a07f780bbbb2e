"""Plain values as JSON that reads back to the same, and state.json, which holds those of a checkpoint. Torch-free."""

import json
import math
from typing import Any

STATE = "state.json"


def state_text(groups: list[str], state: dict[str, Any], *, shards: int = 1) -> bytes:
    """The content of state.json.

    Args:
        groups: of tensors, each in files of its own.
        state: dicts with string keys, lists, tuples, str, int, float, bool, None. Tuples stay tuples, floats keep their bits.
        shards: files in which each group is.

    Raises:
        TypeError: if the state holds something else.
    """
    document: dict[str, Any] = {"schema": 1, "groups": groups, "state": encode_values(state, "state")}
    if shards > 1:
        document["shards"] = shards
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1).encode(
        "utf-8", "surrogatepass"
    )


def encode_values(value: Any, place: str) -> Any:
    """`value` as JSON that reads back to the same: tuples and floats that are no number get a tag."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [encode_values(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode_values(item, f"{place}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in ("$float", "$tuple"):
                raise TypeError(f"{place} has a key {key!r}, which JSON would not give back")
        return {key: encode_values(item, f"{place}.{key}") for key, item in value.items()}
    raise TypeError(f"{place} is a {type(value).__name__}, which JSON would not give back")


def decode_values(value: Any) -> Any:
    """What encode_values was given."""
    if isinstance(value, list):
        return [decode_values(item) for item in value]
    if isinstance(value, dict):
        if "$float" in value:
            return float(value["$float"])
        if "$tuple" in value:
            return tuple(decode_values(item) for item in value["$tuple"])
        return {key: decode_values(item) for key, item in value.items()}
    return value
