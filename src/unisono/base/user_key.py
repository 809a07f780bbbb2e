"""The user's key, which signs checkpoints: one per user, in the settings directory."""

import os
import secrets
from pathlib import Path

from unisono.base.errors import UnfitError
from unisono.base.files import fsync_dir, read_text

KEY_FILE = "checkpoint.key"
_KEY_BYTES = 32
_MOST_KEY_FILE_BYTES = 4096


def user_key(settings_dir: Path) -> bytes:
    """The key in the user's settings directory; the first call creates it.

    Concurrent calls from several processes all return the same key.

    Raises:
        UnfitError: if the key cannot be stored there, is not a valid key, or is readable by others.
    """
    path = settings_dir / KEY_FILE
    try:
        return _read_key(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _key_failure(path, error) from error
    try:
        _make_key(path)
        return _read_key(path)
    except OSError as error:
        raise _key_failure(path, error) from error


def _read_key(path: Path) -> bytes:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise UnfitError.of(
            f"the key that signs checkpoints is readable by others (mode {mode:04o})",
            where=str(path),
            why="anyone who has it can forge your checkpoints",
            fix=f"chmod 600 {path}",
        )
    try:
        key = bytes.fromhex(read_text(path, most_bytes=_MOST_KEY_FILE_BYTES).strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise UnfitError.of(
            "the key that signs checkpoints is damaged",
            where=str(path),
            why=f"it should be {2 * _KEY_BYTES} hexadecimal digits",
            fix="restore the file, or delete it: a new key is created, and older checkpoints then count as foreign",
        )
    return key


def _make_key(path: Path) -> None:
    """Writes a new key to a temporary file and links it into place; the first process wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # a different process was first, and its key is used
        fsync_dir(path.parent)
    finally:
        temporary.unlink()


def _key_failure(path: Path, error: OSError) -> UnfitError:
    return UnfitError.of(
        f"the key that signs checkpoints cannot be stored: {error.strerror}",
        where=str(path),
        why="each user has one, in the settings directory",
        fix="make the directory writable, or set XDG_CONFIG_HOME to a writable one",
    )
