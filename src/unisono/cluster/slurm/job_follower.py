"""Follows a job to its end: how it waits, what its head says, what becomes of its nodes; and ends it when it is asked to."""

import contextlib
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.cluster.slurm.controller import JobState, queue_position, read_job
from unisono.events import Message, Show, say
from unisono.facts.slurm import hosts_of, node_states, run_slurm
from unisono.files import parse_json
from unisono.supervise.interrupts import AGAIN_AFTER_S
from unisono.text import one_line

_LABEL = re.compile(rb"^ *(\d{1,9}): ")
_MOST_BYTES = 8_000_000
"""At once; a line that is longer is no message of ours."""
_PIECE_BYTES = 1_024
"""With --label srun breaks longer lines into pieces of this size, each with a label and an end of its own (Slurm 22.05 to 24.05)."""


@dataclass(frozen=True)
class OutputLine:
    """One line.

    Attributes:
        node: of which node; None: of srun itself.
        message: the message that it is; None: it is text.
        text: the line, safe to show.
    """

    node: int | None
    message: Message | None
    text: str


@dataclass
class JobOutput:
    """A file that grows.

    Attributes:
        path: of it; it need not be there yet.
    """

    path: Path
    _at: int = 0
    _rest: bytes = field(default=b"", repr=False)
    _pieces: dict[int, bytes] = field(default_factory=dict, repr=False)
    """What has come of a message that is longer than a piece, by node."""

    def news(self) -> list[OutputLine]:
        """The whole lines that have come since the last call; none where the file cannot be read now."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                read = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._at += len(read)
        *whole, rest = (self._rest + read).split(b"\n")
        self._rest = rest if len(rest) < _MOST_BYTES else b""
        return [spoken for line in whole if (spoken := self._spoken(line)) is not None]

    def _spoken(self, line: bytes) -> OutputLine | None:
        """What a line says; None for a piece of a message that goes on."""
        label = _LABEL.match(line)
        if label is None:
            return OutputLine(None, None, _shown(line))
        node, piece = int(label[1]), line[label.end() :]
        said = self._pieces.pop(node, b"") + piece
        if not said.startswith(b"{"):
            return OutputLine(node, None, _shown(said))
        try:
            value: Any = parse_json(said)
        except ValueError:
            if len(piece) == _PIECE_BYTES and len(said) < _MOST_BYTES:
                self._pieces[node] = said
                return None
            return OutputLine(node, None, _shown(said))
        is_message = isinstance(value, dict) and isinstance(value.get("kind"), str)
        return OutputLine(node, value if is_message else None, _shown(said))


def _shown(text: bytes) -> str:
    return one_line(text[:4_000].decode("utf-8", "replace"), limit=1_000)


_LINES_S = 0.2
_STATE_S = (1.0, 10.0)  # of a job that waits or has just begun; of one that runs
_YOUNG_S = 60.0
_QUEUE_S = 60.0
_NODES_S = 15.0
_SETTLED_S = 120.0  # a job whose head has ended, and is not to be queued again, leaves the controller by then
_SILENT_S = 60.0
_LAST_WORDS_S = 5.0  # for what was written on other machines to be seen here
_KEPT = 30
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass
class JobEnd:
    """What is known of a job that has ended.

    Attributes:
        state: the controller's last word.
        result: the last that the head said; None if it said none.
        tail: the last lines that were no messages.
        asked: the signal that this command passed on; None if it did not.
        nodes: where it ran.
    """

    state: JobState
    result: Message | None
    tail: list[str]
    asked: signal.Signals | None
    nodes: list[str]


@dataclass
class JobFollower:
    """Reads a job's lines and state in turn, and shows what is new.

    Attributes:
        job: its id.
        lines: what its fronts say.
        show: sees their messages, and lines of ours.
        refuse: called while it waits, with what the controller says of it; raises where it would wait for ever.
    """

    job: str
    lines: JobOutput
    show: Show
    refuse: Callable[[JobState], None] = lambda _: None
    result: Message | None = None
    asked: signal.Signals | None = None
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _state: JobState | None = None
    _nodes: list[str] = field(default_factory=list)
    _ran_on: str = ""
    _greets: bool = False
    _told: str = ""
    _told_at: float = 0.0
    _ill: set[str] = field(default_factory=set)
    _next_nodes: float = 0.0
    _asked_at: float = 0.0
    _result_at: float = 0.0
    _answered_at: float = field(default_factory=time.monotonic)
    _planned: bool = False
    _passed_on: bool = False
    _again: bool = False
    _cancelled: bool = False

    def to_the_end(self) -> JobEnd:
        """Until nothing more comes of the job.

        Raises:
            UnisonoError: what `refuse` raises; the job is cancelled then.
        """
        began, next_state = time.monotonic(), 0.0
        with self._signals():
            while True:
                now = time.monotonic()
                if now >= next_state:
                    state = read_job(self.job)
                    self._hear_state(state)
                    young = (
                        self._state is None
                        or self._state.waits
                        or now - began < _YOUNG_S
                        or self.asked is not None
                    )
                    next_state = now + _STATE_S[0 if young or self.result is not None else 1]
                self._hear_lines()
                self._pass_on()
                if self._state is not None and self._state.ended:
                    return self._last_words(self._state)
                if self._has_settled(now):
                    say(
                        self.show,
                        f"job {self.job} has said its last word, and Slurm does not end it: scontrol show job {self.job}",
                    )
                    return JobEnd(
                        self._state or JobState(self.job, "?"),
                        self.result,
                        list(self._tail),
                        self.asked,
                        self._nodes,
                    )
                time.sleep(_LINES_S)

    def _has_settled(self, now: float) -> bool:
        """Whether nothing more will come, though the controller does not say that the job has ended: it is gone, or a node is."""
        final = self.result is not None and self.result.get("exit_code") != 75
        return final and now - self._result_at > _SETTLED_S

    def _last_words(self, state: JobState) -> JobEnd:
        limit = time.monotonic() + _LAST_WORDS_S
        while self.result is None and time.monotonic() < limit:
            self._hear_lines()
            time.sleep(_LINES_S)
        return JobEnd(state, self.result, list(self._tail), self.asked, self._nodes)

    def _hear_lines(self) -> None:
        for spoken in self.lines.news():
            self._hear(spoken)

    def _hear(self, spoken: OutputLine) -> None:
        message = spoken.message
        if message is None:
            if spoken.text:
                self._tail.append(
                    spoken.text if spoken.node is None else f"node {spoken.node}: {spoken.text}"
                )
            return
        if spoken.node != 0:
            return
        kind = message["kind"]
        if kind == "result":  # the last word of this start; of the job only if it is not queued again
            self.result, self._result_at = message, time.monotonic()
            return
        if kind == "plan":
            self._greets, self._planned, self.result = True, True, None
        elif self._greets and kind in ("step", "eval", "checkpoint"):
            self.show({"kind": "ready", "time": time.time(), "facts": {}})
            self._greets = False
        self.show(message)

    def _hear_state(self, state: JobState | None) -> None:
        if state is None:  # the controller is restarted now and then
            if time.monotonic() - self._answered_at > _SILENT_S:
                self._answered_at = time.monotonic()
                say(
                    self.show,
                    f"Slurm's controller does not answer (scontrol ping); job {self.job} goes on without it, and is still followed",
                )
            return
        self._answered_at = time.monotonic()
        before, self._state = self._state, state
        if before is not None and state.restarts > before.restarts:
            self._hear_lines()
            self.result, self._planned = None, False
            self._passed_on = False  # a wish to stop that came together with the requeue still stands
            say(
                self.show,
                f"job {self.job} is back in the queue ({_times(state.restarts)}), and goes on from its checkpoint",
            )
        if state.waits:
            self._nodes = []
            self.result, self._planned = None, False  # of an earlier start
            self.refuse(state)
            self._tell_queue(state)
        elif state.nodelist and not state.ended:
            if not self._nodes:
                self._nodes, self._ran_on = hosts_of(state.nodelist), state.nodelist
                say(self.show, f"job {self.job} runs on {', '.join(self._nodes)}")
            self._look_at_nodes(state)

    def _tell_queue(self, state: JobState) -> None:
        now = time.monotonic()
        if state.reason == self._told and now < self._told_at + _QUEUE_S:
            return
        self._told, self._told_at = state.reason, now
        starts = state.starts if state.starts not in ("", "Unknown", "N/A") else ""
        parts = [queue_position(state), f"expected to start {starts}" if starts else "", *self._lost_nodes()]
        more = "; ".join(part for part in parts if part)
        say(
            self.show,
            f"job {self.job} waits: {one_line(state.reason or state.state, limit=200)}"
            + (f" ({more})" if more else ""),
        )

    def _lost_nodes(self) -> list[str]:
        """Nodes on which it ran and that are out of order now."""
        return [node.told for node in node_states(self._ran_on) if not node.usable] if self._ran_on else []

    def _look_at_nodes(self, state: JobState) -> None:
        now = time.monotonic()
        if now < self._next_nodes:
            return
        self._next_nodes = now + _NODES_S
        for node in node_states(state.nodelist):
            ill = not node.usable
            if ill and node.told not in self._ill:
                self._ill.add(node.told)
                number = f"node {self._nodes.index(node.name)} " if node.name in self._nodes else ""
                say(
                    self.show,
                    f"{number}({node.name}) of this job is {node.state}"
                    + (f": {one_line(node.reason)}" if node.reason else "")
                    + (
                        "; the job goes on until its end, and no new one is put there"
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
                signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if self.asked is None else signal.SIG_IGN)

    def _note(self, number: int, _frame: Any) -> None:
        """Only notes it: the loop may be in the middle of a line."""
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_at = signal.Signals(number), now
        elif now - self._asked_at >= AGAIN_AFTER_S:
            self._again = True

    def _pass_on(self) -> None:
        """Does what was asked for since the last time."""
        if self.asked is not None and not self._passed_on:
            self._passed_on = True
            self._stop_politely(self.asked)
        if self._again and not self._cancelled:
            self._cancelled = True
            say(self.show, f"again: job {self.job} is cancelled at once; its newest checkpoint stays")
            run_slurm("scancel", self.job)

    def _stop_politely(self, number: signal.Signals) -> None:
        """Asks the fronts, which save and end; a job that has none yet is cancelled."""
        running = self._state is not None and self._state.state == "RUNNING" and self._planned
        if not running:
            say(
                self.show,
                f"{number.name}: job {self.job} is not training now and is cancelled; nothing has changed",
            )
            run_slurm("scancel", self.job)
            return
        name = "INT" if number is signal.SIGINT else "TERM"
        say(
            self.show,
            f"{number.name}: job {self.job} is asked to save a checkpoint and to end (scancel --signal={name}); once more: at once. "
            f"To leave it alone, end this command with SIGKILL, and give it again to come back",
        )
        answer = run_slurm("scancel", f"--signal={name}", self.job)
        if not answer.ok:
            say(self.show, f"scancel: {answer.words}")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
