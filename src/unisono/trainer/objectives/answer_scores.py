"""Scores of sampled answers by their rewards: means, and pass@k. Pure."""

import math
from collections.abc import Iterator, Sequence

from unisono.trainer.objectives.sampled import AnswerGroup


def pass_at(k: int, *, answers: int, passing: int) -> float:
    """The probability that at least one of k answers passes, which are drawn without replacement
    from `answers` of which `passing` pass: the unbiased estimator of arXiv:2107.03374, equation 1.

    Args:
        k: at most `answers`.
        answers: n.
        passing: c.
    """
    return 1 - math.comb(answers - passing, k) / math.comb(answers, k)


def counts_of_answers(samples: int) -> Iterator[int]:
    """The k of pass@k: 1, 2, 4, … below the number of samples, and this number."""
    k = 1
    while k < samples:
        yield k
        k *= 2
    yield samples


def answer_scores(
    groups: Sequence[AnswerGroup], names: Sequence[str], *, samples: int, threshold: float
) -> dict[str, float | None]:
    """The mean reward and that of each function, pass@k, the share of truncated answers, and the
    mean tokens of an answer; None: not known for any.

    An answer without a reward has left its group, as in training: it is in no mean of rewards, and
    pass@k is the mean over the groups in which at least k answers are left.

    Args:
        groups: with answers and rewards.
        names: of the functions; only where there are several they have figures of their own.
        samples: answers to each prompt.
        threshold: least reward of an answer that passes.
    """
    answers = [answer for group in groups for answer in group.answers]
    rated = [[answer.reward for answer in group.answers if answer.reward is not None] for group in groups]
    scores = {"reward": _mean([reward for rewards in rated for reward in rewards])}
    for name in names if len(names) > 1 else ():
        given = [answer.rewards.get(name) for answer in answers]
        scores[f"reward_{name}"] = _mean([value for value in given if value is not None])
    for k in counts_of_answers(samples):
        scores[f"pass@{k}"] = _mean(
            [
                pass_at(k, answers=len(rewards), passing=sum(reward >= threshold for reward in rewards))
                for rewards in rated
                if len(rewards) >= k
            ]
        )
    scores["truncated"] = _mean([answer.is_truncated for answer in answers])
    scores["answer_tokens"] = _mean([answer.written for answer in answers])
    without = [answer.reward is None for answer in answers]
    return scores | ({"no_reward": _mean(without)} if any(without) else {})


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
