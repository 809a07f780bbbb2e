"""This process under guard: whether it is a rank, its heartbeat and stacks, what it reports at its end; and the thread that samples its collectives.

torch's own count of collectives shows what nobody calls from Python: the reducer of DDP, the all-gathers of FSDP. A look at the counts
takes 4 µs. torch's count of completed ones is not used: gloo lets it fall behind, and even back. Which of the recorded collectives are
done, their `retired` tells.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.events import describe_crash
from unisono.integrations.border import (
    Presence,
    Registration,
    find_guard,
    own_registration,
    registrations,
    start_of,
)
from unisono.integrations.inside.step_reachability import StepReachability, StepStarts
from unisono.watch.beat import Beats, Pulse, beat_while_collecting
from unisono.watch.flight_recorder import flight_record, recorders

_LOWEST_SIGNAL = 10  # above SIGRTMIN; programs that use such signals begin at the low ones


class GuardedProcess:
    """This process. Until it is a rank, its beats go nowhere.

    Attributes:
        presence: at the border.
        registration: who it is; None while it is no rank.
        beats: its signs of life, of the main thread.
        step_starts: where its steps begin.
        reachability: whether it can still reach the place where it makes them.
        main: the main thread's number; or of the thread that trains, where that is another one.
        inside: whether the main thread is in a hooked function, which may call others.
        counts_steps: whether steps are those of an optimizer; False once the program says by itself which step it is in.
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
        os.register_at_fork(after_in_child=self._forked)

    @property
    def is_rank(self) -> bool:
        """Whether it has registered."""
        return self.registration is not None

    def is_main_thread(self) -> bool:
        """Whether the caller may write the main record."""
        return threading.get_ident() == self.main

    def become(self, registration: Registration | None) -> None:
        """Registers as a rank, or says more of it; nothing where it is not known who it is, or another living process is that rank."""
        if registration is None:
            return
        if self.registration is None:
            if _is_taken(self.presence, registration):
                return
            registration = replace(registration, stacks_signal=self._begin())
        else:
            known = self.registration
            registration = replace(
                registration, stacks_signal=known.stacks_signal, uuid=registration.uuid or known.uuid
            )
        if registration == self.registration:
            return
        self.registration = registration
        self.presence.register(registration)

    def note(self, text: str) -> None:
        """Tells the front what was done in the program's place, or what a person should know."""
        self.presence.tell("note", text=text)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tells the front something of a rank, as unisono.events has it."""
        if self.is_rank:
            self.presence.tell(kind, **fields)

    def phase(self, name: str) -> None:
        """The main thread does something else from here on."""
        if self.is_main_thread():
            self.beats.enter(name)

    def _follow(self) -> None:
        """The thread that makes the first step is the one whose life is told: Ray trains in a thread of its own. One of autograd's is no program's."""
        if (
            not self.beats.step
            and not self.is_main_thread()
            and type(threading.current_thread()).__name__ != "_DummyThread"
        ):
            self.main = threading.get_ident()

    def step(self, step: int) -> None:
        """The program says by itself which step it works on, from 1: its optimizers are not counted from here on."""
        self._follow()
        self.counts_steps = False
        self._begin_step(step)

    def stepped(self) -> None:
        """An optimizer has made a step."""
        self._follow()
        if self.is_main_thread():
            self.reachability.note(sys._getframe())  # noqa: SLF001 - as traceback does
        if self.counts_steps:
            self._begin_step(max(1, self.beats.step) + 1)

    def take_batch(self) -> None:
        """The program says that it has taken a batch for the step, so that it is begun."""
        if self.is_main_thread() and self.step_starts.batch(None):
            self.beats.take_batch()

    def _begin_step(self, step: int) -> None:
        if self.is_main_thread():
            self.step_starts.stepped()
            self.beats.begin_step(step)
            self.beats.enter("program")

    def _begin(self) -> int:
        """Begins to beat in the front's memory; gives the signal that asks for stacks, 0 for none."""
        record, stacks, answers = self.presence.make_memory()
        step = self.beats.step
        self.beats = Beats(record)
        if step:
            self.beats.begin_step(step)
        self.beats.enter("program")
        number = _free_signal()
        if number:
            import faulthandler

            # Never chained: the default of a real-time signal ends the process.
            faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        sampling = Sampling(self.beats, self._where)
        Pulse(record, sampling.dump, answers).start()
        sampling.start()
        beat_while_collecting(self.beats)
        self._hear_the_end()
        return number

    def _where(self) -> dict[str, Any]:
        """Which thread trains, and whether it can still make a step, as far as that is known. Any thread may ask."""
        may_step = self.reachability.is_open(sys._current_frames().get(self.main or 0))  # noqa: SLF001 - as faulthandler does
        return {"thread": self.main, "may_step": may_step}

    def _hear_the_end(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.ended(error)
            before(kind, error, trace)

        sys.excepthook = hook
        leave = sys.exit

        def leaving(status: Any = None, /) -> None:  # what multiprocessing and its like do with an exception
            cause = sys.exc_info()[1]
            if status not in (None, 0) and cause is not None and not isinstance(cause, SystemExit):
                self.ended(cause)
            self._exit_code = status if isinstance(status, int) else int(status is not None)
            leave(status)

        sys.exit = leaving  # type: ignore[assignment]
        atexit.register(self.ended, None)
        with suppress(ImportError):  # a forked child of multiprocessing comes by there alone
            from multiprocessing.util import Finalize

            Finalize(None, self._ended_as_child, exitpriority=1)

    def _ended_as_child(self) -> None:
        self.ended(sys.exc_info()[1])

    def ended(self, error: BaseException | None) -> None:
        """The last word: once, and never that of a process which was forked."""
        if self._has_ended or not self.is_rank:
            return
        self._has_ended = True
        step = max(0, self.beats.step - 1)  # steps that it has made
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.presence.tell("result", step=step, exit_code=self._exit_code)
        else:
            self.presence.tell("crashed", step=step, **describe_crash(error))

    def _forked(self) -> None:
        """A child is no rank by birth, and must not write in its parent's record."""
        self.presence = Presence(self.presence.guard)
        self.registration = None
        self.beats, self.step_starts, self.reachability = Beats(), StepStarts(), StepReachability()
        self.main = threading.get_ident()
        self.inside = self._has_ended = False


def _is_taken(presence: Presence, registration: Registration) -> bool:
    """Whether a living process is that rank already: then this one is a loader, or another helper that has inherited its environment."""
    return any(
        other.pid != presence.pid
        and (other.rank, other.attempt) == (registration.rank, registration.attempt)
        and other.started == start_of(other.pid)
        for other in registrations(presence.guard.folder)
    )


def _free_signal() -> int:
    """A real-time signal that nobody here handles, ignores or blocks; 0 where there is none."""
    taken = 0
    with open("/proc/self/status") as file:  # noqa: PTH123 - a small file, in somebody else's process
        for line in file:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                taken |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMIN + _LOWEST_SIGNAL, signal.SIGRTMAX):
        if not taken >> (number - 1) & 1:
            return number
    return 0


_this_process: GuardedProcess | None = None
"""This process; None where nothing guards it, or before the first hook."""


def this_process(environment: Mapping[str, str] = os.environ) -> GuardedProcess | None:  # noqa: TID251 - of somebody else's program
    """This process at the border; None where nothing guards it. It is a rank from then on where its environment says which."""
    global _this_process
    if _this_process is None:
        guard = find_guard(environment)
        if guard is None or not guard.is_watched:
            return None
        _this_process = GuardedProcess(Presence(guard))
        if "LOCAL_RANK" in environment:  # else RANK may be the pod's, and this its launcher
            _this_process.become(own_registration(environment))
    return _this_process


_EVERY_S = 0.25
_SILENT_S = 1.0
_LITTLE_S = (
    0.004  # of a processor, in a second: less is nothing, and a loop that polls four times a second is still
)
_MUCH_BYTES = 1 << 16


def count_begun() -> int:
    """How many collectives this process has begun, by torch's own count."""
    return sum(begun_of(json.loads(dump(includeCollectives=False))) for dump in recorders())


def dump_of_interest() -> bytes:
    """All that one recorder has: the one in which something is pending, or else the one that has recorded last."""
    return flight_record(rank_by=pending_of)


class Sampling(threading.Thread):
    """The thread. It ends with the process, and is nothing that anybody waits for."""

    def __init__(self, beats: Beats, where: Callable[[], dict[str, Any]]) -> None:
        """Has not begun.

        Args:
            beats: of the thread that trains.
            where: what is known of where that is; it goes into a dump as it is.
        """
        super().__init__(name="unisono-sampling", daemon=True)
        self._beats = beats
        self._where = where
        self._begun = 0
        self._use = _Use()

    def run(self) -> None:
        """Looks four times a second; closer once a second while the main thread is silent and nothing is begun."""
        self._beats.note_groups(begun=0, pending=0, still_ns=0)
        seen, since, looked = (-1, -1), time.monotonic(), 0.0
        while True:
            time.sleep(_EVERY_S)
            now = time.monotonic()
            with suppress(
                ValueError, LookupError, TypeError, RuntimeError
            ):  # a recorder that is not known here
                self._begun = count_begun()
            moved = (self._beats.written, self._begun)
            if moved != seen:
                seen, since = moved, now
                self._beats.note_groups(begun=self._begun, pending=0, still_ns=0)
                self._use = _Use()
            elif now - since >= _SILENT_S and now - looked >= _SILENT_S:
                looked = now
                self._look_closer()

    def dump(self) -> bytes:
        """All that a recorder has, and where the thread that trains is, for the front that asks for it."""
        where, dump = json.dumps(self._where()).encode(), dump_of_interest()
        return b"%s, %s" % (where[:-1], dump[1:]) if dump.startswith(b'{"') else dump

    def _look_closer(self) -> None:
        pending = 0
        with suppress(ValueError, LookupError, TypeError, RuntimeError):
            pending = pending_of(json.loads(dump_of_interest() or b"{}"))
        self._beats.note_groups(begun=self._begun, pending=pending, still_ns=self._use.still_ns())


def begun_of(dump: Any) -> int:
    """How many collectives all process groups have begun together."""
    return sum(
        max(0, int(status["last_enqueued_collective"])) for status in dump.get("pg_status", {}).values()
    )


def pending_of(dump: Any) -> int:
    """How many of the recorded collectives are begun and not done."""
    return sum(not entry["retired"] for entry in dump.get("entries") or ())


class _Use:
    """What the process, and those that it has started, have used since they were last seen to do something."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self._since = time.monotonic_ns()

    def still_ns(self) -> int:
        """For how long they have used next to nothing."""
        now = time.monotonic_ns()
        own_s = (
            time.process_time() - time.thread_time()
        )  # this thread's own looks are no work of the program's
        found = (own_s, _ticks_below(os.getpid()), _io_bytes())
        last, self._last = self._last, found
        if (
            last is None
            or found[0] - last[0] > _LITTLE_S
            or found[1] != last[1]
            or found[2] - last[2] > _MUCH_BYTES
        ):
            self._since = now
        return now - self._since


def _ticks_below(pid: int) -> int:
    """Processor time of all processes below one, and of those that they have outlived, in the kernel's ticks."""
    total, todo, seen = 0, [pid], 0
    while todo and seen < _MOST_BELOW:
        for child in _children(todo.pop()):
            seen += 1
            with suppress(OSError, IndexError):
                fields = Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()
                total += sum(map(int, fields[11:15]))
                todo.append(child)
    return total


_MOST_BELOW = 256


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - of names alone
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _io_bytes() -> int:
    """What this process has read and written so far."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.partition(": ")[2]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0
