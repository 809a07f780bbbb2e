"""Writes files whole or not at all."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def fsync_dir(path: Path) -> None:
    """Makes renames and new names inside the directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Gives a temporary path beside `path`; at the end it is synced and renamed over `path`, on an error removed.

    Raises:
        OSError: what the file system says.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield temporary
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        fsync_dir(path.parent)
    except BaseException:  # also Ctrl-C leaves no temporary file; raised again
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Writes `text` to `path`, whole or not at all."""
    with whole_file(path, mode=mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Writes `value` as indented JSON, whole or not at all. Floats read back to the same bits."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode=mode)


def read_json(path: Path) -> Any:
    """The JSON value in the file.

    Raises:
        OSError: what the file system says.
        ValueError: if it is not JSON.
    """
    return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; an empty one where the file is missing, torn, or holds something else."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def make_private_dir(path: Path) -> None:
    """Makes the directory and its parents; the directory itself gets mode 0700."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
