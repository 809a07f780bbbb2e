"""Metrics of the answers to evaluation rows: functions that processes of their own call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from unisono.base.causes import Verdict
from unisono.trainer.batches.source import SourceRank, StopRequested
from unisono.trainer.objectives.agreement import sum_or_fail
from unisono.trainer.objectives.rewards.calls import RewardCall, RewardError, Scored
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rewards.verdicts import verdict_on
from unisono.trainer.objectives.rollout_files import note_failures


@dataclass(frozen=True)
class GeneratedRow:
    """An evaluation row with what the model has answered.

    Attributes:
        row: for messages, e.g. `eval.jsonl:3`.
        question: text of the prompt.
        answer: text of the answer.
        ids: its tokens.
        reference: text of the row's own answer.
    """

    row: str
    question: str
    answer: str
    ids: Sequence[int]
    reference: str

    def call(self) -> RewardCall:
        """The call of a metric: the reference is the column `answer`."""
        return RewardCall(self.row, self.question, [self.answer], [self.ids], {"answer": self.reference})


@dataclass(eq=False)
class AnswerMetrics:
    """The functions of `eval.metrics` on one rank.

    Attributes:
        rank: this one among the others.
    """

    rank: SourceRank
    _waited: int = field(default=0, init=False)
    _is_loaded: bool = field(default=False, init=False)

    def start(self) -> None:
        """Starts the processes, and waits until all functions are loaded.

        Raises:
            ConfigError: as `RewardPool.start`.
        """
        self._pool.start()
        self._is_loaded = True

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()

    @property
    def names(self) -> list[str]:
        """Of the metrics."""
        return self._pool.names

    def means(self, rows: Sequence[GeneratedRow], *, is_cut_short: bool) -> dict[str, float]:
        """The mean of each metric over the rows of all ranks; one without a value is absent. All
        ranks must call it.

        Args:
            rows: of this rank.
            is_cut_short: whether a stop request has ended the answers of this rank.

        Raises:
            SourceStopped: on all ranks, if any has cut its answers short.
            SourceFailed: on all ranks, if a function failed on any whose `on_error` is `error`.
        """
        sums, verdict = [0.0] * (2 * len(self.names)), None
        try:
            if not is_cut_short:
                sums, verdict = self._sums(rows)
        except StopRequested:
            is_cut_short = True
        sums = sum_or_fail(self.rank, sums, verdict, is_cut_short=is_cut_short)
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}

    def _sums(self, rows: Sequence[GeneratedRow]) -> tuple[list[float], Verdict | None]:
        """Sum and number of the values of each metric; or what has failed."""
        self.rank.enter("reward", total=len(rows))
        try:
            scored = self._pool.score([row.call() for row in rows])
        except RewardError as error:
            note_failures(self.rank.directory, error.failures)
            return [0.0] * (2 * len(self.names)), verdict_on(error.failure, self.rank.rank, what="metric")
        note_failures(self.rank.directory, [failure for one in scored for failure in one.failures])
        return [part for name in self.names for part in _sum_of(scored, name)], None

    @cached_property
    def _pool(self) -> RewardPool:
        plan = self.rank.plan
        return RewardPool(plan.config.eval.metrics, plan.code_digests, self._show_wait, key="eval.metrics")

    def _show_wait(self, text: str) -> None:
        self._waited += 1  # each call has a deadline, so waiting is progress
        self.rank.enter("reward", done=self._waited)
        self.rank.show("reward", f"waiting for {text}")
        if self._is_loaded:  # before, the ranks do not yet agree on an end
            self.rank.end_if_stopped()


def metric_means(scored: Sequence[Scored], names: Sequence[str]) -> dict[str, float | None]:
    """The mean of each metric over scored rows; None: it has no value."""
    sums = {name: _sum_of(scored, name) for name in names}
    return {name: total / count if count else None for name, (total, count) in sums.items()}


def _sum_of(scored: Sequence[Scored], name: str) -> tuple[float, float]:
    values = [value for one in scored if (value := one.rewards[0][name]) is not None]
    return sum(values), float(len(values))
