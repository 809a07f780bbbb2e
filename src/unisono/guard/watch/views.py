"""What the front sees of its ranks: their records, with what they are asked for; and the views that
the judge reads, and what it reports as long as the run may continue.
"""

import mmap
import os
import signal
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

from unisono.base.causes import Verdict
from unisono.guard.places.ranks import RankPlace
from unisono.guard.watch import (
    COLLECTIONS_AT,
    GROUPS,
    GROUPS_AT,
    KINDS,
    MAIN,
    MAIN_AT,
    MOST_ROWS,
    PHASES,
    PULSE,
    PULSE_AT,
    RECORD_BYTES,
    REQUEST_AT,
    ROWS_AT,
    WORD,
    phase_named,
    words,
)

_READINGS = 20


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Observed durations between heartbeats in a phase, without those of the first step.

    Seconds.
    """

    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat as read from a rank's record.

    Attributes:
        version: grows with every beat of the main thread, at both ends of a full garbage collection
            in it, and with torch's own count of collectives where a second thread writes that.
        at_ns: of that beat, monotonic.
        step: the current optimizer step, from 1; 0 before.
        micro: the micro step in it, from 1.
        comm: number of collectives begun through unisono's group.
        kind: of the last one.
        elements: of the last one's tensor.
        digest: of the sequences of the step's global batch.
        shares_s: seconds in data, compute, comm and other, since the second step of this start.
        pulse_ns: time of the second thread's last pulse, monotonic; 0: none.
        answered: the last request that the second thread has answered.
        begun: collectives begun in all process groups, by torch's own count, including those not
            called from Python.
        pending: how many of them are not completed; counted once the main thread has been silent
            for a second.
        still_s: seconds in which the process and its children used no CPU and did no I/O.
        is_foreign: whether the rank belongs to a foreign program; see unisono.guard.watch.verdicts.
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


class Glance(NamedTuple):
    """A part of a heartbeat.

    Attributes:
        visit: how often the phase has been left since the first step: another value is another stay
            in the same phase.
        at_ns: of the heartbeat, monotonic.
        shares_s: seconds in data, compute, comm and other, as in Beat.
    """

    phase: str
    visit: int
    step: int
    at_ns: int
    shares_s: tuple[float, float, float, float]


class StacksFile:
    """Where faulthandler writes in a process, as read by the front."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self.fd).st_size

    def read(self, *, since: int = 0) -> bytes:
        """What was written after the first `since` bytes."""
        return os.pread(self.fd, max(0, self.size - since), since)

    def close(self) -> None:
        """Closes it; the process is not affected."""
        os.close(self.fd)


@dataclass(frozen=True)
class WorkerProcess:
    """A process that a rank has started, e.g. of a loader, and which shows its stack at a signal.

    Attributes:
        signal: at which faulthandler writes.
        stacks: where it writes; to be closed.
    """

    pid: int
    signal: int
    stacks: StacksFile


class BeatMemory:
    """The front's end of one rank's record, with the files for stacks and answers.

    They have no path, so nothing is left behind.

    Attributes:
        stacks: faulthandler writes there.
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
        """A reader of files that a rank of a foreign program created; they are closed with it.

        Raises:
            ValueError: if the record is too short.
        """
        memory = cls.__new__(cls)
        memory._hold(record_fd, stacks_fd, answers_fd)  # noqa: SLF001 - of this class
        return memory

    def _hold(self, record_fd: int, stacks_fd: int, answers_fd: int) -> None:
        self._map = mmap.mmap(record_fd, RECORD_BYTES)
        self.record_fd, self.stacks, self.answers_fd = record_fd, StacksFile(stacks_fd), answers_fd
        self._requests = 0

    @property
    def fds(self) -> tuple[int, int, int]:
        """For the rank, in the order of `Beats.inherited`."""
        return self.record_fd, self.stacks.fd, self.answers_fd

    def read(self) -> Beat | None:
        """The current heartbeat; None before the first, or if the record changes faster than it can
        be read.
        """
        return read_beat(self._map)

    def glance(self) -> "Glance | None":
        """The few values of the main thread's heartbeat that a timeline needs; None before the
        first.

        A third of the time of `read`.
        """
        main = _newest(self._map, MAIN, MAIN_AT)
        if main is None or main[0] == 0:
            return None
        shares_s = (main[11] / 1e9, main[12] / 1e9, main[13] / 1e9, main[14] / 1e9)
        return Glance(PHASES[main[2] % len(PHASES)].name, main[15], main[4], main[1], shares_s)

    def rows(self) -> list[int]:
        """The sequences of the current micro batch, at most MOST_ROWS; valid for a rank that is
        stalled.
        """
        (count,) = WORD.unpack_from(self._map, ROWS_AT)
        count = min(count, MOST_ROWS)
        return list(words(count).unpack_from(self._map, ROWS_AT + WORD.size))

    def ask(self) -> int:
        """Requests the flight recorder's dump from the rank's second thread; returns the request's
        number.

        See `Beat.answered`.
        """
        self._requests += 1
        os.ftruncate(self.answers_fd, 0)
        WORD.pack_into(self._map, REQUEST_AT, self._requests)
        return self._requests

    def answer(self) -> bytes:
        """The rank's answer to the last request."""
        return os.pread(self.answers_fd, os.fstat(self.answers_fd).st_size, 0)

    def close(self) -> None:
        """Releases the memory."""
        self._map.close()
        for fd in self.fds:
            os.close(fd)


def read_beat(memory: "mmap.mmap | bytearray") -> Beat | None:
    """The heartbeat in a record; None if nothing was written, or if it changed in each of several
    readings.
    """
    main = _newest(memory, MAIN, MAIN_AT)
    if main is None or main[0] == 0:
        return None
    pulse = _newest(memory, PULSE, PULSE_AT) or (0, 0, 0, 0)
    (collections,) = WORD.unpack_from(memory, COLLECTIONS_AT)
    # Each of these is whole; together they need not be.
    changes, begun, pending, still_ns, is_foreign = GROUPS.unpack_from(memory, GROUPS_AT)
    return Beat(
        version=main[0] + collections + changes,
        begun=begun,
        pending=pending,
        still_s=still_ns / 1e9,
        is_foreign=is_foreign > 0,
        at_ns=main[1],
        phase=PHASES[main[2] % len(PHASES)].name,
        kind=KINDS[main[3] % len(KINDS)],
        step=main[4],
        micro=main[5],
        comm=main[6],
        elements=main[7],
        done=main[8],
        total=main[9],
        digest=main[10],
        shares_s=(main[11] / 1e9, main[12] / 1e9, main[13] / 1e9, main[14] / 1e9),
        times=PhaseTimes(main[15], main[16] / 1e9, main[17] / 1e9),
        pulse_ns=pulse[1],
        answered=pulse[2],
    )


def _newest(
    memory: "mmap.mmap | bytearray", form: struct.Struct, slots: tuple[int, int]
) -> tuple[int, ...] | None:
    """The newest complete record; None if both slots were rewritten in every reading."""
    for _ in range(_READINGS):
        whole = [(record, slot) for slot in slots if (record := _whole(memory, form, slot)) is not None]
        if whole:
            record, slot = max(whole)
            if (
                WORD.unpack_from(memory, slot)[0] == record[0]
            ):  # otherwise the slot that was read later may have held a newer one
                return record
    return None


def _whole(memory: "mmap.mmap | bytearray", form: struct.Struct, slot: int) -> tuple[int, ...] | None:
    """The record in a slot; None if the writer is, or was while it was read, in the middle of
    it.

    The reverse of the writer's order: where the last number is there, all values before it are; and
    where the first number is the same after the values were read, the next record in this slot had
    not begun.
    """
    (last,) = WORD.unpack_from(memory, slot + form.size - WORD.size)
    record = form.unpack_from(memory, slot)
    (first,) = WORD.unpack_from(memory, slot)
    return record if first == last else None


@dataclass(frozen=True, slots=True)
class ProcessView:
    """State of a rank's process as reported by the system.

    Attributes:
        state: of its main thread, as in ps(1): R, S, D, T, Z; an empty string if it is gone or
            unknown.
        waits_in: the kernel function that the main thread waits in, or an empty string.
        cpu_s: CPU seconds of all its threads.
        children: states of its child processes, e.g. loaders: one letter each.
        gpu_percent: utilization of its device; None without one.
        reads_input: whether its main thread waits for a terminal or stdin.
    """

    state: str = ""
    waits_in: str = ""
    cpu_s: float = 0.0
    children: str = ""
    gpu_percent: int | None = None
    reads_input: bool = False


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank as seen by its node's front.

    Attributes:
        beat: its last heartbeat; None before the first.
        idle_s: seconds since the last heartbeat of the main thread, by the clock of the front,
            without time in which the front was stopped.
        pulse_idle_s: the same for its second thread.
        has_ended: whether its process is gone or about to exit: it has refused or crashed.
        reported_result: whether it has reported its result.
    """

    rank: int
    node_rank: int
    beat: Beat | None
    idle_s: float
    pulse_idle_s: float
    process: ProcessView
    has_ended: bool = False
    reported_result: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for others: by its phase; for a foreign program, which has few phases,
        also by pending collectives.

        These include collectives that are not called from Python, as in DDP's backward.
        """
        if self.beat is None:
            return False
        return PHASES[phase_named(self.beat.phase)].waits or (self.beat.is_foreign and self.beat.pending > 0)

    def to_json(self) -> dict[str, object]:
        """A JSON object for the head."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the result of to_json.

        Raises:
            KeyError, TypeError, ValueError: if it is not such an object.
        """
        beat = value["beat"]
        if beat is not None:
            beat = Beat(
                **{
                    **beat,
                    "shares_s": tuple(float(share) for share in beat["shares_s"]),
                    "times": PhaseTimes(**beat["times"]),
                }
            )
        return cls(
            rank=int(value["rank"]),
            node_rank=int(value["node_rank"]),
            beat=beat,
            idle_s=float(value["idle_s"]),
            pulse_idle_s=float(value["pulse_idle_s"]),
            process=ProcessView(**value["process"]),
            has_ended=bool(value["has_ended"]),
            reported_result=bool(value["reported_result"]),
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as seen by the head.

    Attributes:
        silent_s: seconds since its last message, by the head's clock; 0 for the head's own node.
        links: connections between ranks with unacknowledged data, as reported by this node's
            kernel: "node 0 (a) → 10.0.0.3:41233: 4 retransmissions".
    """

    node_rank: int
    host: str
    silent_s: float = 0.0
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of torch's flight recorder.

    Attributes:
        group: of which process group.
        sizes: of its tensors, as "[[1000]]".
    """

    group: str
    number: int
    name: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number} {self.sizes}"


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """The stack of a process that a rank has started, as in Look."""

    pid: int
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Data collected from one rank after it was suspected, or while it waited for a suspected
    one.

    Attributes:
        stack: of its main thread, innermost call first, as "file:line in function"; empty if the
            process did not respond.
        how: the source of the stack: "faulthandler", "py-spy", or why there is none.
        begun: the last collective that began, from the flight recorder; None if unknown.
        completed: the number of the last completed one.
        recurs: whether an equal one began before.
        may_step: whether it can still reach the place where it makes its steps; None if unknown.
        note: other information for a person, e.g. a frozen cgroup.
        workers: processes that it has started, e.g. of its loader, if their stacks can be read.
        has_moved: whether the last collective is a later one than at the inspection before this.
    """

    rank: int
    stack: tuple[str, ...] = ()
    how: str = ""
    begun: Collective | None = None
    completed: int | None = None
    rows: tuple[int, ...] = ()
    note: str = ""
    recurs: bool = False
    may_step: bool | None = None
    workers: tuple[WorkerStack, ...] = ()
    has_moved: bool = False

    def after(self, before: "Look | None") -> "Look":
        """This one, compared with an earlier one of the same rank."""
        if before is None or before.begun is None:
            return self
        return replace(self, has_moved=before.begun != self.begun)

    def to_json(self) -> dict[str, object]:
        """A JSON object for the head."""
        begun = self.begun
        return {
            "rank": self.rank,
            "stack": list(self.stack),
            "how": self.how,
            "completed": self.completed,
            "rows": list(self.rows),
            "note": self.note,
            "recurs": self.recurs,
            "may_step": self.may_step,
            "workers": [{"pid": worker.pid, "stack": list(worker.stack)} for worker in self.workers],
            "begun": None
            if begun is None
            else {"group": begun.group, "number": begun.number, "name": begun.name, "sizes": begun.sizes},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the result of to_json.

        Raises:
            KeyError, TypeError, ValueError: if it is not such an object.
        """
        begun, completed, may_step = value["begun"], value["completed"], value.get("may_step")
        return cls(
            rank=int(value["rank"]),
            stack=tuple(map(str, value["stack"])),
            how=str(value["how"]),
            rows=tuple(map(int, value["rows"])),
            note=str(value["note"]),
            recurs=bool(value.get("recurs")),
            may_step=None if may_step is None else bool(may_step),
            workers=tuple(
                WorkerStack(int(worker["pid"]), tuple(map(str, worker["stack"])))
                for worker in value.get("workers", ())
            ),
            completed=None if completed is None else int(completed),
            begun=None
            if begun is None
            else Collective(
                str(begun["group"]), int(begun["number"]), str(begun["name"]), str(begun["sizes"])
            ),
        )


@dataclass(frozen=True)
class RunView:
    """The run at one moment.

    Attributes:
        places: all ranks of the plan.
        nodes: of a job of several nodes, including the head's.
        looks: data of the ranks that were inspected since the last progress.
    """

    places: Mapping[int, RankPlace]
    views: Mapping[int, RankView]
    nodes: Mapping[int, NodeView] = field(default_factory=dict)
    looks: Mapping[int, Look] = field(default_factory=dict)
    total_steps: int = 0


@dataclass(frozen=True)
class Suspicion:
    """A suspected stall; the run continues.

    Attributes:
        verdict: the preliminary verdict. It does not stop the run.
        since_s: seconds without progress.
        is_named: whether it is certain enough to be reported with cause and rank; before that, only
            that ranks are inspected is reported.
        ends_in_s: seconds without progress after which the run is stopped; None if it is not
            stopped for that.
        to_inspect: ranks to inspect: their stacks and flight recorders.
        is_quiet: whether it is normal that a rank is silent for so long, and only the inspection
            can show a stall: then the inspection is not reported.
    """

    verdict: Verdict
    since_s: float
    is_named: bool
    ends_in_s: float | None
    to_inspect: tuple[int, ...] = ()
    is_quiet: bool = False


_WORKS_S = 5.0  # in which a rank of a foreign program is never still
_WORK_SHARE = 0.1  # of a processor; threads of unisono, gloo and loggers use up to a hundredth
_STILL_S = 2.0  # between two measurements of one that works


class Episode:
    """A suspected stall: it lasts until one of its ranks makes progress, not only until it looks
    different for a moment.

    Attributes:
        suspicion: the latest.
        reported_s: its age at the last report, in seconds; None before the first.
        is_announced: whether it was reported that ranks are inspected.
    """

    def __init__(self, suspicion: Suspicion) -> None:
        """Begins with the first suspicion."""
        self.suspicion = suspicion
        self.is_announced = False
        self.reported_s: float | None = None
        self._idle_s: dict[int, float] = {}
        self._works_since: dict[int, tuple[float, float]] = {}  # now, CPU seconds

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose progress ends it."""
        return self.suspicion.verdict.ranks or self.suspicion.to_inspect

    def has_moved(self, views: Mapping[int, RankView], now: float) -> bool:
        """Whether one of its ranks has made progress: a heartbeat, or continuous work.

        Call it with every look at the ranks; `now` in seconds.
        """
        current = [views[rank] for rank in self.ranks if rank in views]
        beaten, working = map(self._has_beaten, current), (self._works(view, now) for view in current)
        return sum(beaten) + sum(working) > 0  # each of them is asked: they note what they see

    def has_ended(self, views: Mapping[int, RankView]) -> bool:
        """Whether one of its ranks has ended."""
        return any(
            views[rank].has_ended or views[rank].reported_result for rank in self.ranks if rank in views
        )

    def take(self, suspicion: Suspicion) -> None:
        """A later suspicion. One that is certain stays certain."""
        if suspicion.is_named or not self.suspicion.is_named:
            self.suspicion = suspicion

    @property
    def is_due(self) -> bool:
        """Whether it is to be reported: once its ranks are certain, and each time that its age has
        doubled.
        """
        if not self.suspicion.is_named:
            return False
        return self.reported_s is None or self.suspicion.since_s >= 2 * self.reported_s

    def _has_beaten(self, view: RankView) -> bool:
        before = self._idle_s.get(view.rank, view.idle_s)
        self._idle_s[view.rank] = view.idle_s
        return view.idle_s < before

    def _works(self, view: RankView, now: float) -> bool:
        if view.beat is None or not view.beat.is_foreign or view.waits or view.beat.still_s >= _STILL_S:
            self._works_since.pop(view.rank, None)
            return False
        since, cpu_s = self._works_since.setdefault(view.rank, (now, view.process.cpu_s))
        return now - since >= _WORKS_S and view.process.cpu_s - cpu_s >= _WORK_SHARE * (now - since)
