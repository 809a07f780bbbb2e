"""Follows a job to its end: its wait in the queue, its head's messages and the state of its nodes;
ends it on a signal.
"""

import contextlib
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.base.files import parse_json
from unisono.base.messages import Message, Show, notify
from unisono.base.text import one_line
from unisono.guard.facts.slurm import hosts_of, node_states, run_slurm
from unisono.guard.supervise.interrupts import AGAIN_AFTER_S
from unisono.jobs.launchers.slurm_controller import JobState, queue_position, read_job

_LABEL = re.compile(rb"^ *(\d{1,9}): ")
_MOST_BYTES = 8_000_000
"""Per read; a longer line is not a message of unisono."""
_PIECE_BYTES = 1_024
"""With --label srun splits longer lines into pieces of this size, each with its own label and line
end (Slurm 22.05 to 24.05).
"""


@dataclass(frozen=True)
class OutputLine:
    """One line of a job's output.

    Attributes:
        node: its node; None: srun itself.
        message: the parsed message; None: the line is plain text.
        text: the line, safe to show.
    """

    node: int | None
    message: Message | None
    text: str


@dataclass
class JobOutput:
    """The output file of a job, read as it grows.

    Attributes:
        path: of the file, which may not exist yet.
    """

    path: Path
    _at: int = 0
    _rest: bytes = field(default=b"", repr=False)
    _pieces: dict[int, bytes] = field(default_factory=dict, repr=False)
    """The first pieces of a message longer than one piece, by node."""

    def read_new(self) -> list[OutputLine]:
        """The complete lines since the last call; none if the file cannot be read now."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                read = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._at += len(read)
        *whole, incomplete = (self._rest + read).split(b"\n")
        self._rest = incomplete if len(incomplete) < _MOST_BYTES else b""
        return [parsed for line in whole if (parsed := self._parsed(line)) is not None]

    def _parsed(self, line: bytes) -> OutputLine | None:
        """A line, parsed; None for a piece of a message that continues."""
        label = _LABEL.match(line)
        if label is None:
            return OutputLine(None, None, _shown(line))
        node, piece = int(label[1]), line[label.end() :]
        content = self._pieces.pop(node, b"") + piece
        if not content.startswith(b"{"):
            return OutputLine(node, None, _shown(content))
        try:
            value: Any = parse_json(content)
        except ValueError:
            if len(piece) == _PIECE_BYTES and len(content) < _MOST_BYTES:
                self._pieces[node] = content
                return None
            return OutputLine(node, None, _shown(content))
        is_message = isinstance(value, dict) and isinstance(value.get("kind"), str)
        return OutputLine(node, value if is_message else None, _shown(content))


def _shown(text: bytes) -> str:
    return one_line(text[:4_000].decode("utf-8", "replace"), limit=1_000)


_LINES_S = 0.2
_STATE_S = (1.0, 10.0)  # of a job that waits or has just started; of a running job
_RECENT_S = 60.0
_QUEUE_S = 60.0
_NODES_S = 15.0
_SETTLED_S = 120.0  # by then the controller has ended a job whose head has ended and that is not requeued
_SILENT_S = 60.0
_VISIBLE_S = 5.0  # until files written on other machines are visible here
_TAIL_LINES = 30
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class JobEnd:
    """How a job ended.

    Attributes:
        state: the last state from the controller.
        result: the last result message of the head; None if there was none.
        tail: the last lines that were not messages.
        signal: the stop signal that this command received; None if there was none.
        nodes: where it ran.
    """

    state: JobState
    result: Message | None
    tail: list[str]
    signal: signal.Signals | None
    nodes: list[str]


@dataclass
class JobFollower:
    """Reads a job's output and state in turn, and shows what is new.

    Attributes:
        show: gets their messages, and notes of this command.
        refuse: called with the state of a waiting job; raises if it would wait forever.
    """

    job: str
    lines: JobOutput
    show: Show
    refuse: Callable[[JobState], None] = lambda _: None
    result: Message | None = None
    stop_signal: signal.Signals | None = None
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    _state: JobState | None = None
    _nodes: list[str] = field(default_factory=list)
    _nodelist: str = ""
    _expects_first_step: bool = False
    _queue_shown: str = ""
    _queue_shown_at: float = 0.0
    _unusable_shown: set[str] = field(default_factory=set)
    _next_nodes: float = 0.0
    _stopped_at: float = 0.0
    _result_at: float = 0.0
    _answered_at: float = field(default_factory=time.monotonic)
    _planned: bool = False
    _passed_on: bool = False
    _stopped_twice: bool = False
    _cancelled: bool = False

    def follow(self) -> JobEnd:
        """How the job ended, once nothing more comes of it.

        Raises:
            UnisonoError: from `refuse`; the caller then cancels the job.
        """
        began, next_state = time.monotonic(), 0.0
        with self._signals():
            while True:
                now = time.monotonic()
                if now >= next_state:
                    state = read_job(self.job)
                    self._take_state(state)
                    is_recent = (
                        self._state is None
                        or self._state.waits
                        or now - began < _RECENT_S
                        or self.stop_signal is not None
                    )
                    next_state = now + _STATE_S[0 if is_recent or self.result is not None else 1]
                self._take_lines()
                self._pass_on()
                if self._state is not None and self._state.ended:
                    return self._final_state(self._state)
                if self._has_settled(now):
                    notify(
                        self.show,
                        f"job {self.job} has sent its result, but Slurm does not end it: scontrol show job"
                        f" {self.job}",
                    )
                    return JobEnd(
                        self._state or JobState(self.job, "?"),
                        self.result,
                        list(self._tail),
                        self.stop_signal,
                        self._nodes,
                    )
                time.sleep(_LINES_S)

    def _has_settled(self, now: float) -> bool:
        """Whether the result is final although the controller does not report the job's end: the
        controller or a node is gone.
        """
        final = self.result is not None and self.result.get("exit_code") != 75
        return final and now - self._result_at > _SETTLED_S

    def _final_state(self, state: JobState) -> JobEnd:
        limit = time.monotonic() + _VISIBLE_S
        while self.result is None and time.monotonic() < limit:
            self._take_lines()
            time.sleep(_LINES_S)
        return JobEnd(state, self.result, list(self._tail), self.stop_signal, self._nodes)

    def _take_lines(self) -> None:
        for line in self.lines.read_new():
            self._take_line(line)

    def _take_line(self, line: OutputLine) -> None:
        message = line.message
        if message is None:
            if line.text:
                self._tail.append(line.text if line.node is None else f"node {line.node}: {line.text}")
            return
        if line.node != 0:
            return
        kind = message["kind"]
        if kind == "result":  # the result of this start, and of the job unless it is requeued
            self.result, self._result_at = message, time.monotonic()
            return
        if kind == "plan":
            self._expects_first_step, self._planned, self.result = True, True, None
        elif self._expects_first_step and kind in ("step", "eval", "checkpoint"):
            self.show({"kind": "ready", "time": time.time(), "facts": {}})
            self._expects_first_step = False
        self.show(message)

    def _take_state(self, state: JobState | None) -> None:
        if state is None:  # controllers restart from time to time
            if time.monotonic() - self._answered_at > _SILENT_S:
                self._answered_at = time.monotonic()
                notify(
                    self.show,
                    f"Slurm's controller does not answer (scontrol ping); job {self.job} continues without it"
                    " and is still followed",
                )
            return
        self._answered_at = time.monotonic()
        before, self._state = self._state, state
        if before is not None and state.restarts > before.restarts:
            self._take_lines()
            self.result, self._planned = None, False
            self._passed_on = False  # a stop request that arrived together with the requeue still holds
            notify(
                self.show,
                f"job {self.job} is back in the queue ({_times(state.restarts)}) and resumes from its"
                " checkpoint",
            )
        if state.waits:
            self._nodes = []
            self.result, self._planned = None, False  # of an earlier start
            self.refuse(state)
            self._show_queue(state)
        elif state.nodelist and not state.ended:
            if not self._nodes:
                self._nodes, self._nodelist = hosts_of(state.nodelist), state.nodelist
                notify(self.show, f"job {self.job} runs on {', '.join(self._nodes)}")
            self._check_nodes(state)

    def _show_queue(self, state: JobState) -> None:
        now = time.monotonic()
        if state.reason == self._queue_shown and now < self._queue_shown_at + _QUEUE_S:
            return
        self._queue_shown, self._queue_shown_at = state.reason, now
        starts = state.starts if state.starts not in ("", "Unknown", "N/A") else ""
        parts = [queue_position(state), f"expected to start {starts}" if starts else "", *self._lost_nodes()]
        more = "; ".join(part for part in parts if part)
        notify(
            self.show,
            f"job {self.job} waits: {one_line(state.reason or state.state, limit=200)}"
            + (f" ({more})" if more else ""),
        )

    def _lost_nodes(self) -> list[str]:
        """The nodes of its last start that are unusable now."""
        return (
            [node.description for node in node_states(self._nodelist) if not node.usable]
            if self._nodelist
            else []
        )

    def _check_nodes(self, state: JobState) -> None:
        now = time.monotonic()
        if now < self._next_nodes:
            return
        self._next_nodes = now + _NODES_S
        for node in node_states(state.nodelist):
            if not node.usable and node.description not in self._unusable_shown:
                self._unusable_shown.add(node.description)
                number = f"node {self._nodes.index(node.name)} " if node.name in self._nodes else ""
                notify(
                    self.show,
                    f"{number}({node.name}) of this job is {node.state}"
                    + (f": {one_line(node.reason)}" if node.reason else "")
                    + (
                        "; the job continues to its end, and no new job starts there"
                        if "DRAIN" in node.state
                        else ""
                    ),
                )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        ignored = [
            number
            for number, handler in before.items()
            if handler is signal.SIG_IGN and number is signal.SIGHUP
        ]
        for number in before:
            if number not in ignored:
                signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self.stop_signal is None else signal.SIG_IGN)

    def _note_signal(self, number: int, _frame: Any) -> None:
        """Only records the signal: the loop may be in the middle of a line."""
        now = time.monotonic()
        if self.stop_signal is None:
            self.stop_signal, self._stopped_at = signal.Signals(number), now
        elif now - self._stopped_at >= AGAIN_AFTER_S:
            self._stopped_twice = True

    def _pass_on(self) -> None:
        """Acts on the signals since the last call."""
        if self.stop_signal is not None and not self._passed_on:
            self._passed_on = True
            self._request_stop(self.stop_signal)
        if self._stopped_twice and not self._cancelled:
            self._cancelled = True
            notify(
                self.show,
                f"second signal: job {self.job} is cancelled immediately; its latest checkpoint is kept",
            )
            run_slurm("scancel", self.job)

    def _request_stop(self, number: signal.Signals) -> None:
        """Signals the fronts, which save and exit; a job without fronts is cancelled."""
        running = self._state is not None and self._state.state == "RUNNING" and self._planned
        if not running:
            notify(
                self.show,
                f"{number.name}: job {self.job} is not training now and is cancelled; nothing has changed",
            )
            run_slurm("scancel", self.job)
            return
        name = "INT" if number is signal.SIGINT else "TERM"
        notify(
            self.show,
            f"{number.name}: job {self.job} will save a checkpoint and end (scancel --signal={name}); a"
            " second signal cancels it immediately. To leave it running, end this command with SIGKILL, and"
            " run it again to follow the job",
        )
        answer = run_slurm("scancel", f"--signal={name}", self.job)
        if not answer.ok:
            notify(self.show, f"scancel: {answer.words}")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
