"""A rank's sign of life: a fixed record in memory that its front made, inherits to it, and reads at any time.

The main thread writes the main record where its phase changes; a thread of its own writes the pulse ten times a second, so that "the
interpreter does not run" differs from "the main thread does not come back". While the main thread beats, nobody asks for that, and the
pulse comes twice a second: to be woken by the kernel is nearly all that it costs.

There is no lock. Each record has two slots that are written in turn, and each begins and ends with its number. A reader takes the newest slot
whose two numbers are equal, and only if a second reading of it is the same. So a writer that was stopped or killed in the middle of a
slot leaves the record before, and the memory outlives the rank: its last words can be read after its death.
"""

import functools
import gc
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from unisono.watch.phases import PHASES, phase_named

PULSE_S, RESTING_S = 0.1, 0.5
RECORD_BYTES = 4096
# All are of 8 bytes, aligned, in the machine's order: so each is written at once, and in the order in which it stands here.
_MAIN = struct.Struct("=19Q")
# number, monotonic ns, phase, kind, step, micro step, collectives begun, elements of the last, done, total, digest of the batch,
# ns in data, compute, comm, other; how often the phase was seen, ns together, ns of the longest; number again
_PULSE = struct.Struct("=4Q")  # number, monotonic ns, answered request, number again
_WORD = struct.Struct("=Q")
_MAIN_AT, _PULSE_AT = (0, 256), (512, 576)
# changes, collectives begun in all groups, how many of them are pending, ns without use of a processor, whether somebody else's program
_GROUPS = struct.Struct("=5Q")
_REQUEST_AT, _COLLECTIONS_AT, _GROUPS_AT, _ROWS_AT = 640, 704, 768, 1024
MOST_ROWS = (RECORD_BYTES - _ROWS_AT - _WORD.size) // 8
KINDS = (
    "none", "all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter", "other", "reduce", "gather", "scatter", "all_to_all", "send",
    "recv",
)  # fmt: skip
_SHARES = ("data", "compute", "comm", "other")
_SHARE_OF = tuple(_SHARES.index(phase.share) for phase in PHASES)
_IN_STEP = tuple(phase.in_step for phase in PHASES)
_COMM = phase_named("comm")
_DATA = phase_named("data")
_READINGS = 20
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long a rank went without a beat in a phase, as seen so far; the first step's are left out. Seconds."""

    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank's record says.

    Attributes:
        version: grows with every beat of the main thread, at both ends of a full garbage collection in it, and with torch's own count of
            collectives where a second thread writes that.
        at_ns: of that beat, monotonic.
        phase: its name.
        step: the optimizer step that it works on, from 1; 0 before.
        micro: the micro step in it, from 1.
        comm: collectives that it has begun, through unisono's group.
        kind: of the last one.
        elements: of the last one's tensor.
        done: progress in a long phase.
        total: of that.
        digest: of the sequences of the step's global batch.
        shares_s: seconds in data, compute, comm and other, since the second step of this start.
        pulse_ns: when the second thread was last alive, monotonic; 0: never.
        answered: the last request that the second thread has answered.
        times: of the phase that it is in.
        begun: collectives that all process groups have begun, by torch's own count: also those that nobody calls from Python.
        pending: how many of them are not done, as far as was looked: where the main thread has been silent for a second.
        still_s: for how long the process and those that it has started have used no processor and read and written nothing.
        is_foreign: whether the rank is one of somebody else's program; see unisono.watch.foreign.
    """

    version: int
    at_ns: int
    phase: str
    step: int
    micro: int
    comm: int
    kind: str
    elements: int
    done: int
    total: int
    digest: int
    shares_s: tuple[float, float, float, float]
    pulse_ns: int
    answered: int
    times: PhaseTimes
    begun: int = 0
    pending: int = 0
    still_s: float = 0.0
    is_foreign: bool = False


class BeatMemory:
    """The front's end of one rank's record, and where the rank leaves what it is asked for. Nothing of it has a name, so nothing stays.

    Attributes:
        record_fd: the record.
        stacks_fd: faulthandler writes there.
        answers_fd: the second thread writes what it is asked for there.
        stacks_signal: at which faulthandler writes in the rank; 0 where it has none.
    """

    stacks_signal: int = signal.SIGUSR2

    def __init__(self, rank: int) -> None:
        record_fd = os.memfd_create(f"unisono-beat-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(record_fd, RECORD_BYTES)
        self._hold(
            record_fd,
            os.memfd_create(f"unisono-stacks-{rank}", os.MFD_CLOEXEC),
            os.memfd_create(f"unisono-answers-{rank}", os.MFD_CLOEXEC),
        )

    @classmethod
    def opened(cls, record_fd: int, stacks_fd: int, answers_fd: int) -> Self:
        """Of files that a rank of somebody else's program has made; they are closed with it.

        Raises:
            ValueError: if the record is too short.
        """
        memory = cls.__new__(cls)
        memory._hold(record_fd, stacks_fd, answers_fd)  # noqa: SLF001 - of this class
        return memory

    def _hold(self, record_fd: int, stacks_fd: int, answers_fd: int) -> None:
        self._map = mmap.mmap(record_fd, RECORD_BYTES)
        self.record_fd, self.stacks_fd, self.answers_fd = record_fd, stacks_fd, answers_fd
        self._requests = 0

    @property
    def fds(self) -> tuple[int, int, int]:
        """For the rank, in the order of `Beats.inherited`."""
        return self.record_fd, self.stacks_fd, self.answers_fd

    def read(self) -> Beat | None:
        """The record as it is now; None before the first beat, and where it changes faster than it can be read: in a loop that only beats."""
        return read_beat(self._map)

    def rows(self) -> list[int]:
        """The sequences of the micro batch that the rank works on, the first MOST_ROWS of them; of a rank that stands still."""
        (count,) = _WORD.unpack_from(self._map, _ROWS_AT)
        count = min(count, MOST_ROWS)
        return list(_words(count).unpack_from(self._map, _ROWS_AT + _WORD.size))

    def ask(self) -> int:
        """Asks the rank's second thread for the flight recorder's dump; gives the request's number. See `Beat.answered`."""
        self._requests += 1
        os.ftruncate(self.answers_fd, 0)
        _WORD.pack_into(self._map, _REQUEST_AT, self._requests)
        return self._requests

    def answer(self) -> bytes:
        """What the rank has left in answer to the last request."""
        return os.pread(self.answers_fd, os.fstat(self.answers_fd).st_size, 0)

    def stacks(self, *, since: int = 0) -> bytes:
        """What faulthandler has written after the first `since` bytes."""
        return os.pread(self.stacks_fd, max(0, self.stacks_bytes - since), since)

    @property
    def stacks_bytes(self) -> int:
        """How much faulthandler has written in all."""
        return os.fstat(self.stacks_fd).st_size

    def close(self) -> None:
        """Gives the memory back."""
        self._map.close()
        for fd in self.fds:
            os.close(fd)


def read_beat(memory: "mmap.mmap | bytearray") -> Beat | None:
    """What a record says; None where nothing was written, or where it changes in every one of some readings."""
    main = _newest(memory, _MAIN, _MAIN_AT)
    if main is None or main[0] == 0:
        return None
    pulse = _newest(memory, _PULSE, _PULSE_AT) or (0, 0, 0, 0)
    (collections,) = _WORD.unpack_from(memory, _COLLECTIONS_AT)
    # Each of these is whole; together they need not be.
    changes, begun, pending, still_ns, is_foreign = _GROUPS.unpack_from(memory, _GROUPS_AT)
    return Beat(
        version=main[0] + collections + changes, begun=begun, pending=pending, still_s=still_ns / 1e9, is_foreign=is_foreign > 0, at_ns=main[1], phase=PHASES[main[2] % len(PHASES)].name, kind=KINDS[main[3] % len(KINDS)],
        step=main[4], micro=main[5], comm=main[6], elements=main[7], done=main[8], total=main[9], digest=main[10],
        shares_s=(main[11] / 1e9, main[12] / 1e9, main[13] / 1e9, main[14] / 1e9),
        times=PhaseTimes(main[15], main[16] / 1e9, main[17] / 1e9), pulse_ns=pulse[1], answered=pulse[2],
    )  # fmt: skip


def _newest(
    memory: "mmap.mmap | bytearray", form: struct.Struct, slots: tuple[int, int]
) -> tuple[int, ...] | None:
    """The newest record that is whole; None where both slots were written anew in every reading."""
    for _ in range(_READINGS):
        found = [(form.unpack_from(memory, slot), slot) for slot in slots]
        record, slot = max(found, key=_number_if_whole)
        if record[0] == record[-1] and form.unpack_from(memory, slot) == record:
            return record
    return None


def _number_if_whole(found: tuple[tuple[int, ...], int]) -> int:
    record, _ = found
    return record[0] if record[0] == record[-1] else -1


@functools.cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"={count}Q")


class Beats:
    """A rank's end. The methods are for its main thread, and cost less than a microsecond: see bench/watch_cost.py.

    Attributes:
        step: the optimizer step that is worked on.
    """

    def __init__(self, memory: "mmap.mmap | bytearray | None" = None) -> None:
        """Begins in phase "start".

        Args:
            memory: RECORD_BYTES of it; without any, as under a debugger, nobody reads what is written.
        """
        self._memory = memory if memory is not None else bytearray(RECORD_BYTES)
        self.step = 0
        self._version = 0
        self._phase = self._kind = self._micro = self._comm = self._elements = self._done = self._total = 0
        self._digest = 0
        self._shares = [0, 0, 0, 0]
        self._times = [[0, 0, 0] for _ in PHASES]
        self._changes = self._begun = 0
        self._is_first = True
        self._waiting = _Waiting(self)
        self._last = time.monotonic_ns()
        self._write(self._last)

    @classmethod
    def inherited(cls, record_fd: int) -> Self:
        """On the memory that the front gave."""
        return cls(mmap.mmap(record_fd, RECORD_BYTES))

    @property
    def written(self) -> int:
        """How often the main thread has beaten."""
        return self._version

    @property
    def phase(self) -> str:
        """What the rank is doing."""
        return PHASES[self._phase].name

    def enter(self, name: str, *, done: int = 0, total: int = 0) -> None:
        """The rank does something else now, or has come further in what it does."""
        self._done, self._total = done, total
        self._change(phase_named(name))

    def progress(self, done: int) -> None:
        """The rank has come further in what it does. How long that lasts as a rule is not learnt from it: a slow disk may soon be slower."""
        self._done = done
        self._write(time.monotonic_ns())

    def begin_step(self, step: int) -> None:
        """An optimizer step begins. The first of a start is not counted: it is slower, for reasons that are no trouble."""
        self._is_first = self.step == 0
        self.step, self._micro, self._digest = step, 0, 0
        self._done = self._total = 0

    def note_batch(self, sequences: list[int]) -> None:
        """The sequences of the step's global batch are known: the same on all ranks, if all is well."""
        self._digest = hash(tuple(sequences)) & _U64  # of integers: the same in all processes

    def begin_micro(self, sequences: list[int]) -> None:
        """A micro step begins, with these sequences."""
        self._micro += 1
        count = min(len(sequences), MOST_ROWS)
        _words(count + 1).pack_into(self._memory, _ROWS_AT, count, *sequences[:count])
        self._change(_DATA)

    def begin_collective(self, kind: str, elements: int) -> None:
        """A collective is begun, and not waited for yet."""
        self._comm += 1
        self._kind, self._elements = KINDS.index(kind), elements
        self._write(time.monotonic_ns())

    def waiting(self) -> "_Waiting":
        """While the rank waits in a collective; afterwards it does again what it did. For `with`, and not inside of itself."""
        return self._waiting

    def wait_in(self, kind: int, elements: int) -> int:
        """The main thread goes into a collective and waits there, KINDS[kind] of so many elements; gives what `come_back` needs.

        The same as begin_collective and waiting in one record, for programs that begin very many.
        """
        before = self._phase
        self._comm += 1
        self._kind, self._elements = kind, elements
        self._change(_COMM)
        return before

    def come_back(self, before: int) -> None:
        """It is over, and the rank does again what it did."""
        self._change(before)

    def take_batch(self) -> None:
        """A batch of the step has been taken from a loader, in a program whose rows nobody here knows."""
        self._micro += 1

    def note_groups(self, *, begun: int, pending: int, still_ns: int) -> None:
        """What a second thread of somebody else's program has found: see Beat. For one thread, which may be another than the main one."""
        self._changes += begun != self._begun
        self._begun = begun
        _GROUPS.pack_into(self._memory, _GROUPS_AT, self._changes, begun, pending, still_ns, 1)

    def _change(self, phase: int) -> None:
        now = time.monotonic_ns()
        left = self._phase
        if not self._is_first or not _IN_STEP[left]:
            passed = now - self._last
            self._shares[_SHARE_OF[left]] += passed
            times = self._times[left]
            times[0] += 1
            times[1] += passed
            if passed > times[2]:
                times[2] = passed
        self._last = now
        self._phase = phase
        self._write(now)

    def _write(self, now: int) -> None:
        # Nothing here makes a container: so no garbage collection, and no other beat, begins between the number and the record.
        number = self._version = self._version + 1
        data, compute, comm, other = self._shares
        count, total, longest = self._times[self._phase]
        _MAIN.pack_into(
            self._memory, _MAIN_AT[number & 1], number, now, self._phase, self._kind, self.step, self._micro, self._comm, self._elements,
            self._done, self._total, self._digest, data, compute, comm, other, count, total, longest, number,
        )  # fmt: skip

    def pulse(self, answer: Callable[[], bytes] | None = None, *, answers_fd: int | None = None) -> "Pulse":
        """The second thread, which has not begun yet; see Pulse."""
        return Pulse(self._memory, answer, answers_fd)


class _Waiting:
    """The phase "comm", for as long as a `with` lasts."""

    __slots__ = ("_beats", "_before")

    def __init__(self, beats: Beats) -> None:
        self._beats = beats
        self._before = 0

    def __enter__(self) -> None:
        self._before = self._beats._phase  # noqa: SLF001 - of this module
        self._beats._change(_COMM)  # noqa: SLF001

    def __exit__(self, error: object, *_: object) -> None:
        if (
            error is None
        ):  # a collective that fails is where the rank ends, and its last sign of life says which
            self._beats._change(self._before)  # noqa: SLF001


class Pulse:
    """The second thread of a rank: it shows that the interpreter runs, and leaves what the front asks for. Ends with the process."""

    def __init__(
        self, memory: "mmap.mmap | bytearray", answer: Callable[[], bytes] | None, answers_fd: int | None
    ) -> None:
        self._memory = memory
        self._answers_fd = answers_fd
        self.answer = answer
        self._number = self._asked = self._answered = 0

    def start(self) -> None:
        """Begins; before torch is loaded, so that also that is seen."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        seen = (0, 0)
        while True:
            number = self._number = self._number + 1
            (asked,) = _WORD.unpack_from(self._memory, _REQUEST_AT)
            if asked != self._asked and self._asked == self._answered:
                self._asked = asked
                # Where the recorder's lock is held for ever, the pulse goes on.
                threading.Thread(target=self._leave_answer, args=(asked,), name="answer", daemon=True).start()
            _PULSE.pack_into(
                self._memory, _PULSE_AT[number & 1], number, time.monotonic_ns(), self._answered, number
            )
            before, seen = seen, self._beats()
            time.sleep(PULSE_S if seen == before else RESTING_S)

    def _beats(self) -> tuple[int, int]:
        """The numbers in both slots of the main record: others after every beat."""
        first, second = _MAIN_AT
        return _WORD.unpack_from(self._memory, first)[0], _WORD.unpack_from(self._memory, second)[0]

    def _leave_answer(self, asked: int) -> None:
        if self.answer is not None and self._answers_fd is not None:
            try:
                data = self.answer()
            except Exception as error:  # noqa: BLE001 - what is asked for in trouble must not make more of it
                data = f'{{"error": "{type(error).__name__}"}}'.encode()
            os.ftruncate(self._answers_fd, 0)  # of one that came late
            os.pwrite(self._answers_fd, data, 0)
        self._answered = asked


def beat_while_collecting(beats: Beats) -> Callable[[str, dict[str, Any]], None]:
    """A callback for gc.callbacks: a full collection, which may take seconds with many objects, is a sign of life at both its ends.

    It has a word of its own, since it may come while the main thread is about to write its record. One in another thread is none of the
    main thread's.
    """
    main_thread = threading.main_thread().ident
    count = 0

    def heard(moment: str, facts: dict[str, Any]) -> None:
        nonlocal count
        if facts.get("generation") == 2 and threading.get_ident() == main_thread:
            count += 1
            _WORD.pack_into(beats._memory, _COLLECTIONS_AT, count)  # noqa: SLF001 - of this module
        del moment

    gc.callbacks.append(heard)
    return heard
