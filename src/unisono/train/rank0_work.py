"""Work that rank 0 does for all ranks: reading files for as long as they make progress, and broadcasting what was read."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from unisono.checkpoint.state import CheckpointReader, Outline
from unisono.checkpoint.writer import StorageFailed, decode_values, encode_values
from unisono.errors import Problem
from unisono.facts.processes import ThreadCounters, read_thread
from unisono.train.process_group import Group
from unisono.train.run import Run

TURN_S = 10.0
_LOOK_S = 0.2
_REPORTED_AFTER_S = 5.0
_GIVEN_UP_AFTER_S = 60.0
_FIX = "check that file system (frozen? network mount with an unreachable server?), and run the same command again"

Result = TypeVar("Result")


def on_rank0(run: Run, work: Callable[[], Result], *, what: str, path: Path) -> Result | None:
    """Runs some work on files on rank 0, and gives it the result; the other ranks get None. All ranks must call it.

    The work may take hours, e.g. to read a large checkpoint from a slow disk. The other ranks wait in turns, because a collective that waits
    longer than the process group's timeout would end the run. The total time is not limited; the time without progress is.

    Args:
        run: of the rank.
        work: only reads and computes. Its exception is raised on rank 0.
        what: description for messages, e.g. "reading checkpoint step-00000100".
        path: the path that is read.

    Raises:
        StorageFailed: on rank 0, if the work makes no progress.
    """
    own = _Rank0Work(run, work, what, path) if run.group.is_main else None
    while run.group.any(own is not None and own.is_running_after_turn()):
        pass
    return own.result() if own is not None else None


class _Rank0Work(Generic[Result]):
    """Work in a background thread."""

    def __init__(self, run: Run, work: Callable[[], Result], what: str, path: Path) -> None:
        self._run = run
        self._what, self._path = what, path
        self._found: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._moves: ThreadCounters | None = None
        self._moved = time.monotonic()
        self._is_reported = False
        self._thread = threading.Thread(target=self._do, args=(work,), name="by-main", daemon=True)
        self._thread.start()

    def is_running_after_turn(self) -> bool:
        """Waits one turn for the end of the work; whether it is still running then.

        Raises:
            StorageFailed: if it has made no progress for too long.
        """
        until = time.monotonic() + TURN_S
        while not self._done.wait(_LOOK_S) and time.monotonic() < until:
            self._look()
        return not self._done.is_set()

    def result(self) -> Result:
        """The result of the work, or its exception."""
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _do(self, work: Callable[[], Result]) -> None:
        try:
            self._found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`, in the main thread
            self._error = error
        finally:
            self._done.set()

    def _look(self) -> None:
        look = read_thread(os.getpid(), self._thread.native_id or 0)
        if look is None or look.moves != self._moves:
            self._moves, self._moved = look.moves if look else None, time.monotonic()
            self._run.beats.progress(sum(self._moves or (0,)))
            return
        idle_s = time.monotonic() - self._moved
        text = f"{self._what} has made no progress for {idle_s:.0f} s: {look}"
        if idle_s > _REPORTED_AFTER_S and not self._is_reported:
            self._is_reported = True
            self._run.report.send(
                "warning", code="storage_blocked", text=text, where=str(self._path), fix=_FIX
            )
        if idle_s > _GIVEN_UP_AFTER_S:
            problem = Problem(text, str(self._path), "the storage does not answer", _FIX)
            raise StorageFailed(problem, path=self._path)


# ---- Broadcast of what was read


def broadcast_json(group: Group, value: Any, *, device: torch.device) -> Any:
    """Rank 0's `value` on all ranks: dicts, lists, tuples, str, int, float, bool, None. All ranks must call it.

    It is JSON in a tensor of bytes: nothing is pickled.
    """
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


class CheckpointBroadcast:
    """A checkpoint that rank 0 reads and broadcasts, so that only rank 0 needs the disk: values at once, tensors one by one.

    Attributes:
        values: everything but tensors.
        shapes: shapes of the tensors, by group and name.
    """

    def __init__(self, group: Group, reader: CheckpointReader | None, *, device: torch.device) -> None:
        """Broadcasts the values and the tensors' outlines. All ranks must call it; rank 0 with its reader."""
        self._group, self._device = group, device
        self._reader = reader
        message: dict[str, Any] | None = None
        if reader is not None:
            message = {
                "values": reader.values,
                "tensors": {name: _outline(of) for name, of in reader.groups.items()},
            }
        message = broadcast_json(group, message, device=device)
        assert message is not None
        self.values: dict[str, Any] = message["values"]
        self._outlines: dict[str, list[list[Any]]] = message["tensors"]
        self.shapes = {
            group: {name: torch.Size(shape) for name, shape, _ in outline}
            for group, outline in self._outlines.items()
        }

    def tensors(self, group: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one group, in order. All ranks must iterate over all of them."""
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
