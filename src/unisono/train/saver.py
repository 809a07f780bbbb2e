"""Saves in the background, one at a time.

What is trained changes in one place only, the optimizer's update. So a thread copies it while the next forward and backward run, and the
update waits for the copies: as a rule not at all. Then the thread writes, and training has gone on long since.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unisono.train.staging import Files, Groups, Staging, in_place
from unisono.watch import Beats

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
