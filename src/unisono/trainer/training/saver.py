"""Saves in the background, one at a time.

What is trained changes in one place only, the optimizer's update. A thread copies it to host memory
during the next forward and backward; the update waits for the copies, in general not at all. The
thread then writes while training continues.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from unisono.guard.facts.limits import available_memory
from unisono.guard.watch import Beats
from unisono.trainer.checkpoint.state import bytes_of, dtype_name
from unisono.trainer.checkpoint.writer import TensorPart


@dataclass(frozen=True)
class RankTensor:
    """A tensor of the run, or this rank's part of it.

    Attributes:
        name: of the tensor.
        tensor: this rank's part, on its device. It is the live tensor, and changes with the next
            update.
        shape: of the full tensor.
        offsets: where the part begins in the full tensor; all zero if it is the full tensor.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether this is the full tensor."""
        return tuple(self.tensor.shape) == self.shape


# ---- Copies in host memory

Groups = dict[str, list[RankTensor]]
Files = dict[str, list[TensorPart]]

_SHARE = 0.5  # share of the free memory that the copies of all ranks on a node may take together


class Staging:
    """The host buffers of one rank.

    They are kept from save to save: the first save pays for the pages, later ones copy at memory
    speed.

    Args:
        device: of the tensors.
        sharers: number of ranks on this machine that copy at the same time.
    """

    def __init__(self, device: torch.device, *, sharers: int = 1) -> None:
        self._device = device
        self._share = _SHARE / sharers
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def has_room(self, groups: Groups) -> bool:
        """Whether there is memory for copies of all parts, with the existing buffers."""
        more = sum(part.tensor.nbytes for _, part in self._new(groups))
        return more == 0 or more < self._share * available_memory()

    def follow(self) -> None:
        """Makes the copies wait for all work submitted to the device so far.

        Called by the thread that computes.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, groups: Groups) -> Files:
        """Copies the tensors, and gives the copies as parts of files.

        Called by the thread that writes.

        Args:
            groups: live tensors. They must not change before this returns; see `hold_back`.
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
        """Makes the device wait for the copies before it computes further.

        Called by the thread that computes, after `copy`.
        """
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _reading(self, group: str, part: RankTensor) -> Callable[[], memoryview]:
        buffer = self._buffers[group, part.name]

        def read() -> memoryview:
            if self._copied is not None:
                self._copied.synchronize()
            return bytes_of(buffer)

        return read

    def _new(self, groups: Groups) -> Iterable[tuple[tuple[str, str], RankTensor]]:
        for group, parts in groups.items():
            for part in parts:
                if (group, part.name) not in self._buffers:
                    yield (group, part.name), part


def in_place(groups: Groups) -> Files:
    """Parts of files that read the live tensors, one at a time: for machines without memory for
    copies.
    """
    return {
        group: [
            _as_file_part(
                part,
                lambda tensor=part.tensor: bytes_of(tensor.detach().cpu().contiguous()),  # type: ignore[misc]
            )
            for part in parts
        ]
        for group, parts in groups.items()
    }


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == "cpu" and source.is_contiguous():
        # A memcpy in one thread, without the GIL: torch's own copy would take cores from training.
        np.copyto(_flat(target), _flat(source))
    else:
        target.copy_(source, non_blocking=True)


def _flat(tensor: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    flat: np.ndarray[tuple[int], np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def _as_file_part(part: RankTensor, read: Callable[[], memoryview]) -> TensorPart:
    whole = None if part.is_whole else part.shape
    return TensorPart(
        part.name,
        dtype_name(part.tensor.dtype),
        tuple(part.tensor.shape),
        read,
        whole,
        part.offsets if whole else (),
    )


# ---- Saves

Write = Callable[["Save", Files], Path | None]

STUCK_S = 10.0
"""After so many seconds without progress a save is no longer waited for by the next one."""
OTHERS_S = 60.0
"""The limit while a save waits for other ranks and none makes progress: a rank whose own storage
hangs reports it itself.
"""
_LOOK_S = 0.2
MOVES_EVERY_S = 2.0
"""How often a save that other ranks wait for reports its progress to them."""


@dataclass
class Save:
    """One save, from its beginning to its end.

    Attributes:
        step: optimizer steps done.
        path: where it was published, if it was.
        blocking_s: seconds for which training was blocked.
        began: monotonic seconds.
        moved: when it last made progress, in monotonic seconds.
        activity: what the thread does, for messages, e.g. "writing /out/checkpoints/…".
        thread_id: the kernel's id of the thread that writes.
        waits_for_others: whether it has written its own part, and waits for those of other ranks.
        waits_for_main: whether it waits for the directory that rank 0 creates; its own thread's
            activity is not progress then.
        looking_since: since when the storage has not answered the look for that directory; None if
            no look is pending.
        is_abandoned: whether training continued while it was reading live tensors; what it read
            must not be published.
        on_stuck: called once, with the reason, after STUCK_S without progress.
        on_move: called every MOVES_EVERY_S while it makes progress, if other ranks wait for it.
    """

    step: int
    path: Path | None = None
    blocking_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    activity: str = "copying"
    thread_id: int = 0
    waits_for_others: bool = False
    waits_for_main: bool = False
    looking_since: float | None = None
    is_abandoned: bool = False
    on_stuck: Callable[[str], None] | None = None
    on_move: Callable[[], None] | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def advance(self, activity: str | None = None) -> None:
        """Records progress."""
        self.moved = time.monotonic()
        if activity is not None:
            self.activity = activity

    @property
    def waits(self) -> bool:
        """Whether progress must come from other ranks, not from the thread that writes."""
        return self.waits_for_others or self.waits_for_main

    @property
    def blocked_s(self) -> float:
        """Seconds for which this rank's own storage has not responded."""
        if self.waits:
            return time.monotonic() - self.looking_since if self.looking_since is not None else 0.0
        return self.idle_s

    @property
    def idle_s(self) -> float:
        """Seconds without progress."""
        return time.monotonic() - self.moved

    def is_stuck(self, patience_s: float | None = None) -> bool:
        """Whether it has made no progress for so long that nothing should wait for it."""
        limit_s = STUCK_S if patience_s is None else patience_s
        if self.waits_for_others:
            limit_s = max(OTHERS_S, limit_s)
        return not self.done.is_set() and self.idle_s >= limit_s


class Saver:
    """The saves of one rank. Only the thread that trains may call its methods.

    Attributes:
        last: the save in flight, or the last one.
    """

    def __init__(self, staging: Staging, beats: Beats | None = None) -> None:
        self._staging = staging
        self._beats = beats or Beats()
        self.last: Save | None = None

    def begin(self, step: int, groups: Groups, write: Write) -> Save:
        """Starts a save; the previous one must have ended.

        Args:
            step: optimizer steps done.
            groups: live tensors.
            write: writes the parts, and gives the path if it published a checkpoint. Called in a
                background thread.
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
        """Waits at most `turn_s` seconds until the tensors being saved are copied; whether they are
        still being read.
        """
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
        """Waits until the tensors being saved are copied.

        Must be called before the weights change.

        A save without memory for copies reads the live tensors while it writes; if it hangs
        meanwhile, it is abandoned.
        """
        save = self.last
        if save is None:
            return
        while self.still_reads(turn_s=1.0):
            pass
        self._staging.hold_back()

    def wait(self, patience_s: float | None = None) -> bool:
        """Waits for the end of the save in flight as long as it makes progress; whether it has
        ended.

        Args:
            patience_s: seconds without progress after which the wait ends; default STUCK_S.

        Raises:
            Exception: the exception of the write, if it was not the storage's fault.
        """
        while self.moves(patience_s):
            pass
        return self.is_free

    @property
    def is_free(self) -> bool:
        """Whether there is no save in flight."""
        return self.last is None or self.last.done.is_set()

    def moves(self, patience_s: float | None = None, *, turn_s: float = 1.0) -> bool:
        """Waits at most `turn_s` seconds for the end of the save in flight; whether it is still
        running then, and makes progress.

        Args:
            patience_s: seconds without progress after which it counts as stuck; default STUCK_S.
            turn_s: seconds.

        Raises:
            Exception: the exception of the write, if it was not the storage's fault.
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
        """Records progress: while the main thread waits for a save, in bounded time, it is not
        stuck; the storage watch reports the save.
        """
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
