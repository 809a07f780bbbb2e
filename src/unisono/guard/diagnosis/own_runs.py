"""Diagnosis of our own runs: the verdict in the run's directory, or the one that follows from what
its ranks reported in events/, metrics.jsonl and logs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.base.causes import resume_hint
from unisono.base.causes.signatures import match_line
from unisono.base.causes.verdict import Evidence, Verdict
from unisono.base.events import own_frame
from unisono.base.files import iterate_lines, objects_of, parse_json, read_object, read_text
from unisono.base.messages import CrashedMessage, Message, RefusedMessage, fields_of, read_message
from unisono.base.text import one_line
from unisono.base.user_code import MODEL_CODE, own_code
from unisono.guard.diagnosis.judge import DiagnosisResult
from unisono.guard.diagnosis.lines import shown
from unisono.guard.diagnosis.own_verdicts import suspected
from unisono.guard.diagnosis.run_facts import EventKind, LogEvent, Origin, RankFacts, RunFacts
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import read_holder
from unisono.guard.rundir.merged_logs import Clocks, is_time
from unisono.guard.rundir.records import RunResult, iterate_metrics, read_result
from unisono.guard.watch import phase_named

SILENT_S = 5.0
"""Seconds by which a rank must have fallen silent earlier than the others to be named."""
_MOST_RANKS = 8
_MOST_TRACE = 6
_VAGUE = ("undetermined", "healthy", "rank_stalled", "rank_died_first", "rdzv_timeout", "preempted_sigterm")
_KINDS: dict[str, EventKind] = {
    "warning": "warning",
    "asked": "warning",
    "crashed": "error",
    "refused": "error",
    "result": "finished",
}
_LEFT_OUT = ("kind", "time", "traceback", "done", "total", "report", "facts")
_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class RankEvents:
    """Events of one rank of our own run, since its last start.

    Attributes:
        rank: its number; host: where it ran.
        events: in order.
        phase: the last phase that it reported.
        last_time: of its last event or log output. Seconds since 1970 by the head's clock; None:
            never.
    """

    rank: int
    host: str
    events: tuple[LogEvent, ...]
    phase: str
    last_time: float | None
    messages: tuple[Message, ...]

    @property
    def crash(self) -> tuple[LogEvent, CrashedMessage | RefusedMessage] | None:
        """The exception that ended it, unless another rank's exit caused it."""
        for event, message in zip(self.events, self.messages, strict=True):
            if message["kind"] in ("crashed", "refused") and not message.get("peer_lost"):
                return event, message
        return None


def read_rank_events(run: RunDir) -> list[RankEvents]:
    """Events of all ranks that reported any, in order; incomplete lines are skipped."""
    clocks = Clocks(run)
    hosts = {
        _whole(rank_place.get("rank")): one_line(str(rank_place.get("host") or ""), limit=100)
        for rank_place in _places(run)
    }
    return [
        _read_rank(path, hosts, clocks, run) for path in sorted(run.events(0).parent.glob("rank-*.jsonl"))
    ]


def facts_of(run: RunDir, reports: list[RankEvents]) -> RunFacts:
    """The run's records as RunFacts, for rules, judging and the timeline."""
    plan = read_object(run.plan)
    step = last_step(run)
    events = tuple(event for one in reports for event in one.events)
    ranks = {one.rank: _rank_facts(one, step) for one in reports}
    for rank in range(_whole(plan.get("world_size")) or 0) if len(ranks) < 10_000 else ():
        ranks.setdefault(rank, RankFacts(rank))
    return RunFacts(
        events=events,
        ranks=dict(sorted(ranks.items())),
        world_size=_whole(plan.get("world_size")),
        nodes=len(objects_of(plan.get("nodes"))) or None,
        hosts=tuple(dict.fromkeys(one.host for one in reports if one.host)),
        framework=_framework(plan, reports),
        step=step,
        steps=_whole(plan.get("total_steps")),
    )


def _framework(plan: Mapping[str, object], reports: list[RankEvents]) -> str:
    """The framework: "unisono", or what a program of `unisono run` has loaded; empty if unknown."""
    if not isinstance(plan.get("command"), list):
        return "unisono"
    names = (
        message.get("name") for one in reports for message in one.messages if message["kind"] == "framework"
    )
    return one_line(str(next(names, "")), limit=100)


def last_step(run: RunDir) -> int | None:
    """The last step in metrics.jsonl."""
    steps = (
        [step for line in iterate_metrics(run.metrics) if (step := _whole(line.get("step"))) is not None]
        if run.metrics.exists()
        else []
    )
    return max(steps, default=None)


def _rank_facts(one: RankEvents, step: int | None) -> RankFacts:
    finished = next((event for event in one.events if event.kind == "finished"), None)
    progress = next((event for event in reversed(one.events) if event.kind == "progress"), None)
    steps = [number for message in one.messages if (number := _whole(message.get("step"))) is not None]
    return RankFacts(
        one.rank,
        host=one.host or None,
        first=one.events[0] if one.events else None,
        last=one.events[-1] if one.events else None,
        progress=progress,
        step=step if one.rank == 0 else max(steps, default=None),
        finished=finished,
        ending="finished" if finished else "exception" if one.crash else "unknown",
    )


def _read_rank(path: Path, hosts: dict[int | None, str], clocks: Clocks, run: RunDir) -> RankEvents:
    rank = _whole(path.stem.rpartition("-")[2]) or 0
    host = hosts.get(rank, "")
    ahead_s = clocks.ahead_s(rank)
    events: list[LogEvent] = []
    messages: list[Message] = []
    phase = ""
    for number, message in _messages(path):
        if message["kind"] == "phase":
            phase = one_line(str(message.get("phase") or ""), limit=40)
            if phase == "start":  # an earlier start is another run's story
                events, messages = [], []
        time = message.get("time")
        when = time - ahead_s if is_time(time) else None
        kind = _KINDS.get(message["kind"], "progress")
        events.append(
            LogEvent(
                f"events/{path.name}",
                number,
                number,
                "told",
                kind,
                None,
                _text(message),
                Origin(rank=rank, host=host or None),
                when,
            )
        )
        messages.append(message)
    times = [event.time for event in events if event.time is not None]
    grew = [
        when - ahead_s
        for log in run.log("HOST", rank).parent.glob(f"*-rank-{rank:05d}.times")
        if (when := _last_growth(log)) is not None
    ]
    return RankEvents(rank, host, tuple(events), phase, max(times[-1:] + grew, default=None), tuple(messages))


def _messages(path: Path) -> Iterator[tuple[int, Message]]:
    try:
        for number, line in enumerate(iterate_lines(path), 1):
            message = read_message(line.decode("utf-8", "replace"))
            if message is not None:
                yield number, message
    except OSError:
        return


def _last_growth(path: Path) -> float | None:
    """The last time at which the front saw the log grow."""
    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines[-3:]):  # the last may be torn
        try:
            when = parse_json(line)[0]
        except (ValueError, TypeError, LookupError):
            continue
        if is_time(when):
            return float(when)
    return None


def _text(message: Message) -> str:
    shown_fields = {
        name: value for name, value in message.items() if name not in _LEFT_OUT and value not in (None, "")
    }
    return shown(
        one_line(
            f"{message['kind']}: " + ", ".join(f"{name} {value}" for name, value in shown_fields.items()),
            limit=_TEXT_CHARS,
        )
    )


def _places(run: RunDir) -> Sequence[Mapping[str, Any]]:
    return objects_of(read_object(run.plan).get("ranks"))


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None


def is_run(path: Path) -> bool:
    """Whether a directory is one of our runs."""
    run = RunDir(path)
    return path.is_dir() and (
        isinstance(read_object(run.plan).get("run_id"), str) or "outcome" in read_object(run.result)
    )


def log_files(root: Path) -> list[str]:
    """The log files of a run."""
    return [str(path) for path in sorted(RunDir(root).log("HOST", 0).parent.glob("*.log"))]


def diagnose_run(root: Path, read_logs: Callable[[], DiagnosisResult] | None = None) -> DiagnosisResult:
    """The verdict on one of our runs, with the command that resumes it.

    Args:
        read_logs: returns the diagnosis of its logs; called only if the run has no verdict.
    """
    run = RunDir(root)
    reports = read_rank_events(run)
    facts = facts_of(run, reports)
    verdict = (
        _running(run, facts)
        or _stored_verdict(run)
        or _ended_with_result(run, facts)
        or _crashed(run, reports, facts)
        or _logs(read_logs, reports, facts)
        or _ended_badly(run, facts)
        or suspected(run, facts)
        or _silent(reports, facts)
    )
    onward = (
        _resume_fix(run, verdict)
        if facts.framework == "unisono"
        else _program_resume_fix(verdict, facts.framework)
    )
    verdict = verdict.model_copy(update={"fix": (*verdict.fix, *onward)})
    return DiagnosisResult(verdict, (), (), (), facts)


def _running(run: RunDir, facts: RunFacts) -> Verdict | None:
    holder = read_holder(run.lock)
    if holder is None:
        return None
    at = f"; its last step is {facts.step}" if facts.step is not None else ""
    return Verdict(
        cause="healthy",
        when="during",
        severity="none",
        summary=f"the run is active: {holder} holds it{at}",
        step=facts.step,
        fix=(f"unisono logs --follow {run.root}",),
    )


def _stored_verdict(run: RunDir) -> Verdict | None:
    """The verdict that the run itself stored."""
    body = read_object(run.verdict) or _verdict_of(read_result(run))
    try:
        verdict = Verdict.from_json(body) if body else None
    except ValidationError:
        return None
    if verdict is None:
        return None
    evidence = tuple(Evidence(where=one_line(item.where), text=shown(item.text)) for item in verdict.evidence)
    return verdict.model_copy(update={"evidence": evidence, "summary": shown(verdict.summary)})


def _verdict_of(result: RunResult | None) -> dict[str, object]:
    return dict(result.verdict or {}) if result else {}


def _ended_with_result(run: RunDir, facts: RunFacts) -> Verdict | None:
    """The verdict from result.json alone."""
    result = read_result(run)
    if result is None:
        return None
    earlier = tuple(
        Evidence(
            where=f"restart from step {restart.from_step}", text=shown(str(restart.verdict.get("summary")))
        )
        for restart in result.restarts[-_MOST_RANKS:]
    )
    if facts.framework != "unisono":
        return _ended_program(result)
    if result.is_completed:
        loss = f", loss {result.loss:.4g}" if result.loss is not None else ""
        again = f"; restarts by itself: {len(result.restarts)}" if result.restarts else ""
        return Verdict(
            cause="healthy",
            when="after",
            severity="none",
            summary=f"the run is completed: {result.step} steps{loss}{again}",
            step=result.step,
            evidence=earlier,
        )
    if result.outcome in ("preempted", "interrupted"):
        who = (
            "it was asked to stop (SIGTERM or SIGUSR1)"
            if result.outcome == "preempted"
            else "it was interrupted from the keyboard"
        )
        summary = f"{who} and made a checkpoint at step {result.step}"
        if result.outcome == "preempted":
            return Verdict(
                cause="preempted_sigterm",
                when="after",
                severity="warning",
                summary=summary,
                step=result.step,
                evidence=earlier,
            )
        return Verdict(
            cause="healthy",
            when="after",
            severity="none",
            summary=summary,
            step=result.step,
            evidence=earlier,
        )
    problems = tuple(
        Evidence(where=one_line(problem.get("where") or "result.json"), text=shown(problem.get("what") or ""))
        for problem in result.problems
    )
    fix = tuple(shown(problem["fix"]) for problem in result.problems if problem.get("fix"))
    causes = [signature.cause for item in problems for signature in match_line(item.text) if signature.cause]
    summary = problems[0].text if problems else f"the run {result.outcome} with exit code {result.exit_code}"
    return Verdict(
        cause=causes[0] if causes else "undetermined",
        when="after",
        summary=summary,
        step=result.step or facts.step,
        evidence=problems or earlier,
        fix=fix,
    )


def _ended_program(result: RunResult) -> Verdict | None:
    """The verdict on a program of `unisono run` that has ended: result.json has neither its steps
    nor its checkpoints, so its log may have the cause.
    """
    if result.is_completed:
        return Verdict(
            cause="healthy", when="after", severity="none", summary="the program succeeded (exit code 0)"
        )
    if result.outcome in ("preempted", "interrupted"):
        signals = "SIGTERM" if result.outcome == "preempted" else "Ctrl-C"
        cause, severity = (
            ("preempted_sigterm", "warning") if result.outcome == "preempted" else ("healthy", "none")
        )
        summary = f"the program was asked to stop ({signals}), and ended with exit code {result.exit_code}"
        return Verdict.model_validate(
            {"cause": cause, "when": "after", "severity": severity, "summary": summary}
        )
    return None


def _ended_badly(run: RunDir, facts: RunFacts) -> Verdict | None:
    """The verdict on a program that exited with an error, and whose log has no known cause."""
    result = read_result(run)
    if result is None or facts.framework == "unisono":
        return None
    summary = f"the program ended with exit code {result.exit_code}, and its log shows no cause"
    return Verdict(cause="undetermined", when="after", summary=summary)


def _crashed(run: RunDir, reports: Sequence[RankEvents], facts: RunFacts) -> Verdict | None:
    """The verdict on a rank's own exception, the first in time."""
    crashes = [(one, *one.crash) for one in reports if one.crash]
    if not crashes:
        return None
    one, event, message = min(crashes, key=lambda crash: crash[1].time or 0.0)
    fields = fields_of(message)
    problems = objects_of(fields.get("problems")) or [{}]
    error = shown(one_line(str(fields.get("error") or problems[0].get("what") or "an exception"), limit=400))
    text = str(fields.get("traceback") or "")
    trace = [line for line in text.splitlines() if line.strip()][-_MOST_TRACE:]
    config = read_object(run.plan).get("config")
    code = {**MODEL_CODE, **_own_code(config)}
    origin = shown(own_frame(text, code)) if facts.framework == "unisono" else ""
    causes = [signature.cause for signature in match_line(error) if signature.cause]
    evidence = (_evidence(event), *(Evidence(where=event.where, text=shown(line.strip())) for line in trace))
    return Verdict(
        cause=causes[0] if causes else "user_code_error",
        when="after",
        summary=f"{_rank(one)} ended with an exception: {error}"
        + (f"; the likely origin is {origin}" if origin else ""),
        ranks=(one.rank,),
        hosts=(one.host,) if one.host else (),
        phase=one.phase or None,
        step=facts.step,
        evidence=evidence,
        fix=(f"Fix {origin}.",) if origin else (),
    )


def _own_code(config: Any) -> dict[str, str]:
    """See `RunPlan.own_code`, from the config in plan.json, which may be damaged."""
    values = config if isinstance(config, dict) else {}
    optim = values.get("optim")
    optimizer = optim.get("kind") if isinstance(optim, dict) else ""
    evaluation = values.get("eval")
    metrics = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    rollout = values.get("rollout")
    environment = rollout.get("environment") if isinstance(rollout, dict) else None
    codes = own_code(
        objective=str(values.get("objective")),
        optimizer=str(optimizer),
        rewards=_uses(values.get("rewards")),
        metrics=_uses(metrics),
        environment=str(environment.get("use")) if isinstance(environment, dict) else "",
    )
    return {str(code.path): f"the {code.what}" for code in codes}


def _uses(entries: Any) -> list[str]:
    """`use` of each entry of a list of sections."""
    listed = entries if isinstance(entries, list) else []
    return [str(one.get("use")) for one in listed if isinstance(one, dict)]


def _logs(
    read_logs: Callable[[], DiagnosisResult] | None, reports: Sequence[RankEvents], facts: RunFacts
) -> Verdict | None:
    """The verdict of the logs, if they state the cause."""
    logs = read_logs() if read_logs else None
    if logs is None or logs.verdict.cause in _VAGUE or logs.verdict.confidence < 0.8:
        return None
    phases = {one.rank: one.phase for one in reports}
    phase = next((phases[rank] for rank in logs.verdict.ranks if phases.get(rank)), None)
    return logs.verdict.model_copy(update={"phase": logs.verdict.phase or phase, "step": facts.step})


def _silent(reports: Sequence[RankEvents], facts: RunFacts) -> Verdict:
    """The verdict without a result, a stored verdict or an exception: which rank is behind, or fell
    silent first.
    """
    at = f"after step {facts.step}" if facts.step is not None else "before its first step"
    last_seen = sorted(
        (one for one in reports if one.last_time is not None), key=lambda one: one.last_time or 0.0
    )
    evidence = [
        Evidence(
            where=one.events[-1].where,
            text=f"{_rank(one)}, last heard in phase {one.phase or 'start'}: {one.events[-1].text}",
        )
        for one in last_seen[:_MOST_RANKS]
        if one.events
    ]
    behind = _behind(reports)
    who = behind or _first_silent(last_seen)
    absent = [rank for rank in range(facts.world_size or 0) if rank not in {one.rank for one in reports}][
        :_MOST_RANKS
    ]
    unknown_ranks = (
        f"; nothing is known about rank {', '.join(map(str, absent))}" if absent and reports else ""
    )
    if behind:
        others = max((one.phase for one in reports), key=phase_named)
        summary = (
            f"the run ended {at} without a result: rank {', '.join(str(one.rank) for one in behind)} was"
            f" still in phase {behind[0].phase or 'start'}, others in {others}{unknown_ranks}"
        )
        return Verdict(
            cause="rank_stalled",
            when="after",
            summary=summary,
            ranks=tuple(one.rank for one in behind),
            hosts=_hosts(behind),
            phase=behind[0].phase or None,
            step=facts.step,
            evidence=tuple(evidence),
            confidence=0.6,
        )
    first = (
        f"; rank {who[0].rank} fell silent first, in phase {who[0].phase or 'start'}"
        if who
        else "; all ranks fell silent together"
        if len(last_seen) > 1
        else ""
    )
    summary = (
        f"the run ended {at} without a result or a verdict: its front was killed (kill -9, out of memory,"
        f" power){first}{unknown_ranks}"
    )
    fix = (
        (
            "Check the machine's logs of that time: dmesg -T | grep -i -E 'oom|killed process', journalctl -b"
            " -1, the scheduler's messages."
        ),
    )
    return Verdict(
        cause="undetermined",
        when="after",
        summary=summary,
        phase=last_seen[0].phase or None if last_seen else None,
        step=facts.step,
        evidence=tuple(evidence),
        fix=fix,
        confidence=0.5,
    )


def _behind(reports: Sequence[RankEvents]) -> list[RankEvents]:
    """Ranks in an earlier phase than most before training; from the first step on, phases recur."""
    places = {one.rank: min(phase_named(one.phase), phase_named("data")) for one in reports}
    lowest, highest = min(places.values(), default=0), max(places.values(), default=0)
    late = [one for one in reports if places[one.rank] == lowest]
    return late if lowest < highest and 2 * len(late) < len(reports) + 1 else []


def _first_silent(last_seen: Sequence[RankEvents]) -> list[RankEvents]:
    """The rank whose last event is clearly earlier than those of all others."""
    if len(last_seen) < 2:
        return []
    return (
        [last_seen[0]] if (last_seen[1].last_time or 0.0) - (last_seen[0].last_time or 0.0) > SILENT_S else []
    )


def _program_resume_fix(verdict: Verdict, framework: str) -> list[str]:
    """How to resume a program of `unisono run`, if known and not in the fix yet."""
    if verdict.severity == "none":
        return []
    return [line for line in resume_hint(framework) if line not in verdict.fix]


def _resume_fix(run: RunDir, verdict: Verdict) -> list[str]:
    """The command that resumes the run."""
    result = read_result(run)
    if verdict.when == "during" and verdict.severity == "none":
        return []
    if result is not None and result.is_completed:
        config = read_object(run.plan).get("config")
        objective = config.get("objective") if isinstance(config, dict) else None
        rows = {"reward": "PAIRS", "classify": "FILE", "embed": "FILE"}.get(str(objective))
        return [f"unisono eval {run.root} --data {rows}" if rows else f"unisono chat {run.root}"]
    steps = [
        int(path.parent.name[5:])
        for path in run.checkpoints.glob("step-*/manifest.json")
        if path.parent.name[5:].isdecimal()
    ]
    nodes = objects_of(read_object(run.plan).get("nodes"))
    nproc = nodes[0].get("nproc") if nodes else None
    ranks = f" --nproc {nproc}" if isinstance(nproc, int) and nproc > 1 else ""
    where = f" on each of the {len(nodes)} nodes, with the same options as before" if len(nodes) > 1 else ""
    begin = (
        f"resumes from step {max(steps)}"
        if steps
        else "there is no checkpoint, so it starts from the beginning"
    )
    return [f"unisono train {run.config}{ranks}{where}: {begin}"]


def _rank(one: RankEvents) -> str:
    return f"rank {one.rank}{f' ({one.host})' if one.host else ''}"


def _hosts(reports: Sequence[RankEvents]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.host for one in reports if one.host))


def _evidence(event: LogEvent) -> Evidence:
    return Evidence(where=event.where, text=event.text)
