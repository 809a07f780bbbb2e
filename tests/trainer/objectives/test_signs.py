"""Signs of trouble in the figures of sampled answers, and for how many steps they must last.

Run: pytest tests/trainer/objectives/test_signs.py
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.causes import find_cause
from unisono.trainer.config.rollout_sections import RolloutSection
from unisono.trainer.objectives.signs import Sign, SignCounts, policy_signs

HEALTHY = {
    "reward": 0.4, "equal_groups": 0.3, "same_answers": 0.1, "entropy": 0.01, "truncated": 0.2, "sampler_kl": 0.03,
    "kl": 0.5,
}  # fmt: skip


def test_later_steps_of_a_rollout_may_differ_from_the_sampler() -> None:
    rollout = RolloutSection(steps=3)
    shown = [
        [sign.cause for sign in policy_signs({"sampler_difference": 0.2, "step": step}, rollout)]
        for step in range(1, 6)
    ]
    assert shown == [["sampler_mismatch"], [], [], ["sampler_mismatch"], []]


def causes(**figures: float) -> list[str]:
    return [sign.cause for sign in policy_signs(HEALTHY | figures, RolloutSection(max_new_tokens=7))]


def test_a_run_that_learns_shows_no_sign() -> None:
    assert causes() == []
    assert policy_signs({}, RolloutSection()) == []


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"equal_groups": 1.0}, "no_reward_signal"),
        ({"equal_groups": 1.0, "same_answers": 1.0}, "entropy_collapsed"),
        ({"truncated": 0.96}, "answers_never_stop"),
        ({"sampler_kl": 1.5}, "kl_exploded"),
        ({"kl": 12.0}, "kl_exploded"),
        ({"sampler_difference": 0.2, "step": 7}, "sampler_mismatch"),
    ],
)
def test_each_trouble_has_its_sign_and_a_cause_of_the_catalogue(
    figures: dict[str, float], cause: str
) -> None:
    assert causes(**figures) == [cause]
    (sign,) = policy_signs(HEALTHY | figures, RolloutSection(max_new_tokens=7))
    entry = find_cause(cause)
    assert entry is not None
    assert sign.ends_run == (entry.exit_code == 4)


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=30), st.integers(1, 5))
def test_a_sign_is_given_once_in_each_row_of_steps_that_is_long_enough(
    steps: list[set[str]], lasts: int
) -> None:
    counts = SignCounts()
    given = [
        sign.cause for step in steps for sign in counts.lasting([Sign(cause, "", lasts) for cause in step])
    ]
    for cause in "abc":
        streaks = [sum(1 for _ in of) for shown, of in itertools.groupby(cause in s for s in steps) if shown]
        assert given.count(cause) == sum(streak >= lasts for streak in streaks)
