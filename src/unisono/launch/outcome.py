"""How a run ended, in the fields of result.json. Pure."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.causes import Verdict, find_cause
from unisono.errors import UnisonoError
from unisono.plan import RankPlace, RunPlan
from unisono.rundir.records import Outcome, RunResult, outcome_of
from unisono.supervise.decision import Decision
from unisono.supervise.interrupts import exit_code_of
from unisono.supervise.local_ranks import RankEnd
from unisono.supervise.postmortem import name_death, name_failure, name_victims
from unisono.supervise.rank_supervisor import Attempt
from unisono.supervise.task_process import refusal

_WISHES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


NOTHING_DONE: dict[str, Any] = {
    "step": 0,
    "tokens": 0,
    "loss": None,
    "eval": {},
    "tokens_per_second": None,
    "checkpoint": None,
    "weights": None,
}
"""The progress of a run that has none, by keys of result.json."""


@dataclass(frozen=True)
class Ending:
    """How one attempt ended.

    Attributes:
        fields: for result.json: step, tokens, loss, eval, tokens_per_second, checkpoint, weights.
        verdict: what was wrong, if anything was.
        error: the refusal of a rank, in its own words.
    """

    exit_code: int
    fields: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    error: UnisonoError | None = None

    @property
    def outcome(self) -> Outcome:
        """The word for it."""
        return outcome_of(self.exit_code)


def ending_of(attempt: Attempt, plan: RunPlan) -> Ending:
    """The outcome of an attempt: rank 0's own result if there is one, else what ended the ranks."""
    known = {
        "step": attempt.step,
        "tokens": attempt.tokens,
        "loss": attempt.loss,
        "eval": attempt.evals,
        "tokens_per_second": attempt.tokens_per_second,
        "checkpoint": attempt.checkpoint,
        "weights": None,
    }
    last = attempt.last or {}
    if last.get("kind") == "result" and attempt.decision is None:
        reported = {name: last[name] for name in known if name in last}
        reported["checkpoint"] = last.get("checkpoint") or attempt.checkpoint
        verdict = Verdict.from_json(last["verdict"]) if last.get("verdict") else None
        if verdict is None and _left_early(last, plan):
            # Its process may hang after its last word, and then has no end yet.
            end = attempt.ends.get(0) or RankEnd(0, 0, last, "end", attempt.step)
            return _ended_by(name_death(end, plan, seen=attempt.run_view), {**known, **reported})
        return Ending(int(last.get("exit_code", 0)), {**known, **reported}, verdict)
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


def _left_early(last: Mapping[str, Any], plan: RunPlan) -> bool:
    """Whether rank 0 believes that the run is whole, and it is not: the others wait for it in the next step."""
    planned = min(plan.total_steps, plan.last_step or plan.total_steps)
    return plan.world_size > 1 and last.get("exit_code", 0) == 0 and int(last.get("step", planned)) < planned


def _ended_by(verdict: Verdict, fields: dict[str, Any]) -> Ending:
    cause = find_cause(verdict.cause)
    return Ending(cause.exit_code if cause else 5, fields, verdict)


def _with_place(error: UnisonoError, place: RankPlace) -> UnisonoError:
    """The same refusal with the rank that raised it: other nodes cannot know."""
    problems = [
        replace(problem, where=f"{place.label}: {problem.where}" if problem.where else place.label)
        for problem in error.problems
    ]
    return type(error)(*problems, verdict=error.verdict)


def _placed(verdict: Verdict | None, end: RankEnd, plan: RunPlan) -> Verdict | None:
    """A verdict that does not know where its rank is, as one on a disk: with the host, and the step that was the last."""
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
    ending: Ending, *, run_id: str, output_dir: str, restarts: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """The object of result.json."""
    body = {
        "run_id": run_id,
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "output_dir": output_dir,
        **ending.fields,
        "verdict": ending.verdict.to_json() if ending.verdict else None,
        "restarts": restarts,
        "wall_time_s": seconds,
    }
    if ending.error is not None:
        body["problems"] = ending.error.to_json()["problems"]
    return RunResult.model_validate(body).to_json()


def refused_result(
    exit_code: int, problems: list[dict[str, str]], verdict: dict[str, Any] | None
) -> dict[str, Any]:
    """The result of a start that was refused before it had a run to speak of."""
    return {
        "schema": 1,
        "run_id": None,
        "outcome": outcome_of(exit_code),
        "exit_code": exit_code,
        "output_dir": None,
        **NOTHING_DONE,
        "verdict": verdict,
        "restarts": [],
        "wall_time_s": 0.0,
        "problems": problems,
    }


def dry_result(plan: RunPlan) -> dict[str, Any]:
    """The result of `--dry-run`: nothing was started."""
    return {
        "schema": 1,
        "run_id": plan.run_id,
        "outcome": "completed",
        "exit_code": 0,
        "dry_run": True,
        "output_dir": plan.output_dir,
        **NOTHING_DONE,
        "verdict": None,
        "restarts": [],
        "wall_time_s": 0.0,
    }
