"""The learning rate and the random streams are functions of the step and the seed. Run: pytest tests/train/test_schedule_and_streams.py"""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.train.optim import Schedule, lr_factor
from unisono.train.run import GeneratorWatch, seed_torch, stream_seed

_SCHEDULES = st.sampled_from(["cosine", "linear", "constant", "wsd"])


@given(total=st.integers(1, 500), warmup=st.integers(0, 500), schedule=_SCHEDULES, floor=st.floats(0, 0.9))
def test_the_factor_rises_in_the_warm_up_never_leaves_its_bounds_and_never_rises_after_it(
    total: int, warmup: int, schedule: Schedule, floor: float
) -> None:
    warmup = min(warmup, total)
    factors = [
        lr_factor(step, total=total, warmup=warmup, schedule=schedule, floor=floor)
        for step in range(1, total + 1)
    ]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    rest = factors[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rest))
    assert all(factor >= floor - 1e-12 for factor in rest)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_step_has_the_floor(schedule: Schedule) -> None:
    assert lr_factor(100, total=100, warmup=3, schedule=schedule, floor=0.1) == pytest.approx(0.1)


@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 10**6))
def test_streams_differ_by_name_seed_and_index(seed: int, index: int) -> None:
    seeds = {
        stream_seed(seed, "dropout", index),
        stream_seed(seed, "weights", index),
        stream_seed(seed, "dropout", index + 1),
    }
    assert len(seeds) == 3
    assert stream_seed(seed, "dropout", index) in seeds


def test_the_watch_names_each_generator_that_moved_once() -> None:
    seed_torch(0, "dropout", 1)
    watch = GeneratorWatch(torch_is_used=False)
    assert watch.moved() == []
    random.random()
    np.random.rand()
    torch.rand(1)
    assert watch.moved() == ["python's random", "numpy.random", "torch's default generator"]
    random.random()
    assert watch.moved() == []
