"""A run that is too short for its owner says so, and what it advises gives the steps that it names.

Run: pytest tests/trainer/plan/test_extent.py
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.plan.test_resolve import inputs, on_ranks, split
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import PlanInputs, ResumePoint, resolve_plan
from unisono.trainer.plan.extent import FEW_STEPS, ways_to_more_steps


def short(given_inputs: PlanInputs) -> str:
    """The line about a short run; empty without one."""
    return next((text for text in resolve_plan(given_inputs).warnings if text.startswith("this run has")), "")


def with_keys(config: RunConfig, keys: dict[str, str]) -> RunConfig:
    body = config.model_dump(mode="json", by_alias=True)
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if name:
            body[section] = {**body[section], name: int(value)}
        else:
            body[section] = value
    return RunConfig.model_validate(body)


@given(
    sequences=st.integers(1, 3000),
    size=st.integers(1, 128),
    epochs=st.sampled_from([0.5, 1, 2, 3, 10]),
    ranks=st.integers(1, 4),
    form=st.sampled_from(["global", "per_rank"]),
)
def test_what_is_advised_gives_the_steps_that_are_named_and_enough_of_them(
    sequences: int, size: int, epochs: float, ranks: int, form: str
) -> None:
    batch = (
        {"per_rank": 1 + size % 5, "accumulate": 1 + size // 5} if form == "per_rank" else {"global": size}
    )
    asked = on_ranks(ranks, sequences=sequences, batch=batch, duration=f"{epochs} epochs")
    made = resolve_plan(asked)
    assert bool(short(asked)) == (made.total_steps < FEW_STEPS)
    if made.total_steps >= FEW_STEPS:
        return
    ways = ways_to_more_steps(made.config, asked.data, ranks=ranks, of_ranks=made.batch_of_ranks)
    assert ways
    for way in ways:
        again = replace(asked, config=with_keys(asked.config, way.keys))
        longer = resolve_plan(again)
        assert longer.total_steps == way.steps >= FEW_STEPS
        assert longer.global_batch >= min(ranks, made.global_batch)
        assert not short(again)
        assert str(way) in short(asked)


@given(size=st.integers(2, 64), sequences=st.integers(1, 300))
def test_a_smaller_batch_that_is_advised_is_the_largest_that_is_enough(size: int, sequences: int) -> None:
    asked = inputs(sequences, batch={"global": size}, duration="3 epochs")
    first = ways_to_more_steps(asked.config, asked.data, ranks=1, of_ranks=None)[0]
    if set(first.keys) != {"batch.global"} or -(-3 * sequences // size) >= FEW_STEPS:
        return
    one_more = int(first.keys["batch.global"]) + 1
    assert -(-3 * sequences // one_more) < FEW_STEPS


def test_tokens_for_many_passes_are_advised_only_with_a_smaller_batch() -> None:
    asked = inputs(24, batch={"global": 16}, duration="9k tokens", total_steps=3)
    train = asked.data.train.model_copy(update={"tokens": 11_000})
    (way,) = ways_to_more_steps(
        asked.config, asked.data.model_copy(update={"train": train}), ranks=1, of_ranks=None
    )
    assert way.keys == {"batch.global": "1", "duration": "23k tokens"}


def test_the_line_says_what_packing_has_made_of_the_rows_and_two_ways_out() -> None:
    asked = inputs(24, batch={"global": 8})
    packed = asked.data.model_copy(update={"train": split(rows=300, sequences=24)})
    text = short(replace(asked, data=packed))
    assert "packing made 24 sequences of 300 rows, batch.global is 8, duration 3 epochs" in text
    assert "set batch.global=1 for 72 optimizer steps, or duration='17 epochs' for 51 optimizer steps" in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"duration": "3 steps"}, "duration is 3 steps"),
        ({"duration": "9k tokens", "total_steps": 5, "batch": {"global": 256}}, "tokens' for about 50"),
        ({"data": {"train": "d", "packing": False}, "duration": "1 epoch"}, "1,000 rows, batch.global is 512"),
        ({"batch": {"per_rank": 256, "accumulate": 2}}, "a step takes 512 (batch.per_rank 256 × batch.accumulate 2 × 1 rank)"),
    ],
)  # fmt: skip
def test_the_line_names_what_makes_the_run_short(keys: dict[str, Any], words: str) -> None:
    assert words in short(inputs(**{"batch": {"global": 512}, **keys}))


def test_requested_micro_batch_divides_the_advised_batch() -> None:
    assert "batch.global=12 for" in short(inputs(250, batch={"global": 48, "micro": 4}))


def test_a_run_that_continues_is_not_told_to_change_its_batch() -> None:
    resumed = replace(inputs(24), resume=ResumePoint(step=2, path="/o/checkpoints/step-00000002"))
    assert short(inputs(24))
    assert not short(resumed)
    assert not short(replace(inputs(24), earlier_batch=(16, None)))


def test_periods_set_beyond_the_end_are_moved_to_it_with_a_line() -> None:
    """Periods that nobody set are moved without one."""
    asked = inputs(160, duration="10 epochs", eval={"every": "150 steps"})
    silent = resolve_plan(asked)
    assert (silent.total_steps, silent.eval_every, silent.checkpoint_every) == (100, 100, 100)
    assert silent.warnings == []
    origins = {"eval.every": "t.yaml:3", "checkpoint.every": "t.yaml:4"}
    assert resolve_plan(replace(asked, origins=origins)).warnings == [
        "longer than the run, which has 100 optimizer steps: eval.every (150 steps), checkpoint.every (200"
        " steps); moved to its end"
    ]
    within = inputs(1600, duration="10 epochs", eval={"every": "150 steps"})
    assert resolve_plan(replace(within, origins=origins)).warnings == []
