"""Metrics of the answers that `unisono eval` generates."""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.base.errors import EndedByVerdict, Problem
from unisono.base.events import Reporter
from unisono.trainer.config.own_code import own_code_digests
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.objectives.rewards.calls import RewardError, Scored
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rewards.verdicts import verdict_on
from unisono.trainer.plan.task_requests import EvaluateRequest
from unisono.trainer.task.inference import InferenceModel, refuse_code
from unisono.trainer.training.answer_metrics import GeneratedRow, metric_means


def requested_metrics(
    request: EvaluateRequest, opened: InferenceModel, config: RunConfig, report: Reporter
) -> "EvaluatedMetrics | None":
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
    pool = RewardPool(
        metrics, digests, lambda text: report.phase("reward", f"waiting for {text}"), key="eval.metrics"
    )
    return EvaluatedMetrics(pool)


@dataclass(frozen=True)
class EvaluatedMetrics:
    """The functions to measure answers with."""

    pool: RewardPool

    def measure(
        self, lines: Sequence[dict[str, object]], tokens: Sequence[Sequence[int]]
    ) -> dict[str, float | None]:
        """The mean of each function as `metric_NAME`; each line gets its own values as `metrics`.

        Args:
            lines: with `row`, `prompt`, `answer` and `reference`.
            tokens: of each answer.

        Raises:
            EndedByVerdict: if a function fails whose `on_error` is `error`.
        """
        rows = [
            GeneratedRow(
                str(line["row"]), str(line["prompt"]), str(line["answer"]), ids, str(line["reference"])
            )
            for line, ids in zip(lines, tokens, strict=True)
        ]
        scored = self._scored(rows)
        for line, one in zip(lines, scored, strict=True):
            line["metrics"] = one.rewards[0]
        return {f"metric_{name}": mean for name, mean in metric_means(scored, self.pool.names).items()}

    def _scored(self, rows: Sequence[GeneratedRow]) -> list[Scored]:
        with self.pool:
            try:
                return self.pool.score([row.call() for row in rows])
            except RewardError as error:
                verdict = verdict_on(error.failure, what="metric")
                fix = "fix the function, or set its on_error to skip or a number: --metric '{use: …, on_error: skip}'"
                raise EndedByVerdict(
                    Problem(verdict.summary, verdict.evidence[0].where, fix=fix), verdict=verdict
                ) from error
