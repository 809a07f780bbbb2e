"""Tensors and optimizers into the files of a checkpoint, and back to the same bits.

A group of tensors is a file `GROUP.safetensors`; everything that is no tensor is in `state.json`. Nothing is pickled:
reading a checkpoint runs no code.
"""

import json
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.manifest import FileEntry
from unisono.checkpoint.reader import DTYPES, CheckpointReader, Tensors
from unisono.checkpoint.tensor_file import ALIASES, TensorPart, group_file
from unisono.checkpoint.values import STATE, state_text
from unisono.checkpoint.writing import TensorFile, write_files
from unisono.errors import IntegrityError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save_state(
    directory: Path, *, tensors: dict[str, Tensors], state: dict[str, Any]
) -> dict[str, FileEntry]:
    """Writes groups of tensors, and a state of plain values, into an empty directory; gives the files.

    Tensors that are one in memory (tied weights) are written once, and are one again after reading.

    Args:
        directory: where; usually what CheckpointStore.writing gives.
        tensors: by group and name; of any device, shape (also 0-dim) and dtype. A group may be empty.
        state: see `values.state_text`.

    Raises:
        StorageFull: if there is not enough room.
        TypeError: if the state holds something else.
    """
    text = state_text(sorted(tensors), state)
    files = []
    for group, members in tensors.items():
        kept, aliases = _once(members)
        parts = [part_of(name, tensor.detach().cpu().contiguous()) for name, tensor in kept.items()]
        files.append(TensorFile(group_file(group, 0, 1), parts, {ALIASES: json.dumps(aliases)}))
    return write_files(directory, files, {STATE: text})


def part_of(name: str, tensor: torch.Tensor) -> TensorPart:
    """A contiguous tensor in host memory, as it goes into a file."""
    return TensorPart(name, dtype_name(tensor.dtype), tuple(tensor.shape), lambda: bytes_of(tensor))


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype."""
    return _NAMES[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; not a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def load_state(directory: Path) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """All that a checkpoint holds; the tensors are whole, and on the CPU.

    It does not look for damage: have CheckpointStore read the directory through first.

    Raises:
        IntegrityError: if a file cannot be read.
    """
    reader = CheckpointReader(directory)
    return {group: reader.group(group) for group in reader.groups}, reader.values


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[Tensors, dict[str, Any]]:
    """An optimizer's state by parameter name: its tensors, and everything else.

    Args:
        optimizer: any of torch.optim; its state may still be empty.
        names: of its parameters, in the order of its groups.

    Returns:
        Tensors under `PARAMETER::KEY`, and values for the JSON state: hyperparameters by group, and what is no tensor.
    """
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for name, parameter in _named(optimizer, names).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}::{key}"] = value
            else:
                values[f"{name}::{key}"] = value
    groups = []
    rest = list(names)
    for group in optimizer.param_groups:
        count = len(group["params"])
        own, rest = rest[:count], rest[count:]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "names": own})
    return tensors, {"groups": groups, "values": values}


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Tensors, state: dict[str, Any]
) -> None:
    """Puts back what optimizer_tensors gave, to the same bits (load_state_dict would cast to the parameter's dtype).

    Raises:
        IntegrityError: if the state is of other parameters, or they are in other groups.
    """
    parameters = _named(optimizer, names)
    _check_groups(optimizer, names, state)
    loaded: dict[str, dict[str, Any]] = {}
    for label, value in {**tensors, **state["values"]}.items():
        name, _, key = label.rpartition("::")
        loaded.setdefault(name, {})[key] = value
    for name, entries in loaded.items():
        parameter = parameters[name]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                entries[key] = value.to(_device(optimizer, parameter, key))
    optimizer.state.clear()
    optimizer.state.update({parameters[name]: entries for name, entries in loaded.items()})
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "names"})


def _named(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(parameters) == len(names) == len(set(names)), "one name for each parameter"
    return dict(zip(names, parameters, strict=True))


def _check_groups(optimizer: torch.optim.Optimizer, names: list[str], state: dict[str, Any]) -> None:
    saved = [name for group in state["groups"] for name in group["names"]]
    if saved != names:
        odd = next(iter(sorted(set(saved) ^ set(names))), "their order")
        raise _misfit(f"it is of other parameters; the first that differs: {odd}")
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["names"]) for group in state["groups"]]
    if ours != theirs:
        raise _misfit(f"its groups have {theirs} parameters, not {ours}")


def _misfit(why: str) -> IntegrityError:
    return IntegrityError.of(
        "the optimizer state of the checkpoint does not fit this run", why=why,
        fix="resume with the config and the model that it was written with, or start anew with --fresh",
    )  # fmt: skip


def _device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.device:
    """Where a tensor of the state belongs: a step count is on the CPU unless the kernel reads it on the device."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return parameter.device if on_device else torch.device("cpu")


def _once(members: Tensors) -> tuple[Tensors, dict[str, str]]:
    """The tensors without second names of one and the same, and those names. Views of part of another are copied."""
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    kept: Tensors = {}
    aliases: dict[str, str] = {}
    for name, tensor in members.items():
        place = tensor.untyped_storage().data_ptr()
        identity = (place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in first:
            aliases[name] = first[identity]
            continue
        first[identity] = name
        kept[name] = tensor.detach().clone() if tensor.numel() and place in storages else tensor
        storages.add(place)
    return kept, aliases
