"""Reads a checkpoint or a final directory through and lists what is damaged, down to the tensor.

Torch-free.

The manifest of a final directory (adapter/ or model/ of a run, or an export) has every file with
its digest and those of its tensors. It is stored in the directory itself, so that a copy of the
directory can be verified, too. transformers, peft and vLLM ignore it. Unlike a checkpoint's
manifest it has no mac: nothing in such a directory is executed, and it is made to be shared.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import field_validator

from unisono.base.errors import IntegrityError, Problem
from unisono.base.files import open_plain, parse_json, read_bytes
from unisono.guard.rundir import MODEL_MANIFEST
from unisono.trainer.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    ManifestError,
    Vouched,
    is_file_name,
)
from unisono.trainer.checkpoint.writer import ITEM_BYTES

HEADER = "the header"
_LENGTH_BYTES = 8
_HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own
_CHUNK_BYTES = 4 << 20
_TENSORS_SHOWN = 3
_UNREAD = "0" * 32  # in place of the digest of a file that is not read

Pace = Callable[[int], None]
"""Called with the number of bytes just read. It may sleep, and may raise to stop the reading."""

Kind = Literal["manifest", "missing", "size", "content", "step", "run", "foreign", "extra", "edited"]
_ADAPTER_SETTINGS = "adapter_config.json"
_BASE = "base_model_name_or_path"
# Files that users edit in a finished model; a change in any other file changes the weights or the
# tokenization.
_FREE_TO_EDIT = ("README.md", "generation_config.json")

Read = Callable[[Path], tuple[int, str]]
"""Returns the size of a file and the XXH3-128 of its bytes; raises OSError."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One finding in a checkpoint.

    Attributes:
        what: the problem, in plain words.
        tensors: the damaged ones of the file, if known.
    """

    file: str
    what: str
    kind: Kind
    tensors: tuple[str, ...] = ()

    @property
    def is_fatal(self) -> bool:
        """Whether the checkpoint must not be read.

        A foreign one may be if it is trusted; an extra file is never read.
        """
        return self.kind not in ("foreign", "extra", "edited")

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class Stamp:
    """The state of a checkpoint when it was read through: its manifest, and size, time and inode of
    every file.
    """

    manifest: Manifest
    files: tuple[tuple[int, int, int], ...]

    @property
    def digest(self) -> str:
        """A short digest of it, for the record."""
        return xxhash.xxh3_128_hexdigest(repr(self.files).encode())


@dataclass(frozen=True)
class VerificationResult:
    """The result of reading a checkpoint through.

    Attributes:
        manifest: None if it cannot be read.
        findings: all damage, and notes.
        stamp: its state just before; None if a file is missing.
    """

    path: Path
    manifest: Manifest | None
    findings: list[Damage]
    stamp: Stamp | None

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged; a foreign checkpoint may be intact."""
        return not any(finding.is_fatal for finding in self.findings)

    @property
    def is_foreign(self) -> bool:
        """Whether it has no valid mac of this user."""
        return any(finding.kind == "foreign" for finding in self.findings)


def stamp_of(path: Path, manifest: Manifest) -> Stamp | None:
    """The present stamp; None if a file is missing."""
    try:
        stats = [(path / name).lstat() for name in (MANIFEST, *sorted(manifest.files))]
    except OSError:
        return None
    return Stamp(manifest, tuple((entry.st_size, entry.st_mtime_ns, entry.st_ino) for entry in stats))


def digest_file(fd: int, pace: Pace | None = None) -> tuple[int, str]:
    """The size of an open file in bytes, and the XXH3-128 digest of its content."""
    digest, size = xxhash.xxh3_128(), 0
    while chunk := os.read(fd, _CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        if pace is not None:
            pace(len(chunk))
    return size, digest.hexdigest()


def read_through(
    path: Path, *, key: bytes, run_id: str | None = None, pace: Pace | None = None
) -> VerificationResult:
    """Reads a published checkpoint through.

    Args:
        run_id: the run that it must belong to; None: any.
        pace: slows the reading down; None: full speed, and from the page cache where possible.
    """
    manifest = read_manifest(path)
    # Before reading, so that a change in the meantime is noticed afterwards.
    stamp = stamp_of(path, manifest) if manifest is not None else None
    return VerificationResult(path, *inspect(path, key=key, run_id=run_id, pace=pace), stamp)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it cannot be read."""
    try:
        return Manifest.from_bytes(read_bytes(path / MANIFEST))
    except (OSError, ManifestError):
        return None


def inspect(
    path: Path, *, key: bytes, run_id: str | None = None, contents: bool = True, pace: Pace | None = None
) -> tuple[Manifest | None, list[Damage]]:
    """The manifest, or None if it cannot be read, and all findings.

    Args:
        run_id: the run that it must belong to; None: any.
        contents: read the files through; False: check presence and sizes only.
    """
    try:
        manifest = Manifest.from_bytes(read_bytes(path / MANIFEST))
    except FileNotFoundError:
        return None, [Damage(MANIFEST, "it is missing", "missing")]
    except OSError as error:
        return None, [Damage(MANIFEST, f"it cannot be read: {error.strerror}", "manifest")]
    except ManifestError as error:
        return None, [Damage(MANIFEST, f"it is damaged: {error}", "manifest")]
    findings = _misplaced(path, manifest, run_id)
    for name, entry in manifest.files.items():
        finding = _inspect_file(path, name, entry, contents=contents, pace=pace)
        if finding is not None:
            findings.append(finding)
    findings += [
        Damage(name, "it is not in the manifest, and is ignored", "extra")
        for name in _names(path)
        if name != MANIFEST and name not in manifest.files
    ]
    if not manifest.is_signed_by(key):
        findings.append(
            Damage(MANIFEST, "it is not signed with this user's key: the checkpoint is foreign", "foreign")
        )
    return manifest, findings


def _names(path: Path) -> list[str]:
    """The names in the directory; none if the run pruned it in the meantime, and its files are
    reported missing anyway.
    """
    try:
        return sorted(entry.name for entry in os.scandir(path))
    except FileNotFoundError:
        return []


def _misplaced(path: Path, manifest: Manifest, run_id: str | None) -> list[Damage]:
    findings = []
    if path.name != f"step-{manifest.step:08d}":
        findings.append(Damage(MANIFEST, f"it is the manifest of step {manifest.step}", "step"))
    if run_id is not None and manifest.run_id != run_id:
        findings.append(
            Damage(MANIFEST, f"it belongs to a different run: {manifest.run_id}, not {run_id}", "run")
        )
    return findings


def _inspect_file(
    path: Path, name: str, entry: FileEntry, *, contents: bool, pace: Pace | None
) -> Damage | None:
    try:
        fd = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Damage(name, "it is missing", "missing")
    except OSError as error:
        link = error.errno == errno.ELOOP
        return Damage(name, "it is a link" if link else f"it cannot be read: {error.strerror}", "content")
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Damage(name, "it is not a regular file", "content")
        if status.st_size == entry.bytes:
            if not contents:
                return None
        elif not _has_size_elsewhere(path, name, status.st_size):
            # Its size alone says that it is damaged, and a digest would find it nowhere else: a
            # file of many gigabytes is not read for that.
            return explain_damage(path, name, entry, FileEntry(bytes=status.st_size, xxh3_128=_UNREAD))
        size, digest = digest_file(fd) if pace is None else _digest_from_disk(fd, pace)
    except OSError as error:
        return Damage(name, f"it cannot be read: {error.strerror}", "content")
    finally:
        os.close(fd)
    if (size, digest) == (entry.bytes, entry.xxh3_128):
        return None
    return _explain(path, name, entry, FileEntry(bytes=size, xxh3_128=digest))


def _has_size_elsewhere(path: Path, name: str, size: int) -> bool:
    """Whether such a file has this size in another checkpoint."""
    return any(other.files[name].bytes == size for other in _other_manifests(path) if name in other.files)


def _digest_from_disk(fd: int, pace: Pace) -> tuple[int, str]:
    """Like digest_file, but from the disk: pages of the file are dropped from the page cache before
    and after.
    """
    for_all = (0, 0, os.POSIX_FADV_DONTNEED)
    with contextlib.suppress(OSError):  # a file system without fadvise
        os.posix_fadvise(fd, *for_all)
    result = digest_file(fd, pace)
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, *for_all)
    return result


def _explain(path: Path, name: str, expected: FileEntry, actual: FileEntry) -> Damage:
    """Explains a wrong file: it belongs to a different step, or it is damaged."""
    for other in _other_manifests(path):
        if (entry_there := other.files.get(name)) is not None and entry_there.describes(actual):
            return Damage(name, f"it is the file of step {other.step}", "step")
    return explain_damage(path, name, expected, actual)


def explain_damage(path: Path, name: str, expected: FileEntry, actual: FileEntry) -> Damage:
    """How a file in the directory `path` differs from what was written, and in which tensors."""
    damaged = tuple(_tensors_of_damaged_file(path / name, expected))
    where = f" in {show_tensors(damaged)}" if damaged else ""
    if actual.bytes < expected.bytes:
        return Damage(
            name, f"it is truncated{where}: {actual.bytes} bytes of {expected.bytes}", "size", damaged
        )
    if actual.bytes > expected.bytes:
        return Damage(
            name, f"it is too long: {actual.bytes} bytes instead of {expected.bytes}", "size", damaged
        )
    if len(damaged) == len(expected.tensors) > 1:
        where = " in every tensor, as if it belonged to a different step or run"
    what = f"its content has changed{where}: digest {actual.xxh3_128}, not {expected.xxh3_128}"
    return Damage(name, what, "content", damaged)


def _tensors_of_damaged_file(path: Path, entry: FileEntry) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        return damaged_tensors(fd, entry)
    except OSError:
        return []  # it was readable a moment ago; it is reported as damaged in any case
    finally:
        os.close(fd)


def _other_manifests(path: Path) -> Iterator[Manifest]:
    """The readable manifests of the other checkpoints in the same directory."""
    for file in sorted(path.parent.glob("step-*/" + MANIFEST)):
        if file.parent != path:
            with contextlib.suppress(OSError, ManifestError):
                yield Manifest.from_bytes(read_bytes(file))


# ---- which tensors of a damaged file are damaged


@dataclass(frozen=True)
class _TensorSpan:
    """The position of a tensor's bytes in the file."""

    name: str
    begin: int
    end: int


def damaged_tensors(fd: int, entry: FileEntry) -> list[str]:
    """The tensors whose bytes differ from what was written, in file order; [HEADER] if the header
    is damaged.

    Args:
        fd: the damaged file, open for reading.
        entry: its entry in the manifest. Without digests of its tensors the result is empty.

    Raises:
        OSError: if it cannot be read.
    """
    if not entry.tensors:
        return []
    places = _places(fd, entry)
    if places is None:
        return [HEADER]
    damaged = [span.name for span in places if _digest(fd, span) != entry.tensors[span.name]]
    return damaged or [HEADER]


def show_tensors(tensors: Sequence[str]) -> str:
    """The first few names, for people; empty for none."""
    more = f" and {len(tensors) - _TENSORS_SHOWN} more tensors" if len(tensors) > _TENSORS_SHOWN else ""
    return ", ".join(tensors[:_TENSORS_SHOWN]) + more


def _places(fd: int, entry: FileEntry) -> list[_TensorSpan] | None:
    """The position of each tensor according to the header; None if the header cannot be the one
    that was written.
    """
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if length > min(_HEADER_LIMIT_BYTES, entry.bytes):
        return None
    try:
        header = json.loads(os.pread(fd, length, _LENGTH_BYTES))
        return _checked(header, _LENGTH_BYTES + length, entry)
    except (ValueError, TypeError, KeyError, AttributeError):  # whatever a flipped bit makes of the text
        return None


def _checked(header: dict[str, Any], data: int, entry: FileEntry) -> list[_TensorSpan] | None:
    header.pop("__metadata__", None)
    if header.keys() != entry.tensors.keys():
        return None
    places = []
    for name, value in header.items():
        begin, end = value["data_offsets"]
        if end - begin != prod(value["shape"]) * ITEM_BYTES[value["dtype"]]:
            return None
        places.append(_TensorSpan(name, data + begin, data + end))
    places.sort(key=lambda span: (span.begin, span.end))
    ends = [data, *(span.end for span in places)]
    is_whole = all(span.begin == end for span, end in zip(places, ends, strict=False))
    return places if is_whole and ends[-1] == entry.bytes else None


def _digest(fd: int, span: _TensorSpan) -> str:
    digest = xxhash.xxh3_64()
    at = span.begin
    while at < span.end and (piece := os.pread(fd, min(_CHUNK_BYTES, span.end - at), at)):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest() if at == span.end else "cut short"


class ModelManifest(Vouched):
    """All files of a final directory, by relative path."""

    adapter_settings: str = ""
    """The digest of adapter_config.json without `base_model_name_or_path`, which differs between
    machines.
    """

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            if not all(is_file_name(part) for part in name.split("/")) or name == MODEL_MANIFEST:
                raise ValueError(f"{name!r} cannot be a file of a model")
        return files


@dataclass(frozen=True)
class ModelCheck:
    """The result of comparing a directory with its manifest.

    Attributes:
        listed: whether it has a manifest; a damaged one counts.
        findings: the differences; `edited` ones are for information, all others are damage.
    """

    path: Path
    listed: bool
    findings: list[Damage] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged."""
        return not any(finding.is_fatal for finding in self.findings)

    def refusal(self, *, restore: str) -> IntegrityError:
        """The error that refuses a damaged directory."""
        return IntegrityError(
            *(
                Problem(
                    f"{self.path.name}/{finding}",
                    str(self.path / finding.file),
                    f"{MODEL_MANIFEST} in this directory has the digest of every file as written",
                    f"{restore}; if the change is intended, delete {self.path / MODEL_MANIFEST}: the files"
                    " are then not verified",
                )
                for finding in self.findings
                if finding.is_fatal
            )
        )


def write_model_manifest(directory: Path, known: Mapping[str, FileEntry]) -> None:
    """Writes the manifest of all files that are in a directory now. The caller syncs it.

    Args:
        known: by name, the files whose digests are known from writing them; all others are read.

    Raises:
        OSError: if the storage fails.
    """
    files = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory).as_posix()
        if file.is_file() and name != MODEL_MANIFEST:
            files[name] = known.get(name) or _entry(file)
    settings = _settings_digest(directory / _ADAPTER_SETTINGS) if _ADAPTER_SETTINGS in files else ""
    (directory / MODEL_MANIFEST).write_bytes(
        ModelManifest(files=files, adapter_settings=settings).with_checksum().to_bytes()
    )


def _entry(file: Path) -> FileEntry:
    size, digest = read_digest(file)
    return FileEntry(bytes=size, xxh3_128=digest)


def read_model_manifest(directory: Path) -> ModelManifest | None:
    """The manifest of a directory; None if it has none.

    Raises:
        OSError: if it cannot be read.
        ManifestError: if it is damaged.
    """
    try:
        return ModelManifest.from_bytes(read_bytes(directory / MODEL_MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_digest(file: Path) -> tuple[int, str]:
    """The size of a file in bytes, and the XXH3-128 of its content, read now.

    Raises:
        OSError: if it is missing, unreadable, or not a regular file (a named pipe would wait for a
            writer).
    """
    with open_plain(file) as stream:
        return digest_file(stream.fileno())


def listed_files(directory: Path) -> list[Path]:
    """The files that `check_model` reads: those in the manifest that exist; none without a readable
    manifest.
    """
    try:
        manifest = read_model_manifest(directory)
    except (OSError, ManifestError):
        return []
    return [directory / name for name in manifest.files if (directory / name).is_file()] if manifest else []


def check_model(
    directory: Path, *, read: Read = read_digest, only: Callable[[str], bool] = lambda _name: True
) -> ModelCheck:
    """Compares the files of a directory with its manifest.

    Args:
        directory: a final directory, or any model; without a manifest nothing is compared.
        only: whether to check the file of this name.
    """
    try:
        manifest = read_model_manifest(directory)
    except OSError as error:
        return ModelCheck(
            directory,
            listed=True,
            findings=[Damage(MODEL_MANIFEST, f"it cannot be read: {error.strerror}", "manifest")],
        )
    except ManifestError as error:
        return ModelCheck(
            directory, listed=True, findings=[Damage(MODEL_MANIFEST, f"it is damaged: {error}", "manifest")]
        )
    if manifest is None:
        return ModelCheck(directory, listed=False)
    damages = [_compare(directory, name, manifest, read) for name in manifest.files if only(name)]
    return ModelCheck(directory, listed=True, findings=[damage for damage in damages if damage is not None])


def _compare(directory: Path, name: str, manifest: ModelManifest, read: Read) -> Damage | None:
    expected, may_change = manifest.files[name], name in _FREE_TO_EDIT
    try:
        size, digest = read(directory / name)
    except FileNotFoundError:
        return None if may_change else Damage(name, "it is missing", "missing")
    except OSError as error:
        return Damage(name, f"it cannot be read: {error.strerror}", "content")
    if (size, digest) == (expected.bytes, expected.xxh3_128):
        return None
    if may_change:
        return Damage(name, "it was edited after it was written; the edited file is used", "edited")
    if name == _ADAPTER_SETTINGS and _settings_digest(directory / name) == manifest.adapter_settings:
        return Damage(name, f"its {_BASE} was edited; the rest is unchanged", "edited")
    return explain_damage(directory, name, expected, FileEntry(bytes=size, xxh3_128=digest))


def _settings_digest(file: Path) -> str:
    """The digest of adapter_config.json without the path of the base model; empty if the file is
    not a JSON object.
    """
    try:
        value = parse_json(read_bytes(file))
    except (OSError, ValueError):
        return ""
    if not isinstance(value, dict):
        return ""
    value.pop(_BASE, None)
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
