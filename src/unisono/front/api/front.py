"""The front of a Python program as a process of its own, and the events of the run that it
supervises.

A notebook keeps the interpreter busy, installs its own signal handlers, or ends a thread: none of
this may stall or kill a run.
"""

import asyncio
import contextlib
import json
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from unisono.base import errors
from unisono.base.causes import Verdict
from unisono.base.errors import Problem, RankDied, UnisonoError
from unisono.base.messages import Message, RefusedMessage, fields_of, message_of
from unisono.base.text import one_line
from unisono.front.api import Result
from unisono.guard.facts.environment import all_variables
from unisono.guard.rundir.records import RunResult
from unisono.guard.supervise.child_process import ChildProcess
from unisono.guard.supervise.codec import encode
from unisono.guard.supervise.task_process import how_it_ended, refusal, tail_of

_STOP = {"kind": "stop"}
_LAST = ("result", "report", "stopped", "start_refused", "crashed")
_POLL_S = 0.2
_PATIENCE = 3  # Ctrl-C so often: the front is killed


@dataclass(frozen=True, slots=True)
class FrontRequest:
    """What a program requests of its front.

    Attributes:
        config: the path of a config file; None: there is none, or it is a text.
        options: those of the command line, by name.
    """

    command: Literal["train", "doctor"]
    config: str | None
    overrides: tuple[str, ...]
    options: Mapping[str, Any]


class Front:
    """A front that serves one request of this program.

    Messages are read by a thread, so that it never waits for the program.

    Attributes:
        last: its last message: result, report, stopped, start_refused or crashed; None before, or
            if it was killed.
    """

    def __init__(self, request: FrontRequest, *, config: str | None = None) -> None:
        """Starts it.

        Args:
            request: for `unisono.front.api.__main__`.
            config: the text of a config file, which replaces that of the request.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-")  # mode 0700
        root = Path(self._folder.name)
        if config is not None:
            (root / "config.yaml").write_text(config, encoding="utf-8")
            request = replace(request, config=str(root / "config.yaml"))
        (root / "request.json").write_text(json.dumps(encode(request)), encoding="utf-8")
        self.last: Message | None = None
        self._printed = (root / "printed").open("w+b")
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._child = ChildProcess(
            lambda fd: [
                *(
                    sys.executable,
                    "-m",
                    "unisono.front.api",
                    str(root / "request.json"),
                    "--report-fd",
                    str(fd),
                )
            ],
            environment=all_variables(),
            output=self._printed,
            has_input=True,
        )
        self._stops = 0
        self._reader = threading.Thread(target=self._read, name="unisono-front", daemon=True)
        self._reader.start()

    def next_message(self) -> Message | None:
        """The next message before the last one; None once there is none left."""
        message = self._messages.get()
        if message is None:
            self._messages.put(None)  # for whoever asks again
        return message

    def stop(self) -> None:
        """Requests a checkpoint and the end, and waits for both.

        Ctrl-C meanwhile ends it at once.
        """
        self._stops = max(self._stops, 1)
        self.wait()

    def wait(self) -> None:
        """Waits for its end. Ctrl-C requests the end, a second one ends it at once."""
        while self._reader.is_alive():
            try:
                self._reader.join()
            except KeyboardInterrupt:
                self._stops += 1
        self._folder.cleanup()

    def error(self) -> UnisonoError:
        """Why there is no result."""
        last = self.last
        if last is not None and last["kind"] == "start_refused":
            known = refusal(last)
            kind = getattr(errors, str(last.get("type")), type(known))
            return kind(*known.problems, verdict=known.verdict) if issubclass(kind, type(known)) else known
        if last is not None and last["kind"] == "crashed":
            error = UnisonoError.of(
                f"a bug in unisono, not your mistake: {one_line(str(last['error']))}",
                where="the process that supervises the run",
                fix="report it with the traceback below",
            )
            error.add_note(str(last.get("traceback", "")))
            return error
        return RankDied(
            Problem(
                f"the process that supervises the run ended: {how_it_ended(self._child.returncode or 0)}",
                f"{sys.executable} -m unisono.front.api",
                one_line(self._tail, limit=2000),
                "the same call resumes from the newest checkpoint; check memory and disk",
            )
        )

    def _read(self) -> None:
        sent = 0
        try:
            while not self._child.ended:
                if self._stops > sent:
                    sent += 1
                    self._child.send(_STOP)
                if self._stops >= _PATIENCE:
                    self._child.kill()
                for message in self._child.read(_POLL_S):
                    if message["kind"] in _LAST:
                        self.last = message
                    else:
                        self._messages.put(message)
        finally:
            self._child.end(patience_s=0)
            self._tail = tail_of(self._printed)
            self._printed.close()
            self._messages.put(None)


# ---- the events of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The base class of all events of a run.

    Attributes:
        time: time of the event, in seconds since 1970 (UTC).
    """

    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Event):
    """The plan of the run, before each start of the ranks.

    Attributes:
        plan: the contents of plan.json: nodes, ranks, devices, batch, steps, resume point, and the
            origin of each value.
        total_steps: number of optimizer steps of the whole run.
        world_size: number of ranks.
        output_dir: the run's directory.
    """

    plan: dict[str, Any]
    total_steps: int
    world_size: int
    output_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The ranks are ready for their first step.

    Attributes:
        facts: what the ranks found: parameters, trained parameters, attention, memory, and the step
            to resume from.
    """

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(Event):
    """The progress of a phase before, between or after steps.

    Attributes:
        name: e.g. `load_model`.
        text: description for people.
        done: number of finished units of work; None if the phase has no units.
        total: number of units; None if the phase has no units.
    """

    name: str
    text: str
    done: int | None
    total: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """An optimizer step, as in a line of metrics.jsonl.

    Attributes:
        step: number of the step, from 1.
        loss: loss of the global batch per loss token, before the update.
        metrics: all values of the line: epoch, lr, grad_norm, tokens, tokens_per_second,
            step_time_s …
    """

    step: int
    loss: float | None
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Event):
    """The result of an evaluation.

    Attributes:
        step: the step after which the evaluation ran; 0 means before training.
        metrics: eval_loss and other metrics.
    """

    step: int
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Event):
    """An answer that the model generated after `step`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Event):
    """A complete checkpoint.

    Attributes:
        step: the step after which it was saved.
        path: directory of the checkpoint.
        bytes: size in bytes.
        seconds: time from the step until the checkpoint was on the disk.
    """

    step: int
    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A message for people.

    Attributes:
        is_warning: whether the message is a warning.
        code: code of the warning; empty for other messages.
        text: the message.
        fix: what to do about it; may be empty.
    """

    is_warning: bool
    code: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The run failed and may restart. The last verdict is also in the result."""

    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    """The last event of a run."""

    result: Result


def event_of(message: Message) -> Event | None:
    """The event of a message; None for messages that are not for programs."""
    when = message.get("time", 0.0)
    match message["kind"]:
        case "plan":
            return Planned(
                time=when,
                plan=fields_of(message),
                total_steps=message["total_steps"],
                world_size=message["world_size"],
                output_dir=Path(str(message["output_dir"])),
            )
        case "ready":
            facts = message.get("facts")
            return Started(time=when, facts=facts if isinstance(facts, dict) else {})
        case "phase":
            return Phase(
                time=when,
                name=str(message.get("phase", "")),
                text=str(message.get("text", "")),
                done=message.get("done"),
                total=message.get("total"),
            )
        case "step":
            loss = message.get("loss")
            return Step(time=when, step=int(message["step"]), loss=loss, metrics=fields_of(message))
        case "eval":
            metrics = {name: value for name, value in fields_of(message).items() if name != "step"}
            return Evaluation(time=when, step=int(message["step"]), metrics=metrics)
        case "sample":
            prompt, text = str(message.get("prompt", "")), str(message.get("text", ""))
            return Sample(time=when, step=int(message.get("step") or 0), prompt=prompt, text=text)
        case "checkpoint":
            return Checkpoint(
                time=when,
                step=int(message["step"]),
                path=Path(str(message.get("path", ""))),
                bytes=int(message.get("bytes") or 0),
                seconds=float(message.get("seconds") or 0.0),
            )
        case "warning" | "note":
            return Notice(
                time=when,
                is_warning=message["kind"] == "warning",
                code=str(message.get("code", "")),
                text=str(message.get("text", "")),
                fix=str(message.get("fix", "")),
            )
        case "verdict":
            return Failed(time=when, verdict=Verdict.from_json(fields_of(message)))
        case _:
            return None


class Stream(Iterator[Event]):
    """An iterator over the events of a run. The run proceeds whether or not they are read.

    A stream is an asynchronous iterator, too.

    The run ends with this object: it saves a checkpoint on `close`, at the end of a `with` block,
    or when the last reference is gone. The same call resumes the run.
    """

    _CLOSED: ClassVar[None] = None

    def __init__(self, front: Front) -> None:
        self._front = front
        self._is_over = False

    def __next__(self) -> Event:
        """The next event.

        Raises:
            UnisonoError: if the config, data, model or machine is refused before the start.
            StopIteration: after Ended.
        """
        while not self._is_over:
            message = self._front.next_message()
            if message is None:
                self._is_over = True
                return Ended(time=self._ended_at(), result=self.result())
            event = event_of(message)
            if event is not None:
                return event
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await asyncio.to_thread(next, self, self._CLOSED)
        if event is None:
            raise StopAsyncIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the start itself failed
            self.close()

    def cancel(self) -> Result:
        """Finishes the step, saves a checkpoint, ends the ranks, and returns the result, whose
        outcome is interrupted with exit code 130.

        It can be called from another thread than the one that reads the events. The events end with
        Ended.

        Raises:
            UnisonoError: as `result`.
        """
        self._front.stop()
        return self.result()

    def close(self) -> None:
        """Ends the run like `cancel`, without returning the result.

        A run that has ended is left as it is.
        """
        self._front.stop()
        self._is_over = True

    def result(self) -> Result:
        """Waits for the end of the run, and returns its result.

        Raises:
            UnisonoError: if nothing was started.
        """
        self._front.wait()
        last = self._front.last
        if last is not None and last["kind"] == "stopped":
            return Result(RunResult(outcome="interrupted", exit_code=130))
        if last is None or last["kind"] != "result":
            raise shown(self._front.error())
        result = Result(RunResult.from_json(fields_of(last)))
        if result.outcome == "refused":
            refused = {**fields_of(last), "exit_code": result.exit_code}
            raise shown(refusal(message_of(RefusedMessage, refused)))
        return result

    def _ended_at(self) -> float:
        self._front.wait()
        return float(self._front.last.get("time") or 0.0) if self._front.last is not None else 0.0


def shown(error: UnisonoError) -> UnisonoError:
    """The error with all of its lines in the traceback: where, why and how to fix it."""
    for line in error.lines()[1:]:
        error.add_note(line)
    return error
