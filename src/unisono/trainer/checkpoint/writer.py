"""Writes the files of a checkpoint: tensors as safetensors, plain values as state.json; and what a
failed write means.

Torch-free.

A file may hold parts of tensors: the shards of several ranks. Then its metadata has, for each part,
its place in the whole tensor. Digests are of the bytes that were meant, not of what a second
reading finds: damage on the way to the disk is found by `verify`.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import (
    Problem,
    UnfitError,
    error_number,
    is_full,
    storage_reason,
    storage_remedy,
    storage_verdict,
    storage_words,
)
from unisono.base.text import show_bytes
from unisono.trainer.checkpoint.manifest import FileEntry

PARTS = "unisono.parts"
"""Key in the header's metadata: for each part, the full shape of its tensor and the part's offsets,
as JSON.
"""
STATE = "state.json"
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_CHUNK_BYTES = 8 << 20  # stays in the cache between digest and write
_ALIGNMENT = 8
_SLACK_BYTES = 1 << 16  # headers, the manifest, and what a file system rounds up

Read = Callable[[], memoryview]
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class TensorPart:
    """A tensor, or one rank's part of it, as it goes into a file.

    Attributes:
        dtype: safetensors' name for it, e.g. F32 or BF16.
        shape: the shape of this part.
        read: returns its bytes, contiguous; called when they are written, so they may be made only
            then.
        whole: the shape of the full tensor; None if this part is all of it.
        offsets: where the part begins in the full tensor, per dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Read = field(repr=False)
    whole: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def file_order(parts: Iterable[TensorPart]) -> list[TensorPart]:
    """The order of parts in a file: wide types first, so that each part is aligned to its type;
    then as given.
    """
    return sorted(parts, key=lambda part: -ITEM_BYTES[part.dtype])


def write_tensor_file(
    path: Path,
    parts: Iterable[TensorPart],
    *,
    metadata: dict[str, str] | None = None,
    on_bytes: OnBytes | None = None,
) -> FileEntry:
    """Writes a new file and syncs it; returns its size, its digest and those of its tensors.

    Args:
        path: a file that does not exist yet.
        parts: read in `file_order`, one at a time, so that only one need be in memory.
        on_bytes: receives the number of bytes written so far, from time to time.

    Raises:
        OSError: from the file system, e.g. a full disk.
        ValueError: if a part has a different size than declared, or a name occurs twice.
    """
    ordered = file_order(parts)
    digests: dict[str, str] = {}
    with open(path, "xb", buffering=0) as file:  # noqa: PTH123 - exclusive
        out = _Out(file.fileno(), on_bytes)
        out.write(memoryview(_header(ordered, metadata or {})))
        for part in ordered:
            content = part.read()
            if content.nbytes != part.bytes:
                raise ValueError(f"{part.name} has {content.nbytes} bytes instead of {part.bytes}")
            digests[part.name] = out.write(content.cast("B") if content.nbytes else content)
        os.fsync(file.fileno())
    return FileEntry(bytes=out.size, xxh3_128=out.digest.hexdigest(), tensors=digests)


def file_bytes(parts: Sequence[TensorPart], *, metadata: dict[str, str] | None = None) -> int:
    """The size of the file with these parts."""
    return len(_header(file_order(parts), metadata or {})) + sum(part.bytes for part in parts)


def _header(parts: Sequence[TensorPart], metadata: dict[str, str]) -> bytes:
    places = {part.name: [list(part.whole), list(part.offsets)] for part in parts if part.whole is not None}
    if places:
        metadata = metadata | {PARTS: json.dumps(places, separators=(",", ":"))}
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for part in parts:
        if part.name in header:
            raise ValueError(f"{part.name} occurs twice")
        begin, end = end, end + part.bytes
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _Out:
    """A file that is written sequentially, and digested."""

    def __init__(self, fd: int, on_bytes: OnBytes | None) -> None:
        self._fd = fd
        self._on_bytes = on_bytes
        self.digest = xxhash.xxh3_128()
        self.size = 0

    def write(self, content: memoryview) -> str:
        """Writes all of it; returns the XXH3-64 digest of this piece in hex."""
        digest = xxhash.xxh3_64()
        for start in range(0, content.nbytes, _CHUNK_BYTES):
            piece = content[start : start + _CHUNK_BYTES]
            self.digest.update(piece)
            digest.update(piece)
            while piece.nbytes:
                piece = piece[os.write(self._fd, piece) :]
            self.size += min(_CHUNK_BYTES, content.nbytes - start)
            if self._on_bytes is not None:
                self._on_bytes(self.size)
        return digest.hexdigest()


def group_file(group: str, shard: int, shards: int) -> str:
    """The name of a group's file, or of one shard's file if there are several."""
    return f"{group}.safetensors" if shards == 1 else f"{group}.shard-{shard:05d}-of-{shards:05d}.safetensors"


def group_files(group: str, shards: int) -> list[str]:
    """The names of all files of a group."""
    return [group_file(group, shard, shards) for shard in range(shards)]


# ---- plain values


def state_text(groups: list[str], state: Mapping[str, object], *, shards: int = 1) -> bytes:
    """The content of state.json.

    Args:
        groups: names of tensor groups, each in its own files.
        state: dicts with string keys, lists, tuples, str, int, float, bool, None. Tuples stay
            tuples, floats stay bit-exact.
        shards: number of files per group.

    Raises:
        TypeError: if the state holds a different type.
    """
    document: dict[str, object] = {"schema": 1, "groups": groups, "state": encode_values(state, "state")}
    if shards > 1:
        document["shards"] = shards
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1).encode(
        "utf-8", "surrogatepass"
    )


def encode_values(value: Any, where: str) -> Any:
    """`value` as JSON that reads back to an equal value: tuples, NaN and infinities get a tag."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [encode_values(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode_values(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in ("$float", "$tuple"):
                raise TypeError(f"{where} has a key {key!r}, which JSON cannot represent")
        return {key: encode_values(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot represent")


def decode_values(value: Any) -> Any:
    """The inverse of encode_values."""
    if isinstance(value, list):
        return [decode_values(item) for item in value]
    if isinstance(value, dict):
        if "$float" in value:
            return float(value["$float"])
        if "$tuple" in value:
            return tuple(decode_values(item) for item in value["$tuple"])
        return {key: decode_values(item) for key, item in value.items()}
    return value


# ---- whole files


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors to be written."""

    name: str
    parts: Sequence[TensorPart]
    metadata: dict[str, str] = field(default_factory=dict)


def write_files(
    directory: Path,
    files: Sequence[TensorFile],
    texts: Mapping[str, bytes],
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, FileEntry]:
    """Writes and syncs all files; returns their entries for the manifest.

    Args:
        texts: other files, by name.
        on_bytes: receives, from time to time, the number of bytes written of the current file.

    Raises:
        StorageFull: if there is not enough space.
        OSError: if the storage fails in a different way.
    """
    needed = _SLACK_BYTES + sum(map(len, texts.values()))
    needed += sum(file_bytes(file.parts, metadata=file.metadata) for file in files)
    free = free_bytes(directory)
    if needed > free:
        raise StorageFull(directory, needed_bytes=needed, free_bytes=free)
    try:
        entries = {
            file.name: write_tensor_file(
                directory / file.name, file.parts, metadata=file.metadata, on_bytes=on_bytes
            )
            for file in files
        }
        return entries | {name: _write_text(directory / name, text) for name, text in texts.items()}
    except OSError as error:
        if not is_full(error):
            raise
        # A different process took the space meanwhile.
        written = sum(file.stat().st_size for file in directory.iterdir())
        available = written + free_bytes(directory)
        raise StorageFull(directory, needed_bytes=max(needed, available + 1), free_bytes=available) from error


def _write_text(path: Path, text: bytes) -> FileEntry:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=len(text), xxh3_128=xxhash.xxh3_128_hexdigest(text))


# ---- what a failed write means


class StorageFailed(UnfitError):  # noqa: N818 - named for what happened, as RankDied is
    """A checkpoint could not be written; existing ones are untouched."""

    def __init__(self, *problems: Problem, path: Path, verdict: Verdict | None = None) -> None:
        super().__init__(*problems, verdict=verdict)
        self.path = path


class StorageFull(StorageFailed):
    """There is not enough space for a checkpoint."""

    def __init__(self, path: Path, *, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        missing = show_bytes(self.missing_bytes)
        problem = Problem(
            f"not enough space for checkpoint {path.name}: {missing} ({self.missing_bytes} bytes) missing",
            str(path),
            f"it needs {show_bytes(needed_bytes)} in {path.parent}, and {show_bytes(free_bytes)} are free",
            f"free {missing} there, or lower checkpoint.keep; older checkpoints are unchanged",
        )
        super().__init__(problem, path=path, verdict=disk_full(problem, phase="save"))

    @property
    def missing_bytes(self) -> int:
        """The missing space, in bytes."""
        return max(1, self.needed_bytes - self.free_bytes)


def disk_full(problem: Problem, *, phase: str) -> Verdict:
    """The verdict on a full disk, from the problem that reports it; the caller adds the node, if
    known.
    """
    known = find_cause("disk_full")
    return Verdict(
        cause="disk_full",
        when="during",
        summary=problem.what,
        phase=phase,
        evidence=(Evidence(where=problem.where, text=problem.why),),
        fix=(problem.fix, *(known.remedy if known else ())),
    )


def free_bytes(directory: Path) -> int:
    """Free bytes on the file system of `directory`."""
    return shutil.disk_usage(directory).free


def write_failure(error: BaseException, target: Path, temporary: Path) -> StorageFailed | None:
    """The error for the user after an exception during a write; None if the storage is not the
    cause.

    Removes what was written.
    """
    if isinstance(error, StorageFailed):
        error.path = target
        return None
    if error_number(error) is None and not isinstance(error, OSError):
        return None
    if is_full(error):
        with contextlib.suppress(OSError):  # a directory that was removed, too, cannot be measured
            written = sum(file.stat().st_size for file in temporary.glob("*")) if temporary.exists() else 0
            shutil.rmtree(temporary, ignore_errors=True)
            free = free_bytes(_existing(target.parent))
            return StorageFull(target, needed_bytes=max(written, free) + 1, free_bytes=free)
    problem = Problem(
        f"checkpoint {target.name} cannot be written: {storage_words(error)}",
        str(getattr(error, "filename", None) or target),
        storage_reason(error),
        storage_remedy(
            error, else_="fix it, or set output_dir to a different one; older checkpoints are unchanged"
        ),
    )
    return StorageFailed(problem, path=target, verdict=storage_verdict(error, problem, phase="save"))


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
