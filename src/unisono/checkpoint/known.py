"""What is known of a run's checkpoints without reading one: by what this process has done, and by the record of who has read them."""

from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.keeping import Candidate
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.record import recorded_state
from unisono.checkpoint.verify import Stamp, read_manifest, stamp_of


@dataclass(frozen=True, slots=True)
class _Seen:
    """A checkpoint as this process has left it: how it looked, and whether it was read through or only written."""

    stamp: Stamp | None
    was_read: bool


class Known:
    """What one process knows. What looks otherwise than it did then is not known any more."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note_written(self, path: Path, manifest: Manifest) -> None:
        """It was written just now, whole."""
        self._seen[path.name] = _Seen(stamp_of(path, manifest), was_read=False)

    def note_read(self, path: Path, manifest: Manifest) -> None:
        """It was read through just now, and is intact."""
        self._seen[path.name] = _Seen(stamp_of(path, manifest), was_read=True)

    def forget(self, path: Path) -> None:
        """It is gone, or damaged."""
        self._seen.pop(path.name, None)

    def of(self, path: Path, *, step: int, key: bytes) -> Candidate:
        """What is known of a checkpoint; `intact` is None where nobody can say without reading it.

        Args:
            path: the checkpoint.
            step: its own.
            key: the user's key.
        """
        manifest = read_manifest(path)
        if manifest is None:
            return Candidate(step, intact=False, read_back=False)
        if not manifest.is_signed_by(key):
            return Candidate(step, foreign=True, read_back=False)
        recorded = recorded_state(path, manifest)  # first: a disk that rots changes neither time nor size
        if recorded is not None:
            return Candidate(step, intact=recorded, read_back=recorded)
        seen = self._seen.get(path.name)
        if seen is None or seen.stamp is None or seen.stamp != stamp_of(path, seen.stamp.manifest):
            return Candidate(step, read_back=False)
        return Candidate(step, intact=True, read_back=seen.was_read)
