"""Values as a person reads them in a verdict: short, on one line, without secrets."""

import json
import math
import re
from collections.abc import Hashable, Mapping
from decimal import Decimal
from typing import Any

from unisono.text import one_line

_LONGEST = 80
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PROXY|_KEY$", re.IGNORECASE)


def freeze(value: Any) -> Hashable:
    """A hashable stand-in that is equal where the values mean the same: 1 and 1.0 do, 1 and true do not."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # nan is not even equal to itself
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return ("map", tuple(sorted((str(key), freeze(item)) for key, item in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(freeze(item) for item in value))
    return repr(value)


def show(value: Any) -> str:
    """`value` for people: `1e-4`, `not set`, `"two words"`, cut where it is long."""
    match value:
        case None:
            text = "not set"
        case bool():
            text = str(value).lower()
        case float():
            text = show_float(value)
        case str():
            text = value if value and not value.isspace() else json.dumps(value)
        case ("bool", bool() as flag):
            text = str(flag).lower()
        case ("list", tuple() as items):
            text = f"[{', '.join(show(item) for item in items)}]"
        case ("map", tuple() as items):
            text = "{" + ", ".join(f"{key}: {show(item)}" for key, item in items) + "}"
        case int():
            text = str(value)
        case _:
            text = repr(value)
    return one_line(text, limit=_LONGEST)


def show_float(value: float) -> str:
    """The shortest spelling that reads back as the same number: 0.001, 1e-4, 2.5e-5."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    mantissa = str(digits[0]) + ("." + "".join(map(str, digits[1:])) if len(digits) > 1 else "")
    return f"{'-' if sign else ''}{mantissa}e{exponent + len(digits) - 1}"


def show_setting(name: str, value: str | None) -> str:
    """`NCCL_ALGO=Ring`, `NCCL_ALGO not set`; of a variable that may hold a secret only that it is set."""
    if value is None:
        return f"{name} not set"
    return f"{name} (set)" if holds_secret(name) else f"{name}={show_value(name, value)}"


def show_value(name: str, value: str | None) -> str:
    """The value of an environment variable as it may be shown."""
    if value is not None and holds_secret(name):
        return "(set)"
    return show(value)


def holds_secret(name: str) -> bool:
    """Whether a variable of this name may hold what nobody else should read."""
    return bool(_SECRET.search(name)) and name not in {"TOKENIZERS_PARALLELISM", "NO_PROXY", "no_proxy"}


def show_digest(digest: str) -> str:
    """Enough of a digest to compare two by eye."""
    return one_line(digest, limit=16) or "none"


def show_bytes(amount: int) -> str:
    """`64 MiB`, `1.5 GiB`: of memory and disks, in the units that limits are set in."""
    size = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
