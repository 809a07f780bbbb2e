"""Makes foreign text safe to show: removes terminal control sequences from rows, model answers, host names and logs."""

import json
import re
from typing import Any

# C0 and C1 controls, DEL, and the bidirectional and zero-width marks that can hide or reorder text.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # a complete CSI sequence, not only its first byte
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links, clipboard
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` without control characters; newlines and tabs stay."""
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))


def one_line(text: str, *, limit: int = 0) -> str:
    """`text` on one line, without control characters, cut to `limit` characters with an ellipsis if `limit` is given."""
    flat = " ".join(plain(text).split())
    return flat if not limit or len(flat) <= limit else flat[: limit - 1] + "…"


def library_words(error: BaseException, *, library: str = "transformers") -> str:
    """The innermost error of a library on one line, marked as the library's words."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return f"{library} says: {one_line(text, limit=250) or type(error).__name__}"


def nearest(word: str, known: list[str]) -> str | None:
    """The closest match for `word` in `known`, or None if none is close."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return close[0] if close else None


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text",
    "bool": "true or false",
    "dict": "an object",
    "model": "an object",
    "mapping": "an object",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
}


def validation_words(error: Any) -> str:
    """The first error of a pydantic ValidationError in plain words: the key, the value, and what it should be."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"])) or "it"
    kind, context = str(first["type"]), first.get("ctx", {})
    if kind == "missing":
        return f"{key} is missing"
    if kind == "extra_forbidden":
        return f"{key} is unknown to this version of unisono"
    if kind == "value_error":
        return f"{key}: {one_line(str(context.get('error')), limit=200)}"
    value = one_line(repr(first["input"]), limit=60)
    if kind == "literal_error":
        return f"{key} is {value} and should be {context.get('expected')}"
    wanted = _KINDS.get(kind.partition("_")[0])
    return (
        f"{key} is {value} and should be {wanted}"
        if wanted
        else f"{key} is {value}, which is out of its range"
    )


def why_unreadable(error: OSError | ValueError) -> str:
    """Why a JSON file cannot be read, from the error of reading or validating it."""
    if hasattr(error, "errors"):  # pydantic's
        return validation_words(error)
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: line {error.lineno}, column {error.colno}"
    return (
        "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else one_line(str(error), limit=200)
    )
