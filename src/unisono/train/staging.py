"""Copies of what a checkpoint holds, in host memory that is kept from save to save.

The first save pays for the pages; later ones copy at the speed of memory.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import numpy as np
import torch

from unisono.checkpoint.state import bytes_of, dtype_name
from unisono.checkpoint.writer import TensorPart
from unisono.facts.limits import available_memory
from unisono.train.part import Part

Groups = dict[str, list[Part]]
Files = dict[str, list[TensorPart]]

_SHARE = 0.5  # of the free memory that the copies of a node's ranks may take together


class Staging:
    """The buffers of one rank.

    Args:
        device: on which the tensors are.
        sharers: ranks on this machine that make copies, all at the same time.
    """

    def __init__(self, device: torch.device, *, sharers: int = 1) -> None:
        self._device = device
        self._share = _SHARE / sharers
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def has_room(self, groups: Groups) -> bool:
        """Whether there is memory for copies of all this, beside the buffers that there are."""
        more = sum(part.tensor.nbytes for _, part in self._new(groups))
        return more == 0 or more < self._share * available_memory()

    def follow(self) -> None:
        """Has the copies wait for what the device has been told to compute up to now. Called by the thread that computes."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, groups: Groups) -> Files:
        """Copies, and gives the copies as parts of files. Called by the thread that writes.

        Args:
            groups: live tensors, which must not change until this has returned; see `hold_back`.
        """
        for key, part in self._new(groups):
            self._buffers[key] = torch.empty(
                part.tensor.shape, dtype=part.tensor.dtype, pin_memory=self._stream is not None
            )
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for group, parts in groups.items():
                for part in parts:
                    _copy(part.tensor, self._buffers[group, part.name])
            if self._stream is not None:
                self._copied = self._stream.record_event()
        return {
            group: [_as_file_part(part, self._reading(group, part)) for part in parts]
            for group, parts in groups.items()
        }

    def hold_back(self) -> None:
        """Has the device wait for the copies before it computes on. Called by the thread that computes, after `copy`."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _reading(self, group: str, part: Part) -> Callable[[], memoryview]:
        buffer = self._buffers[group, part.name]

        def read() -> memoryview:
            if self._copied is not None:
                self._copied.synchronize()
            return bytes_of(buffer)

        return read

    def _new(self, groups: Groups) -> Iterable[tuple[tuple[str, str], Part]]:
        for group, parts in groups.items():
            for part in parts:
                if (group, part.name) not in self._buffers:
                    yield (group, part.name), part


def in_place(groups: Groups) -> Files:
    """Parts of files that read the live tensors, one at a time: for machines without the memory for copies."""
    return {
        group: [
            _as_file_part(part, lambda tensor=part.tensor: bytes_of(tensor.detach().cpu().contiguous()))  # type: ignore[misc]
            for part in parts
        ]
        for group, parts in groups.items()
    }


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == "cpu" and source.is_contiguous():
        # memcpy of one thread, without the interpreter's lock: torch's own copy would take the cores from the training.
        np.copyto(_flat(target), _flat(source))
    else:
        target.copy_(source, non_blocking=True)


def _flat(tensor: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    found: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _as_file_part(part: Part, read: Callable[[], memoryview]) -> TensorPart:
    whole = None if part.is_whole else part.shape
    return TensorPart(
        part.name, dtype_name(part.tensor.dtype), tuple(part.tensor.shape), read, whole, part.offsets if whole else ()
    )  # fmt: skip
