"""Learning rates beyond any training are named, and what is advised instead is not.

Run: pytest tests/trainer/plan/test_schedule.py
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.plan.test_resolve import plan
from unisono.trainer.config import RunConfig
from unisono.trainer.plan.schedule import beyond_training, factor_at, lower_rates, usual_rates


def config(**keys: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "m", "data": {"train": "d"}, "output_dir": "o", **keys})


@given(st.floats(1e-9, 1e30), st.sampled_from(["sft", "dpo"]), st.sampled_from([{}, {"adapter": None}]))
def test_an_advised_rate_is_lower_and_one_with_which_runs_train(
    lr: float, objective: str, keys: dict[str, Any]
) -> None:
    asked = config(optim={"lr": lr}, objective=objective, **keys)
    advised = float(lower_rates(asked).partition("optim.lr=")[2].split()[0])
    assert advised < lr
    assert advised <= 0.025
    assert bool(beyond_training(asked)) == (lr > 0.1)


def test_the_advice_names_the_usual_rate_of_what_is_trained() -> None:
    assert lower_rates(config(optim={"lr": 1e30})) == "optim.lr=0.0002 (0.0002 is usual for an adapter)"
    assert lower_rates(config(optim={"lr": 4e-3})) == "optim.lr=0.001 (0.0002 is usual for an adapter)"
    full = config(optim={"lr": 1.0, "kind": "muon", "muon_lr": 0.1}, adapter=None)
    assert (
        lower_rates(full)
        == "optim.lr=2e-05 (2e-05 is usual for all weights) optim.muon_lr=0.025 (0.02 is usual for Muon)"
    )


@pytest.mark.parametrize(
    ("keys", "usual"),
    [({}, 2e-4), ({"adapter": None}, 2e-5), ({"objective": "dpo"}, 2e-5), ({"objective": "dpo", "adapter": None}, 2e-6)],
)  # fmt: skip
def test_usual_rates_are_a_tenth_for_all_weights_and_for_preferences(
    keys: dict[str, Any], usual: float
) -> None:
    assert usual_rates(config(**keys))["optim.lr"][0] == pytest.approx(usual)


def test_a_rate_beyond_training_is_a_line_of_the_plan() -> None:
    (line,) = plan(optim={"lr": 1e30}).warnings
    assert line.startswith("optim.lr is 1e+30")
    assert "0.0002 is usual for an adapter" in line
    assert plan(optim={"lr": 0.1}).warnings == []


def test_the_factor_of_a_plan_is_that_of_its_schedule() -> None:
    made = plan(duration="100 steps", optim={"schedule": "linear", "warmup": "10 steps"})
    assert factor_at(made, 1) == pytest.approx(1 / 11)
    assert factor_at(made, 11) == pytest.approx(1 - 1 / 90)
    assert factor_at(made, 100) == pytest.approx(0.0)
