"""Tensors and plain values of a checkpoint: safetensors and JSON, nothing else, and back to the same bits.

A group of tensors is a file `GROUP.safetensors`; everything that is no tensor is in `state.json`. Nothing is pickled:
reading a checkpoint runs no code.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unisono.checkpoint.trouble import StorageFull, free_bytes, is_full
from unisono.errors import IntegrityError

Tensors = dict[str, torch.Tensor]

STATE = "state.json"
_GROUP = re.compile(r"[a-z0-9_-]+")
_ALIASES = "unisono.aliases"
_SLACK_BYTES = 1 << 16  # headers, the manifest, and what a file system rounds up


def save_state(directory: Path, *, tensors: dict[str, Tensors], state: dict[str, Any]) -> None:
    """Writes groups of tensors, and a state of plain values, into an empty directory.

    Tensors that are one in memory (tied weights) are written once, and are one again after reading.

    Args:
        directory: where; usually what CheckpointStore.writing gives.
        tensors: by group and name; of any device, shape (also 0-dim) and dtype. A group may be empty.
        state: dicts with string keys, lists, tuples, str, int, float, bool, None. Tuples stay tuples, floats keep their bits.

    Raises:
        StorageFull: if there is not enough room.
        TypeError: if the state holds something else.
    """
    document = {"schema": 1, "groups": sorted(tensors), "state": encode_values(state, "state")}
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1).encode(
        "utf-8", "surrogatepass"
    )
    unique = {group: _once(members) for group, members in tensors.items()}
    needed = len(text) + _SLACK_BYTES + sum(_bytes(members) for members, _ in unique.values())
    free = free_bytes(directory)
    if needed > free:
        raise StorageFull(directory, needed_bytes=needed, free_bytes=free)
    try:
        for group, (members, aliases) in unique.items():
            assert _GROUP.fullmatch(group), f"{group!r} cannot name a file"
            ready = {name: tensor.detach().cpu().contiguous() for name, tensor in members.items()}
            save_file(ready, str(_file(directory, group)), metadata={_ALIASES: json.dumps(aliases)})
        (directory / STATE).write_bytes(text)
    except Exception as error:
        # safetensors raises one of its own for a full disk; what is none is raised again
        if is_full(error):  # somebody else took the room meanwhile
            written = sum(file.stat().st_size for file in directory.iterdir())
            available = written + free_bytes(directory)
            raise StorageFull(
                directory, needed_bytes=max(needed, available + 1), free_bytes=available
            ) from error
        raise


def load_state(directory: Path) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """What save_state was given; the tensors are on the CPU.

    It does not look for damage: have CheckpointStore read the directory through first.

    Raises:
        IntegrityError: if a file cannot be read.
    """
    try:
        document = json.loads((directory / STATE).read_bytes().decode("utf-8", "surrogatepass"))
        tensors = {group: _load_group(_file(directory, group)) for group in document["groups"]}
        return tensors, decode_values(document["state"])
    except Exception as error:
        # whatever a reader says of files that are not ours, it is damage; the cause is chained
        raise IntegrityError.of(
            f"checkpoint {directory.name} cannot be read: {error}", where=str(directory),
            why="its files do not hold what unisono writes", fix="`unisono checkpoint verify RUN` says what is damaged",
        ) from error  # fmt: skip


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


def _bytes(members: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() + 128 for tensor in members.values())


def _file(directory: Path, group: str) -> Path:
    return directory / f"{group}.safetensors"


def _load_group(path: Path) -> Tensors:
    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        aliases = json.loads((file.metadata() or {}).get(_ALIASES, "{}"))
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def encode_values(value: Any, place: str) -> Any:
    """`value` as JSON that reads back to the same: tuples and floats that are no number get a tag."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [encode_values(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode_values(item, f"{place}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in ("$float", "$tuple"):
                raise TypeError(f"{place} has a key {key!r}, which JSON would not give back")
        return {key: encode_values(item, f"{place}.{key}") for key, item in value.items()}
    raise TypeError(f"{place} is a {type(value).__name__}, which JSON would not give back")


def decode_values(value: Any) -> Any:
    """What encode_values was given."""
    if isinstance(value, list):
        return [decode_values(item) for item in value]
    if isinstance(value, dict):
        if "$float" in value:
            return float(value["$float"])
        if "$tuple" in value:
            return tuple(decode_values(item) for item in value["$tuple"])
        return {key: decode_values(item) for key, item in value.items()}
    return value
