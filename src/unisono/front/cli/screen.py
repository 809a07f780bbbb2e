"""Terminal output of a run: the screen and the JSON lines of `unisono train`, and the lines of
`unisono run`.
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from unisono.base.causes import Verdict
from unisono.base.errors import Problem
from unisono.base.messages import (
    CheckpointMessage,
    EvalMessage,
    Message,
    PhaseMessage,
    PlanMessage,
    ReadyMessage,
    RefusedMessage,
    ResultMessage,
    SampleMessage,
    StepMessage,
    VerdictMessage,
    WarningMessage,
    fields_of,
)
from unisono.base.text import columns, one_line, shortened, show_bytes, show_count, show_seconds
from unisono.front.cli.output import Output, shown, terminal_width
from unisono.front.cli.terminal import first_screen
from unisono.guard.rundir.records import shown_outcome
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.families import family_at, family_of

_PLAIN_EVERY_S = 15.0
_PLAIN_PARTS = 10
_SHORTEST_LEFT_S = 0.1
_SAMPLE_WIDTH = 176  # of a sample without a terminal


def _cause_of(message: WarningMessage) -> str:
    """The cause of a warning that has one, as after a verdict's summary."""
    return f"  [{message['code']}]" if message.get("verdict") else ""


class Line(Protocol):
    """The progress line, or its substitute without a terminal."""

    def show(self, text: str, *, share: float | None) -> None:
        """Redraws it; `share` is the completed share of the run, None if unknown."""
        ...

    def above(self, text: str) -> None:
        """Prints a permanent line."""
        ...

    def close(self) -> None:
        """Restores the terminal."""
        ...


class PlainLine:
    """Plain lines for files and pipes: at each tenth of the run, and at intervals in between."""

    def __init__(self, notify: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._notify = notify
        self._clock = clock
        self._share = 0.0
        self._next_part = 0
        self._next_time = 0.0

    def show(self, text: str, *, share: float | None) -> None:
        """Prints the line if it is due."""
        now = self._clock()
        if share is not None and share < self._share:  # a different phase has begun
            self._next_part = 0
        self._share = share if share is not None else self._share
        part = int(self._share * _PLAIN_PARTS + 1e-9)
        reached = share is not None and part >= self._next_part
        if not reached and now < self._next_time:
            return
        if share is not None:
            self._next_part = part + 1
        self._next_time = now + _PLAIN_EVERY_S
        self._notify(text)

    def above(self, text: str) -> None:
        """Prints the line."""
        self._notify(text)

    def close(self) -> None:
        """Does nothing."""


class StepRate:
    """Steps per second over the last steps, without the first step of a start, which includes
    warmup.
    """

    _KEPT = 50

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: list[tuple[float, int]] = []

    def note(self, step: int, at: float | None = None) -> None:
        """Records a completed step; `at`: when, in seconds, where its line came later, as from a
        job that is followed.
        """
        self._seen = [*self._seen[-self._KEPT :], (self._clock() if at is None else at, step)]

    def rate(self) -> float | None:
        """Steps per second, or None if not yet known."""
        if len(self._seen) < 2:
            return None
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - begin) if end > begin else None


class Screen:
    """Shows the messages of a run on stderr, and its result on stdout."""

    def __init__(
        self, printer: Output, line: Line | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._printer = printer
        self._line = line or _line_for(printer)
        self._clock = clock
        self._pace = StepRate(clock)
        self._plan: RunPlan | None = None
        self._header_shown = False
        self._verdict: Verdict | None = None
        self._figures: dict[str, str] = {}

    def show(self, message: Message) -> None:  # noqa: C901 - a table of kinds
        """Shows one message; ignores unknown kinds."""
        match message["kind"]:
            case "plan":
                self._on_plan(message)
            case "ready":
                self._on_ready(message)
            case "phase":
                self._on_phase(message)
            case "step":
                self._on_step(message)
            case "eval":
                self._on_eval(message)
            case "sample":
                self._on_sample(message)
            case "checkpoint":
                self._on_checkpoint(message)
            case "warning":
                self._on_warning(message)
            case "note":
                self._notify(one_line(str(message.get("text", ""))))
            case "verdict":
                self._on_verdict(message)
            case "refused":
                self._on_refused(message)
            case "result":
                self._on_result(message)
            case _:
                pass

    def close(self) -> None:
        """Restores the terminal."""
        self._show_verdict()
        self._line.close()

    def _on_plan(self, message: PlanMessage) -> None:
        self._show_verdict()  # of the previous start
        self._pace = StepRate(self._clock)  # after a restart steps count from the checkpoint again
        self._plan = RunPlan.model_validate(fields_of(message))

    def _on_ready(self, message: ReadyMessage) -> None:
        facts = message.get("facts")
        if not self._header_shown:
            self._show_header(facts if isinstance(facts, dict) else {})

    def _show_header(self, facts: Mapping[str, object]) -> None:
        assert self._plan is not None
        self._header_shown = True
        for text in first_screen(self._plan, facts):
            self._notify(text)
        for text in [*self._plan.warnings, *self._plan.data.warnings]:
            self._line.above(f"warning: {one_line(text)}")

    def _on_phase(self, message: PhaseMessage) -> None:
        done, total = message.get("done"), message.get("total")
        share = done / total if isinstance(done, int | float) and total else None
        if self._printer.quiet:
            return
        counted = f" {min(done, total):,} of {total:,}" if share is not None and done and total else ""
        trains = self._pace.rate() is not None  # then the bar shows the steps
        self._line.show(
            shown(one_line(str(message.get("text", "")))) + counted, share=None if trains else share
        )

    def _on_step(self, message: StepMessage) -> None:
        step = int(message["step"])
        self._pace.note(step, message.get("time"))
        if self._printer.quiet:
            return
        total = self._plan.total_steps if self._plan else 0
        rate = self._pace.rate()
        parts = [f"step {step:,}" + (f"/{total:,}" if total else ""), f"loss {_figure(message.get('loss'))}"]
        parts += [f"{name} {value}" for name, value in self._figures.items()]
        if speed := message.get("tokens_per_second"):
            parts.append(_speed(float(speed), self._plan))
        if rate:
            parts.append(f"{rate:.3g} steps/s")
        left_s = (total - step) / rate if rate and step < total else 0.0
        if left_s >= _SHORTEST_LEFT_S:
            parts.append(f"{show_seconds(left_s)} left")
        self._line.show(" · ".join(parts), share=step / total if total else None)

    def _on_eval(self, message: EvalMessage) -> None:
        figures = {k: v for k, v in message.items() if k not in ("kind", "time", "step") and _is_number(v)}
        if "eval_loss" in figures:
            self._figures["eval_loss"] = _figure(figures["eval_loss"])
        shown = ", ".join(f"{name} {_figure(value)}" for name, value in figures.items())
        self._notify(f"evaluation at step {message.get('step')}: {shown}")

    def _on_sample(self, message: SampleMessage) -> None:
        width = terminal_width(sys.stderr) or _SAMPLE_WIDTH
        prompt = shortened(one_line(str(message.get("prompt", ""))), width * 2 // 5)
        answer = one_line(str(message.get("text", "")))
        self._notify(f"  {prompt} → {shortened(answer, width - columns(prompt) - len('   → '))}")

    def _on_checkpoint(self, message: CheckpointMessage) -> None:
        step, size, seconds = message.get("step"), message.get("bytes"), message.get("seconds")
        self._notify(
            f"checkpoint at step {step}"
            + (f", {show_bytes(size)}" if size else "")
            + (f" in {show_seconds(seconds)}" if seconds is not None else "")
        )

    def _on_warning(self, message: WarningMessage) -> None:
        fix = f" ({one_line(str(fix))})" if (fix := message.get("fix")) else ""
        source = message.get("place") or (f"rank {message['rank']}" if "rank" in message else "")
        source = f"{one_line(str(source))}: " if source else ""
        text, cause = one_line(str(message.get("text", ""))), _cause_of(message)
        self._line.above(f"warning: {source}{text}{cause}{fix}")

    def _on_verdict(self, message: VerdictMessage) -> None:
        """Shows the summary immediately; the block with evidence and fix follows at the end."""
        self._show_verdict()
        self._verdict = Verdict.from_json(fields_of(message))
        if self._verdict.when == "during":  # before a start nothing follows
            self._line.above(f"{self._verdict.summary}  [{self._verdict.cause}]")

    def _show_verdict(self) -> None:
        verdict, self._verdict = self._verdict, None
        for text in verdict.lines() if verdict is not None else ():
            self._line.above(text)

    def _on_refused(self, message: RefusedMessage) -> None:
        for problem in message.get("problems") or []:
            for text in Problem(**{name: str(value) for name, value in problem.items()}).lines():
                self._line.above(text)

    def _on_result(self, message: ResultMessage) -> None:
        verdict, self._verdict = self._verdict, None
        self.close()
        for text in ending(message, Path.cwd(), plan=self._plan):
            self._printer.result(text)
        self._verdict = verdict
        self._show_verdict()

    def _notify(self, text: str) -> None:
        if not self._printer.quiet:
            self._line.above(text)


class JsonLines:
    """The messages of a run for programs: one JSON object per line on stdout, the result last."""

    _KINDS = ("plan", "step", "eval", "checkpoint", "warning", "verdict", "result")

    def __init__(self, printer: Output) -> None:
        self._printer = printer

    def show(self, message: Message) -> None:
        """Writes the message if programs need it."""
        if message["kind"] in self._KINDS:
            self._printer.emit(message)

    def close(self) -> None:
        """Does nothing."""


def _speed(tokens_per_second: float, plan: RunPlan | None) -> str:
    if plan is None:
        return f"{show_count(tokens_per_second)} tokens/s"
    return family_of(plan.model).speed(tokens_per_second, plan.data.train)


def ending(result: ResultMessage, cwd: Path, *, plan: RunPlan | None = None) -> list[str]:
    """The last lines: the outcome, the path of the result, and the next command; paths relative to
    `cwd`.

    Args:
        result: the message.
        cwd: the working directory.
        plan: None if there is none yet.
    """
    alone = plan is not None and len(plan.nodes) == 1
    output_dir = str(result.get("output_dir", ""))
    figures = [f"step {result.get('step', 0):,}"]
    if result.get("loss") is not None:
        figures.append(f"loss {_figure(result['loss'])}")
    if speed := result.get("tokens_per_second"):
        figures.append(_speed(float(speed), plan))
    figures.append(show_seconds(float(result.get("wall_time_s") or 0)))
    trained = bool(result.get("step") or result.get("checkpoint"))
    verdict = result.get("verdict") or {}
    outcome = shown_outcome(str(result.get("outcome")), verdict)
    if not trained and result.get("outcome") == "disagreed":
        # Refused by the head: the other nodes may already be training.
        refused_at_call = verdict.get("phase") == "agree.call"
        what = "started on this node" if refused_at_call else "trained" if alone else "trained, on any node"
        return [f"disagreed: nothing was {what}"]
    if not trained and verdict.get("when") == "before":
        return [f"{outcome}: nothing was trained"]
    lines = [
        f"{outcome}{' · ' if outcome.startswith('stopped') else ': '}{' · '.join(figures)}",
        *_evaluation(result.get("eval") or {}),
    ]
    if result.get("held_by"):
        saved = result.get("weights") or result.get("checkpoint")
        if saved is None and result.get("outcome") != "completed":
            return [*lines, f"checkpoints: on {result['held_by']}, in its output_dir"]
        return [*lines, f"result: {saved or output_dir}, on {result['held_by']}"]
    if result.get("outcome") == "completed":
        weights = _near(str(result.get("weights") or output_dir), cwd)
        run = shlex.quote(_near(output_dir, cwd))
        lines += _read_back(result.get("read_back"))
        following = family_at(Path(output_dir)).following(
            run, objective="" if plan is None else plan.config.objective
        )
        return [*lines, f"result: {weights}", f"next:   {following}"]
    checkpoint = result.get("checkpoint")
    none = "there is no checkpoint yet"
    if verdict.get("cause") == "output_removed":  # its checkpoints are where the directory went
        none = f"checkpoint: none of this run is at {_near(output_dir, cwd)}"
    lines.append(f"checkpoint: {_near(checkpoint, cwd)}" if checkpoint else none)
    if result.get("exit_code") in (75, 130):
        lines.append("next:   the same command " + ("resumes from it" if checkpoint else "starts at step 1"))
    return lines


def _read_back(about: Mapping[str, Any] | None) -> list[str]:
    """How the written files compare with the trained model; empty if they were not read again."""
    if not about:
        return []
    took = show_seconds(float(about["seconds"]))
    if about["compared"] == "digests":
        return [f"read back in {took}: names, shapes and digests only, as {about['why']}"]
    what = "logits" if about["compared"] == "logits" else "predictions"
    return [
        f"read back in {took}: {what} differ from the trained model's by {about['differs_by']:.1e} of their"
        " spread"
    ]


def _evaluation(figures: Mapping[str, object]) -> list[str]:
    """The evaluation metrics in a line, each with its value before training if known."""
    shown = []
    for name, value in figures.items():
        if _is_number(value) and not name.endswith("_before"):
            before = figures.get(f"{name}_before")
            shown.append(
                f"{name} " + (f"{_figure(before)} → " if _is_number(before) else "") + _figure(value)
            )
    return [f"evaluation: {', '.join(shown)}"] if shown else []


def _near(path: str, cwd: Path) -> str:
    """A path to type."""
    return str(Path(path).relative_to(cwd)) if Path(path).is_relative_to(cwd) else path


def _line_for(printer: Output) -> Line:
    if sys.stderr.isatty() and not printer.quiet:
        from unisono.front.cli.terminal import LiveLine

        return LiveLine()
    return PlainLine(printer.warn)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else str(value)


_FOR_PROGRAMS = ("verdict", "result")


class RunOutput:
    """Shows messages as lines with the prefix `unisono:`, to tell them apart from the program's
    output.
    """

    def __init__(self, printer: Output) -> None:
        self._printer = printer
        self._verdict: Verdict | None = None

    def show(self, message: Message) -> None:
        """Shows one message."""
        if self._printer.json and message["kind"] in _FOR_PROGRAMS:
            self._printer.emit(message)
        match message["kind"]:
            case "note":
                self._printer.notify(f"unisono: {one_line(str(message.get('text', '')))}")
            case "warning":
                fix = f" ({one_line(str(fix))})" if (fix := message.get("fix")) else ""
                text, cause = one_line(str(message.get("text", ""))), _cause_of(message)
                self._printer.warn(f"unisono: warning: {text}{cause}{fix}")
            case "verdict":
                self._on_verdict(message)
            case "result":
                self._on_result(message)
            case _:
                pass

    def _on_verdict(self, message: VerdictMessage) -> None:
        """Shows the summary immediately; the block with evidence and fix follows at the end."""
        self._verdict = Verdict.from_json(fields_of(message))
        self._printer.warn(f"unisono: {self._verdict.summary}  [{self._verdict.cause}]")

    def _on_result(self, message: ResultMessage) -> None:
        verdict = Verdict.from_json(named) if (named := message.get("verdict")) else None
        for line in verdict.lines() if verdict is not None else ():
            self._printer.warn(line)
        duration = show_seconds(float(message.get("wall_time_s") or 0.0))
        outcome = shown_outcome(str(message.get("outcome")), message.get("verdict"))
        where = f" · {message['output_dir']}" if message.get("output_dir") else ""
        if outcome == "disagreed":
            self._printer.warn(
                "unisono: disagreed: the program was started on no node"
                if not where
                else f"unisono: disagreed · {duration}{where}"
            )
            return
        self._printer.notify(f"unisono: {outcome}: exit code {message.get('exit_code')} · {duration}{where}")
