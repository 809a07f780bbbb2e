"""Reads the tensors of a checkpoint, and the state of optimizers; bit-exact both ways.

The only module here that needs torch.

A group of tensors is a file `GROUP.safetensors`, or one per rank that wrote a part of it;
everything else is in `state.json`. Nothing is pickled: reading a checkpoint runs no code. It does
not look for damage: have CheckpointStore read the directory through first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import safe_open

from unisono.base.errors import ConfigError, IntegrityError
from unisono.base.files import parse_json, path_below, read_text
from unisono.trainer.checkpoint.writer import (
    PARTS,
    STATE,
    decode_values,
    encode_values,
    group_files,
)

Tensors = dict[str, torch.Tensor]
ParamGroup = dict[str, Any]  # of torch.optim; its keys depend on the optimizer

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OptimizerValues(TypedDict):
    """An optimizer's groups with names of parameters, and other values by `PARAMETER::KEY`."""

    groups: list[ParamGroup]
    values: dict[str, object]


class RunValues(TypedDict, total=False):
    """The `state` of state.json of a run; see `training.run.Contents`."""

    train: dict[str, object]
    optimizer: dict[str, OptimizerValues]
    kernels: bool | None
    batches: Mapping[str, object]
    base: dict[str, str | bool | None]


@dataclass(frozen=True)
class Outline:
    """A tensor's full shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _StoredPart:
    """The location of a part: its file, its name there, and its position in the full tensor."""

    file: Any
    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


class CheckpointReader:
    """An open checkpoint. Files are memory-mapped, so a tensor is read on access.

    Attributes:
        groups: the outlines of the tensors, by group and name.

    Raises:
        IntegrityError: if the files are not in the format that unisono writes, or parts are
            missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, dict[str, list[_StoredPart]]] = {}
        self.groups: dict[str, dict[str, Outline]] = {}
        try:
            document = parse_json(read_text(directory / STATE, errors="surrogatepass"))
            self.values: RunValues = decode_values(document["state"])
            shards = int(document.get("shards", 1))
            for group in document["groups"]:
                self._open(
                    group, [path_below(directory, name, parts=1) for name in group_files(group, shards)]
                )
        except IntegrityError:
            raise
        except Exception as error:  # any error of a reader on these files is damage; the cause is chained
            raise _unreadable(directory, str(error)) from error

    def tensor(self, group: str, name: str) -> torch.Tensor:
        """A full tensor on the CPU, assembled from its parts if there are several."""
        places, outline = self._places[group][name], self.groups[group][name]
        if len(places) == 1 and places[0].shape == outline.shape:
            tensor: torch.Tensor = places[0].file.get_tensor(places[0].name)
            return tensor
        whole = torch.empty(outline.shape, dtype=outline.dtype)
        for part in places:
            window = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.shape, strict=True))
            whole[window] = part.file.get_tensor(part.name)
        return whole

    def weight(self, name: str) -> torch.Tensor:
        """A trained tensor as it is used: with schedule_free (arXiv:2405.15682) x, the average, of
        which `trainable` has y = (1 - β₁) z + β₁ x.
        """
        trained = self.tensor("trainable", name)
        for part, values in self.values.get("optimizer", {}).items():
            label = f"{name}::z"
            if label in self.groups[f"optimizer-{part}"]:
                group = next(group for group in values["groups"] if name in group["names"])
                if group.get("train_mode"):
                    other = self.tensor(f"optimizer-{part}", label)
                    return trained.lerp(other, 1 - 1 / group["betas"][0])
        return trained

    def _open(self, group: str, files: list[Path]) -> None:
        self.groups[group], self._places[group] = {}, {}
        for path in files:
            file: Any = safe_open(str(path), framework="pt")
            metadata = file.metadata() or {}
            parts = parse_json(metadata.get(PARTS, "{}"))
            for name in file.keys():  # noqa: SIM118 - not a dict
                self._note(group, name, file, parts.get(name))
        self._check_cover(group)

    def _note(self, group: str, name: str, file: Any, part: list[list[int]] | None) -> None:
        piece = file.get_slice(name)
        shape = tuple(piece.get_shape())
        whole, offsets = (tuple(part[0]), tuple(part[1])) if part else (shape, (0,) * len(shape))
        outline = Outline(whole, DTYPES[piece.get_dtype()])
        if self.groups[group].setdefault(name, outline) != outline:
            raise _unreadable(self._directory, f"the parts of {name} belong to different tensors")
        self._places[group].setdefault(name, []).append(_StoredPart(file, name, shape, offsets))

    def _check_cover(self, group: str) -> None:
        """Checks that the parts of a tensor cover it: within bounds, without overlap, and with the
        right number of values.
        """
        for name, outline in self.groups[group].items():
            places = self._places[group][name]
            held = sum(torch.Size(part.shape).numel() for part in places)
            inside = all(
                o >= 0 and o + s <= w
                for part in places
                for o, s, w in zip(part.offsets, part.shape, outline.shape, strict=True)
            )
            begins = {part.offsets for part in places}
            if not inside or held != torch.Size(outline.shape).numel() or len(begins) != len(places):
                raise _unreadable(self._directory, f"the parts of {name} do not cover the tensor")


def _unreadable(directory: Path, why: str) -> IntegrityError:
    return IntegrityError.of(
        f"checkpoint {directory.name} cannot be read: {why}",
        where=str(directory),
        why="its files are not in the format that unisono writes",
        fix="`unisono checkpoint verify RUN` shows what is damaged",
    )


# ---- tensors as bytes, and optimizers


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype."""
    return _NAMES[dtype]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; not a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[Tensors, OptimizerValues]:
    """An optimizer's state by parameter name: tensors, and everything else.

    Args:
        optimizer: any torch.optim optimizer; its state may still be empty.
        names: of its parameters, in the order of its groups.

    Returns:
        Tensors under `PARAMETER::KEY`, and values for the JSON state: hyperparameters by group, and
        non-tensor state.
    """
    tensors: Tensors = {}
    values: dict[str, object] = {}
    for name, parameter in _named(optimizer, names).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}::{key}"] = value
            else:
                values[f"{name}::{key}"] = value
    groups = []
    remaining = list(names)
    for group in optimizer.param_groups:
        count = len(group["params"])
        group_names, remaining = remaining[:count], remaining[count:]
        groups.append({**{k: v for k, v in group.items() if k != "params"}, "names": group_names})
    return tensors, {"groups": groups, "values": values}


def refuse_unsaved(optimizer: torch.optim.Optimizer, names: list[str]) -> None:
    """Refuses an optimizer with state that `optimizer_tensors` would not save.

    Raises:
        ConfigError: with the key of the state.
    """
    labels = {parameter: name for name, parameter in _named(optimizer, names).items()}
    for parameter, entries in optimizer.state.items():
        if parameter not in labels:
            raise _unsaved(f"`state[{parameter!r:.60}]`, which is not the state of a parameter")
        for key, value in entries.items():
            if not isinstance(key, str) or "::" in key:
                raise _unsaved(f"{key!r:.60}, a key of the state of {labels[parameter]}, which is not a name")
            is_tensor = isinstance(value, torch.Tensor) and value.dtype in _NAMES and not value.is_sparse
            if not is_tensor and not _is_plain(value):
                raise _unsaved(f"`{key}` of {labels[parameter]}, a {type(value).__name__}")
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params" and not _is_plain(value):
                raise _unsaved(f"`{key}` of a parameter group, a {type(value).__name__}")


def _unsaved(what: str) -> ConfigError:
    return ConfigError.of(
        f"the optimizer keeps {what}: a checkpoint cannot hold it",
        where="optim.kind",
        why="checkpoints hold tensors and plain values of parameters, and plain values of groups",
        fix="keep the state of each parameter in `self.state[parameter]`, as tensors or plain values with a name",
    )


def _is_plain(value: Any) -> bool:
    """Whether state.json can hold a value."""
    try:
        encode_values(value, "")
    except TypeError:
        return False
    return True


def load_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Tensors, state: OptimizerValues
) -> None:
    """Restores what optimizer_tensors returned, bit-exactly (load_state_dict would cast to the
    parameter's dtype).

    Raises:
        IntegrityError: if the parameters or their groups differ.
    """
    parameters = _named(optimizer, names)
    _check_groups(optimizer, names, state)
    loaded: dict[str, dict[str, object]] = {}
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


def _check_groups(optimizer: torch.optim.Optimizer, names: list[str], state: OptimizerValues) -> None:
    saved = [name for group in state["groups"] for name in group["names"]]
    if saved != names:
        odd = next(iter(sorted(set(saved) ^ set(names))), "their order")
        raise _misfit(f"it has different parameters; the first difference: {odd}")
    own_counts = [len(group["params"]) for group in optimizer.param_groups]
    saved_counts = [len(group["names"]) for group in state["groups"]]
    if own_counts != saved_counts:
        raise _misfit(f"its groups have {saved_counts} parameters, not {own_counts}")


def _misfit(why: str) -> IntegrityError:
    return IntegrityError.of(
        "the optimizer state of the checkpoint does not match this run",
        why=why,
        fix="resume with the config and the model that it was written with, or start again with --fresh",
    )


def _device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.device:
    """The device of a tensor of the state: a step count is on the CPU unless the kernel reads it on
    the device.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return parameter.device if on_device else torch.device("cpu")
