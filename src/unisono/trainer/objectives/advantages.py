"""Advantages: how much better the reward of an answer is than those of the other answers to its
prompt.

Importing this loads no torch. A group is the rewards of the answers to one prompt; None is the
reward of an answer that has none. Such an answer leaves its group: it does not count in it, and its
advantage is None. Rewards are finite.

The formulas are those of TRL 1.16, `GRPOTrainer` and `RLOOTrainer`. There an answer without a
reward stays in the batch with advantage 0; rewards are float32, so that a group of equal rewards
may have advantages of up to 1e-3 by rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

Rewards = Sequence[float | None]
EPSILON = 1e-4
"""Added to a standard deviation before an advantage is divided by it."""


@dataclass(frozen=True)
class RewardSums:
    """What the standard deviation of all rewards of a rollout follows from; those of ranks add up.

    Attributes:
        count: number of rewards.
        total: their sum.
        squares: the sum of their squares.
    """

    count: float
    total: float
    squares: float

    @classmethod
    def of(cls, rewards: Rewards) -> Self:
        """The sums of some rewards, without those that are None."""
        scored = _scored(rewards)
        return cls(len(scored), math.fsum(scored), math.fsum(reward * reward for reward in scored))

    def __add__(self, other: "RewardSums") -> "RewardSums":
        return RewardSums(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 0 of fewer than two rewards.

        Sums lose digits where the mean is large: its error is up to 1e-8 times the mean.
        """
        if self.count < 2:
            return 0.0
        return math.sqrt(max(self.squares - self.total**2 / self.count, 0.0) / (self.count - 1))


def is_equal(rewards: Rewards) -> bool:
    """Whether a group says nothing about which answer is better: all its rewards are equal exactly,
    or it has fewer than two.
    """
    return len(set(_scored(rewards))) < 2


def penalize(rewards: Rewards, truncated: Sequence[bool]) -> list[float | None]:
    """The rewards of a group in which truncated answers have its lowest reward. An answer without a
    reward still has none.
    """
    lowest = min(_scored(rewards), default=None)
    return [
        lowest if cut and reward is not None else reward
        for reward, cut in zip(rewards, truncated, strict=True)
    ]


def less_divergence(rewards: Rewards, divergences: Sequence[float], *, beta: float) -> list[float | None]:
    """Rewards less β times the divergence from the reference model, before advantages.

    So TRL's `RLOOTrainer` uses β (arXiv:2402.14740); `GRPOTrainer` has the divergence
    in the loss (`policy.k3`).

    Args:
        rewards: of answers.
        divergences: of each answer, Σ over its tokens of the log-probability at the time of
            sampling less that under the reference model (k1; it may be negative).
        beta: its weight.
    """
    return [
        None if reward is None else reward - beta * divergence
        for reward, divergence in zip(rewards, divergences, strict=True)
    ]


def group_advantages(
    rewards: Rewards,
    *,
    scale: Literal["group", "batch", "none"] = "group",
    batch_std: float = 0.0,
    leave_one_out: bool = False,
) -> list[float | None]:
    """The advantages of a group: rewards less their mean, in units of a standard deviation (GRPO,
    arXiv:2402.03300, section 4.1.2). Their mean is 0.

    A group that `is_equal` has advantages of exactly 0. TRL's `RLOOTrainer` has no scale; its
    `normalize_advantages` divides by the standard deviation of all advantages, not of rewards.

    Args:
        rewards: of the answers to one prompt.
        scale: group: divide by the unbiased standard deviation of the group + EPSILON; batch: by
            `batch_std` + EPSILON (arXiv:2508.08221); none: do not divide (arXiv:2503.20783).
        batch_std: `RewardSums.std` of all rewards of the rollout.
        leave_one_out: compare with the mean of the *other* answers (RLOO, arXiv:2402.14740): n /
            (n - 1) times as much.
    """
    if is_equal(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    scored = _scored(rewards)
    count = len(scored)
    mean = math.fsum(scored) / count
    factor = count / (count - 1) if leave_one_out else 1.0
    if scale == "group":
        factor /= math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (count - 1)) + EPSILON
    elif scale == "batch":
        factor /= batch_std + EPSILON
    return [None if reward is None else factor * (reward - mean) for reward in rewards]


def _scored(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None]
