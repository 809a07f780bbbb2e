"""The front's end of a rank's record: what its signs of life say, and what it is asked for. See unisono.watch.beat."""

import mmap
import os
import signal
import struct
from dataclasses import dataclass
from typing import Self

from unisono.watch.beat import (
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
    words,
)

_READINGS = 20


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Observed durations between heartbeats in a phase, without those of the first step. Seconds."""

    count: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat as read from a rank's record.

    Attributes:
        version: grows with every beat of the main thread, at both ends of a full garbage collection in it, and with torch's own count of
            collectives where a second thread writes that.
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
        begun: collectives begun in all process groups, by torch's own count, including those not called from Python.
        pending: how many of them are not completed; counted once the main thread has been silent for a second.
        still_s: seconds in which the process and its children used no CPU and did no I/O.
        is_foreign: whether the rank belongs to a foreign program; see unisono.watch.verdicts.
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
    """The front's end of one rank's record, with the files for stacks and answers. They have no path, so nothing is left behind.

    Attributes:
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
        self.record_fd, self.stacks_fd, self.answers_fd = record_fd, stacks_fd, answers_fd
        self._requests = 0

    @property
    def fds(self) -> tuple[int, int, int]:
        """For the rank, in the order of `Beats.inherited`."""
        return self.record_fd, self.stacks_fd, self.answers_fd

    def read(self) -> Beat | None:
        """The current heartbeat; None before the first, or if the record changes faster than it can be read."""
        return read_beat(self._map)

    def rows(self) -> list[int]:
        """The sequences of the current micro batch, at most MOST_ROWS; valid for a rank that is stalled."""
        (count,) = WORD.unpack_from(self._map, ROWS_AT)
        count = min(count, MOST_ROWS)
        return list(words(count).unpack_from(self._map, ROWS_AT + WORD.size))

    def ask(self) -> int:
        """Requests the flight recorder's dump from the rank's second thread; returns the request's number. See `Beat.answered`."""
        self._requests += 1
        os.ftruncate(self.answers_fd, 0)
        WORD.pack_into(self._map, REQUEST_AT, self._requests)
        return self._requests

    def answer(self) -> bytes:
        """The rank's answer to the last request."""
        return os.pread(self.answers_fd, os.fstat(self.answers_fd).st_size, 0)

    def stacks(self, *, since: int = 0) -> bytes:
        """faulthandler's output after the first `since` bytes."""
        return os.pread(self.stacks_fd, max(0, self.stacks_bytes - since), since)

    @property
    def stacks_bytes(self) -> int:
        """Size of faulthandler's output."""
        return os.fstat(self.stacks_fd).st_size

    def close(self) -> None:
        """Releases the memory."""
        self._map.close()
        for fd in self.fds:
            os.close(fd)


def read_beat(memory: "mmap.mmap | bytearray") -> Beat | None:
    """The heartbeat in a record; None if nothing was written, or if it changed in each of several readings."""
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
        found = [(form.unpack_from(memory, slot), slot) for slot in slots]
        record, slot = max(found, key=_number_if_whole)
        if record[0] == record[-1] and form.unpack_from(memory, slot) == record:
            return record
    return None


def _number_if_whole(found: tuple[tuple[int, ...], int]) -> int:
    record, _ = found
    return record[0] if record[0] == record[-1] else -1
