"""Advantages compare the answers to a prompt with each other, and with nothing else.

Run: pytest tests/trainer/objectives/test_advantages.py
"""

import math
import random
import statistics
import subprocess
import sys
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.objectives.advantages import (
    EPSILON,
    RewardSums,
    group_advantages,
    is_equal,
    less_divergence,
    penalize,
)

Scale = Literal["group", "batch", "none"]
SCALES: tuple[Scale, ...] = ("group", "batch", "none")
REWARD = st.floats(-1e6, 1e6)
FEW = st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.0])  # ties are frequent
GROUPS = st.lists(st.none() | REWARD, max_size=9) | st.lists(st.none() | FEW, max_size=9)


def _advantages(rewards: list[float | None], scale: Scale, *, others: bool = False) -> list[float | None]:
    std = RewardSums.of(rewards).std
    return group_advantages(rewards, scale=scale, batch_std=std, leave_one_out=others)


def _numbers(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@given(rewards=GROUPS)
def test_advantages_are_finite_and_their_mean_is_zero(
    rewards: list[float | None], scale: Scale, *, others: bool
) -> None:
    advantages = _advantages(rewards, scale, others=others)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    numbers = _numbers(advantages)
    assert all(map(math.isfinite, numbers))
    largest = max(map(abs, numbers), default=0.0)
    # The mean of the rewards is rounded: relative to the rewards, not to their differences.
    rounding = 2**-50 * max(map(abs, _numbers(rewards)), default=0.0) / (1.0 if scale == "none" else EPSILON)
    assert abs(math.fsum(numbers)) <= len(numbers) * (1e-12 * largest + 2 * rounding)


@pytest.mark.parametrize("scale", SCALES)
@given(rewards=GROUPS, seed=st.integers(0, 99))
def test_the_order_of_answers_does_not_matter(rewards: list[float | None], scale: Scale, seed: int) -> None:
    order = list(range(len(rewards)))
    random.Random(seed).shuffle(order)
    advantages = _advantages(rewards, scale)
    assert _advantages([rewards[i] for i in order], scale) == [advantages[i] for i in order]


@pytest.mark.parametrize("scale", SCALES)
@given(rewards=st.lists(st.none() | st.integers(-50, 50), max_size=9), shift=st.integers(-1000, 1000))
def test_a_shift_of_all_rewards_does_not_matter(
    rewards: list[float | None], scale: Scale, shift: int
) -> None:
    shifted = [None if reward is None else reward + shift for reward in rewards]
    before, after = _numbers(_advantages(rewards, scale)), _numbers(_advantages(shifted, scale))
    assert after == pytest.approx(before, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("scale", SCALES)
@given(rewards=st.lists(st.none() | st.integers(-50, 50), max_size=9), factor=st.floats(1.0, 1e4))
def test_the_unit_of_rewards_matters_only_without_a_scale(
    rewards: list[float | None], scale: Scale, factor: float
) -> None:
    larger = [None if reward is None else factor * reward for reward in rewards]
    before, after = _numbers(_advantages(rewards, scale)), _numbers(_advantages(larger, scale))
    if scale == "none":
        assert after == pytest.approx([factor * a for a in before], rel=1e-9, abs=1e-9)
    else:  # the standard deviation of integers that differ is at least 0.3, so EPSILON is little
        assert after == pytest.approx(before, rel=2 * EPSILON / 0.3)


@given(st.lists(REWARD, min_size=2, max_size=9))
def test_an_advantage_of_rloo_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    wanted = [reward - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    assert group_advantages(rewards, scale="none", leave_one_out=True) == pytest.approx(
        wanted, rel=1e-9, abs=1e-8
    )


@given(st.lists(REWARD, min_size=2, max_size=9).filter(lambda rewards: not is_equal(rewards)))
def test_the_scale_is_the_unbiased_standard_deviation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    wanted = [(reward - mean) / (std + EPSILON) for reward in rewards]
    assert group_advantages(rewards) == pytest.approx(wanted, rel=1e-9, abs=1e-4)


@pytest.mark.parametrize("scale", SCALES)
@given(
    rewards=st.lists(REWARD, min_size=1, max_size=6),
    skipped=st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_an_answer_without_a_reward_changes_nothing_for_the_others(
    rewards: list[float], scale: Scale, skipped: list[int]
) -> None:
    with_skipped: list[float | None] = list(rewards)
    for i in skipped:
        with_skipped.insert(i, None)
    advantages = _advantages(with_skipped, scale)
    assert [a for a, r in zip(advantages, with_skipped, strict=True) if r is not None] == _advantages(
        list(rewards), scale
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "rewards", [[], [None, None], [3.0], [None, 0.1], [0.1] * 3, [0.1, None, 0.1], [1e6 / 3] * 7, [0.0, -0.0]]
)
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(
    rewards: list[float | None], scale: Scale
) -> None:
    assert is_equal(rewards)
    for others in (False, True):
        advantages = group_advantages(rewards, scale=scale, batch_std=0.5, leave_one_out=others)
        assert advantages == [None if reward is None else 0.0 for reward in rewards]


@pytest.mark.parametrize("rewards", [[1.0, 1.0 + 2**-40], [0.1 + 0.2, 0.3], [0.0] * 63 + [1e-9]])
def test_a_small_difference_of_rewards_is_one(rewards: list[float]) -> None:
    assert not is_equal(rewards)
    assert any(group_advantages(rewards))


@given(st.lists(st.lists(st.none() | st.floats(-100, 100), max_size=5), max_size=5))
def test_the_sums_of_ranks_give_the_standard_deviation_of_all_rewards(
    ranks: list[list[float | None]],
) -> None:
    sums = sum(map(RewardSums.of, ranks), RewardSums(0, 0.0, 0.0))
    rewards = _numbers([reward for rank in ranks for reward in rank])
    assert sums.count == len(rewards)
    # The error of a variance from sums is relative to the squares: its root is 1e-8 times as large.
    assert sums.std == pytest.approx(
        statistics.stdev(rewards) if len(rewards) > 1 else 0.0, rel=1e-9, abs=1e-5
    )


def test_truncated_answers_get_the_lowest_reward_of_their_group() -> None:
    assert penalize([1.0, 0.5, 2.0, None], [True, False, False, True]) == [0.5, 0.5, 2.0, None]
    assert penalize([1.0, 0.5, 2.0], [False, True, False]) == [1.0, 0.5, 2.0]
    assert penalize([1.0, 2.0], [True, True]) == [1.0, 1.0]
    assert penalize([None], [True]) == [None]
    assert penalize([], []) == []


def test_a_divergence_is_subtracted_from_the_reward_of_its_answer() -> None:
    assert less_divergence([1.0, None, 0.5], [2.0, 7.0, -1.0], beta=0.1) == [0.8, None, 0.6]


def test_rewards_are_compared_without_torch() -> None:
    """Processes of rewards must not load it."""
    code = (
        "import sys, unisono.trainer.objectives.advantages;"
        " sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
