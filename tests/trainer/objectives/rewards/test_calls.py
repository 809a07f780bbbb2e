"""The sum of several rewards: weights, functions that do not apply, failures.

Run: pytest tests/trainer/objectives/rewards/test_calls.py
"""

import json
import math
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.config.answer_functions import function_names
from unisono.trainer.config.rollout_sections import RewardSection
from unisono.trainer.objectives.rewards.calls import (
    FunctionResult,
    RewardError,
    RewardFailure,
    combined,
    cut,
    total,
)

NUMBERS = st.floats(min_value=-1e6, max_value=1e6)
REWARDS = st.dictionaries(st.sampled_from("abcdef"), st.none() | NUMBERS)
WEIGHTS = st.fixed_dictionaries(dict.fromkeys("abcdef", NUMBERS))


def failure(answer: int | None, kind: str = "error") -> RewardFailure:
    return RewardFailure("train.jsonl:7", answer, "f", "error", 0.1, kind, "rewards.py:3", "prompt", "text")


@given(REWARDS, WEIGHTS)
def test_a_function_that_does_not_apply_counts_like_one_that_is_absent(
    rewards: dict[str, float | None], weights: dict[str, float]
) -> None:
    absent = {name: value for name, value in rewards.items() if value is not None}
    assert total(rewards, weights) == total(absent, weights)
    assert (total(rewards, weights) is None) == (not absent)


@given(REWARDS, WEIGHTS)
def test_the_total_is_the_weighted_sum(rewards: dict[str, float | None], weights: dict[str, float]) -> None:
    expected = sum(weights[name] * (value or 0.0) for name, value in rewards.items())
    assert math.isclose(total(rewards, weights) or 0.0, expected, rel_tol=1e-9, abs_tol=1e-3)


@given(st.lists(st.lists(st.none() | NUMBERS, min_size=3, max_size=3), min_size=1, max_size=3), st.data())
def test_an_answer_leaves_its_group_if_any_function_skips_it(
    values: list[list[float | None]], data: st.DataObject
) -> None:
    skipped = [set(data.draw(st.lists(st.integers(0, 2)))) for _ in values]
    results = {str(n): FunctionResult(row, skipped[n]) for n, row in enumerate(values)}
    scored = combined(results, dict.fromkeys(results, 1.0), count=3)
    for answer in range(3):
        leaves = any(answer in answers for answers in skipped)
        applies = any(row[answer] is not None for row in values)
        assert (scored.totals[answer] is None) == (leaves or not applies)
        assert scored.rewards[answer] == {str(n): row[answer] for n, row in enumerate(values)}


@given(st.none() | st.integers(0, 3), st.just("skip") | NUMBERS)
def test_on_error_concerns_the_answers_that_failed_alone(answer: int | None, on_error: float | str) -> None:
    result = FunctionResult([1.0, 2.0, 3.0, 4.0])
    result.fail(failure(answer), on_error)
    concerned = range(4) if answer is None else [answer]
    assert result.skipped == (set(concerned) if on_error == "skip" else set())
    for number in range(4):
        failed = None if on_error == "skip" else on_error
        assert result.values[number] == (failed if number in concerned else number + 1.0)


def test_metrics_are_means_over_the_calls_of_all_functions() -> None:
    first, second = FunctionResult([1.0]), FunctionResult([1.0])
    assert first.add([0], {"values": [1.0], "metrics": {"m": [1.0, 2.0]}, "extras": {"c": ["x"]}}) == []
    assert second.add([0], {"values": ["bad"], "metrics": {"m": [6.0]}, "extras": {}}) == [(0, "bad")]
    scored = combined({"a": first, "b": second}, {"a": 1.0, "b": 1.0}, count=1)
    assert scored.metrics == {"m": 3.0}
    assert scored.extras == {"c": ["x"]}


def test_functions_with_the_same_name_have_their_number() -> None:
    uses = ("a.py:exact", "exact", "length", "b.py:other")
    entries = [RewardSection(use=use) for use in uses]
    assert function_names(entries) == ["exact.0", "exact.1", "length", "other"]


def test_a_failure_is_a_line_with_bounded_texts() -> None:
    long = RewardFailure("a:1", 0, "f", "value", 0.1, "nan", "", cut("p" * 10_000), cut([{"content": "hi"}]))
    line = json.loads(json.dumps(long.to_json()))
    assert line["completion"] == "hi"
    assert len(line["prompt"]) == 4000
    assert str(RewardError(failure(3))) == "f on train.jsonl:7, answer 3: error (rewards.py:3)"


def test_importing_a_pool_loads_no_torch_and_its_processes_little() -> None:
    heavy = {"pool": "'torch', 'numpy', 'transformers'", "child": "'torch', 'numpy', 'pydantic', 'asyncio'"}
    for module, names in heavy.items():
        words = (
            f"import sys, unisono.trainer.objectives.rewards.{module}; print({{{names}}} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", words], check=True, capture_output=True, text=True)
        assert done.stdout == "set()\n"
