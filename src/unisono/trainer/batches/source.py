"""The seam between the training loop and where its rows come from.

A source gives the micro batches of each step. Rows of a token table are one source
(`batches.table`); an objective may put its own before it (`Objective.source`), e.g. one whose
`step` generates rows with the model's current weights. The loop only sees what is declared here.

How many steps there are is a decision of the plan: schedule and checkpoints need it before a rank
starts. A source has batches for each of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from unisono.base.causes import Verdict
from unisono.trainer.model.forward import Rows
from unisono.trainer.plan import RunPlan


@dataclass(frozen=True)
class Micro:
    """The units of one micro batch.

    Attributes:
        rows: rows of tokens in the order of the units. The requested sides of a unit follow each
            other.
        units: number of units, U.
        row_ids: the origin of each row of tokens, for messages.
        columns: named values of the units, each (U, …): `label` (U,) bool, whether a rated answer
            is desirable, or (U, L) bool, which labels a row to classify has; `reference` (U, 2)
            float32, the reference model's log-probability of the answer of each side; and the
            columns of your own source, which may also be values of the loss tokens, (N,).
    """

    rows: Rows
    units: int
    row_ids: Sequence[str] = ()
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of input tokens in the rows."""
        return sum(self.rows.lengths)


@dataclass(frozen=True)
class Counts:
    """The totals of a global batch, or of all rows of an evaluation.

    Attributes:
        units: number of rows, pairs, or rated answers.
        loss_tokens: number of tokens that count in the loss, over all sides.
        first_tokens: number of all tokens on the first side of the units.
        unpredicted: for units with two sides, the number of these tokens that stand for pictures.
    """

    units: int
    loss_tokens: int
    first_tokens: int
    unpredicted: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of a micro batch, not yet loaded.

    Attributes:
        sequences: their numbers, for messages.
        places: where in the endless stream of sequences each of them is; random streams begin
            there.
        units: number of units of each sequence.
        load: gives their units as tensors on the device, of each unit only some sides.
    """

    sequences: list[int]
    places: list[int]
    units: list[int]
    load: Callable[[Sequence[int]], Micro]


@dataclass(frozen=True)
class StepBatches:
    """The batches of one optimizer step. All but `micros` is the same on all ranks.

    Attributes:
        step: from 1.
        sequences: the sequences of the global batch, in the plan's order, over all ranks.
        micros: the micro batches of this rank.
        rounds: the largest number of micro batches on any rank.
        tokens: input tokens of the global batch.
        counts: of the global batch; the loss is divided by them.
        figures: more figures of this step for the metrics, of this rank.
    """

    step: int
    sequences: list[int]
    micros: list[MicroBatch]
    rounds: int
    tokens: int
    counts: Counts
    figures: Mapping[str, float] = field(default_factory=dict)


class SourceFailed(Exception):  # noqa: N818 - named for what happened
    """A source cannot make the rows of a step; raised on all ranks.

    Attributes:
        verdict: why; the same on all ranks.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.summary)
        self.verdict = verdict


class StopRequested(Exception):  # noqa: N818 - named for what happened
    """This rank got a stop request while it makes the rows of a step."""


class SourceStopped(Exception):  # noqa: N818 - named for what happened
    """A stop request came while a source made the rows of a step; raised on all ranks.

    Attributes:
        flags: the stop requests of all ranks, a number for each reason; see
            `training.front_io.outcome_of`.
    """

    def __init__(self, flags: Sequence[float]) -> None:
        super().__init__("a stop request came")
        self.flags = flags


class BatchSource(ABC):
    """What the steps of a run are made of.

    Attributes:
        measures: whether `measure` gives the figures of evaluations, instead of the objective's
            loss.
    """

    measures: ClassVar[bool] = False

    @abstractmethod
    def step(self, step: int) -> StepBatches:
        """The batches of a step, from 1. All ranks must call it, once for each step, in order.

        Raises:
            SourceFailed: on all ranks, if the rows cannot be made.
            SourceStopped: on all ranks, if a stop request came meanwhile.
        """

    @abstractmethod
    def longest(self, sides: Sequence[int], *, padded: bool = False) -> MicroBatch:
        """The micro batch that needs the most memory, of only these sides of each unit, for a trial
        before the first step.

        Its size is the number of tokens or, if rows are padded, the number of rows times the
        longest.
        """

    def padding(self) -> float | None:
        """The share of padding if the rows of a micro batch are padded to the longest; None if it
        is not known before the run.
        """
        return None

    @abstractmethod
    def shortest(self) -> MicroBatch:
        """The cheapest micro batch, for a forward whose loss does not count."""

    @abstractmethod
    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        """The origin of the rows of some sequences, for messages: `train.jsonl:17`."""

    @abstractmethod
    def examples(self) -> list[list[int]]:
        """The tokens of three rows; the logits of a result are compared on them when it is read
        back.
        """

    def measure(self, evaluation: object) -> Mapping[str, float]:
        """The figures of an evaluation. All ranks must call it, which get the same.

        Args:
            evaluation: the `batches.table.EvaluationRows` of the run.
        """
        raise NotImplementedError  # a source that `measures` has it

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends what the source has started."""

    def state(self) -> Mapping[str, object]:
        """What a resume needs beyond the number of steps done, after a step; the same on all
        ranks.

        Dicts with string keys, lists, tuples, str, int, float, bool and None. A checkpoint stores
        it.
        """
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Continues after the step whose `state` it was; a source without state has nothing to
        do.
        """
        del state


class RankSum(Protocol):
    """The ranks of a run, as a source needs them.

    All ranks must call the methods at the same point.
    """

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` by the sum over all ranks, bit-identical on all ranks."""

    def figures(self, summed: torch.Tensor) -> list[float]:
        """The values of a sum, (n,); on a GPU this waits for the other ranks."""


class SourceRank(RankSum, Protocol):
    """The rank of a run, as a source needs it that generates its rows."""

    @property
    def plan(self) -> RunPlan:
        """The plan of the run."""

    @property
    def device(self) -> torch.device:
        """The computation's."""

    @property
    def directory(self) -> Path:
        """That of the run."""

    def write_adapter(self, directory: Path | None) -> None:
        """Writes the present adapter as peft reads it. If weights are sharded, all ranks must call
        it.

        Args:
            directory: a new directory; None on ranks that only contribute their parts.

        Raises:
            OSError: from the file system.
        """

    @property
    def stop_flags(self) -> Sequence[float]:
        """The stop request of this rank, a number for each reason; all 0: none."""

    def enter(self, phase: str, *, done: int = 0, total: int = 0) -> None:
        """Tells the watch what the rank does, or that it made progress."""

    def end_if_stopped(self) -> None:
        """Ends what takes long, once there is a stop request.

        Raises:
            StopRequested: then.
        """

    def show(self, phase: str, text: str, *, done: int | None = None, total: int | None = None) -> None:
        """Shows people what the rank does."""

    def warn(self, code: str, text: str, *, fix: str = "") -> None:
        """Shows people a warning, also in a log.

        Args:
            code: the kind of warning.
            text: what has happened.
            fix: what to do.
        """


def agree_on(batches: StepBatches, group: RankSum, device: torch.device) -> StepBatches:
    """The batches of a step whose tokens, counts and rounds each rank only knows of its own micro
    batches.

    Tokens and counts become sums over the ranks, and `rounds` the largest on any of them. All ranks
    must call it, and do so before the first forward of the step: with sharded weights every forward
    is collective, so all need the same number of them.
    """
    counts = batches.counts
    figures = torch.zeros(4 + group.world_size, dtype=torch.float64, device=device)  # exact up to 2⁵³
    figures[:4] = figures.new_tensor([batches.tokens, counts.units, counts.loss_tokens, counts.first_tokens])
    figures[4 + group.rank] = len(batches.micros)
    group.sum(figures)
    tokens, units, loss_tokens, first_tokens, *rounds = map(int, group.figures(figures))
    return StepBatches(
        batches.step,
        batches.sequences,
        batches.micros,
        max(rounds),
        tokens,
        Counts(units, loss_tokens, first_tokens),
    )
