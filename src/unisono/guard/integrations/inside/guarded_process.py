"""This process under guard: whether it is a rank, its heartbeat and stacks, what it reports at its
end; and the thread that samples its collectives.

`unisono.guarded()` is three lines with which a custom loop reports its steps and its loss:

    with unisono.guarded() as guard:
        for batch in guard.steps(loader):
            ...
            guard.step(loss)

Under `unisono run` the watch then knows phase, step and loss. Elsewhere it does nothing, and costs
nothing.

torch's own count of collectives shows what nobody calls from Python: the reducer of DDP, the
all-gathers of FSDP. A look at the counts takes 4 µs. torch's count of completed ones is not used:
gloo lets it fall behind, and even back. Which of the recorded collectives are done, their `retired`
shows it.
"""

import atexit
import inspect
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from unisono.base.events import describe_crash
from unisono.base.torch_internals import flight_record, recorders
from unisono.guard.integrations.border import (
    Presence,
    Registration,
    find_guard,
    own_registration,
    registrations,
    start_of,
)
from unisono.guard.integrations.inside import StepReachability, StepStarts
from unisono.guard.integrations.inside.process_use import Use
from unisono.guard.integrations.worker_stacks import show_stacks
from unisono.guard.watch import Beats, Pulse, beat_while_collecting

_LOWEST_SIGNAL = 10  # above SIGRTMIN; programs that use such signals begin at the low ones
_Batch = TypeVar("_Batch")
_LOSS_EVERY_S = 1.0


class GuardedProcess:
    """This process. Until it is a rank, its beats go nowhere.

    Attributes:
        presence: of this process at the border.
        registration: its identity; None while it is not a rank.
        step_starts: where its steps begin.
        reachability: whether it can still reach the place where it makes them.
        main: the number of the main thread, or of the thread that trains if that is a different
            one.
        inside: whether the main thread is in a hooked function, which may call others.
        counts_steps: whether optimizer steps are counted; False once the program reports its steps
            itself.
    """

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.registration: Registration | None = None
        self.beats = Beats()
        self.step_starts = StepStarts()
        self.reachability = StepReachability()
        self.main = threading.main_thread().ident
        self.inside = False
        self.counts_steps = True
        self._has_ended = False
        self._exit_code = 0
        self._signal = 0  # at which it writes its stacks
        self._stacks: int | None = None  # their descriptor, of a worker
        os.register_at_fork(after_in_child=self._forked)

    @property
    def is_rank(self) -> bool:
        """Whether it has registered as a rank."""
        return self.registration is not None

    def is_main_thread(self) -> bool:
        """Whether the caller may write the main record."""
        return threading.get_ident() == self.main

    def become(self, registration: Registration | None) -> None:
        """Registers as a rank, or updates the registration; does nothing if it is None, or a
        different living process is that rank.
        """
        if registration is None:
            return
        if self.registration is None:
            if _is_taken(self.presence, registration):
                return
            registration = replace(registration, stacks_signal=self._begin())
        else:
            previous = self.registration
            registration = replace(
                registration, stacks_signal=previous.stacks_signal, uuid=registration.uuid or previous.uuid
            )
        if registration == self.registration:
            return
        self.registration = registration
        self.presence.register(registration)

    def note(self, text: str) -> None:
        """Reports to the front what was changed for the program, or other information for a
        person.
        """
        self.presence.emit("note", text=text)

    def emit(self, kind: str, **fields: Any) -> None:
        """Reports an event of a rank (unisono.base.events) to the front."""
        if self.is_rank:
            self.presence.emit(kind, **fields)

    def phase(self, name: str) -> None:
        """The main thread enters a phase."""
        if self.is_main_thread():
            self.beats.enter(name)

    def _follow(self) -> None:
        """Follows the thread that makes the first step, since Ray trains in its own thread.

        Threads of autograd do not count.
        """
        if (
            not self.beats.step
            and not self.is_main_thread()
            and type(threading.current_thread()).__name__ != "_DummyThread"
        ):
            self.main = threading.get_ident()

    def step(self, step: int) -> None:
        """The program reports its step itself, from 1; optimizer steps are no longer counted."""
        self._follow()
        self.counts_steps = False
        self._begin_step(step)

    def stepped(self) -> None:
        """An optimizer has made a step."""
        self._follow()
        if self.is_main_thread():
            self.reachability.note(inspect.currentframe())
        if self.counts_steps:
            self._begin_step(max(1, self.beats.step) + 1)

    def take_batch(self) -> None:
        """The program reports that it has read a batch, which starts the step."""
        if self.is_main_thread() and self.step_starts.batch(None):
            self.beats.take_batch()

    def _begin_step(self, step: int) -> None:
        if self.is_main_thread():
            self.step_starts.stepped()
            self.beats.begin_step(step)
            self.beats.enter("program")

    def _begin(self) -> int:
        """Starts the heartbeat in the front's memory; returns the signal that requests stacks, 0
        for none.
        """
        record, stacks, answers = self.presence.make_memory()
        step = self.beats.step
        self.beats = Beats(record)
        if step:
            self.beats.begin_step(step)
        self.beats.enter("program")
        number = self._signal = self._signal or _free_signal()
        if number:
            import faulthandler

            # Never chained: the default action of a real-time signal kills the process.
            faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        sampling = Sampling(self.beats, self._where, is_left=self.presence.guard.is_left)
        Pulse(record, sampling.dump, answers).start()
        sampling.start()
        beat_while_collecting(self.beats)
        self._on_exit()
        return number

    def _where(self) -> dict[str, int | None]:
        """Which thread trains, and whether it can still make a step, if known.

        Any thread may call it.
        """
        # No other function of Python 3.11 to 3.14 gives the frames of another thread.
        may_step = self.reachability.is_open(sys._current_frames().get(self.main or 0))  # noqa: SLF001
        return {"thread": self.main, "may_step": may_step}

    def _on_exit(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.ended(error)
            before(kind, error, trace)

        sys.excepthook = hook
        leave = sys.exit

        def leaving(status: Any = None, /) -> None:  # used by multiprocessing after an exception
            cause = sys.exc_info()[1]
            if status not in (None, 0) and cause is not None and not isinstance(cause, SystemExit):
                self.ended(cause)
            self._exit_code = status if isinstance(status, int) else int(status is not None)
            leave(status)

        sys.exit = leaving  # type: ignore[assignment]
        atexit.register(self.ended, None)
        with suppress(ImportError):  # a forked child of multiprocessing runs only this
            from multiprocessing.util import Finalize

            Finalize(None, self._ended_as_child, exitpriority=1)

    def _ended_as_child(self) -> None:
        self.ended(sys.exc_info()[1])

    def ended(self, error: BaseException | None) -> None:
        """Reports the end of the process, once, and never for a forked child."""
        if self._has_ended or not self.is_rank:
            return
        self._has_ended = True
        step = max(0, self.beats.step - 1)  # completed steps
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.presence.emit("result", step=step, exit_code=self._exit_code)
        else:
            self.presence.emit("crashed", step=step, **describe_crash(error))

    def show_stacks(self) -> None:
        """Shows the stacks of a process that is not a rank, or not yet, at a signal: a rank may
        have started it, e.g. for its loader.
        """
        before, self._stacks = self._stacks, None
        with suppress(OSError):  # no free descriptor, or no /proc: then it shows none
            self._signal = self._signal or _free_signal()
            self._stacks = show_stacks(self._signal) if self._signal else None
            if before is not None:
                os.close(before)

    def _forked(self) -> None:
        """A forked child is not a rank, and must not write to its parent's record, nor its
        stacks.
        """
        self.presence = Presence(self.presence.guard)
        self.registration = None
        self.beats, self.step_starts, self.reachability = Beats(), StepStarts(), StepReachability()
        self.main = threading.get_ident()
        self.inside = self._has_ended = False
        self.show_stacks()


def _is_taken(presence: Presence, registration: Registration) -> bool:
    """Whether a living process is already that rank: then this one is a loader or other child that
    inherited its environment.
    """
    return any(
        other.pid != presence.pid
        and (other.rank, other.attempt) == (registration.rank, registration.attempt)
        and other.started == start_of(other.pid)
        for other in registrations(presence.guard.folder)
    )


def _free_signal() -> int:
    """A real-time signal that this process does not handle, ignore or block; 0 if there is none."""
    taken = 0
    with open("/proc/self/status") as file:  # noqa: PTH123 - a small file, in a foreign process
        for line in file:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                taken |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMIN + _LOWEST_SIGNAL, signal.SIGRTMAX):
        if not taken >> (number - 1) & 1:
            return number
    return 0


_this_process: GuardedProcess | None = None
"""This process; None if it is not guarded, or before the first hook."""


def this_process(
    environment: Mapping[str, str] = os.environ,  # noqa: TID251 - of a foreign program
) -> GuardedProcess | None:
    """This guarded process; None if it is not guarded.

    It registers as a rank if its environment has one.
    """
    global _this_process
    if _this_process is None:
        guard = find_guard(environment)
        if guard is None or not guard.is_watched:
            return None
        _this_process = GuardedProcess(Presence(guard))
        # Otherwise RANK may be the pod's, and this process its launcher.
        if "LOCAL_RANK" in environment:
            _this_process.become(own_registration(environment))
        if not _this_process.is_rank:
            _this_process.show_stacks()
    return _this_process


_EVERY_S = 0.25
_SILENT_S = 1.0
_CHECKED_EVERY_S = 1.0  # whether front and subreaper live; takes 10 µs


def count_begun() -> int:
    """Number of collectives that this process has begun, by torch's own count."""
    return sum(begun_of(json.loads(dump(includeCollectives=False))) for dump in recorders())


def dump_of_interest() -> bytes:
    """The dump of one recorder: the one with pending collectives, or else the one with the newest
    entry.
    """
    return flight_record(rank_by=pending_of)


class Sampling(threading.Thread):
    """The sampling thread, a daemon."""

    def __init__(
        self, beats: Beats, where: Callable[[], dict[str, int | None]], *, is_left: Callable[[], bool] = bool
    ) -> None:
        """Not started yet.

        Args:
            where: returns facts about that thread, which are added to a dump.
            is_left: whether nobody is there any more to end this process: it then ends itself.
        """
        super().__init__(name="unisono-sampling", daemon=True)
        self._beats = beats
        self._where = where
        self._is_left = is_left
        self._begun = 0
        self._use = Use()

    def run(self) -> None:
        """Samples four times per second, half as often while the main thread beats; once per second
        in detail while it is silent and no collective begins.
        """
        self._beats.note_groups(begun=0, pending=0, still_ns=0)
        seen, since, looked = (-1, -1), time.monotonic(), 0.0
        checked = since
        while True:
            time.sleep(_EVERY_S if self._beats.written == seen[0] else 2 * _EVERY_S)
            now = time.monotonic()
            if now - checked > _CHECKED_EVERY_S:
                checked = now
                if self._is_left():
                    os.kill(os.getpid(), signal.SIGKILL)
            written = self._beats.written
            if written == seen[0]:  # a dump takes longer than all the rest
                # An unknown recorder raises one of these.
                with suppress(ValueError, LookupError, TypeError, RuntimeError):
                    self._begun = count_begun()
            moved = (written, self._begun)
            if moved != seen:
                seen, since = moved, now
                self._beats.note_groups(begun=self._begun, pending=0, still_ns=0)
                self._use = Use()
            elif now - since >= _SILENT_S and now - looked >= _SILENT_S:
                looked = now
                self._inspect()

    def dump(self) -> bytes:
        """A recorder's dump with facts about the training thread, requested by the front."""
        where, dump = json.dumps(self._where()).encode(), dump_of_interest()
        return b"%s, %s" % (where[:-1], dump[1:]) if dump.startswith(b'{"') else dump

    def _inspect(self) -> None:
        pending = 0
        with suppress(ValueError, LookupError, TypeError, RuntimeError):
            pending = pending_of(json.loads(dump_of_interest() or b"{}"))
        still_ns = self._use.still_ns(self._where()["thread"], is_examined=self._beats.was_examined())
        self._beats.note_groups(begun=self._begun, pending=pending, still_ns=still_ns)


def begun_of(dump: Any) -> int:
    """Number of collectives begun in all process groups."""
    return sum(
        max(0, int(status["last_enqueued_collective"])) for status in dump.get("pg_status", {}).values()
    )


def pending_of(dump: Any) -> int:
    """Number of recorded collectives that are not completed."""
    return sum(not entry["retired"] for entry in dump.get("entries") or ())


class Guarded:
    """A loop that reports its progress.

    Attributes:
        done: number of optimizer steps made.
    """

    def __init__(self, at: GuardedProcess | None, *, done: int = 0) -> None:
        """Nothing is reported yet.

        Args:
            at: this guarded process; None if it is not guarded.
            done: optimizer steps made before, for a resumed run.
        """
        self._at = at
        self.done = done
        self._reported_at = -math.inf

    def __enter__(self) -> Self:
        if self._at is not None:
            self._at.step(self.done + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._at is not None and error is None:
            self._at.phase("program")

    def steps(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches, with a heartbeat before and after each is read."""
        if self._at is None:
            yield from batches
            return
        reading = iter(batches)
        while True:
            self._at.phase("data")
            try:
                batch = next(reading)
            except StopIteration:
                self._at.phase("program")
                return
            self._at.take_batch()
            self._at.phase("compute")
            yield batch

    def step(self, loss: object = None) -> None:
        """An optimizer step has been made.

        Args:
            loss: of the step, as a number. A tensor is read only if it is on the CPU, since a read
                would synchronize the device; it is reported once per second, and immediately if it
                is not finite.
        """
        self.done += 1
        if self._at is None:
            return
        self._at.step(self.done + 1)
        value = _number(loss)
        now = time.monotonic()
        if value is not None and (now - self._reported_at >= _LOSS_EVERY_S or not math.isfinite(value)):
            self._reported_at = now
            self._at.emit("step", step=self.done, loss=value if math.isfinite(value) else str(value))

    def phase(self, name: str) -> None:
        """Enters a phase: "evaluate", "save", "load_data", "load_model"; then "program"."""
        if self._at is not None:
            self._at.phase(name)


def guarded(*, done: int = 0) -> Guarded:
    """A loop that reports its progress under `unisono run`; elsewhere it reports nothing.

    Args:
        done: optimizer steps made before, for a resumed run.
    """
    return Guarded(this_process(), done=done)


def _number(loss: Any) -> float | None:
    """The loss, if it is in host memory."""
    if isinstance(loss, int | float):
        return float(loss)
    device = getattr(loss, "device", None)
    if getattr(device, "type", None) != "cpu" or getattr(loss, "numel", int)() != 1:
        return None
    return float(loss.detach().item())
