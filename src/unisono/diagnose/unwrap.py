"""Lines that are JSON objects, as collectors of logs and programs write them: the message in them, and whose it is."""

import json
import re
from typing import Any

from unisono.diagnose.event import NOBODY, Who
from unisono.text import plain

_TEXTS = ("log", "msg", "message", "event", "textPayload", "text", "error", "exc", "exc_info", "exception", "traceback", "stack", "stack_info", "stacktrace")  # fmt: skip
_RANKS = ("rank", "global_rank", "RANK")
_HOSTS = ("host", "hostname", "node", "pod", "pod_name", "container_name")
_HOST = re.compile(r"[A-Za-z0-9_.@:-]{1,63}")
_MOST_CHARS = 1 << 16
_MOST_LINES = 200


def unwrap(line: str) -> tuple[Who, list[str]] | None:
    """Whom a line that is a JSON object names, and the lines of its message; None: it is none, or has no message."""
    text = line.strip()
    if not (text.startswith('{"') and text.endswith("}")) or len(text) > _MOST_CHARS:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    messages = [found[name] for name in _TEXTS if isinstance(found.get(name), str)]
    lines = [plain(one) if "\x1b" in one else one for message in messages for one in message.splitlines() if one.strip()]  # fmt: skip
    if not lines or isinstance(found.get("loss"), int | float):
        return None
    inner = [found, *(value for value in found.values() if isinstance(value, dict))]
    return _who(inner), lines[:_MOST_LINES]


def _who(objects: list[dict[str, Any]]) -> Who:
    rank = next((one[name] for one in objects for name in _RANKS if name in one), None)
    host = next(
        (
            one[name]
            for one in objects
            for name in _HOSTS
            if isinstance(one.get(name), str) and _HOST.fullmatch(one[name])
        ),
        None,
    )
    number = int(str(rank)) if str(rank).isdecimal() and len(str(rank)) < 7 else None
    return NOBODY if number is None and not host else Who(rank=number, host=host)
