"""Tasks on checkpoints: `storage`, copies of them in a storage supported by fsspec; and
`rehearsed`, which reads a run's first one back from disk, as a later start would.

`storage`:

    URL/RUN_ID/plan.json, config.yaml, environment.json, data.json, metrics.jsonl
        as of the last upload
    URL/RUN_ID/step-00000100/*
        manifest.json last: without it a copy does not count

Message `progress`: bytes, of. The storage's package takes credentials from the environment.

`rehearsed`: message `room`: the measured disk space.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

import xxhash

from unisono.base.errors import (
    DataError,
    IntegrityError,
    Problem,
    UnfitError,
    UnisonoError,
    storage_reason,
    storage_remedy,
)
from unisono.base.events import Reporter
from unisono.base.files import open_plain, read_bytes
from unisono.base.messages import RoomMessage, message_of
from unisono.base.text import one_line, redact
from unisono.base.user_key import user_key
from unisono.guard.facts import read_environment
from unisono.guard.rundir.records import best_evaluated
from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest, ManifestError
from unisono.trainer.checkpoint.retention import Rules, measure_disk_space, record_verified
from unisono.trainer.checkpoint.verify import read_through
from unisono.trainer.data.sources import open_storage
from unisono.trainer.plan.task_requests import (
    CopyRead,
    FetchCopy,
    Fetched,
    FindCopy,
    NewestCopy,
    ReadCopy,
    RehearsedRequest,
    StorageRequest,
    Timed,
    TryStorage,
    UploadCheckpoint,
    Uploaded,
)

if TYPE_CHECKING:
    from unisono.trainer.checkpoint.state import CheckpointReader

BESIDE = (
    "environment.json",
    "config.yaml",
    "data.json",
    "metrics.jsonl",
    "reference.safetensors",
    "plan.json",
)
"""Files of a run that are copied with its checkpoints; the plan last, as a directory with it counts
as a run.
"""
TRIED = "tried"
"""The object that is written to test the storage; if the test is killed, the next one removes
it.
"""
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_STEP = re.compile(r"step-(\d{8,})")
_IN_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"})
"""Storages without directories: creating a directory would create the bucket, even if its name is
mistyped.
"""
_DISTINGUISHES_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs"})
"""Storages whose packages distinguish an empty bucket from a missing one."""
_CHUNK_BYTES = 8 << 20
_PROGRESS_S = 1.0


def run_storage(request: StorageRequest, report: Reporter) -> Mapping[str, object]:
    """Carries out one request.

    Raises:
        UnfitError: if the storage cannot be reached, read or written, or its package is missing.
        IntegrityError: if a fetched or uploaded file does not match its manifest.
        DataError: if the URL has an unknown scheme.
    """
    storage = None
    try:
        storage = Storage(request.url, report)
        return _carry_out(request, storage)
    except DataError as error:
        if isinstance(
            error.__cause__, ImportError
        ):  # the URL is valid, but a package is missing on this machine
            raise UnfitError(*error.problems) from error
        raise
    except (UnisonoError, AssertionError):
        raise
    except Exception as error:  # each storage package has its own errors; the message is passed on
        text = one_line(redact(str(error)), limit=300)
        is_local = isinstance(error, OSError) and str(error.filename or "").startswith("/")
        raise UnfitError.of(
            f"{request.url} cannot be {storage.operation if storage else 'read'}",
            where="checkpoint.storage",
            why=f"{type(error).__name__}: {text}" + (f"; {storage_reason(error)}" if is_local else ""),
            fix=(
                storage_remedy(error)
                if is_local
                else "check the URL, the free space there, the network and the credentials in the environment"
            ),
        ) from error


def _carry_out(request: StorageRequest, storage: "Storage") -> Mapping[str, object]:
    match request:
        case FindCopy():
            return storage.newest(request.run_id, before=request.before)
        case TryStorage():
            return storage.try_out(request.run_id)
        case ReadCopy():
            return storage.read_back(request.run_id, request.step, checksum=request.checksum)
        case UploadCheckpoint():
            rules, best = Rules(request.keep, request.keep_every), request.best
            return storage.upload(request.run_id, request.path, rules=rules, best=best, beside=request.beside)
        case FetchCopy():
            return storage.fetch(request.run_id, request.step, request.to, beside=request.beside)


class Storage:
    """The copies below one URL.

    Attributes:
        operation: the present operation, for error messages: read, written, deleted.
    """

    def __init__(self, url: str, report: Reporter) -> None:
        self._url = url
        self._fs, self._root = open_storage(url, "checkpoint.storage")
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._report = report
        self.operation = "read"
        self._of = self._done = 0
        self._reported_at = 0.0

    def newest(self, run_id: str | None, *, before: int | None) -> NewestCopy:
        """The newest complete checkpoint of the newest run, or of one run, before a step."""
        runs = (
            [run_id] if run_id else sorted(filter(_RUN_ID.fullmatch, self._names(self._root)), reverse=True)
        )
        for run in runs:
            for step in sorted(self._steps(run), reverse=True):
                manifest = self._manifest(run, step) if before is None or step < before else None
                if manifest is not None and self._is_complete(run, manifest):
                    return {"run_id": run, "step": step, "manifest": manifest.to_bytes().decode()}
        return {"run_id": None, "step": None, "manifest": None}

    def try_out(self, run_id: str) -> Timed:
        """Tests all operations of an upload: lists a run's directory, writes a small object there,
        reads it back and removes it.

        Raises:
            UnfitError: if the object differs from what was written.
        """
        began = time.monotonic()
        folder = f"{self._root}/{run_id}"
        place, words = f"{folder}/{TRIED}", secrets.token_hex(16).encode()
        self._names(folder)
        self.operation = "written"
        made = self._make_directories(folder)
        self._write(place, words)
        self.operation = "read"
        self._fs.invalidate_cache()
        content = self._fs.cat_file(place)
        self.operation = "deleted"
        self._fs.rm_file(place)
        for directory in made:
            with contextlib.suppress(OSError):  # another program has written to it meanwhile
                self._fs.rmdir(directory)
        if content != words:
            raise UnfitError.of(
                f"{self._url} returns different bytes than were written to it",
                where="checkpoint.storage",
                why=f"{len(words)} bytes were written to {place}, and {len(content)} different bytes were read",
                fix="use a different storage",
            )
        return {"seconds": time.monotonic() - began}

    def upload(self, run_id: str, path: Path, *, rules: Rules, best: str | None, beside: Path) -> Uploaded:
        """Copies a checkpoint, its manifest last; then deletes old copies."""
        began = time.monotonic()
        self.operation = "written"
        with contextlib.ExitStack() as stack:
            # All files are opened first: the checkpoint may be pruned here during the copy, and
            # open files stay readable.
            try:
                manifest = Manifest.from_bytes(read_bytes(path / MANIFEST))
                files = {name: stack.enter_context(open_plain(path / name)) for name in manifest.files}
            except FileNotFoundError:
                if (path / MANIFEST).exists():  # a file of it is missing
                    raise
                seconds = time.monotonic() - began
                return {"bytes": 0, "seconds": seconds, "checksum": "", "deleted": [], "pruned": True}
            there = self._manifest(run_id, manifest.step)
            new = there is None or there.checksum != manifest.checksum or not self._is_complete(run_id, there)
            if new:
                self._copy(run_id, path, manifest, files)
        for name in BESIDE:
            if (beside / name).is_file():
                self._write(f"{self._root}/{run_id}/{name}", (beside / name).read_bytes())
        if new:  # the other files of the run must exist before the copy counts
            self._write(f"{self._place(run_id, manifest.step)}/{MANIFEST}", manifest.to_bytes())
        if best:
            rules = replace(rules, protect=self._best(run_id, beside / "metrics.jsonl", best))
        deleted = self._prune(run_id, rules=rules, local=path.parent)
        size = manifest.total_bytes if new else 0
        seconds = time.monotonic() - began
        return {
            "bytes": size,
            "seconds": seconds,
            "checksum": manifest.checksum,
            "deleted": deleted,
            "pruned": False,
        }

    def fetch(self, run_id: str, step: int, to: Path, *, beside: Path) -> Fetched:
        """Fetches a checkpoint's files, except its manifest, to one directory, and the run's other
        files to another.

        Raises:
            IntegrityError: if a file does not match the manifest.
        """
        began = time.monotonic()
        manifest = self._manifest(run_id, step)
        if manifest is None:
            raise IntegrityError.of(f"step {step} has no manifest any more", where=self._place(run_id, step))
        self._of = manifest.total_bytes
        for name, entry in manifest.files.items():
            place = f"{self._place(run_id, step)}/{name}"
            with self._fs.open(place, "rb") as source, (to / name).open("xb") as target:
                copied = self._pour(source, target)
                target.flush()
                os.fsync(target.fileno())
            if copied != (entry.bytes, entry.xxh3_128):
                raise _damaged(place, copied, (entry.bytes, entry.xxh3_128))
        for name in BESIDE:
            with contextlib.suppress(FileNotFoundError):  # a run of one rank has fewer of them
                (beside / name).write_bytes(self._fs.cat_file(f"{self._root}/{run_id}/{name}"))
        return {"bytes": manifest.total_bytes, "seconds": time.monotonic() - began}

    def read_back(self, run_id: str, step: int, *, checksum: str) -> CopyRead:
        """Reads a copy back, as a resume would.

        A copy that differs from what was uploaded loses its manifest: the next start uploads it
        again.

        Raises:
            IntegrityError: if the manifest differs from the uploaded one, or a file does not match
                the manifest.
        """
        began = time.monotonic()
        place = self._place(run_id, step)
        self._fs.invalidate_cache()
        manifest = self._manifest(run_id, step)
        if manifest is None or manifest.checksum != checksum:
            raise IntegrityError.of(
                f"{place}/{MANIFEST} is not what was uploaded",
                where=place,
                why="without its manifest a copy does not count",
            )
        self._of = manifest.total_bytes
        with Path(os.devnull).open("wb") as nowhere:
            for name, entry in manifest.files.items():
                stored = self._read_from_storage(f"{place}/{name}", nowhere)
                if stored != (entry.bytes, entry.xxh3_128):
                    self._remove_marker(place)
                    raise _damaged(f"{place}/{name}", stored, (entry.bytes, entry.xxh3_128))
        steps = [step for step in sorted(self._steps(run_id)) if self._manifest(run_id, step) is not None]
        seconds = time.monotonic() - began
        return {
            "bytes": manifest.total_bytes,
            "seconds": seconds,
            "steps": steps,
            "free_bytes": self._free_bytes(),
        }

    def _read_from_storage(self, place: str, target: BinaryIO) -> tuple[int, str]:
        """Size and digest of a file in the storage; 0 and "none" if it is missing."""
        if self._is_local:  # a file that was just written is in the page cache, and may not be on disk
            with contextlib.suppress(FileNotFoundError):
                forget_cached(Path(place), flush=True)
        try:
            with self._fs.open(place, "rb") as source:
                return self._pour(source, target)
        except FileNotFoundError:
            return 0, "none"

    @property
    def _is_local(self) -> bool:
        return "file" in self._protocols

    def _free_bytes(self) -> int | None:
        """Free bytes, if the storage is a directory of this machine whose file system reports
        them.
        """
        if not self._is_local:
            return None
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize if disk.f_blocks else None

    def _copy(self, run_id: str, path: Path, manifest: Manifest, files: Mapping[str, BinaryIO]) -> None:
        place = self._place(run_id, manifest.step)
        self._remove_marker(place)
        self._make_directories(place)
        self._of = manifest.total_bytes
        for name, source in files.items():
            entry = manifest.files[name]
            with self._fs.open(f"{place}/{name}", "wb") as target:
                copied = self._pour(source, target)
            if copied != (entry.bytes, entry.xxh3_128):
                raise _damaged(str(path / name), copied, (entry.bytes, entry.xxh3_128))

    def _pour(self, source: IO[bytes], target: IO[bytes]) -> tuple[int, str]:
        """Copies a stream; gives its size and digest."""
        digest, size = xxhash.xxh3_128(), 0
        while data := source.read(_CHUNK_BYTES):
            target.write(data)
            digest.update(data)
            size += len(data)
            self._done += len(data)
            self._progress()
        return size, digest.hexdigest()

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_S:
            self._reported_at = now
            self._report.send({"kind": "progress", "bytes": self._done, "of": self._of})

    def _prune(self, run_id: str, *, rules: Rules, local: Path) -> list[int]:
        """Deletes copies that the run itself has pruned, except the newest and the protected
        ones.
        """
        steps = sorted(self._steps(run_id))
        local_steps = {int(match[1]) for path in local.iterdir() if (match := _STEP.fullmatch(path.name))}
        old = steps[: max(0, len(steps) - rules.keep)]
        removed = [step for step in old if step not in local_steps and not rules.protects(step)]
        for step in removed:
            place = self._place(run_id, step)
            self._remove_marker(place)
            self._fs.rm(place, recursive=True)
        return removed

    def _best(self, run_id: str, metrics: Path, metric: str) -> set[int]:
        """The best step with a complete copy.

        A run that was resumed on a different machine has that checkpoint only in the storage.
        """
        steps = set(self._steps(run_id))
        while (best := best_evaluated(metrics, steps, metric=metric)) is not None:
            if self._manifest(run_id, best[0]) is not None:
                return {best[0]}
            steps.discard(best[0])
        return set()

    def _make_directories(self, place: str) -> list[str]:
        """Creates the directories of a place, if the storage has directories; gives those of run
        and root that were missing, deepest first.
        """
        if self._protocols & _IN_BUCKETS:
            return []
        missing = [folder for folder in (place, place.rpartition("/")[0]) if not self._fs.exists(folder)]
        self._fs.makedirs(place, exist_ok=True)
        return missing

    def _remove_marker(self, place: str) -> None:
        """Removes the manifest first, so that an interrupted operation leaves no copy that seems
        complete.
        """
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{place}/{MANIFEST}")

    def _place(self, run_id: str, step: int) -> str:
        return f"{self._root}/{run_id}/step-{step:08d}"

    def _names(self, place: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(place, detail=False)]
        except FileNotFoundError:
            self._need_bucket()
            return []

    def _need_bucket(self) -> None:
        """Refuses a missing bucket, which is not an empty storage: the run would start from
        scratch, or write to the wrong place.
        """
        bucket = self._root.partition("/")[0]
        if not self._protocols & _DISTINGUISHES_BUCKETS:
            return
        try:
            self._fs.ls(bucket, detail=False)
        except PermissionError:  # only deeper paths may be readable
            return
        except FileNotFoundError:
            raise UnfitError.of(
                f"there is no bucket {bucket}",
                where="checkpoint.storage",
                why=f"{self._url} would be in it",
                fix="fix the URL, or create the bucket",
            ) from None

    def _steps(self, run_id: str) -> Iterator[int]:
        for name in self._names(f"{self._root}/{run_id}"):
            if match := _STEP.fullmatch(name):
                yield int(match[1])

    def _manifest(self, run_id: str, step: int) -> Manifest | None:
        """The manifest of a copy; None if there is none, or it is invalid."""
        try:
            data = self._fs.cat_file(f"{self._place(run_id, step)}/{MANIFEST}")
            manifest = Manifest.from_bytes(data)
        except (FileNotFoundError, ManifestError):
            return None
        return manifest if (manifest.run_id, manifest.step) == (run_id, step) else None

    def _is_complete(self, run_id: str, manifest: Manifest) -> bool:
        """Whether all files exist with the right sizes."""
        place = self._place(run_id, manifest.step)
        try:
            return all(
                self._fs.size(f"{place}/{name}") == entry.bytes for name, entry in manifest.files.items()
            )
        except FileNotFoundError:
            return False

    def _write(self, place: str, data: bytes) -> None:
        self._fs.pipe_file(place, data)


def _damaged(place: str, actual: tuple[int, str], wanted: tuple[int, str]) -> IntegrityError:
    return IntegrityError.of(
        f"{place} does not match its manifest",
        where=place,
        why=(
            f"it has {actual[0]} bytes with digest {actual[1]}; the manifest has {wanted[0]} bytes with digest"
            f" {wanted[1]}"
        ),
    )


def run_rehearsed(request: RehearsedRequest, report: Reporter) -> Mapping[str, object]:
    """Reports the disk space at once, then reads everything.

    Raises:
        IntegrityError: with everything that is wrong with the checkpoint.
    """
    path, key = request.path, user_key(read_environment().settings_dir)
    report.send(message_of(RoomMessage, asdict(measure_disk_space(path.parent, key=key))))
    began = time.monotonic()
    for file in path.iterdir():
        forget_cached(file)
    reading = read_through(path, key=key, run_id=request.run_id)
    if reading.manifest is None or not reading.intact or reading.is_foreign:
        findings = [finding for finding in reading.findings if finding.kind != "extra"]
        raise IntegrityError(*(Problem(str(finding), str(path / finding.file)) for finding in findings))
    tensors = _read_tensors(path)
    record_verified(path.parent, [reading])
    return {"seconds": time.monotonic() - began, "bytes": reading.manifest.total_bytes, "tensors": tensors}


def _read_tensors(path: Path) -> int:
    """Reads every tensor; gives their number.

    Raises:
        IntegrityError: if they do not match state.json.
    """
    from unisono.trainer.checkpoint.state import (
        CheckpointReader,  # imports torch, which the digests do not need
    )

    reader = CheckpointReader(path)
    problems = _misfits(reader)
    if problems:
        raise IntegrityError(*(Problem(text, str(path)) for text in problems))
    count = 0
    for group, outlines in reader.groups.items():
        for name, outline in outlines.items():
            tensor = reader.tensor(group, name)
            assert (tuple(tensor.shape), tensor.dtype) == (outline.shape, outline.dtype)
            count += 1
    return count


def _misfits(reader: "CheckpointReader") -> list[str]:
    """The differences between the tensors and the parameters in the optimizer groups of
    state.json.
    """
    optimizers = reader.values["optimizer"]
    named = {name for state in optimizers.values() for group in state["groups"] for name in group["names"]}
    misfits = [
        f"{name} is in state.json, but has no tensor"
        for name in sorted(named - set(reader.groups["trainable"]))
    ]
    misfits += [
        f"{name} is a tensor, but not in state.json"
        for name in sorted(set(reader.groups["trainable"]) - named)
    ]
    for optimizer in optimizers:
        for label, outline in reader.groups[f"optimizer-{optimizer}"].items():
            parameter = reader.groups["trainable"].get(label.rpartition("::")[0])
            if parameter is None or outline.shape not in ((), parameter.shape):
                misfits.append(f"{label} does not match its parameter")
    return misfits[:8]


def forget_cached(file: Path, *, flush: bool = False) -> None:
    """Drops a file from the page cache, so that later reads come from the disk.

    Args:
        file: the file.
        flush: whether to sync the file first; otherwise the kernel keeps pages that are not on disk
            yet.

    Raises:
        OSError: if it cannot be opened or synced.
    """
    fd = os.open(file, os.O_RDONLY)
    try:
        if flush:
            os.fsync(fd)
        with contextlib.suppress(OSError):  # the file system has no page cache, or does not support it
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
