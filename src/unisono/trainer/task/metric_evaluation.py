"""Metrics of the answers that `unisono eval` generates."""

from collections.abc import Sequence

from unisono.base.errors import EndedByVerdict, Problem
from unisono.base.events import Reporter
from unisono.trainer.config.own_code import own_code_digests
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.objectives.rewards.calls import RewardError, Scored
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rewards.verdicts import verdict_on
from unisono.trainer.plan.task_requests import EvaluateRequest
from unisono.trainer.task.inference import InferenceModel, refuse_code
from unisono.trainer.training.answer_metrics import GeneratedRow


def requested_metrics(
    request: EvaluateRequest, opened: InferenceModel, config: RunConfig, report: Reporter
) -> RewardPool | None:
    """The functions to measure answers with: those requested, else those of the run; None if there
    are none.

    Raises:
        UsageError: if one that is requested is code that is not trusted.
    """
    plan = opened.target.plan
    metrics = list(request.metrics) or (list(plan.config.eval.metrics) if plan is not None else [])
    untrusted = [] if request.trust_code else [one.use for one in metrics if one.is_own]
    if request.metrics and untrusted:
        refuse_code(untrusted, where="--metric")
    if untrusted:
        report.warning(
            "metrics",
            f"{', '.join(untrusted)} of the run is not measured: it is code that has not been trusted",
            fix="read it, and pass --trust-code",
        )
        metrics = [one for one in metrics if one.use not in untrusted]
    if not metrics:
        return None
    section = config.eval.model_copy(update={"metrics": metrics})
    digests = own_code_digests(config.model_copy(update={"eval": section}))
    return RewardPool(
        metrics, digests, lambda text: report.phase("reward", f"waiting for {text}"), key="eval.metrics"
    )


def scored_rows(metrics: RewardPool, rows: Sequence[GeneratedRow]) -> list[Scored]:
    """What functions give for answers.

    Raises:
        EndedByVerdict: if one fails whose `on_error` is `error`.
    """
    with metrics:
        try:
            return metrics.score([row.call() for row in rows])
        except RewardError as error:
            verdict = verdict_on(error.failure, what="metric")
            fix = "fix the function, or set its on_error to skip or a number: --metric '{use: …, on_error: skip}'"
            raise EndedByVerdict(
                Problem(verdict.summary, verdict.evidence[0].where, fix=fix), verdict=verdict
            ) from error
