"""One start of the worker, from its first process to its last word."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from unisono.events import Message
from unisono.facts.memory_events import oom_kills
from unisono.launch.command import Programs, child_environment, worker_command
from unisono.launch.interrupts import Interrupts
from unisono.launch.process import ChildProcess
from unisono.launch.tasks import tail_of
from unisono.plan import RunPlan
from unisono.rundir import RunDir
from unisono.units import parse_seconds, show_seconds

Show = Callable[[Message], None]

_LAST_WORDS = ("result", "refused", "crashed")
_TEARDOWN_S = 20.0  # results are final before teardown begins, so one that hangs is ended without loss
_NOTHING_TO_SAVE_S = 3.0


@dataclass
class Attempt:
    """What is known of one start of the worker.

    Attributes:
        from_step: the step it went on from.
        step: the last step it finished.
        checkpoint: the newest checkpoint, or None.
        phase: the last phase it told.
        last: its last word: `result`, `refused` or `crashed`; None if it died without one.
        returncode: of the process; negative: a signal.
        ended_by_us: why the front ended it, if it did.
        oom_killed: whether the kernel killed something for memory in this cgroup meanwhile.
        seconds: from its start to its end.
        ready: whether it has loaded everything and trains; before that there is nothing of its own to save.
        tail: the end of what it printed.
    """

    from_step: int
    step: int
    checkpoint: str | None
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    phase: str = "start"
    ready: bool = False
    last: Message | None = None
    returncode: int = 0
    ended_by_us: str = ""
    oom_killed: bool = False
    seconds: float = 0.0
    tail: str = ""
    evals: dict[str, Any] = field(default_factory=dict)

    def note(self, message: Message) -> None:
        """Keeps what a message tells."""
        match message["kind"]:
            case "step":
                self.step = int(message["step"])
                self.tokens = int(message.get("tokens") or 0)
                self.loss = message.get("loss")
                self.tokens_per_second = message.get("tokens_per_second")
                self.phase = "train"
            case "ready":
                self.ready = True
            case "phase":
                self.phase = str(message.get("phase"))
            case "checkpoint":
                self.checkpoint = str(message.get("path"))
            case "eval":
                if message.get("eval_loss") is not None:
                    self.evals["loss"] = message["eval_loss"]
            case kind:
                self.last = message if kind in _LAST_WORDS else self.last


def run_attempt(plan: RunPlan, *, programs: Programs, interrupts: Interrupts, show: Show) -> Attempt:
    """Starts the worker on the plan in its output_dir, shows its messages, passes signals on, and waits for its end."""
    run = RunDir(Path(plan.output_dir))
    attempt = Attempt(
        from_step=plan.resume.step if plan.resume else 0,
        step=plan.resume.step if plan.resume else 0,
        checkpoint=plan.resume.path if plan.resume else None,
    )
    environment = child_environment(threads=plan.threads, without=plan.ignored_variables, device=plan.device)
    kills_before = oom_kills()
    with _open_log(run.log(plan.host, 0)) as log:
        stopping = _Stopping(interrupts, grace_s=parse_seconds(plan.config.grace), show=show)
        with ChildProcess(
            lambda fd: worker_command(programs, plan=run.plan, events=run.events(0), report_fd=fd),
            environment=environment, output=log,
        ) as child:  # fmt: skip
            interrupts.collect()
            _watch(child, attempt, stopping, show, _LogTimes(log, run.log(plan.host, 0)))
            attempt.seconds = time.monotonic() - child.started
        attempt.returncode = child.returncode or 0
        attempt.tail = tail_of(log)
    attempt.oom_killed = (oom_kills() or 0) > (kills_before or 0)
    return attempt


def _watch(
    child: ChildProcess, attempt: Attempt, stopping: "_Stopping", show: Show, times: "_LogTimes"
) -> None:
    final_since: float | None = None
    while not child.ended:
        for message in child.read():
            attempt.note(message)
            if message["kind"] not in _LAST_WORDS:
                show(message)
        times.note()
        if attempt.last is not None:
            final_since = final_since or time.monotonic()
            if time.monotonic() - final_since > _TEARDOWN_S:
                child.end(patience_s=0)
        else:
            stopping.pass_on(child, attempt)


class _Stopping:
    """Passes the wish to stop on to the worker, and sees that it is met in time."""

    def __init__(self, interrupts: Interrupts, *, grace_s: float, show: Show) -> None:
        self._interrupts = interrupts
        self._grace_s = grace_s
        self._show = show
        self._deadline: float | None = None

    def pass_on(self, child: ChildProcess, attempt: Attempt) -> None:
        first = self._interrupts.first
        if first is None:
            return
        if self._interrupts.twice:
            self._end(child, attempt, "Ctrl-C again")
        elif self._deadline is None:
            child.signal(signal.SIGINT if first is signal.SIGINT else signal.SIGTERM)
            patience = self._grace_s if attempt.ready else min(self._grace_s, _NOTHING_TO_SAVE_S)
            self._deadline = self._interrupts.at + patience
            self._say(_stopping_text(first, attempt, patience))
        elif time.monotonic() > self._deadline:
            self._end(
                child,
                attempt,
                f"not done {show_seconds(time.monotonic() - self._interrupts.at)} after the signal",
            )

    def _end(self, child: ChildProcess, attempt: Attempt, why: str) -> None:
        attempt.ended_by_us = why
        if attempt.ready:
            self._say(f"{why}: ending the rank; the newest checkpoint is {attempt.checkpoint or 'none'}")
        child.end(patience_s=0)

    def _say(self, text: str) -> None:
        self._show({"kind": "note", "time": time.time(), "text": text})


def _stopping_text(first: signal.Signals, attempt: Attempt, patience_s: float) -> str:
    name = "Ctrl-C" if first is signal.SIGINT else first.name
    if not attempt.ready:
        return f"{name} before the first step: ending; nothing has changed"
    again = "; Ctrl-C again leaves at once" if first is signal.SIGINT else ""
    return f"{name}: finishing the step, saving a checkpoint (at most {show_seconds(patience_s)}{again})"


class _LogTimes:
    """Notes when a rank's log grew to what size, beside the log, so that `unisono logs` can merge it in time."""

    def __init__(self, log: IO[bytes], path: Path) -> None:
        self._log = log
        self._path = path.with_suffix(".times")
        self._size = os.fstat(log.fileno()).st_size

    def note(self) -> None:
        """Looks once; a line is written only where the log has grown."""
        size = os.fstat(self._log.fileno()).st_size
        if size == self._size:
            return
        self._size = size
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([round(time.time(), 3), size]) + "\n")
        except OSError:
            return  # a full disk: the log merges less finely, and the run goes on


def _open_log(path: Path) -> IO[bytes]:
    """The rank's log, for appending; only its owner may read it, since ranks print what they like."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "ab", buffering=0)
