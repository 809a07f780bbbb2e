"""How long a run is in optimizer steps, what makes it short, and what would make it longer.

Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.base.text import Duration
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import GRPO
from unisono.trainer.config.training_sections import BatchSection
from unisono.trainer.plan.families import family_for
from unisono.trainer.plan.run_plan import DataSummary

FEW_STEPS = 50
"""With fewer steps a run says before it starts why, and what to set."""
_MANY_EPOCHS = 20  # more passes over the same rows are not advised while a smaller batch does it


def steps_of(config: RunConfig, data: DataSummary) -> tuple[int, int]:
    """Steps and sequences of the whole run. `N epochs` ends with one short batch."""
    duration = Duration.parse(config.duration)
    if duration.unit == "epochs":
        # Rounded first: 0.7 × 10 is 7.000000000000001, which must not become 8 sequences.
        sequences = math.ceil(round(duration.amount * data.train.sequences, 6))
        return -(-sequences // config.rows_per_step), sequences
    steps = int(duration.amount) if duration.unit == "steps" else data.total_steps
    return steps, steps * config.rows_per_step


def period_of(text: str | None, config: RunConfig, data: DataSummary) -> int | None:
    """A period in steps; epochs and tokens are rounded to steps, at least one."""
    if text is None:
        return None
    period = Duration.parse(text)
    if period.unit == "steps":
        return int(period.amount)
    per_step = config.rows_per_step
    if period.unit == "epochs":
        return max(1, round(period.amount * data.train.sequences / per_step))
    return max(1, round(period.amount / (data.train.tokens / data.train.sequences * per_step)))


def beyond_the_end(periods: Mapping[str, int | None], origins: Mapping[str, str], *, steps: int) -> list[str]:
    """A line if periods that the user has set are longer than the run: what is due at them is done
    at its end.

    Args:
        periods: in steps, by config key.
        origins: keys that were set; a default that is too long is seen on the first screen only.
        steps: of the run.
    """
    longer = {key: period for key, period in periods.items() if (period or 0) > steps and key in origins}
    if not longer:
        return []
    named = ", ".join(f"{key} ({period:,} steps)" for key, period in longer.items())
    return [f"longer than the run, which has {_counted(steps)}: {named}; moved to its end"]


@dataclass(frozen=True)
class LongerRun:
    """A way to more steps.

    Attributes:
        keys: what to set, by config key.
        steps: of the run with them; approximate if `duration` is in tokens.
        epochs: passes over the rows that its `duration` makes; 0 if it sets none.
    """

    keys: dict[str, str]
    steps: int
    epochs: float = 0

    def __str__(self) -> str:
        return " ".join(f"{key}='{v}'" if " " in v else f"{key}={v}" for key, v in self.keys.items())


def short_run(
    config: RunConfig, data: DataSummary, *, steps: int, ranks: int, of_ranks: tuple[int, int] | None = None
) -> list[str]:
    """A line if a run has so few steps that it learns little: why, and what to set.

    Args:
        config: with its global batch.
        steps: of the run.
        ranks: all of them.
        of_ranks: `batch.per_rank` and `batch.accumulate`, if they made the global batch.
    """
    if steps >= FEW_STEPS:
        return []
    ways = ways_to_more_steps(config, data, ranks=ranks, of_ranks=of_ranks)
    is_rough = Duration.parse(config.duration).unit == "tokens"
    first, *others = (
        (
            f"{way} for about {way.steps:,} optimizer steps"
            if is_rough
            else f"{way} for {way.steps:,} optimizer steps"
        )
        for way in ways
    )
    options = f"{first}, or {others[0]}" if others else first
    return [
        f"this run has only {_counted(steps)}: {_why_few(config, data, of_ranks, ranks)}."
        f" In fewer than {FEW_STEPS} a model often learns little; set {options}"
    ]


def _counted(steps: int) -> str:
    return f"{steps:,} optimizer step{'' if steps == 1 else 's'}"


def _why_few(config: RunConfig, data: DataSummary, of_ranks: tuple[int, int] | None, ranks: int) -> str:
    if Duration.parse(config.duration).unit == "steps":
        return f"duration is {config.duration}"
    made = family_for(config.objective).made(
        data.train.rows, data.train.sequences, packing=config.data.packing
    )
    size = f"batch.global is {config.batch.global_:,}"
    if of_ranks is not None:
        size = (
            f"a step takes {config.batch.global_:,} (batch.per_rank {of_ranks[0]} × batch.accumulate"
            f" {of_ranks[1]} × {ranks} rank{'' if ranks == 1 else 's'})"
        )
    return f"{made}, {size}, duration {config.duration}"


def ways_to_more_steps(
    config: RunConfig, data: DataSummary, *, ranks: int, of_ranks: tuple[int, int] | None
) -> list[LongerRun]:
    """Settings with at least FEW_STEPS steps, one at a time where one is enough: the largest
    smaller batch, the shortest longer duration.
    """
    unit = Duration.parse(config.duration).unit
    if unit == "steps":
        return [LongerRun({"duration": f"{FEW_STEPS} steps"}, FEW_STEPS)]
    _, sequences = steps_of(config, data)
    is_rough = unit == "tokens"  # its last step may be partly unused
    most = sequences // FEW_STEPS if is_rough else (sequences - 1) // (FEW_STEPS - 1)
    longer = _longer(config, data, config.rows_per_step, {})
    # Answers of a step are whole groups, whose number is not for us to change.
    batch = None if config.objective == GRPO else _batch_of(config, most, ranks=ranks, of_ranks=of_ranks)
    if batch is None:
        return [longer]
    size, keys = batch
    steps = sequences // size if is_rough else -(-sequences // size)
    is_sensible = longer.epochs <= _MANY_EPOCHS
    if steps >= FEW_STEPS:
        return [LongerRun(keys, steps), *([longer] if is_sensible else [])]
    return [longer if is_sensible else _longer(config, data, size, keys)]


def _batch_of(
    config: RunConfig, most: int, *, ranks: int, of_ranks: tuple[int, int] | None
) -> tuple[int, dict[str, str]] | None:
    """The largest global batch of at most `most` sequences, or the smallest there is, with its
    keys; None if the config's is as small.

    It keeps a sequence for each rank, and micro batches as they were asked for.
    """
    size = config.batch.global_
    if of_ranks is None:
        micro = 1 if config.batch.micro == "auto" else config.batch.micro
        smaller = max(-(-ranks // micro), min(most, size - 1) // micro) * micro
        return (smaller, {"batch.global": str(smaller)}) if smaller < size else None
    per_rank, accumulate = of_ranks
    forwards = min(most // (per_rank * ranks), accumulate - 1)
    if forwards >= 1:
        return per_rank * forwards * ranks, {"batch.accumulate": str(forwards)}
    rows = max(1, min(most // ranks, per_rank))
    keys = {"batch.per_rank": str(rows)} | ({"batch.accumulate": "1"} if accumulate > 1 else {})
    return (rows * ranks, keys) if rows * ranks < size else None


def _with_batch(config: RunConfig, size: int) -> RunConfig:
    return config.model_copy(update={"batch": BatchSection.model_validate({"global": size})})


def _longer(config: RunConfig, data: DataSummary, size: int, keys: dict[str, str]) -> LongerRun:
    """The shortest duration of whole epochs, or of tokens, with enough steps of `size`
    sequences.
    """
    duration = Duration.parse(config.duration)
    if duration.unit == "tokens":
        amount = math.ceil(FEW_STEPS * size * data.train.tokens / data.train.sequences)
        text = f"{-(-amount // 1000)}k tokens"
        return LongerRun({**keys, "duration": text}, FEW_STEPS, amount / data.train.tokens)
    least = (FEW_STEPS - 1) * size + 1  # sequences: the last batch may be short
    epochs = -(-least // data.train.sequences)
    text = str(Duration(epochs, "epochs"))
    longer = config if config.objective == GRPO else _with_batch(config, size)
    longer = longer.model_copy(update={"duration": text})
    return LongerRun({**keys, "duration": text}, steps_of(longer, data)[0], epochs)


@dataclass(frozen=True)
class ProposedExtent:
    """What a config to start from has, so that its run is long enough.

    Attributes:
        global_batch: sequences per step.
        epochs: passes over the rows.
        steps: of the run, about.
        every: steps between evaluations, and between checkpoints.
    """

    global_batch: int
    epochs: int
    steps: int
    every: int


_ENOUGH_STEPS = 2 * FEW_STEPS  # a proposal is made before rows are tokenized, so it keeps a distance
_PARTS = 4  # of a run, with an evaluation after each


def propose_extent(sequences: int, *, global_batch: int, epochs: int, every: int) -> ProposedExtent:
    """A batch of the template's or half, a quarter … of it, so that there are steps enough; more
    epochs only if a batch of 1 is not enough.

    Args:
        sequences: of one epoch.
        global_batch: of the template, as the next three.
        epochs: at least these.
        every: steps, at most these.
    """
    size = global_batch
    while size > 1 and -(-epochs * sequences // size) < _ENOUGH_STEPS:
        size //= 2
    if epochs * sequences < FEW_STEPS:
        epochs = min(_MANY_EPOCHS, -(-FEW_STEPS // sequences))
    steps = -(-epochs * sequences // size)
    tens = max(1, steps // _PARTS // 10) * 10
    return ProposedExtent(size, epochs, steps, min(every, tens))
