"""What a checkpoint of a run holds: the trained tensors, the optimizers' state, and the plain values. As they stand; nothing is copied.

What is random in a run is a function of (seed, place in the endless stream of sequences) and is set anew before each use, so no rank has a
generator whose state would have to be kept; `streams.GlobalStateWatch` tells of code that draws from one all the same.
"""

from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from unisono.checkpoint.state import Tensors, optimizer_tensors
from unisono.train.part import Part
from unisono.train.run import Run

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's whole shape, and the offsets of this rank's part in it."""


@dataclass(frozen=True)
class Contents:
    """All that this rank would save.

    Attributes:
        groups: parts by group: `trainable`, and `optimizer-NAME` for each optimizer.
        values: for state.json, as they are now: `train` (TrainState) and `optimizer` (what is no tensor, by optimizer).
    """

    groups: dict[str, list[Part]]
    values: dict[str, Any]


def contents_of(run: Run) -> Contents:
    """What this rank would save now. Of several ranks rank 0 has what is whole everywhere, and each its parts of what is sharded."""
    groups = {"trainable": _parts(run, dict(run.forward.loaded.trainable))}
    numbers: dict[str, Any] = {}
    for name, part in run.optimizers.parts.items():
        tensors, numbers[name] = optimizer_tensors(part, run.optimizers.names[name])
        groups[f"optimizer-{name}"] = _parts(run, tensors)
    return Contents(groups, {"train": run.state.to_json(), "optimizer": numbers})


def _parts(run: Run, tensors: Tensors) -> list[Part]:
    found = []
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            shape, offsets = _place(run, name, value)
            local = value.to_local()
            if local.numel():  # a rank may have nothing of a small tensor
                found.append(Part(name, local, shape, offsets))
        elif run.group.is_main or run.sharded is None:
            found.append(Part(name, value, tuple(value.shape), (0,) * value.ndim))
    return found


def _place(run: Run, name: str, tensor: DTensor) -> Place:
    """As torch.distributed.checkpoint's own planner places the part. It stays, so it is asked once."""
    known = run.places.get(name)
    if known is None:
        from torch.distributed.checkpoint import DefaultSavePlanner

        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, is_coordinator=True)
        (item,) = planner.create_local_plan().items
        assert item.tensor_data is not None
        known = run.places[name] = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
    return known
