"""Writes safetensors files from memory, digested on the way. Torch-free, so that the front can do it, too.

A file may hold parts of tensors: one of several ranks' shards. Then its metadata says of each part where in the whole it belongs.
The digest is of the bytes that were meant, not of what a second reading finds: damage on the way to the disk is found by `verify`.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import xxhash

from unisono.checkpoint.manifest import FileEntry

PARTS = "unisono.parts"
"""In the header's metadata: for each part its tensor's whole shape and the part's offsets, as JSON."""
ALIASES = "unisono.aliases"
"""In the header's metadata: second names of tensors that were one in memory, as JSON."""
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_CHUNK_BYTES = 8 << 20  # stays in the cache between digest and write
_ALIGNMENT = 8

Read = Callable[[], memoryview]
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class TensorPart:
    """A tensor, or one rank's part of it, as it goes into a file.

    Attributes:
        name: of the tensor.
        dtype: safetensors' name for it, as F32 or BF16.
        shape: of this part.
        read: gives its bytes, contiguous, when they are written; they may be made only then.
        whole: the shape of the whole tensor; None where this is the whole.
        offsets: where in the whole the part begins, for each dimension.
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
    """The order in which they stand in a file: wide types first, so that each begins where its type may; then as given."""
    return sorted(parts, key=lambda part: -ITEM_BYTES[part.dtype])


def write_tensor_file(
    path: Path,
    parts: Iterable[TensorPart],
    *,
    metadata: dict[str, str] | None = None,
    on_bytes: OnBytes | None = None,
) -> FileEntry:
    """Writes a new file and syncs it; gives its size, its digest and those of its tensors.

    Args:
        path: a file that does not exist yet.
        parts: read in `file_order`, one after the other, so only one need be in memory.
        metadata: for the header.
        on_bytes: is told how many bytes were written, from time to time.

    Raises:
        OSError: what the file system says, as a full disk.
        ValueError: if a part has other bytes than it said, or a name comes twice.
    """
    ordered = file_order(parts)
    digests: dict[str, str] = {}
    with open(path, "xb", buffering=0) as file:  # noqa: PTH123 - exclusive
        out = _Out(file.fileno(), on_bytes)
        out.write(memoryview(_header(ordered, metadata or {})))
        for part in ordered:
            content = part.read()
            if content.nbytes != part.bytes:
                raise ValueError(f"{part.name} has {content.nbytes} bytes, and should have {part.bytes}")
            digests[part.name] = out.write(content.cast("B") if content.nbytes else content)
        os.fsync(file.fileno())
    return FileEntry(bytes=out.size, xxh3_128=out.digest.hexdigest(), tensors=digests)


def file_bytes(parts: Sequence[TensorPart], *, metadata: dict[str, str] | None = None) -> int:
    """The size of the file that the parts would make."""
    return len(_header(file_order(parts), metadata or {})) + sum(part.bytes for part in parts)


def _header(parts: Sequence[TensorPart], metadata: dict[str, str]) -> bytes:
    places = {part.name: [list(part.whole), list(part.offsets)] for part in parts if part.whole is not None}
    if places:
        metadata = metadata | {PARTS: json.dumps(places, separators=(",", ":"))}
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for part in parts:
        if part.name in header:
            raise ValueError(f"{part.name} comes twice")
        begin, end = end, end + part.bytes
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _Out:
    """A file that is written from its start, and digested."""

    def __init__(self, fd: int, on_bytes: OnBytes | None) -> None:
        self._fd = fd
        self._on_bytes = on_bytes
        self.digest = xxhash.xxh3_128()
        self.size = 0

    def write(self, content: memoryview) -> str:
        """Writes all of it; gives the XXH3-64 digest of this piece in hex."""
        own = xxhash.xxh3_64()
        for start in range(0, content.nbytes, _CHUNK_BYTES):
            piece = content[start : start + _CHUNK_BYTES]
            self.digest.update(piece)
            own.update(piece)
            while piece.nbytes:
                piece = piece[os.write(self._fd, piece) :]
            self.size += min(_CHUNK_BYTES, content.nbytes - start)
            if self._on_bytes is not None:
                self._on_bytes(self.size)
        return own.hexdigest()


def group_file(group: str, shard: int, shards: int) -> str:
    """The name of a group's file, or of one shard's where there are several."""
    return f"{group}.safetensors" if shards == 1 else f"{group}.shard-{shard:05d}-of-{shards:05d}.safetensors"


def group_files(group: str, shards: int) -> list[str]:
    """The names of all files of a group."""
    return [group_file(group, shard, shards) for shard in range(shards)]
