"""What foreign text may look like when it is shown: no secrets, no control characters, not endless."""

import re
from typing import Any

from unisono.facts.redaction import redact
from unisono.text import plain

SHOWN_CHARS = 600
_COLOUR = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,4}m")
"""What is left of a terminal's colour that had lost its first character: stuck to a token it would hide it."""
_KEY_BODY = re.compile(r"^\s*[A-Za-z0-9+/]{60,}={0,2}\s*$")


def shown(text: str) -> str:
    """The line as it may be shown."""
    limit = 4 * SHOWN_CHARS
    flat = plain(text[:limit]).rstrip()
    if len(text) > limit:
        flat = flat.rpartition(" ")[0] or flat  # a token cut in two would no longer look like one
    flat = redacted(flat)
    return flat if len(flat) <= SHOWN_CHARS else flat[: SHOWN_CHARS - 1] + "…"


def redacted(text: str) -> str:
    """Any text without control characters and secrets."""
    flat = _COLOUR.sub("", plain(text))
    if _KEY_BODY.match(flat):  # a line of a private key, or another block of base64
        return "…"
    return redact(flat)


def redacted_json(value: Any) -> Any:
    """The same JSON value with all of its texts redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redacted_json(inner) for key, inner in value.items()}
    return [redacted_json(inner) for inner in value] if isinstance(value, list | tuple) else value
