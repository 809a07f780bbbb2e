"""What ranks encode and sum is what each of them decodes.

Run: pytest tests/trainer/training/test_step_sums.py
"""

import math

import pytest
import torch

from unisono.trainer.training.front_io import Outcome
from unisono.trainer.training.step_sums import StepSums, encode_step, size_of_step


def of_rank(rank: int, loss: float, *, stop: Outcome | None = None, origin: int = 0) -> torch.Tensor:
    metrics = torch.tensor([rank + 0.5, 1.0])
    origin_of_nan = torch.tensor(float(origin))
    return encode_step(torch.tensor(loss), metrics, origin_of_nan, stop=stop, rank=rank, world_size=3)


def test_the_sums_of_three_ranks_are_those_of_the_step() -> None:
    numbers = of_rank(0, 0.25) + of_rank(1, 0.5) + of_rank(2, 1.0)
    assert len(numbers) == size_of_step(3, metrics=2)
    step = StepSums.decode(numbers.tolist(), world_size=3)
    assert step == StepSums(loss=1.75, stop=None, odd_ranks=[], origin_of_nan=0, metrics=[4.5, 3.0])


@pytest.mark.parametrize("origin", [1, 2])
def test_a_rank_whose_loss_is_nan_is_known_to_all_with_the_origin(origin: int) -> None:
    numbers = of_rank(0, 0.25) + of_rank(1, math.nan, origin=origin) + of_rank(2, math.inf)
    step = StepSums.decode(numbers.tolist(), world_size=3)
    assert (step.odd_ranks, step.origin_of_nan) == ([1, 2], origin)
    assert math.isnan(step.loss)


def test_an_interrupt_on_one_rank_comes_before_a_preemption_on_another() -> None:
    numbers = of_rank(0, 1.0, stop="preempted") + of_rank(1, 1.0, stop="interrupted") + of_rank(2, 1.0)
    assert StepSums.decode(numbers.tolist(), world_size=3).stop == "interrupted"
    only_one = of_rank(0, 1.0, stop="preempted") + of_rank(1, 1.0) + of_rank(2, 1.0)
    assert StepSums.decode(only_one.tolist(), world_size=3).stop == "preempted"
