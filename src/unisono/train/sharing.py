"""Plain values and tensors from rank 0 to all, so that only rank 0 needs the disk. JSON in a tensor of bytes: nothing is pickled."""

import json
from collections.abc import Iterator
from typing import Any

import torch

from unisono.checkpoint.state import CheckpointReader, Outline
from unisono.checkpoint.writer import decode_values, encode_values
from unisono.train.group import Group


def share_json(group: Group, value: Any, *, device: torch.device) -> Any:
    """Rank 0's `value`, on all ranks; all must call it. dicts, lists, tuples, str, int, float, bool, None."""
    if group.world_size == 1:
        return value
    text = json.dumps(encode_values(value, "value")).encode() if group.is_main else b""
    size = torch.tensor([len(text)], device=device)
    group.broadcast(size)
    if group.is_main:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    else:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    group.broadcast(content)
    return decode_values(json.loads(content.cpu().numpy().tobytes()))


class SharedState:
    """What rank 0 reads of a checkpoint, for all ranks: values at once, tensors one after the other.

    Attributes:
        values: everything that is no tensor.
        shapes: of the tensors, by group and name.
    """

    def __init__(self, group: Group, reader: CheckpointReader | None, *, device: torch.device) -> None:
        """All ranks must call it; rank 0 with what it reads from."""
        self._group, self._device = group, device
        self._reader = reader
        message: dict[str, Any] | None = None
        if reader is not None:
            message = {
                "values": reader.values,
                "tensors": {name: _outline(of) for name, of in reader.groups.items()},
            }
        message = share_json(group, message, device=device)
        assert message is not None
        self.values: dict[str, Any] = message["values"]
        self._outlines: dict[str, list[list[Any]]] = message["tensors"]
        self.shapes = {
            group: {name: torch.Size(shape) for name, shape, _ in outline}
            for group, outline in self._outlines.items()
        }

    def tensors(self, group: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one group, in order. All ranks must take them all."""
        for name, shape, dtype in self._outlines[group]:
            if self._reader is not None:
                tensor = self._reader.tensor(group, name)
                if self._group.world_size > 1:
                    tensor = tensor.to(self._device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast(tensor)
            yield name, tensor


def _outline(tensors: dict[str, Outline]) -> list[list[Any]]:
    return [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
