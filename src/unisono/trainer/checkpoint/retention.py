"""Which checkpoints stay and which are deleted (pure), how much disk space they need, and what is
known of them without reading them again.

The run's store, `checkpoint prune` and remote storage share the rules. The newest intact ones stay,
the best stays, and those at the multiples of a period stay forever. One that is damaged, or not yet
verified, never counts as kept: nothing is deleted before as many as are wanted are known to be
intact. What was only written may not be what the disk returns, so the newest one that was found
intact by reading stays, too, until a newer one was.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NotRequired, TypedDict

from unisono.base.files import read_object, write_json
from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest
from unisono.trainer.checkpoint.verify import Stamp, VerificationResult, inspect, read_manifest, stamp_of
from unisono.trainer.checkpoint.writer import free_bytes

_OWN_NAME = re.compile(r"(step-(?P<step>\d{8,})|step-\d{8,}\.tmp-[0-9a-f]+|\.trash-\d{8,}-[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A published checkpoint.

    Attributes:
        step: optimizer steps done when it was saved.
        intact: whether it is intact; None: unknown.
        foreign: not signed by this user: never deleted, and never relied on.
        read_back: whether it was read through since it was written, and found intact; None:
            unknown.
    """

    step: int
    intact: bool | None = None
    foreign: bool = False
    read_back: bool | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The retention policy.

    Attributes:
        keep: how many of the newest intact ones stay; at least 1.
        every: checkpoints at its multiples stay forever, in steps; None: no such period.
        protect: steps that stay, e.g. the best one.
    """

    keep: int
    every: int | None = None
    protect: Collection[int] = ()

    def are_permanent(self, step: int) -> bool:
        """Whether a step is one of those that stay forever."""
        return self.every is not None and step > 0 and step % self.every == 0

    def protects(self, step: int) -> bool:
        """Whether a step stays regardless of its age and state."""
        return step in self.protect or self.are_permanent(step)


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The checkpoints to delete, or to read first.

    Attributes:
        go: the steps to delete, oldest first.
        ask: the step whose state is needed before anything can be decided, by reading it if
            necessary; nothing is deleted until then.
        recall: the step for which `read_back` is needed; it need not be read for that. Nothing is
            deleted until then.
        oldest_kept: the oldest of the newest that stay; damaged ones that were renamed before it
            can be deleted. None if there are too few.
    """

    go: tuple[int, ...] = ()
    ask: int | None = None
    recall: int | None = None
    oldest_kept: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether something must be found out first."""
        return self.ask is not None or self.recall is not None


def decide(candidates: Iterable[Candidate], rules: Rules) -> RetentionPlan:
    """The steps to delete. Damaged ones stay until they are older than all that are kept.

    Args:
        candidates: all published ones, in any order, each step once.
    """
    assert rules.keep >= 1
    newest_first = sorted(
        (one for one in candidates if not one.foreign), key=lambda one: one.step, reverse=True
    )
    kept: list[int] = []
    go: list[int] = []
    for candidate in newest_first:
        if len(kept) < rules.keep:
            if candidate.intact is None:
                return RetentionPlan(ask=candidate.step)
            if candidate.intact:
                kept.append(candidate.step)
        elif not rules.protects(candidate.step):
            go.append(candidate.step)
    if len(kept) < rules.keep:
        return RetentionPlan()
    last = _last_read_back(newest_first, since=go[-1]) if go else None
    if last is not None and last.read_back is None:
        return RetentionPlan(recall=last.step)
    spared = last.step if last is not None else None
    return RetentionPlan(go=tuple(step for step in reversed(go) if step != spared), oldest_kept=kept[-1])


def _last_read_back(newest_first: Iterable[Candidate], *, since: int) -> Candidate | None:
    """The newest one that was read back, or may have been; None if there is none from that step
    on.
    """
    return next((one for one in newest_first if one.step >= since and one.read_back is not False), None)


# ---- disk space


@dataclass(frozen=True)
class DiskSpace:
    """Disk usage of a directory of checkpoints, and free space.

    Attributes:
        own_bytes: of the run's own checkpoints: published, being written, being deleted. Foreign
            ones are not counted, since they stay.
        steps: of the published ones, oldest first.
    """

    free_bytes: int
    own_bytes: int
    steps: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The most that the run's checkpoints can use, all together."""
        return self.free_bytes + self.own_bytes


def measure_disk_space(root: Path, *, key: bytes) -> DiskSpace:
    """Measures a directory of checkpoints.

    Args:
        key: the user's key; a checkpoint that is not signed with it is foreign.

    Raises:
        OSError: if it cannot be read.
    """
    before = _own_bytes(root, key)
    free = free_bytes(root)
    after = _own_bytes(root, key)
    # A checkpoint that is deleted meanwhile is in the first sum and already free: the smaller sum
    # is right.
    own_bytes = min(sum(before.values()), sum(after.values()))
    steps = [int(match["step"]) for name in after if (match := _OWN_NAME.fullmatch(name)) and match["step"]]
    return DiskSpace(free, own_bytes, tuple(sorted(steps)))


def _own_bytes(root: Path, key: bytes) -> dict[str, int]:
    """Bytes by directory."""
    sizes = {}
    for path in root.iterdir():
        named = _OWN_NAME.fullmatch(path.name)
        if named is None:
            continue
        manifest = read_manifest(path) if named["step"] else None
        if manifest is None or manifest.is_signed_by(key):
            sizes[path.name] = _directory_bytes(path)
    return sizes


def _directory_bytes(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):  # it is being deleted
        for file in directory.iterdir():
            total += file.stat().st_size
    return total


def max_on_disk(there: Sequence[int], due: Sequence[int], rules: Rules, *, best: bool) -> int:
    """The largest number of checkpoints on disk at the same time: when the last one is written,
    before others are deleted.

    Args:
        there: the steps of existing ones, oldest first.
        due: the steps of future ones, oldest first.
        best: whether the best one is kept, too, whichever it will be.
    """
    steps = [*there, *due]
    older = steps[: -(rules.keep + 1)]
    permanent = sum(1 for step in older if rules.protects(step))
    return min(len(steps), permanent + max_without_permanent(rules.keep, best=best))


def max_without_permanent(keep: int, *, best: bool) -> int:
    """The most checkpoints at a time without permanent ones, in a run that makes more than enough.

    These are: the ones that are kept, the one that is written, the last one that was read back if
    no newer one was yet, and the best.
    """
    return keep + 2 + best


VERIFIED = "verified.json"


@dataclass(frozen=True, slots=True)
class Verified:
    """The last verification of a checkpoint: when (UTC, ISO 8601), and whether it was intact.

    Attributes:
        read_again: whether it was read since it was written; otherwise the time is that of its
            writing.
    """

    at: str
    intact: bool
    read_again: bool = True


def record_verified(root: Path, readings: Iterable[VerificationResult]) -> None:
    """Records that checkpoints were read through now; best effort."""
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
    # A different user's run, or a full disk: the finding itself is reported anyway.
    with contextlib.suppress(OSError), _locked(root):
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
    """Whether the checkpoint was intact when it was last read; None if it was never read in its
    present state.
    """
    entry = _entry_of(path.parent, path.name, manifest)
    if entry is None or not isinstance(entry.get("intact"), bool):
        return None
    stamp = stamp_of(path, manifest)
    if entry.get("looks") != (stamp.digest if stamp else None):
        return None
    return bool(entry["intact"])


def _entry_of(root: Path, name: str, manifest: Manifest | None) -> dict[str, object] | None:
    """The record about a checkpoint with this manifest."""
    entry = _entries(root).get(name)
    checksum = manifest.checksum if manifest else None
    return entry if isinstance(entry, dict) and entry.get("checksum") == checksum else None


def _entries(root: Path) -> dict[str, object]:
    value = read_object(root / VERIFIED)
    entries = value.get("verified") if value.get("schema") == 1 else None
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
class _SeenCheckpoint:
    """A checkpoint as this process last saw it: its stamp, and whether it was read through or only
    written.
    """

    stamp: Stamp | None
    was_read: bool


class KnownStates:
    """The states of checkpoints that this process knows.

    A checkpoint that has changed since is unknown again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _SeenCheckpoint] = {}

    def note_written(self, path: Path, manifest: Manifest) -> None:
        """Notes that it was written completely just now."""
        self._seen[path.name] = _SeenCheckpoint(stamp_of(path, manifest), was_read=False)

    def note_read(self, path: Path, manifest: Manifest) -> None:
        """Notes that it was read through just now, and is intact."""
        self._seen[path.name] = _SeenCheckpoint(stamp_of(path, manifest), was_read=True)

    def forget(self, path: Path) -> None:
        """Notes that it is deleted or damaged."""
        self._seen.pop(path.name, None)

    def of(self, path: Path, *, step: int, key: bytes) -> Candidate:
        """Facts of a checkpoint; `intact` is None if it must be read first."""
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


# ---- for people


class CheckpointRow(TypedDict):
    """A checkpoint as a JSON row.

    Attributes:
        writers: hosts whose ranks wrote files.
        read_again: whether it was, since it was written.
        best, for_ever: in a list: of the best evaluation; no rule deletes it.
    """

    step: int
    path: str
    bytes: int | None
    created: str | None
    verified_at: str | None
    intact: bool
    holder: str | None
    foreign: bool
    writers: list[str]
    read_again: bool
    best: NotRequired[bool]
    for_ever: NotRequired[bool]


def row_of(path: Path, *, key: bytes) -> CheckpointRow:
    """A checkpoint as a JSON row."""
    manifest, findings = inspect(path, key=key, contents=False)
    verified = last_verified(path.parent, path.name, manifest)
    complete = not any(finding.is_fatal for finding in findings)
    return {
        "step": int(path.name.removeprefix("step-")),
        "path": str(path),
        "bytes": manifest.total_bytes + (path / MANIFEST).stat().st_size if manifest else None,
        "created": manifest.created if manifest else None,
        "verified_at": verified.at if verified else None,
        "intact": complete and (verified is None or verified.intact),
        "holder": manifest.holder if manifest else None,
        "foreign": any(finding.kind == "foreign" for finding in findings),
        "writers": _writers(manifest),
        "read_again": verified.read_again if verified else False,
    }


def _writers(manifest: Manifest | None) -> list[str]:
    """The hosts that wrote its files. All files are on the holder's disk."""
    return sorted({entry.host or manifest.holder for entry in manifest.files.values()}) if manifest else []
