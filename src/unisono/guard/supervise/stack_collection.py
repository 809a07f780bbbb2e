"""Collects the stacks of a rank and of its worker processes, and the rank's flight recorder, while
they hang: by faulthandler, else by py-spy.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from unisono.base.text import one_line
from unisono.guard.facts.processes import frozen_cgroup, has_handler, read_stat
from unisono.guard.supervise.child_process import ChildProcess
from unisono.guard.supervise.evidence import RawEvidence
from unisono.guard.supervise.task_process import how_it_ended
from unisono.guard.watch.rank_dumps import main_thread_of_faulthandler, main_thread_of_py_spy, read_flight
from unisono.guard.watch.views import BeatMemory, Look, StacksFile, WorkerProcess, WorkerStack

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

    def __init__(
        self,
        rank: int,
        pid: int | None,
        memory: BeatMemory,
        workers: Sequence[WorkerProcess] = (),
        *,
        now: float,
    ) -> None:
        """Requests the stacks by signals, and the flight recorder through shared memory.

        Args:
            pid: of its process; None if that has ended.
            workers: processes below it; their files are closed at the end.
            now: monotonic seconds.
        """
        self.rank = rank
        self.raw = RawEvidence()
        self._memory = memory
        self._began = now
        self._request = memory.ask()
        self._frozen = frozen_cgroup(pid) if pid is not None else None
        self._main = _ProcessStack(
            pid, memory.stacks_signal, memory.stacks, frozen=self._frozen, now=now, uses_py_spy=True
        )
        self._workers = [
            (worker, _ProcessStack(worker.pid, worker.signal, worker.stacks, now=now)) for worker in workers
        ]

    def result(self, now: float, *, has_pulse: bool) -> Look | None:
        """The result, once it is complete or time is over; else None.

        Args:
            now: monotonic seconds.
            has_pulse: whether the rank's second thread runs, which writes the flight recorder's
                dump.
        """
        stacks = [self._main, *(stack for _, stack in self._workers)]
        complete = [stack.is_complete(now) for stack in stacks]
        if self._main.has_ended or now - self._began >= LIMIT_S:
            return self._finish()
        return self._finish() if all(complete) and (self._is_answered or not has_pulse) else None

    def close(self) -> None:
        """Ends what was started for it."""
        self._main.close()
        for worker, stack in self._workers:
            stack.close()
            worker.stacks.close()

    @property
    def _is_answered(self) -> bool:
        beat = self._memory.read()
        return beat is not None and beat.answered >= self._request

    def _finish(self) -> Look:
        flight_text = self._memory.answer().decode("utf-8", "replace") if self._is_answered else ""
        flight = read_flight(flight_text)
        stack, how, text = self._main.result(trains=flight.thread)
        workers, texts = [], [text]
        for worker, process in self._workers:
            of_worker, _, text = process.result()
            if of_worker:
                workers.append(WorkerStack(worker.pid, of_worker))
                texts.append(f"Worker process {worker.pid}:\n{text}")
        self.raw = RawEvidence("\n".join(texts), flight_text)
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
            workers=tuple(workers),
        )


class _ProcessStack:
    """The stack of one process, from its request to its result."""

    def __init__(
        self,
        pid: int | None,
        number: int,
        file: StacksFile,
        *,
        now: float,
        frozen: Path | None = None,
        uses_py_spy: bool = False,
    ) -> None:
        """Requests it by a signal.

        Args:
            pid: None if the process has ended.
            number: the signal at which faulthandler writes; 0 for none.
            file: where it writes.
            frozen: the control group that froze the process.
            uses_py_spy: whether py-spy reads the stack if the signal is not answered: not for
                dozens of workers of a busy machine.
        """
        self._pid = pid
        self._uses_py_spy = uses_py_spy
        self._file = file
        self._began = now
        self._since = file.size
        self._size, self._grown_at = self._since, now
        self._spy: _PySpy | None = None
        self._error = _signal_error(pid, number, frozen)

    @property
    def has_ended(self) -> bool:
        """Whether there is no process."""
        return self._pid is None

    def is_complete(self, now: float) -> bool:
        """Whether nothing more is expected; starts py-spy if the signal is not answered."""
        if self._pid is None or self._has_text(now):
            return True
        if self._error or now - self._began >= _ANSWERS_S:
            return not self._uses_py_spy or self._spy_is_done(self._pid)
        return False

    def result(self, *, trains: int | None = None) -> tuple[tuple[str, ...], str, str]:
        """The stack, how it was obtained, and the text; or why there is none.

        Args:
            trains: the number of the thread that trains instead of the main one, if any.
        """
        text = self._text()
        stack = main_thread_of_faulthandler(text, trains=trains)
        if stack:
            return stack, "faulthandler", text
        late = f"the process did not answer a signal within {LIMIT_S:g} s"
        why = self._error or (late if not text else "faulthandler has omitted the main thread")
        if self._spy is None:
            return (), why, text
        printed = self._spy.printed
        stack = main_thread_of_py_spy(printed, pid=self._pid or 0)
        if stack:
            return stack, "py-spy", printed
        return (), f"{why}; py-spy: {self._spy.why_missing}", text

    def close(self) -> None:
        """Ends py-spy, if it was started."""
        if self._spy is not None:
            self._spy.close()

    def _has_text(self, now: float) -> bool:
        size = self._file.size
        if size != self._size:
            self._size, self._grown_at = size, now
        is_settled = size > self._since and now - self._grown_at >= _SETTLED_S
        return is_settled and bool(main_thread_of_faulthandler(self._text()))

    def _text(self) -> str:
        return self._file.read(since=self._since).decode("utf-8", "replace")

    def _spy_is_done(self, pid: int) -> bool:
        """Runs py-spy, if it is installed; whether nothing more is expected from it."""
        if self._spy is None:
            program = py_spy()
            if program is None:
                return bool(self._error)  # a signal may still be answered
            self._spy = _PySpy(program, pid)
        return self._spy.has_ended()


def _signal_error(pid: int | None, number: int, frozen: Path | None) -> str:
    """Signals faulthandler in a process; returns why that was not possible."""
    if pid is None:
        return "the process has ended"
    stat = read_stat(pid)
    state = stat.state if stat is not None else "Z"
    if frozen is not None:
        return f"the process is frozen by its control group {frozen}, and no signal reaches it"
    if state in _NO_SIGNAL:
        return _NO_SIGNAL[state]
    if not number:
        return "the program uses all signals itself"
    if not has_handler(pid, number):  # its default would end the process
        return "the process has only just started and cannot show its stack yet"
    try:
        os.kill(pid, number)
    except OSError as error:
        return f"the process cannot be signalled: {error.strerror}"
    return ""


class _PySpy:
    """`py-spy dump` of a process without pausing it: it may be stopped, or wait where no signal
    reaches it.
    """

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
    path = shutil.which("py-spy")
    return Path(path) if path else None
