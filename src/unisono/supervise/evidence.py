"""Evidence of a verdict: stacks, the flight recorder, the end of the log and the rows of a rank, collected and kept as files in the run's directory."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from unisono.causes import Evidence, Verdict
from unisono.errors import UnisonoError
from unisono.facts.processes import frozen_cgroup, has_handler, read_stat
from unisono.files import make_private_dir, open_plain, write_json, write_text
from unisono.rundir import RunDir
from unisono.supervise.child_process import ChildProcess, Programs
from unisono.supervise.task_process import how_it_ended, run_task
from unisono.text import one_line, plain, redact
from unisono.watch import PHASES, phase_named
from unisono.watch.rank_dumps import (
    main_thread_of_faulthandler,
    main_thread_of_py_spy,
    read_flight,
    shortened,
)
from unisono.watch.views import BeatMemory, Look

LOG_LINES = 20
MESSAGE_BYTES = 1 << 20
_STACKS_CHARS = 128 << 10
_FLIGHT_CHARS = 512 << 10
_LOG_BYTES = 16 << 10
_MOST_RANKS = 64
_ROWS_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RawEvidence:
    """The raw evidence of a rank, unparsed: people read it as files.

    Attributes:
        stacks: of all threads.
        flight: the flight recorder's dump, as JSON.
        log: the last lines of what it printed.
    """

    stacks: str = ""
    flight: str = ""
    log: str = ""

    def bounded(self) -> Self:
        """The same in bounded sizes, without control characters and without anything that looks like a secret."""
        return type(self)(
            stacks=_safe(self.stacks)[:_STACKS_CHARS],
            flight=shortened(_safe(self.flight), limit=_FLIGHT_CHARS),
            log=_safe(self.log)[-_LOG_BYTES:],
        )

    def to_json(self) -> dict[str, str]:
        """As a message for the head, at most 1 MiB; what is still too large is cut again."""
        found = self.bounded()
        value = {"stacks": found.stacks, "flight": found.flight, "log": found.log}
        if len(json.dumps(value)) > MESSAGE_BYTES:  # each character of some scripts takes six bytes
            value = {"stacks": found.stacks[: 64 << 10], "flight": "", "log": found.log}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the output of to_json, and bounds it again.

        Raises:
            KeyError, TypeError: if the value is not such an object.
        """
        return cls(str(value["stacks"]), str(value["flight"]), str(value["log"])).bounded()


def end_of_log(path: Path) -> str:
    """The last lines of a rank's log; empty if there is no log."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])


def keep_evidence(
    run: RunDir,
    verdict: Verdict,
    *,
    table: Path,
    raw: Mapping[int, RawEvidence],
    looks: Mapping[int, Look],
    programs: Programs | None = None,
) -> tuple[Evidence, ...]:
    """Writes the evidence that a verdict cites: stacks and flight recorder of all ranks, log and rows of the culprits.

    A second verdict of a run gets its own files. A full disk gives less evidence and no error. This takes up to 5 s, so the ranks are
    ended first.

    Args:
        verdict: whose `ranks` are the culprits.
        table: the plan's token table, `data.cache_dir`.
        raw: by rank.
        looks: by rank.
        programs: that run the task which looks up rows; tests pass different ones.
    """
    ranks = sorted(raw, key=lambda rank: (rank not in verdict.ranks, rank))[:_MOST_RANKS]
    files = _Files(run.evidence)
    for rank in ranks:
        files.text("stacks", rank, raw[rank].stacks)
        files.text("flight", rank, raw[rank].flight, suffix="json")
    for rank in verdict.ranks[:_MOST_RANKS]:
        files.text("log", rank, raw[rank].log if rank in raw else "")
        look = looks.get(rank)
        if look is not None and look.rows and _is_in_step(verdict.phase):
            rows = row_ids(table, look.rows, programs=programs)
            value = {
                "schema": 1,
                "rank": rank,
                "step": verdict.step,
                "sequences": list(look.rows),
                "rows": rows,
            }
            files.json("rows", rank, value)
    return tuple(files.cited(run.root))


def row_ids(table: Path, sequences: Sequence[int], *, programs: Programs | None = None) -> list[str]:
    """The sources of some training sequences, e.g. `train.jsonl:17`; empty if they cannot be found within 5 s."""
    request = {"table": str(table), "sequences": list(sequences)}
    with contextlib.suppress(UnisonoError, OSError):  # the sequences' numbers are written in any case
        return [
            str(row) for row in run_task("rows", request, programs=programs, silence_s=_ROWS_LIMIT_S)["rows"]
        ]
    return []


class _Files:
    """Files of one verdict; those of an earlier verdict keep their names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: list[tuple[Path, str]] = []
        with contextlib.suppress(OSError):
            make_private_dir(folder)
        self._number = 1
        while any(folder.glob(f"*-rank-?????{self._mark}.*")):
            self._number += 1

    @property
    def _mark(self) -> str:
        return f"-{self._number}" if self._number > 1 else ""

    def text(self, kind: str, rank: int, text: str, *, suffix: str = "txt") -> None:
        if text:
            path = self._path(kind, rank, suffix)
            with contextlib.suppress(OSError):
                write_text(path, text if text.endswith("\n") else text + "\n", mode=0o600)
                self._written.append((path, _CAPTIONS[kind].format(rank=rank)))

    def json(self, kind: str, rank: int, value: dict[str, Any]) -> None:
        path = self._path(kind, rank, "json")
        with contextlib.suppress(OSError):
            write_json(path, value, mode=0o600)
            self._written.append((path, _CAPTIONS[kind].format(rank=rank)))

    def cited(self, root: Path) -> Iterator[Evidence]:
        for path, caption in self._written:
            yield Evidence(where=str(path.relative_to(root)), text=caption)

    def _path(self, kind: str, rank: int, suffix: str) -> Path:
        return self._folder / f"{kind}-rank-{rank:05d}{self._mark}.{suffix}"


_CAPTIONS = {
    "stacks": "the Python stacks of all threads of rank {rank}",
    "flight": "the last collectives of rank {rank}, by torch's flight recorder",
    "log": f"the last {LOG_LINES} lines that rank {{rank}} printed",
    "rows": "the rows that rank {rank} worked on",
}


def _is_in_step(phase: str | None) -> bool:
    """Whether a rank works on rows in this phase; in other phases its memory still holds those of its last step."""
    return phase is not None and PHASES[phase_named(phase)].in_step


def _safe(text: str) -> str:
    return redact(plain(text))


LIMIT_S = 1.5
_ANSWERS_S = 0.5  # faulthandler takes a few milliseconds on an idle machine
_SETTLED_S = 0.03  # it writes thread by thread; after this long without output it is done
_PY_SPY_BYTES = 1 << 20
_NO_SIGNAL = {
    "T": "the process is stopped, and no signal reaches it",
    "t": "the process is held by a tracer, and no signal reaches it",
    "Z": "the process has ended",
}


class StackCollection:
    """One collection, from its request to its result or time limit. Nothing here waits."""

    def __init__(self, rank: int, pid: int | None, memory: BeatMemory, *, now: float) -> None:
        """Requests the stack by a signal, and the flight recorder through shared memory.

        Args:
            pid: of its process; None if that has ended.
            now: monotonic seconds.
        """
        self.rank = rank
        self.raw = RawEvidence()
        self._pid = pid
        self._memory = memory
        self._began = now
        self._since = memory.stacks_bytes
        self._size, self._grown_at = self._since, now
        self._request = memory.ask()
        self._spy: _PySpy | None = None
        self._frozen = frozen_cgroup(pid) if pid is not None else None
        self._signal_error = self._signal()

    def result(self, now: float, *, has_pulse: bool) -> Look | None:
        """The result, once it is complete or time is over; else None.

        Args:
            now: monotonic seconds.
            has_pulse: whether the rank's second thread runs, which writes the flight recorder's dump.
        """
        if self._pid is None or now - self._began >= LIMIT_S:
            return self._finish()
        has_stacks = self._has_stacks(now)
        if not has_stacks and (self._signal_error or now - self._began >= _ANSWERS_S):
            has_stacks = self._spy_is_done(self._pid)
        beat = self._memory.read()
        is_answered = beat is not None and beat.answered >= self._request
        return self._finish() if has_stacks and (is_answered or not has_pulse) else None

    def close(self) -> None:
        """Ends py-spy, if it was started."""
        if self._spy is not None:
            self._spy.close()

    def _signal(self) -> str:
        """Signals faulthandler in the rank; gives why that was not possible."""
        if self._pid is None:
            return "the process has ended"
        stat = read_stat(self._pid)
        state = stat.state if stat is not None else "Z"
        if self._frozen is not None:
            return f"the process is frozen by its control group {self._frozen}, and no signal reaches it"
        if state in _NO_SIGNAL:
            return _NO_SIGNAL[state]
        number = self._memory.stacks_signal
        if not number:
            return "the program uses all signals itself"
        if not has_handler(self._pid, number):  # its default would end the process
            return "the process has only just started and cannot show its stack yet"
        try:
            os.kill(self._pid, number)
        except OSError as error:
            return f"the process cannot be signalled: {error.strerror}"
        return ""

    def _has_stacks(self, now: float) -> bool:
        size = self._memory.stacks_bytes
        if size != self._size:
            self._size, self._grown_at = size, now
        is_settled = size > self._since and now - self._grown_at >= _SETTLED_S
        return is_settled and bool(main_thread_of_faulthandler(self._stacks()))

    def _stacks(self) -> str:
        return self._memory.stacks(since=self._since).decode("utf-8", "replace")

    def _spy_is_done(self, pid: int) -> bool:
        """Runs py-spy, if it is installed; whether nothing more is expected from it."""
        if self._spy is None:
            program = py_spy()
            if program is None:
                return bool(self._signal_error)  # a signal may still be answered
            self._spy = _PySpy(program, pid)
        return self._spy.has_ended()

    def _finish(self) -> Look:
        stacks, flight_text = self._stacks(), self._flight_text()
        flight = read_flight(flight_text)
        stack, how = main_thread_of_faulthandler(stacks, trains=flight.thread), "faulthandler"
        if not stack:
            stack, how, stacks = self._by_spy(stacks)
        self.raw = RawEvidence(stacks, flight_text)
        return Look(
            rank=self.rank,
            stack=stack,
            how=how,
            begun=flight.begun,
            completed=flight.completed,
            rows=tuple(self._memory.rows()),
            recurs=flight.recurs,
            may_step=flight.may_step,
            note=f"its control group {self._frozen} is frozen" if self._frozen is not None else "",
        )

    def _by_spy(self, stacks: str) -> tuple[tuple[str, ...], str, str]:
        """The stack, how it was obtained, and the text; or why there is none."""
        late = f"the process did not answer a signal within {LIMIT_S:g} s"
        why = self._signal_error or (late if not stacks else "faulthandler has omitted the main thread")
        if self._spy is None:
            return (), why, stacks
        printed = self._spy.printed
        stack = main_thread_of_py_spy(printed, pid=self._pid or 0)
        if stack:
            return stack, "py-spy", printed
        return (), f"{why}; py-spy: {self._spy.why_missing}", stacks

    def _flight_text(self) -> str:
        beat = self._memory.read()
        is_answered = beat is not None and beat.answered >= self._request
        return self._memory.answer().decode("utf-8", "replace") if is_answered else ""


class _PySpy:
    """`py-spy dump` of a process without pausing it: it may be stopped, or wait where no signal reaches it."""

    def __init__(self, program: Path, pid: int) -> None:
        self._output: IO[bytes] = os.fdopen(os.memfd_create("unisono-py-spy", os.MFD_CLOEXEC), "w+b")
        command = [str(program), "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            self._child = ChildProcess(lambda _: command, environment={}, output=self._output)
        except BaseException:  # raised again
            self._output.close()
            raise

    def has_ended(self) -> bool:
        self._child.read(0)
        return self._child.ended

    @property
    def printed(self) -> str:
        return os.pread(self._output.fileno(), _PY_SPY_BYTES, 0).decode("utf-8", "replace")

    @property
    def why_missing(self) -> str:
        code = self._child.returncode
        if code is None:
            return "has not ended in time"
        return one_line(self.printed, limit=200) or how_it_ended(code)

    def close(self) -> None:
        self._child.end(patience_s=0)
        self._output.close()


def py_spy() -> Path | None:
    """The program, beside this Python or on the path; installed by the extra `watch`."""
    beside = Path(sys.executable).parent / "py-spy"
    if beside.exists():
        return beside
    found = shutil.which("py-spy")
    return Path(found) if found else None
