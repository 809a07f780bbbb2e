"""Writes the files of a checkpoint into its temporary directory. Torch-free."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from unisono.checkpoint.manifest import FileEntry
from unisono.checkpoint.tensor_file import TensorPart, file_bytes, write_tensor_file
from unisono.checkpoint.trouble import StorageFull, free_bytes
from unisono.storage_errors import is_full

_SLACK_BYTES = 1 << 16  # headers, the manifest, and what a file system rounds up


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors that is to be written."""

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
    """Writes and syncs them all; gives what goes into the manifest.

    Args:
        directory: of the checkpoint that is being made.
        files: of tensors.
        texts: other files, by name.
        on_bytes: is told, from time to time, how many bytes of the file at hand were written.

    Raises:
        StorageFull: if there is not enough room.
        OSError: if the storage fails otherwise.
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
        written = sum(
            file.stat().st_size for file in directory.iterdir()
        )  # somebody else took the room meanwhile
        available = written + free_bytes(directory)
        raise StorageFull(directory, needed_bytes=max(needed, available + 1), free_bytes=available) from error


def _write_text(path: Path, text: bytes) -> FileEntry:
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=len(text), xxh3_128=xxhash.xxh3_128_hexdigest(text))
