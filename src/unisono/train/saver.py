"""Saves in the background, one at a time.

What is trained changes in one place only, the optimizer's update. A thread copies it to host memory during the next forward and backward; the
update waits for the copies, in general not at all. The thread then writes while training continues.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from unisono.checkpoint.state import bytes_of, dtype_name
from unisono.checkpoint.writer import TensorPart
from unisono.facts.limits import available_memory
from unisono.watch import Beats


@dataclass(frozen=True)
class Part:
    """A tensor of the run, or this rank's part of it.

    Attributes:
        name: of the tensor.
        tensor: this rank's, on its device. It is the live one, and changes with the next update.
        shape: of the whole.
        offsets: where in the whole it begins; all zero where it is the whole.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether there are no other parts of it."""
        return tuple(self.tensor.shape) == self.shape


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
        part.name,
        dtype_name(part.tensor.dtype),
        tuple(part.tensor.shape),
        read,
        whole,
        part.offsets if whole else (),
    )


Write = Callable[["Save", Files], Path | None]

STUCK_S = 10.0
"""A save that has made no progress for so long is not waited for by the next one."""
OTHERS_S = 60.0
"""The same while it waits for other ranks, and none of them shows progress: a rank whose own storage hangs says so itself."""
_LOOK_S = 0.2
MOVES_EVERY_S = 2.0
"""How often a save that others wait for shows them its progress."""


@dataclass
class Save:
    """One save, from its beginning to its end.

    Attributes:
        step: optimizer steps done.
        path: where it was published, if it was.
        blocking_s: seconds for which training stood still.
        began: monotonic seconds.
        moved: when it last made progress, in monotonic seconds.
        doing: what the thread does, for people; as "writing /out/checkpoints/…".
        thread_id: the kernel's number of the thread that writes.
        waits_for_others: whether it has written its own part, and others have not.
        waits_for_main: whether it waits for the directory that rank 0 makes: what its own thread does then is no progress.
        asked: since when it asks the storage for that directory; None: it has been answered.
        is_abandoned: training has gone on while it was reading live tensors; what it read must not be published.
        on_stuck: told once, with the reason, when it has made no progress for STUCK_S.
        on_move: told every MOVES_EVERY_S while it makes progress, where other ranks wait for it.
    """

    step: int
    path: Path | None = None
    blocking_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    doing: str = "copying"
    thread_id: int = 0
    waits_for_others: bool = False
    waits_for_main: bool = False
    asked: float | None = None
    is_abandoned: bool = False
    on_stuck: Callable[[str], None] | None = None
    on_move: Callable[[], None] | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def advance(self, doing: str | None = None) -> None:
        """Notes progress."""
        self.moved = time.monotonic()
        if doing is not None:
            self.doing = doing

    @property
    def waits(self) -> bool:
        """Whether others must show progress, and not the thread that writes."""
        return self.waits_for_others or self.waits_for_main

    @property
    def blocked_s(self) -> float:
        """Seconds for which this rank's own storage has not answered."""
        if self.waits:
            return time.monotonic() - self.asked if self.asked is not None else 0.0
        return self.idle_s

    @property
    def idle_s(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self.moved

    def is_stuck(self, patience_s: float | None = None) -> bool:
        """Whether it has not moved for so long that nobody should wait for it."""
        limit_s = STUCK_S if patience_s is None else patience_s
        if self.waits_for_others:
            limit_s = max(OTHERS_S, limit_s)
        return not self.done.is_set() and self.idle_s >= limit_s


class Saver:
    """The saves of one rank. All methods are for the thread that trains.

    Attributes:
        last: the save in flight, or the last one.
    """

    def __init__(self, staging: Staging, beats: Beats | None = None) -> None:
        self._staging = staging
        self._beats = beats or Beats()
        self.last: Save | None = None

    def begin(self, step: int, groups: Groups, write: Write) -> Save:
        """Begins a save; the one before must have ended.

        Args:
            step: optimizer steps done.
            groups: live tensors.
            write: writes the parts, and gives the path if it published a checkpoint. Called in a thread of its own.
        """
        assert self.last is None or self.last.done.is_set(), "one save in flight"
        began = time.perf_counter()
        save = self.last = Save(step)
        self._staging.follow()
        thread = threading.Thread(target=self._run, args=(save, groups, write), name="save", daemon=True)
        thread.start()
        save.blocking_s += time.perf_counter() - began
        return save

    def still_reads(self, *, turn_s: float) -> bool:
        """Waits until what is being saved has been copied, at most `turn_s` seconds; whether it has not, and is not given up."""
        save = self.last
        if save is None or save.copied.is_set() or save.is_abandoned:
            return False
        began = time.perf_counter()
        limit = began + turn_s
        self._beats.enter("save")
        while not save.copied.wait(_LOOK_S) and not save.is_abandoned and time.perf_counter() < limit:
            self._beat(save)
            save.is_abandoned = save.is_stuck()
        save.blocking_s += time.perf_counter() - began
        return not save.copied.is_set() and not save.is_abandoned

    def before_update(self) -> None:
        """Waits until what is being saved has been copied. To be called before anything trained is changed.

        A save without memory for copies reads the live tensors while it writes; one that hangs in that is abandoned.
        """
        save = self.last
        if save is None:
            return
        while self.still_reads(turn_s=1.0):
            pass
        self._staging.hold_back()

    def wait(self, patience_s: float | None = None) -> bool:
        """Waits for the end of the save in flight for as long as it makes progress; whether there is none now.

        Args:
            patience_s: seconds without progress after which it is not waited for; STUCK_S where none is given.

        Raises:
            Exception: what the writing has raised, if it was not the storage's fault.
        """
        while self.moves(patience_s):
            pass
        return self.is_free

    @property
    def is_free(self) -> bool:
        """Whether there is no save in flight."""
        return self.last is None or self.last.done.is_set()

    def moves(self, patience_s: float | None = None, *, turn_s: float = 1.0) -> bool:
        """Waits for the end of the save in flight, at most `turn_s` seconds; whether it goes on then, and makes progress.

        Args:
            patience_s: seconds without progress after which it counts as one that hangs; STUCK_S where none is given.
            turn_s: seconds.

        Raises:
            Exception: what the writing has raised, if it was not the storage's fault.
        """
        save = self.last
        if save is None:
            return False
        began = time.perf_counter()
        limit = began + turn_s
        while not save.done.wait(_LOOK_S) and not save.is_stuck(patience_s) and time.perf_counter() < limit:
            self._beat(save)
        save.blocking_s += time.perf_counter() - began
        if save.done.is_set() and save.error is not None:
            raise save.error
        return not save.done.is_set() and not save.is_stuck(patience_s)

    def _beat(self, save: Save) -> None:
        """While the main thread waits for a save, in bounded time, it is not the one that is stuck: the watch of the storage names that."""
        self._beats.progress(int((time.monotonic() - save.began) * 1000))

    def _run(self, save: Save, groups: Groups, write: Write) -> None:
        save.thread_id = threading.get_native_id()
        try:
            if self._staging.has_room(groups):
                files = self._staging.copy(groups)
                save.copied.set()
            else:
                files = in_place(groups)
            save.advance("writing")
            save.path = write(save, files)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`, in the thread that trains
            save.error = error
        finally:
            save.copied.set()
            save.advance("done")
            save.done.set()
