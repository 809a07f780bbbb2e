"""Writes what a start leaves in the run's directory beside the worker's own files; and how a run
ended, in the fields of result.json.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.base.causes import Verdict, find_cause
from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.files import make_private_dir, read_object, write_json, write_text
from unisono.base.messages import Message, ResultMessage, Show, WarningMessage, fields_of
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import NodeReport, RankReport
from unisono.guard.facts import package_versions
from unisono.guard.facts.environment import versions_digest
from unisono.guard.facts.storage import RunsDisk
from unisono.guard.places.ranks import RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.rundir.records import (
    Outcome,
    Progress,
    Restart,
    RunResult,
    is_evaluation,
    iterate_metrics,
    outcome_of,
    read_result,
    set_verdict,
    write_result,
)
from unisono.guard.supervise.decision import Decision
from unisono.guard.supervise.interrupts import exit_code_of
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.postmortem import name_death, name_failure, name_victims
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.guard.supervise.task_process import refusal
from unisono.jobs.runs.curve_drawing import CurveDrawing
from unisono.jobs.runs.train_request import config_yaml
from unisono.trainer.checkpoint.store import CheckpointStore, step_of
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan

_WISHES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def write_decision(run: RunDir, plan: RunPlan) -> None:
    """Writes config.yaml, plan.json and environment.json: all that is decided before the ranks
    start; and agreement.json of one rank.
    """
    for folder in (run.checkpoints, run.events(0).parent, run.log(plan.host, 0).parent):
        make_private_dir(folder)
    write_text(run.config, config_yaml(plan.config, command=f"unisono train {run.config}"), mode=0o600)
    versions = package_versions()
    digest = versions_digest(versions)
    write_json(run.environment, {"schema": 1, "digest": digest, "packages": versions})
    if plan.world_size == 1:
        write_json(run.agreement, _agreement(plan, versions_digest_=digest))
    write_json(run.plan, plan.to_json(), mode=0o600)


def read_progress(run: RunDir) -> Progress:
    """A run's progress, read from its directory; for a node that writes the result in place of a
    lost head.

    A checkpoint is not read through: whoever resumes from it does that.
    """
    known: dict[str, object] = {}
    step = 0
    for line in iterate_metrics(run.metrics):
        step = line["step"]
        if is_evaluation(line):
            known["eval"] = {k.removeprefix("eval_"): v for k, v in line.items() if k.startswith("eval_")}
        else:
            known |= {name: line[name] for name in ("tokens", "loss", "tokens_per_second") if name in line}
    saved = CheckpointStore(run.checkpoints, key=b"").list()  # only names are read
    if saved:
        known["checkpoint"] = str(saved[-1])
        step = max(step, step_of(saved[-1].name))
    return replace(Progress(step), **known)  # type: ignore[arg-type]


def note_in_plan(run: RunDir, **fields: Any) -> None:
    """Adds to plan.json what the ranks have found out since it was written.

    One that is gone or damaged is left alone.
    """
    plan = read_object(run.plan)
    if plan and any(plan.get(name) != value for name, value in fields.items()):
        write_json(run.plan, {**plan, **fields}, mode=0o600)


@dataclass
class AgreementReports:
    """The reports of all nodes and ranks, and the results of their comparison.

    Attributes:
        nodes: by node rank.
        ranks: by rank, of the newest start.
        of_ranks: what came of comparing ranks; None before all have reported.
    """

    nodes: Sequence[NodeReport] = ()
    ranks: Sequence[RankReport] = ()
    of_nodes: Agreement | None = None
    of_ranks: Agreement | None = None

    def set_nodes(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        """Takes what the nodes brought to their meeting."""
        self.nodes, self.of_nodes = list(reports), agreement

    def add_ranks(self, reports: Mapping[int, RankReport], agreement: Agreement | None) -> None:
        """Takes what the ranks of a start have brought."""
        self.ranks = [reports[rank] for rank in sorted(reports)]
        self.of_ranks = agreement


def write_agreement(run: RunDir, table: AgreementReports) -> None:
    """Writes agreement.json of several ranks."""
    agreement = Agreement().merged(*(a for a in (table.of_nodes, table.of_ranks) if a is not None))
    outcome = "refused" if not agreement.agreed else "agreed" if table.of_ranks is not None else "unfinished"
    body = {
        "schema": 1,
        "outcome": outcome,
        "nodes": [report.to_json() for report in table.nodes],
        "ranks": [report.to_json() for report in table.ranks],
        **agreement.to_json(),
    }
    write_json(run.agreement, body)


def is_about_nodes(error: UnisonoError) -> bool:
    """Whether it came of comparing nodes or ranks, be it a single node with what it needs; its
    verdict is then kept in the run's directory.
    """
    phase = (error.verdict.phase if error.verdict is not None else None) or ""
    return isinstance(error, Disagreed) or phase.startswith("agree.")


def keep_refusal(
    run: RunDir, config: RunConfig, table: AgreementReports, error: UnisonoError, *, command: str
) -> None:
    """Keeps why nodes or ranks did not agree: agreement.json, verdict.json, result.json.

    A finished run's result stays.
    """
    agreement = table.of_nodes or Agreement()
    if error.verdict is not None and not agreement.fatal:
        table.of_nodes = agreement.merged(Agreement.found("joining", error.verdict))
    if not run.config.exists():
        write_text(run.config, config_yaml(config, command=command), mode=0o600)
    write_agreement(run, table)
    before = read_result(run)
    if before is not None and before.is_completed:
        return
    set_verdict(run, error.verdict)
    verdict = error.verdict.to_json() if error.verdict else None
    write_result(
        run,
        RunResult.model_validate(
            {
                "outcome": outcome_of(error.exit_code),
                "exit_code": error.exit_code,
                "output_dir": str(run.root),
                "verdict": verdict,
            }
        ),
    )


def _agreement(plan: RunPlan, *, versions_digest_: str) -> dict[str, object]:
    """One node with one rank: its report, without a comparison."""
    report = {
        "node_rank": 0,
        "host": plan.host,
        "nproc_per_node": 1,
        "world_size": 1,
        "device": plan.device.model_dump(mode="json"),
        "config_digest": plan.config_digest,
        "data_digest": plan.data.digest,
        "model_digest": plan.model.digest,
        "environment_digest": versions_digest_,
        "threads": plan.threads,
        "dtype": plan.dtype,
        "resume_step": plan.resume.step if plan.resume else 0,
        "ignored_variables": plan.ignored_variables,
    }
    return {"schema": 1, "nodes": [report], "verdicts": [], "outcome": "agreed"}


def write_plan(run: RunDir, lock: RunLock, plan: RunPlan, table: AgreementReports) -> None:
    """Writes all that is decided before a start of the ranks, on the head; agreement.json of
    several ranks, too.
    """
    make_private_dir(run.root)
    lock.keep()  # preparing data may take hours, and the directory may have been removed meanwhile
    write_decision(run, plan)
    if plan.world_size > 1:
        write_agreement(run, table)


class RunRecorder:
    """Passes messages on, and updates the run's directory at a first step, an evaluation, and a
    measurement of kept steps.
    """

    def __init__(self, run: RunDir, plan: RunPlan, disk: RunsDisk, show: Show) -> None:
        self.drawing = CurveDrawing(run, title=f"{Path(plan.output_dir).name}: {plan.config.model.path}")
        self._run = run
        self._disk = disk
        self._show = show
        self._stepped = False
        self.on_step: Callable[[], None] = lambda: None

    def show(self, message: Message) -> None:
        """Takes one message of a rank, or of the head itself."""
        if message["kind"] == "step":
            self.on_step()
        if message["kind"] == "step" and not self._stepped:
            self._stepped = True
            self._disk.later(self._forget_earlier_end)
        if message["kind"] == "eval":
            self.drawing.again()
        self._note_kept(message)
        self._show(message)

    def keep_agreement(
        self, table: AgreementReports, reports: Mapping[int, RankReport], agreement: Agreement
    ) -> None:
        """Adds what the ranks reported to agreement.json, and shows what does not prevent the
        start.
        """
        table.add_ranks(reports, agreement)
        self._disk.write("agreement.json", partial(write_agreement, self._run, table))
        for verdict in agreement.warnings:
            self.show(as_warning(verdict))

    def _note_kept(self, message: Message) -> None:
        """What the ranks measure and belongs to the plan: how many steps a death may cost, and the
        share of padding.
        """
        match message["kind"]:
            case "ready":
                facts = message.get("facts")
                names = {name: name for name in ("kept_every", "padded", "padding")}
            case "kept":
                facts, names = fields_of(message), {"kept_every": "every"}
            case _:
                return
        if isinstance(facts, dict) and "rank" not in message:
            fields = {field: facts[name] for field, name in names.items() if name in facts}
            self._disk.later(partial(note_in_plan, self._run, **fields))

    def _forget_earlier_end(self) -> None:
        """The result and verdict of an earlier start are history from the first step on."""
        self._run.result.unlink(missing_ok=True)
        set_verdict(self._run, None)


def as_warning(verdict: Verdict) -> WarningMessage:
    """The message of a verdict that does not end the run."""
    return {
        "kind": "warning",
        "time": time.time(),
        "code": verdict.cause,
        "text": verdict.summary,
        "fix": "; ".join(verdict.fix),
    }


@dataclass(frozen=True)
class Ending:
    """How one attempt ended.

    Attributes:
        verdict: what was wrong, if anything was.
        error: the refusal of a rank, in its own words.
    """

    exit_code: int
    progress: Progress = field(default_factory=Progress)
    verdict: Verdict | None = None
    error: UnisonoError | None = None

    @property
    def outcome(self) -> Outcome:
        """The word for it."""
        return outcome_of(self.exit_code)


def ending_of(attempt: Attempt, plan: RunPlan) -> Ending:
    """The outcome of an attempt: rank 0's own result if there is one, else what ended the ranks."""
    known = Progress(
        attempt.step,
        attempt.tokens,
        attempt.loss,
        attempt.evals,
        attempt.tokens_per_second,
        attempt.checkpoint,
    )
    last = attempt.last
    if last is not None and last["kind"] == "result" and attempt.decision is None:
        said = fields_of(last)
        values: dict[str, Any] = {one.name: said[one.name] for one in fields(known) if one.name in said}
        reported = replace(known, **values)
        reported = replace(reported, checkpoint=last.get("checkpoint") or attempt.checkpoint)
        verdict = Verdict.from_json(named) if (named := last.get("verdict")) else None
        if verdict is None and _left_early(last, plan):
            # Its process may hang after its last word, and then has no end yet.
            end = attempt.ends.get(0) or RankEnd(0, 0, last, "end", attempt.step)
            return _ended_by(name_death(end, plan, seen=attempt.run_view), reported)
        return Ending(int(last.get("exit_code", 0)), reported, verdict)
    decision = attempt.decision or Decision()
    if decision.agreement is not None:
        return Ending(3, known, decision.agreement.fatal[0])
    if decision.error is not None:
        return Ending(decision.error.exit_code, known, decision.error.verdict, decision.error)
    if decision.verdict is not None:
        cause = find_cause(decision.verdict.cause)
        if (
            attempt.stop_signal is not None
        ):  # the run was stopping anyway; the rank that delayed it is reported
            return Ending(exit_code_of(attempt.stop_signal), known, decision.verdict)
        return Ending(cause.exit_code if cause else 4, known, decision.verdict)
    culprit = decision.culprit
    if culprit is not None and culprit.last is not None and culprit.last["kind"] == "refused":
        error = refusal(culprit.last)
        if plan.world_size > 1:
            error = _with_place(error, plan.ranks[culprit.rank])
        return Ending(error.exit_code, known, _placed(error.verdict, culprit, plan), error)
    stopped = _stopped(attempt, culprit)
    if stopped and not (culprit is not None and culprit.last is not None):
        return Ending(stopped, known)
    return _ended_by(_name(decision, attempt, plan), known)


def _left_early(last: ResultMessage, plan: RunPlan) -> bool:
    """Whether rank 0 believes that the run is whole, and it is not: the others wait for it in the
    next step.
    """
    planned = min(plan.total_steps, plan.last_step or plan.total_steps)
    step = last.get("step")
    is_whole = step is None or step >= planned
    return plan.world_size > 1 and last.get("exit_code", 0) == 0 and not is_whole


def _ended_by(verdict: Verdict, progress: Progress) -> Ending:
    cause = find_cause(verdict.cause)
    return Ending(cause.exit_code if cause else 5, progress, verdict)


def _with_place(error: UnisonoError, place: RankPlace) -> UnisonoError:
    """The refusal with the rank that raised it: other nodes cannot know."""
    problems = [
        replace(problem, where=f"{place.label}: {problem.where}" if problem.where else place.label)
        for problem in error.problems
    ]
    return type(error)(*problems, verdict=error.verdict)


def _placed(verdict: Verdict | None, end: RankEnd, plan: RunPlan) -> Verdict | None:
    """A verdict that does not know where its rank is, as one on a disk: with the host, and the step
    that was the last.
    """
    if verdict is None or verdict.hosts:
        return verdict
    step = verdict.step if verdict.step is not None else end.step or None
    return verdict.model_copy(update={"hosts": (plan.ranks[end.rank].host,), "step": step})


def _name(decision: Decision, attempt: Attempt, plan: RunPlan) -> Verdict:
    after_s = decision.after_s if plan.world_size > 1 else None
    verdict = name_failure(decision, plan, after_s=after_s, seen=attempt.run_view)
    return verdict or name_victims(list(attempt.ends.values()), plan, after_s=after_s)


def _stopped(attempt: Attempt, culprit: RankEnd | None) -> int:
    """130 or 75 if the run was stopped by a signal, else 0."""
    if attempt.stop_signal is not None:
        return exit_code_of(attempt.stop_signal)
    code = culprit.returncode if culprit is not None else 0
    if -code in _WISHES:  # it came before the rank could hear it
        return exit_code_of(signal.Signals(-code))
    return code if code in (75, 130) else 0  # the signal went to a rank itself


def result_of(
    ending: Ending, *, run_id: str, output_dir: str, restarts: Sequence[Restart], seconds: float
) -> RunResult:
    """What result.json holds."""
    return RunResult.model_validate(
        {
            **vars(ending.progress),
            "run_id": run_id,
            "outcome": ending.outcome,
            "exit_code": ending.exit_code,
            "output_dir": output_dir,
            "verdict": ending.verdict.to_json() if ending.verdict else None,
            "restarts": list(restarts),
            "wall_time_s": seconds,
            "problems": [asdict(one) for one in ending.error.problems] if ending.error is not None else [],
        }
    )


def result_without_run(ending: Ending, *, seconds: float, output_dir: str = "") -> RunResult:
    """The result of a start that ended before it had a run."""
    return result_of(ending, run_id="", output_dir=output_dir, restarts=[], seconds=seconds)


def refused_result(
    exit_code: int, problems: Sequence[Mapping[str, str]], verdict: Mapping[str, object] | None
) -> RunResult:
    """The result of a start that was refused before it had a run to speak of."""
    return RunResult(
        run_id=None,
        outcome=outcome_of(exit_code),
        exit_code=exit_code,
        output_dir=None,
        verdict=dict(verdict) if verdict else None,
        problems=[dict(one) for one in problems],
    )


def dry_result(plan: RunPlan) -> RunResult:
    """The result of `--dry-run`: nothing was started."""
    return RunResult(
        run_id=plan.run_id, outcome="completed", exit_code=0, output_dir=plan.output_dir, dry_run=True
    )
