"""pass@k is the chance of its definition, and means leave out what has no reward.

Run: pytest tests/trainer/objectives/test_answer_scores.py
"""

import itertools

import pytest

from unisono.trainer.objectives.answer_scores import answer_scores, counts_of_answers, pass_at
from unisono.trainer.objectives.sampled import AnswerGroup, SampledAnswer


@pytest.mark.parametrize("answers", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_choices_with_a_passing_answer(answers: int) -> None:
    for passing, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        choices = list(itertools.combinations(range(answers), k))
        share = sum(min(choice) < passing for choice in choices) / len(choices)
        assert pass_at(k, answers=answers, passing=passing) == pytest.approx(share)


def test_pass_at_k_of_the_paper_s_numerically_stable_form() -> None:
    product = 1.0
    for number in range(4000 - 7 + 1, 4000 + 1):
        product *= 1 - 100 / number
    assert pass_at(100, answers=4000, passing=7) == pytest.approx(1 - product)


@pytest.mark.parametrize(
    ("samples", "expected"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_k_doubles_up_to_the_number_of_samples(samples: int, expected: list[int]) -> None:
    assert list(counts_of_answers(samples)) == expected


def group(*rewards: float | None, truncated: int = 0) -> AnswerGroup:
    made = AnswerGroup(0, 0, 0, "rows.jsonl:1", [1], {})
    made.answers = [
        SampledAnswer([1], [2] * (number + 1), [], "", is_truncated=number < truncated, rewards={"one": reward}, reward=reward)
        for number, reward in enumerate(rewards)
    ]  # fmt: skip
    return made


def test_an_answer_without_a_reward_has_left_its_group() -> None:
    groups = [group(1.0, 0.0, 0.5, None, truncated=1), group(None, None, None, None)]
    scores = answer_scores(groups, ["one"], samples=4, threshold=0.5)
    assert scores == {
        "reward": pytest.approx(0.5),
        "pass@1": pytest.approx(2 / 3),
        "pass@2": 1.0,
        "pass@4": None,
        "truncated": 1 / 8,
        "answer_tokens": 2.5,
        "no_reward": 5 / 8,
    }


def test_several_functions_have_figures_of_their_own() -> None:
    one, other = group(1.0, 0.0), group(0.0, 0.0)
    one.answers[0].rewards["two"] = 0.25
    scores = answer_scores([one, other], ["one", "two"], samples=2, threshold=1.0)
    assert (scores["reward_one"], scores["reward_two"]) == (0.25, 0.25)
    assert (scores["pass@1"], scores["pass@2"]) == (0.25, 0.5)
    assert "no_reward" not in scores
