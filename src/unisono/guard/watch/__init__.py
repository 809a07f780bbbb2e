"""Detects stalls while a run is active, and finds the rank that causes them.

Here is a rank's heartbeat: the layout of its record, its phases, and the rank's own end that writes
them. It is of the standard library alone, since a rank of a foreign program imports nothing else of
this room.

There is no lock. Each record has two slots that are written in turn, and each begins and ends with
its number. The writer writes the first number, the values and the last number, each by a call of
its own, since struct clears all bytes of a call before it writes any. The reader reads the last
number, the values and the first number, and takes the newest slot whose two numbers are equal. So a
writer that was stopped or killed in the middle of a slot leaves the record before, and the memory
outlives the rank: it can be read after its death.
"""

import functools
import gc
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

RECORD_BYTES = 4096
# All are of 8 bytes, aligned, in the machine's order: so each is read and written at once.
MAIN = struct.Struct("=19Q")
# number, monotonic ns, phase, kind, step, micro step, collectives begun, elements of the last,
# done, total, digest of the batch, ns in data, compute, comm, other; how often the phase was seen,
# ns together, ns of the longest; number again
PULSE = struct.Struct("=4Q")  # number, monotonic ns, answered request, number again
WORD = struct.Struct("=Q")
_MAIN_VALUES, _PULSE_VALUES = struct.Struct("=17Q"), struct.Struct("=2Q")  # between the two numbers
MAIN_AT, PULSE_AT = (0, 256), (512, 576)
# changes, collectives begun in all groups, how many of them are pending, ns without use of a
# processor, whether of a foreign program
GROUPS = struct.Struct("=5Q")
REQUEST_AT, COLLECTIONS_AT, GROUPS_AT, ROWS_AT = 640, 704, 768, 1024
MOST_ROWS = (RECORD_BYTES - ROWS_AT - WORD.size) // 8
KINDS = (
    "none",
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather",
    "reduce_scatter",
    "other",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
)


@functools.cache
def words(count: int) -> struct.Struct:
    """The struct of `count` consecutive words."""
    return struct.Struct(f"={count}Q")


Share = Literal["data", "compute", "comm", "other"]
"""The part of a step that its time counts as."""


@dataclass(frozen=True, slots=True)
class RankPhase:
    """An activity of a rank.

    Attributes:
        name: as in messages, verdicts and the table of ranks.
        text: for people: "rank 1 is …".
        share: the part of a step's time.
        in_step: whether it is part of an optimizer step and recurs every few milliseconds or
            seconds; the duration of others is unknown until they have been observed.
        waits: whether the rank waits for others in it, and so is a victim if it does not return.
    """

    name: str
    text: str
    share: Share = "other"
    in_step: bool = False
    waits: bool = False


PHASES: tuple[RankPhase, ...] = (
    RankPhase("start", "starting"),
    RankPhase("objective", "executing the file of the objective"),
    RankPhase("load_model", "loading the model"),
    RankPhase("load_data", "opening the data"),
    RankPhase("agree.ranks", "waiting until all ranks agree", waits=True),
    RankPhase("join", "joining the other ranks", waits=True),
    RankPhase("resume", "reading the checkpoint"),
    RankPhase("reference", "computing the reference's log-probabilities"),
    RankPhase("rehearse", "trying the longest batch"),
    RankPhase("data", "reading its batch", share="data", in_step=True),
    RankPhase("sync", "sending its weights to the server that samples", in_step=True),
    RankPhase("rollout", "sampling answers", share="compute", in_step=True),
    RankPhase("reward", "waiting for rewards", share="data", in_step=True),
    RankPhase("compute", "in forward and backward", share="compute", in_step=True),
    RankPhase("comm", "in a collective", share="comm", in_step=True, waits=True),
    RankPhase("update", "updating the weights", share="compute", in_step=True),
    RankPhase("log", "writing metrics", in_step=True),
    RankPhase("evaluate", "evaluating"),
    RankPhase("sample", "writing sample answers"),
    RankPhase("save", "saving a checkpoint"),
    RankPhase("finish", "writing the result"),
    RankPhase("close", "leaving"),
    # Of a foreign program only is known that it is not in a collective that was called from Python.
    RankPhase("program", "in the program's own code", in_step=True),
)

_NUMBERS = {phase.name: number for number, phase in enumerate(PHASES)}


def phase_named(name: str) -> int:
    """The number of a phase. Unknown names, e.g. a phase of a newer worker, count as "start".

    Reporting must never make a rank fail.
    """
    return _NUMBERS.get(name, 0)


PULSE_S, RESTING_S = 0.1, 0.5
_SHARES = ("data", "compute", "comm", "other")
_SHARE_OF = tuple(_SHARES.index(phase.share) for phase in PHASES)
_IN_STEP = tuple(phase.in_step for phase in PHASES)
_COMM = phase_named("comm")
_DATA = phase_named("data")
_U64 = (1 << 64) - 1
# A lookup per call would allocate an object.
_pack_values, _pack_number = _MAIN_VALUES.pack_into, WORD.pack_into
_LAST_AT = MAIN.size - WORD.size


class Beats:
    """Writes a rank's heartbeat.

    Only its main thread calls the methods, which cost less than a microsecond: see
    bench/watch_cost.py.
    """

    def __init__(self, memory: "mmap.mmap | bytearray | None" = None) -> None:
        """Starts in phase "start".

        Args:
            memory: RECORD_BYTES of it; without it, as under a debugger, the heartbeat is not read.
        """
        self._memory = memory if memory is not None else bytearray(RECORD_BYTES)
        self.step = 0
        self._version = 0
        self._phase = self._kind = self._micro = self._comm = self._elements = self._done = self._total = 0
        self._digest = 0
        self._shares = [0, 0, 0, 0]
        self._times = [[0, 0, 0] for _ in PHASES]
        self._changes = self._begun = 0
        self._requests = (0, 0)  # of the front, as they were at the last two measurements
        self._is_first = True
        self._waiting = _Waiting(self)
        self._last = time.monotonic_ns()
        self._write(self._last)

    @classmethod
    def inherited(cls, record_fd: int) -> Self:
        """A writer on the memory that the front passed."""
        return cls(mmap.mmap(record_fd, RECORD_BYTES))

    @property
    def written(self) -> int:
        """Number of heartbeats of the main thread."""
        return self._version

    @property
    def phase(self) -> str:
        """The current phase."""
        return PHASES[self._phase].name

    def enter(self, name: str, *, done: int = 0, total: int = 0) -> None:
        """Enters a phase, or reports progress in it."""
        self._done, self._total = done, total
        self._change(phase_named(name))

    def progress(self, done: int) -> None:
        """Reports progress in the phase.

        Durations are not measured with it: a slow disk may soon be slower.

        The storage watch calls it, too, while the main thread is inside a file operation and cannot
        beat.
        """
        self._done = done
        self._write(time.monotonic_ns())

    def begin_step(self, step: int) -> None:
        """An optimizer step begins.

        The first after a start is not timed, since it is always slower.
        """
        self._is_first = self.step == 0
        self.step, self._micro, self._digest = step, 0, 0
        self._done = self._total = 0

    def note_batch(self, sequences: list[int]) -> None:
        """Records a digest of the step's global batch, which must be equal on all ranks."""
        self._digest = hash(tuple(sequences)) & _U64  # of integers: the same in all processes

    def begin_micro(self, sequences: list[int]) -> None:
        """A micro step begins, with these sequences."""
        self._micro += 1
        count = min(len(sequences), MOST_ROWS)
        words(count + 1).pack_into(self._memory, ROWS_AT, count, *sequences[:count])
        self._change(_DATA)

    def begin_collective(self, kind: str, elements: int) -> None:
        """A collective has begun and is not waited for yet."""
        self._comm += 1
        self._kind, self._elements = KINDS.index(kind), elements
        self._write(time.monotonic_ns())

    def waiting(self) -> "_Waiting":
        """A context manager for waiting in a collective; the previous phase is restored after it.

        Not reentrant.
        """
        return self._waiting

    def wait_in(self, kind: int, elements: int) -> int:
        """The main thread begins a collective, KINDS[kind] of `elements`, and waits in it; returns
        the argument of `come_back`.

        The same as begin_collective and waiting with one record, for programs with very many
        collectives.
        """
        before = self._phase
        self._comm += 1
        self._kind, self._elements = kind, elements
        self._change(_COMM)
        return before

    def come_back(self, before: int) -> None:
        """The collective is over; restores the previous phase."""
        self._change(before)

    def take_batch(self) -> None:
        """A batch of the step was read from a loader, in a program whose rows are unknown."""
        self._micro += 1

    def was_examined(self) -> bool:
        """Whether the front has requested stacks or a dump since the call before the last.

        Called by one thread, once per measurement.
        """
        (requested,) = WORD.unpack_from(self._memory, REQUEST_AT)
        (earlier, last), self._requests = self._requests, (self._requests[1], requested)
        return requested != earlier or requested != last

    def note_groups(self, *, begun: int, pending: int, still_ns: int) -> None:
        """Records what the sampling thread of a foreign program measured: see Beat.

        Called by one thread, not necessarily the main one.
        """
        self._changes += begun != self._begun
        self._begun = begun
        GROUPS.pack_into(self._memory, GROUPS_AT, self._changes, begun, pending, still_ns, 1)

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
        # Nothing here allocates a collectable object: so no garbage collection, and no other beat,
        # can start between the number and the record.
        number = self._version = self._version + 1
        data, compute, comm, other = self._shares
        count, total, longest = self._times[self._phase]
        memory, at = self._memory, MAIN_AT[number & 1]
        _pack_number(memory, at, number)
        _pack_values(
            memory,
            at + 8,
            now,
            self._phase,
            self._kind,
            self.step,
            self._micro,
            self._comm,
            self._elements,
            self._done,
            self._total,
            self._digest,
            data,
            compute,
            comm,
            other,
            count,
            total,
            longest,
        )
        _pack_number(memory, at + _LAST_AT, number)

    def pulse(self, answer: Callable[[], bytes] | None = None, *, answers_fd: int | None = None) -> "Pulse":
        """The second thread, not started yet; see Pulse."""
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
        # A rank usually exits at a collective that fails: the record keeps which one.
        if error is None:
            self._beats._change(self._before)  # noqa: SLF001


class Pulse:
    """The second thread of a rank: it shows that the interpreter runs, and answers requests of the
    front.

    A daemon thread.
    """

    def __init__(
        self, memory: "mmap.mmap | bytearray", answer: Callable[[], bytes] | None, answers_fd: int | None
    ) -> None:
        self._memory = memory
        self._answers_fd = answers_fd
        self.answer = answer
        self._number = self._requested = self._answered = 0

    def start(self) -> None:
        """Starts the thread; before torch is imported, so that this is observed, too."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def _run(self) -> None:
        seen = (0, 0)
        while True:
            number = self._number = self._number + 1
            (requested,) = WORD.unpack_from(self._memory, REQUEST_AT)
            if requested != self._requested and self._requested == self._answered:
                self._requested = requested
                # The pulse continues even if the recorder's lock is held forever.
                threading.Thread(
                    target=self._leave_answer, args=(requested,), name="answer", daemon=True
                ).start()
            at = PULSE_AT[number & 1]
            WORD.pack_into(self._memory, at, number)
            _PULSE_VALUES.pack_into(self._memory, at + WORD.size, time.monotonic_ns(), self._answered)
            WORD.pack_into(self._memory, at + PULSE.size - WORD.size, number)
            before, seen = seen, self._beats()
            time.sleep(PULSE_S if seen == before else RESTING_S)

    def _beats(self) -> tuple[int, int]:
        """The numbers in both slots of the main record, which change with every beat."""
        first, second = MAIN_AT
        return WORD.unpack_from(self._memory, first)[0], WORD.unpack_from(self._memory, second)[0]

    def _leave_answer(self, requested: int) -> None:
        if self.answer is not None and self._answers_fd is not None:
            try:
                data = self.answer()
            except Exception as error:  # noqa: BLE001
                # A request in trouble must not make more of it.
                data = f'{{"error": "{type(error).__name__}"}}'.encode()
            os.ftruncate(self._answers_fd, 0)  # removes a late answer to an earlier request
            os.pwrite(self._answers_fd, data, 0)
        self._answered = requested


def beat_while_collecting(beats: Beats) -> Callable[[str, dict[str, int]], None]:
    """A callback for gc.callbacks: a full collection, which may take seconds with many objects,
    counts as a heartbeat at its start and end.

    It has its own word in the record, since it may run while the main thread writes its record.
    Collections in other threads do not count.
    """
    main_thread = threading.main_thread().ident
    count = 0

    def on_collection(moment: str, facts: dict[str, int]) -> None:
        nonlocal count
        if facts.get("generation") == 2 and threading.get_ident() == main_thread:
            count += 1
            WORD.pack_into(beats._memory, COLLECTIONS_AT, count)  # noqa: SLF001 - of this module
        del moment

    gc.callbacks.append(on_collection)
    return on_collection
