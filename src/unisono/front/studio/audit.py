"""The log of what was done from the page: one line for each action."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.base.text import one_line

_LONGEST_VALUE = 300


class AuditLog:
    """The file `studio.log`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, action: str, **about: Any) -> None:
        """Adds a line: the time in UTC, the action, and what it was about as JSON."""
        values = {
            name: one_line(value, limit=_LONGEST_VALUE) if isinstance(value, str) else value
            for name, value in about.items()
        }
        line = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {action} {json.dumps(values, ensure_ascii=False)}\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, line.encode(errors="replace"))
        finally:
            os.close(fd)
