"""What is known of checkpoints without reading them again: verified.json, and what this process has read or written.

The record serves `checkpoint ls`, the verifier (which checkpoint has not been read for longest) and retention: there an entry counts only
as long as the checkpoint looks as it did when it was read. No checkpoint is loaded on the strength of a record.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.retention import Candidate
from unisono.checkpoint.verify import Reading, Stamp, read_manifest, stamp_of
from unisono.files import read_json, write_json

VERIFIED = "verified.json"


@dataclass(frozen=True, slots=True)
class Verified:
    """The last verification of a checkpoint: when (UTC, ISO 8601), and whether it was intact.

    Attributes:
        read_again: whether it was read since it was written; otherwise the time is that of its writing.
    """

    at: str
    intact: bool
    read_again: bool = True


def record_verified(root: Path, readings: Iterable[Reading]) -> None:
    """Records that checkpoints were read through now; best effort.

    Args:
        root: the directory of checkpoints.
        readings: the results.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    new = {
        reading.path.name: {
            "checksum": reading.manifest.checksum if reading.manifest else None,
            "at": now,
            "intact": reading.intact,
            "looks": reading.stamp.digest if reading.stamp else None,
        }
        for reading in readings
    }
    with (
        contextlib.suppress(OSError),
        _locked(root),
    ):  # a different user's run, or a full disk: the finding itself is reported anyway
        entries = _entries(root) | new
        there = {name: entry for name, entry in entries.items() if (root / name).is_dir()}
        write_json(root / VERIFIED, {"schema": 1, "verified": there}, mode=0o600)


def last_verified(root: Path, name: str, manifest: Manifest | None) -> Verified | None:
    """When the checkpoint was last read through; if never, when it was written; None if unknown."""
    entry = _entry_of(root, name, manifest)
    if entry is not None:
        return Verified(str(entry.get("at")), entry.get("intact") is True)
    return Verified(manifest.created, intact=True, read_again=False) if manifest else None


def recorded_state(path: Path, manifest: Manifest) -> bool | None:
    """Whether the checkpoint was intact when it was last read; None if it was never read in its present state."""
    entry = _entry_of(path.parent, path.name, manifest)
    if entry is None or not isinstance(entry.get("intact"), bool):
        return None
    stamp = stamp_of(path, manifest)
    if entry.get("looks") != (stamp.digest if stamp else None):
        return None
    return bool(entry["intact"])


def _entry_of(root: Path, name: str, manifest: Manifest | None) -> dict[str, Any] | None:
    """The record about a checkpoint with this manifest."""
    entry = _entries(root).get(name)
    of_this = isinstance(entry, dict) and entry.get("checksum") == (manifest.checksum if manifest else None)
    return entry if of_this else None


def _entries(root: Path) -> dict[str, Any]:
    try:
        value = read_json(root / VERIFIED)
    except (OSError, ValueError):
        return {}
    entries = value.get("verified") if isinstance(value, dict) and value.get("schema") == 1 else None
    return entries if isinstance(entries, dict) else {}


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Prevents a lost update when a verifier and a command write the file at the same time."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: at worst one of two records is lost
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# ---- what this process knows


@dataclass(frozen=True, slots=True)
class _Seen:
    """A checkpoint as this process last saw it: its stamp, and whether it was read through or only written."""

    stamp: Stamp | None
    was_read: bool


class KnownStates:
    """The states of checkpoints that this process knows. A checkpoint that has changed since is unknown again."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note_written(self, path: Path, manifest: Manifest) -> None:
        """Notes that it was written completely just now."""
        self._seen[path.name] = _Seen(stamp_of(path, manifest), was_read=False)

    def note_read(self, path: Path, manifest: Manifest) -> None:
        """Notes that it was read through just now, and is intact."""
        self._seen[path.name] = _Seen(stamp_of(path, manifest), was_read=True)

    def forget(self, path: Path) -> None:
        """Notes that it is deleted or damaged."""
        self._seen.pop(path.name, None)

    def of(self, path: Path, *, step: int, key: bytes) -> Candidate:
        """What is known of a checkpoint; `intact` is None if it must be read first.

        Args:
            path: the checkpoint.
            step: the checkpoint's.
            key: the user's key.
        """
        manifest = read_manifest(path)
        if manifest is None:
            return Candidate(step, intact=False, read_back=False)
        if not manifest.is_signed_by(key):
            return Candidate(step, foreign=True, read_back=False)
        recorded = recorded_state(path, manifest)  # first: bit rot changes neither time nor size
        if recorded is not None:
            return Candidate(step, intact=recorded, read_back=recorded)
        seen = self._seen.get(path.name)
        if seen is None or seen.stamp is None or seen.stamp != stamp_of(path, seen.stamp.manifest):
            return Candidate(step, read_back=False)
        return Candidate(step, intact=True, read_back=seen.was_read)
