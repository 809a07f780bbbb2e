"""What a run minimizes: the seam between the training loop and the objectives.

An objective turns the units of a micro batch into their part of the loss. A unit is a row, a pair,
or a rated answer. Step, evaluation and the rehearsal of the longest batch all go through
`Objective.loss`, which divides by the counts of the *global* batch, so that parts add up to the
same loss for any number of micro batches and ranks.

What the seam can carry without a change of the loop:

- Other weights of tokens (DFT, in `sft`): `Forward.log_probs` gives each loss token's
  log-probability with its gradient.
- Terms that need a figure of the whole global batch first, without gradient (the divergence of
  KTO): `first_sides` and `first`.
- Named values of each unit: `Micro.columns`, e.g. whether a rated answer is desirable, or the
  log-probabilities of a reference model.
- Distillation from stored log-probabilities: an objective whose stored numbers are those of the
  teacher. Of a sequence's log-probability they are two numbers for each unit, as here. Of single
  tokens they are one row for each loss token, which a source then selects.
- Rows that are generated (GRPO): `Objective.source` puts a source before that of the data, whose
  rows have their advantages and the log-probabilities at the time of generation as columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from unisono.trainer.batches.source import BatchSource, Counts, Micro, SourceRank
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.forward import Forward
from unisono.trainer.objectives.signs import Sign
from unisono.trainer.plan import RunPlan

BOTH = (0, 1)
"""The sides of a pair: chosen, rejected."""

PAIR_METRICS = (
    "rewards_chosen",
    "rewards_rejected",
    "reward_margin",
    "reward_accuracy",
    "logps_chosen",
    "logps_rejected",
)
"""Metrics of pairs: means over pairs; logps are sums over the tokens of an answer, or means where
the loss uses means.
"""


@dataclass(frozen=True)
class Part:
    """A micro batch's part of the loss and of the metrics.

    Attributes:
        loss: a float32 scalar with a gradient.
        sums: (2 · metrics,) float32 without a gradient: for each metric, the sum over units and the
            number of these units.
    """

    loss: torch.Tensor
    sums: torch.Tensor


class Objective(ABC):
    """What a run minimizes. Instances hold only settings and are immutable.

    Attributes:
        metrics: names of the metrics whose sums `loss` returns.
        sides: the sides of a unit that `loss` needs.
        first_sides: the sides of a unit that `first` needs; empty if `loss` needs no value of the
            global batch in advance.
        uses_reference: whether the loss compares with a reference model.
    """

    metrics: tuple[str, ...] = ()
    sides: tuple[int, ...] = (0,)
    first_sides: tuple[int, ...] = ()
    uses_reference: ClassVar[bool] = False

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Returns the objective of a run. Override it in your own class to read settings."""
        del config
        return cls()

    def check(self, plan: RunPlan, *, rank: int) -> None:
        """Checks what the source will need, before the model is loaded. Each rank calls it.

        Raises:
            ConfigError: if it is not there.
        """
        del plan, rank

    def source(self, rows: BatchSource, forward: Forward, group: SourceRank) -> BatchSource:
        """Returns the source of the steps. All ranks must call it before the first step.

        Args:
            rows: the rows of the data.
            forward: the model, with its current weights whenever it is used.
            group: this rank among the others, which must agree on what is not the same on all of
                them (`batches.source.agree_on`).
        """
        del forward, group
        return rows

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Returns a float32 scalar. Its sum over the units of the global batch, divided by their
        number, is `known` in `loss`.

        Called only with `first_sides`, without gradient and dropout.
        """
        del forward
        return torch.zeros((), device=micro.rows.input_ids.device)

    @abstractmethod
    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """Returns the micro batch's part of the loss. Divide by `counts`, the totals of the global
        batch, so that the parts add up to its loss.

        Args:
            forward: the model.
            micro: the units.
            counts: the totals of the global batch.
            known: the mean of what `first` returns, over the units of the global batch.
        """

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """Returns the metrics of a batch from the sums over all ranks: means over units. A metric
        without a value is absent.
        """
        del known
        each = zip(self.metrics, sums[::2], sums[1::2], strict=True)
        return {name: total / number for name, total, number in each if number}

    def signs(self, figures: Mapping[str, float]) -> Sequence[Sign]:
        """Returns the signs of trouble in the figures of a step, the line of metrics.jsonl."""
        del figures
        return ()


def sums_of(*values: torch.Tensor) -> torch.Tensor:
    """Sum and number of values (n,), float32, of each metric, in the form of `Part.sums`."""
    return torch.stack(
        [
            part
            for value in values
            for part in (value.detach().float().sum(), value.new_tensor(float(len(value))))
        ]
    )


def pair_sums(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    logps_chosen: torch.Tensor,
    logps_rejected: torch.Tensor,
    *,
    rounding: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """The sums of PAIR_METRICS from rewards and log-probabilities, (U,) each; rewards are equal if
    they differ by `rounding` at most.
    """
    margin = chosen - rejected
    return sums_of(chosen, rejected, margin, accurate(margin, rounding), logps_chosen, logps_rejected)


def accurate(margin: torch.Tensor, rounding: torch.Tensor | float = 0.0) -> torch.Tensor:
    """(U,): 1 where the chosen reward is higher, 0 where it is lower, and ½ where both are equal,
    e.g. before the first step.
    """
    return torch.where(margin.abs() > rounding, (margin.sign() + 1) / 2, 0.5)


@dataclass(frozen=True)
class Answers:
    """The log-probabilities of the answers of pairs under the model, with a gradient.

    Attributes:
        chosen: (U,) float32, sums over the tokens of the chosen answer.
        rejected: (U,), of the rejected one.
        chosen_tokens: (U,), loss tokens of the chosen answer.
        rejected_tokens: (U,), of the rejected one.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor


def answers_of(forward: Forward, micro: Micro) -> Answers:
    """The log-probabilities of the answers of pairs, from one forward over both sides."""
    sums = micro.rows.sums(forward.log_probs(micro.rows)).view(-1, 2)
    tokens = torch.tensor(micro.rows.loss_counts, dtype=sums.dtype, device=sums.device).view(-1, 2)
    return Answers(sums[:, 0], sums[:, 1], tokens[:, 0], tokens[:, 1])
