"""The learning rate and the random streams are functions of the step and the seed.

Run: pytest tests/trainer/training/test_schedule_and_streams.py
"""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from unisono.trainer.batches.seeds import seed_torch, stream_seed
from unisono.trainer.config.schedules import SCHEDULES, Parameters, from_transformers
from unisono.trainer.training.run import GeneratorWatch

_SCHEDULES = st.sampled_from(["cosine", "linear", "constant", "wsd", "cosine_warmup_with_min_lr"])


def lr_factor(
    step: int, *, total: int, warmup: int, schedule: str, floor: float = 0.0, start: int = 1, **more: Any
) -> float:
    """The factor at a step, from 1."""
    parameters = Parameters(min_lr=floor, start=start, **more)
    return SCHEDULES[schedule].factor(step - 1 + start, total, warmup, parameters)


@given(total=st.integers(1, 500), warmup=st.integers(0, 500), schedule=_SCHEDULES, floor=st.floats(0, 0.9))
def test_factor_rises_in_the_warm_up_stays_in_bounds_and_then_never_rises(
    total: int, warmup: int, schedule: str, floor: float
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


@pytest.mark.parametrize(
    "schedule", ["cosine", "linear", "wsd", "cosine_with_restarts", "polynomial", "cosine_warmup_with_min_lr"]
)
def test_the_last_step_has_the_floor(schedule: str) -> None:
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


@pytest.mark.parametrize(
    ("name", "extra", "ours"),
    [
        ("cosine", {}, {}),
        ("linear", {}, {}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"cycles": 3}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}, {"power": 2.0, "floor": 1e-5 / 2e-4}),
        ("polynomial", {}, {"floor": 1e-7 / 2e-4}),
        ("cosine_with_min_lr", {"min_lr": 2e-5}, {"floor": 0.1}),
        ("inverse_sqrt", {}, {}),
        ("cosine_warmup_with_min_lr", {"min_lr": 2e-5}, {"floor": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.0}, {}),
    ],
)
@pytest.mark.parametrize(("total", "warmup"), [(50, 5), (7, 0), (31, 30)])
def test_from_position_zero_learning_rates_equal_those_of_transformers(
    name: str, extra: dict[str, float], ours: dict[str, float], total: int, warmup: int
) -> None:
    lr = 2e-4
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler: Any = get_scheduler(
        name, theirs, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=extra
    )
    named = from_transformers(name)
    assert named is not None
    given: dict[str, Any] = {"floor": 0.0, **ours}
    for step in range(1, total + 1):
        factor = lr_factor(step, total=total, warmup=warmup, schedule=named[0], start=0, **given)
        assert lr * factor == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-11), step
        theirs.step()
        scheduler.step()


def test_restarts_return_to_the_peak_and_a_power_bends_the_line() -> None:
    common: dict[str, Any] = {"total": 90, "warmup": 0, "floor": 0.0}
    waves = [lr_factor(s, schedule="cosine_with_restarts", start=0, cycles=3, **common) for s in range(1, 91)]
    assert [s for s, factor in enumerate(waves) if factor == 1.0] == [0, 30, 60]
    assert lr_factor(45, schedule="polynomial", power=3.0, **common) == pytest.approx(0.125)
