"""Whole checkpoints of small tensors: written at once, and read at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.state import CheckpointReader, Tensors, bytes_of, dtype_name
from unisono.trainer.checkpoint.writer import (
    STATE,
    TensorFile,
    TensorPart,
    group_file,
    state_text,
    write_files,
)


def save_state(
    directory: Path, *, tensors: dict[str, Tensors], state: Mapping[str, object]
) -> dict[str, FileEntry]:
    """Writes groups of tensors and a state of plain values into an empty directory; returns the
    files.

    Args:
        tensors: by group and name; any device, shape (also 0-dim) and dtype. A group may be empty.
        state: see `state_text`.

    Raises:
        StorageFull: if there is not enough space.
        TypeError: if the state holds an unsupported type.
    """
    text = state_text(sorted(tensors), state)
    files = []
    for group, members in tensors.items():
        parts = [part_of(name, tensor.detach().cpu().contiguous()) for name, tensor in members.items()]
        files.append(TensorFile(group_file(group, 0, 1), parts))
    return write_files(directory, files, {STATE: text})


def part_of(name: str, tensor: torch.Tensor) -> TensorPart:
    """A contiguous tensor in host memory as a part for a file."""
    return TensorPart(name, dtype_name(tensor.dtype), tuple(tensor.shape), lambda: bytes_of(tensor))


def load_state(directory: Path) -> tuple[dict[str, Tensors], Any]:
    """The complete content of a checkpoint; the tensors are full, and on the CPU.

    It does not look for damage: have CheckpointStore read the directory through first.

    Raises:
        IntegrityError: if a file cannot be read.
    """
    reader = CheckpointReader(directory)
    return {
        group: {name: reader.tensor(group, name) for name in names} for group, names in reader.groups.items()
    }, reader.values
