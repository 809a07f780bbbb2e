"""A run's checkpoints on disk: published atomically, verified before they are read, pruned by the
retention policy.

step-00000100/               published: complete when it was renamed to this name
step-00000200.tmp-NONCE/     being written; locked by its writer, so that leftovers of a dead
                             writer can be recognized and removed
step-00000100.aside-NONCE/   damaged, or foreign, when the same step was saved again
.trash-00000100-NONCE/       being deleted
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from unisono.base.errors import IntegrityError, Problem
from unisono.base.files import fsync_dir, read_bytes
from unisono.trainer.checkpoint.manifest import MANIFEST, FileEntry, Manifest, is_file_name
from unisono.trainer.checkpoint.retention import Candidate, KnownStates, Rules, decide
from unisono.trainer.checkpoint.verify import Damage, digest_file, inspect
from unisono.trainer.checkpoint.writer import StorageFailed, write_failure

_PUBLISHED = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+|\.trash-\d{8,}-[0-9a-f]+")
_ASIDE = re.compile(r"step-(\d{8,})\.aside-[0-9a-f]+")

OnDamage = Callable[[Path, Damage], None]
Paths = list[Path]  # `list` is a method of the class below
Findings = list[Damage]


@dataclass(frozen=True, slots=True)
class IntactCheckpoint:
    """A published checkpoint that was read through and found intact.

    Attributes:
        is_foreign: it has no valid mac of this user, but is trusted.
    """

    path: Path
    manifest: Manifest
    is_foreign: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step


class CheckpointStore:
    """The checkpoints of one run.

    There is one writer at a time (the run's lock ensures it) and any number of readers.
    """

    def __init__(self, root: Path, *, key: bytes) -> None:
        self.root = root
        self._key = key
        self._known = KnownStates()
        self._partial: set[Path] = set()
        """Directories of failed saves that were not removed completely: another rank was still
        writing there.
        """

    def path(self, step: int) -> Path:
        """The path of a step's checkpoint, whether it exists or not."""
        return self.root / f"step-{step:08d}"

    def list(self) -> Paths:
        """All published checkpoints, oldest first, intact or not."""
        try:
            names = [entry.name for entry in os.scandir(self.root) if _PUBLISHED.fullmatch(entry.name)]
        except FileNotFoundError:
            return []
        return [self.root / name for name in sorted(names, key=step_of)]

    def save(
        self,
        step: int,
        write: Callable[[Path], Mapping[str, FileEntry] | None],
        *,
        run_id: str,
        config_digest: str,
        world_size: int,
        threads: int,
        holder: str,
        temporary: str | None = None,
    ) -> Path:
        """Publishes a directory that `write` fills; returns its path.

        An intact checkpoint of this step and run is never overwritten. The digests that `write`
        returns are used as they are; those files are not read again.

        Raises:
            StorageFull: if there is not enough space; existing checkpoints are untouched.
            StorageFailed: if the storage fails in a different way.
        """
        try:
            is_saved = self.is_saved(step, run_id)
        except OSError as error:  # a stale file handle, or an unreachable server
            raise _not_accessible(error, self.path(step)) from error
        if not is_saved:
            known: dict[str, FileEntry] = {}
            with self.writing(
                step,
                run_id=run_id,
                config_digest=config_digest,
                world_size=world_size,
                threads=threads,
                holder=holder,
                temporary=temporary,
                known=known,
            ) as directory:
                known.update(write(directory) or {})
        return self.path(step)

    @contextlib.contextmanager
    def writing(
        self,
        step: int,
        *,
        run_id: str,
        config_digest: str,
        world_size: int,
        threads: int,
        holder: str,
        temporary: str | None = None,
        known: Mapping[str, FileEntry] | None = None,
    ) -> Iterator[Path]:
        """Yields an empty directory; it is then digested, synced, signed and published, or removed
        on an error.

        Args:
            threads: of each rank.
            holder: the host whose output_dir has all files.
            temporary: the directory's name until then, if other processes write into it, too; see
                `temporary_name`.
            known: files that are already synced, and their digests; read at the end.

        Raises:
            StorageFull: if there is not enough space; existing checkpoints are untouched.
            StorageFailed: if the storage fails in a different way.
        """
        target = self.path(step)
        directory = self.root / (temporary or temporary_name(step, secrets.token_hex(4)))
        lock: int | None = None
        try:
            # Not its parents: if the run's directory was removed, the front restores it together
            # with the plan.
            self.root.mkdir(mode=0o700, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=temporary is not None)
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: the run's lock has to suffice
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield directory
            manifest = Manifest(
                run_id=run_id,
                step=step,
                created=_now(),
                config_digest=config_digest,
                world_size=world_size,
                threads=threads,
                holder=holder,
                files=_digest_and_sync(directory, known or {}),
            )
            self._publish(directory, target, manifest.signed(self._key))
        except BaseException as error:  # Ctrl-C leaves no partial directory either; raised again
            failure = write_failure(error, target, directory)
            self._partial.add(directory)
            self._remove_partial()
            if failure is not None:
                raise failure from error
            raise
        finally:
            if lock is not None:
                os.close(lock)

    def adopt(self, directory: Path, manifest: Manifest) -> Path:
        """Publishes files that were copied here, under their own manifest and its signature.

        Args:
            directory: beside the checkpoints; its files are already synced and compared with the
                manifest.
        """
        self._publish(directory, self.path(manifest.step), manifest)
        return self.path(manifest.step)

    def verify(self, path: Path, *, run_id: str | None = None) -> Findings:
        """Reads a published checkpoint through; returns all findings, [] for none.

        Args:
            run_id: the run that it must belong to; None: any.
        """
        manifest, findings = inspect(path, key=self._key, run_id=run_id)
        if manifest is not None and not any(finding.is_fatal for finding in findings):
            self._known.note_read(path, manifest)
        else:
            self._known.forget(path)
        return findings

    def newest_intact(
        self, on_damage: OnDamage | None = None, *, run_id: str | None = None, trust: bool = False
    ) -> IntactCheckpoint | None:
        """The newest intact checkpoint, after reading it through; None if there is none.

        Args:
            on_damage: receives every finding in a newer one, with its path.
            run_id: the run that it must belong to; None: any.
            trust: accept one that is not signed by this user.
        """
        for path in reversed(self.list()):
            checkpoint = self._check(path, on_damage, run_id=run_id, trust=trust)
            if checkpoint is not None:
                return checkpoint
        return None

    def require(self, path: Path, *, run_id: str | None = None, trust: bool = False) -> IntactCheckpoint:
        """The checkpoint at `path`, after reading it through.

        Raises:
            IntegrityError: with all findings.
        """
        findings: Findings = []
        checkpoint = self._check(path, lambda _, damage: findings.append(damage), run_id=run_id, trust=trust)
        if checkpoint is not None:
            return checkpoint
        if not path.exists():
            raise IntegrityError.of(f"there is no checkpoint {path.name}", where=str(path))
        raise IntegrityError(
            *(
                Problem(f"checkpoint {path.name} cannot be read: {damage.what}", str(path / damage.file))
                for damage in findings
                if damage.kind != "extra"
            )
        )

    def prune(self, keep: int, protect: Collection[int] = (), *, every: int | None = None) -> Paths:
        """Deletes old checkpoints; returns the deleted ones, oldest first.

        Foreign ones and the last one that was read back stay.

        Args:
            keep: how many of the newest intact ones stay.
            protect: steps that stay, e.g. the best one.
            every: checkpoints at its multiples stay forever, in steps.
        """
        self._remove_partial()
        candidates = {step: Candidate(step) for step in map(step_of, (path.name for path in self.list()))}
        rules = Rules(keep, every, protect)
        while (decision := decide(candidates.values(), rules)).is_open:
            if decision.ask is not None:
                candidates[decision.ask] = self._look_at(self.path(decision.ask))
            if decision.recall is not None:
                candidates[decision.recall] = self._recall(self.path(decision.recall))
        deleted = [path for path in map(self.path, decision.go) if not self._is_foreign(path)]
        for path in deleted:
            self._delete(path)
        if decision.oldest_kept is not None:
            self._delete_aside(before=decision.oldest_kept)
        return deleted

    def _remove_partial(self) -> None:
        for directory in self._partial:
            shutil.rmtree(directory, ignore_errors=True)
        self._partial = {directory for directory in self._partial if os.path.lexists(directory)}

    def sweep(self) -> Paths:
        """Removes leftovers of dead writers: partially written and partially deleted directories.

        Returns what it removed.
        """
        try:
            leftovers = [
                self.root / entry.name for entry in os.scandir(self.root) if _LEFTOVER.fullmatch(entry.name)
            ]
        except FileNotFoundError:
            return []
        dead = [path for path in leftovers if _writer_is_dead(path)]
        for path in dead:
            shutil.rmtree(path, ignore_errors=True)
        return dead

    def is_saved(self, step: int, run_id: str) -> bool:
        """Whether the step is already saved: intact, of this run and signed by this user."""
        path = self.path(step)
        return path.exists() and not any(
            finding.kind != "extra" for finding in inspect(path, key=self._key, run_id=run_id)[1]
        )

    def _check(
        self, path: Path, on_damage: OnDamage | None, *, run_id: str | None, trust: bool
    ) -> IntactCheckpoint | None:
        manifest, findings = inspect(path, key=self._key, run_id=run_id)
        foreign = any(finding.kind == "foreign" for finding in findings)
        fatal = any(finding.is_fatal for finding in findings)
        if not path.exists():  # pruned by its run in the meantime
            return None
        for finding in findings:
            if on_damage is not None:
                on_damage(path, finding)
        if manifest is None or fatal or (foreign and not trust):
            return None
        self._known.note_read(path, manifest)
        return IntactCheckpoint(path, manifest, is_foreign=foreign)

    def _publish(self, temporary: Path, target: Path, manifest: Manifest) -> None:
        with open(temporary / MANIFEST, "xb") as file:  # noqa: PTH123 - exclusive
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        fsync_dir(temporary)
        if target.exists():
            if self.is_saved(manifest.step, manifest.run_id):
                shutil.rmtree(temporary)
                return
            target.rename(target.with_name(f"{target.name}.aside-{secrets.token_hex(4)}"))
        temporary.rename(target)
        fsync_dir(self.root)
        self._known.note_written(target, manifest)

    def _recall(self, path: Path) -> Candidate:
        """Facts of a checkpoint without reading it."""
        return self._known.of(path, step=step_of(path.name), key=self._key)

    def _look_at(self, path: Path) -> Candidate:
        """The state of a checkpoint.

        It is read through unless it is unchanged since this process, or one that recorded it, read
        it.
        """
        candidate = self._recall(path)
        if candidate.intact is not None or candidate.foreign:
            return candidate
        intact = not any(finding.is_fatal for finding in self.verify(path))
        return Candidate(candidate.step, intact=intact, read_back=intact)

    def _is_foreign(self, path: Path) -> bool:
        try:
            manifest = Manifest.from_bytes(read_bytes(path / MANIFEST))
        except (OSError, ValueError):
            return False
        return not manifest.is_signed_by(self._key)

    def _delete(self, path: Path) -> None:
        """Renames before deleting, so that a crash in between leaves no published directory with
        missing files.
        """
        trash = self.root / f".trash-{step_of(path.name):08d}-{secrets.token_hex(4)}"
        path.rename(trash)
        fsync_dir(self.root)
        shutil.rmtree(trash, ignore_errors=True)  # the next start sweeps the rest
        self._known.forget(path)

    def _delete_aside(self, *, before: int) -> None:
        for entry in os.scandir(self.root):
            match = _ASIDE.fullmatch(entry.name)
            if match and int(match[1]) < before:
                shutil.rmtree(entry.path, ignore_errors=True)


def step_of(name: str) -> int:
    """The step of a published checkpoint, from its directory's name."""
    match = _PUBLISHED.match(name)
    assert match is not None
    return int(match[1])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _not_accessible(error: OSError, path: Path) -> StorageFailed:
    problem = Problem(
        f"checkpoint {path.name} cannot be written: {error.strerror or error}",
        str(error.filename or path),
        "the storage does not report whether it exists",
        "fix it; older checkpoints are unchanged",
    )
    return StorageFailed(problem, path=path)


def temporary_name(step: int, nonce: str) -> str:
    """The name of a checkpoint's directory while it is written.

    Args:
        nonce: unique hexadecimal digits.
    """
    return f"step-{step:08d}.tmp-{nonce}"


def _digest_and_sync(directory: Path, known: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    entries = dict(known)
    for name, entry in known.items():
        size = (directory / name).stat().st_size
        if size != entry.bytes:
            raise OSError(
                errno.EIO, f"{name} has {size} bytes, and {entry.bytes} were written", str(directory / name)
            )
    for path in sorted(directory.iterdir()):
        assert is_file_name(path.name), f"{path.name!r} cannot be a file of a checkpoint"
        assert path.is_file(), f"{path} is not a regular file"
        if path.name in known:
            continue
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            size, digest = digest_file(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        entries[path.name] = FileEntry(bytes=size, xxh3_128=digest)
    return entries


def _writer_is_dead(path: Path) -> bool:
    """Whether the lock on the directory is free.

    Without working locks the answer is yes: the run's lock already excludes other writers.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
    return True
