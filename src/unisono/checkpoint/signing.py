"""The user's own key, under which checkpoints are signed."""

import os
import secrets
from pathlib import Path

from unisono.errors import UnfitError
from unisono.files import fsync_dir, read_text

KEY_FILE = "checkpoint.key"
_KEY_BYTES = 32


def user_key(settings_dir: Path) -> bytes:
    """The key in the user's folder of settings; it is made there at the first call.

    Several processes may call this at once: all get the same key.

    Raises:
        UnfitError: if the key cannot be kept there, or is no key of ours, or others can read it.
    """
    path = settings_dir / KEY_FILE
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unfit(path, error) from error
    try:
        _make(path)
        return _read(path)
    except OSError as error:
        raise _unfit(path, error) from error


_MOST_BYTES = 4096


def _read(path: Path) -> bytes:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise UnfitError.of(
            f"the key that signs checkpoints can be read by others (mode {mode:04o})", where=str(path),
            why="whoever has it can make checkpoints that pass for yours", fix=f"chmod 600 {path}",
        )  # fmt: skip
    try:
        key = bytes.fromhex(read_text(path, most_bytes=_MOST_BYTES).strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise UnfitError.of(
            "the key that signs checkpoints is damaged", where=str(path),
            why=f"it should be {2 * _KEY_BYTES} hexadecimal digits",
            fix="restore the file, or delete it: a new key is made, and older checkpoints then count as foreign",
        )  # fmt: skip
    return key


def _make(path: Path) -> None:
    """Writes a new key beside its place and links it in; the first of several processes wins."""
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
            return  # another process was first, and its key is the key
        fsync_dir(path.parent)
    finally:
        temporary.unlink()


def _unfit(path: Path, error: OSError) -> UnfitError:
    return UnfitError.of(
        f"the key that signs checkpoints cannot be kept: {error.strerror}", where=str(path),
        why="each user has one, in the folder of settings",
        fix="make the folder writable, or point XDG_CONFIG_HOME at one that is",
    )  # fmt: skip
