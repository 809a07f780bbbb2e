"""Pauses that look like faults and are none; a loss that is no number.

Run: pytest tests/trainer/training/test_faults.py
"""

from collections.abc import Callable

from tests.conftest import Trained


def test_a_run_that_pauses_everywhere_trains_the_same(train_here: Callable[..., Trained]) -> None:
    sections = {"data": {"eval": 0.2}, "eval": {"every": "2 steps"}, "checkpoint": {"every": "3 steps"}}
    pauses = [
        {"how": how, "seconds": 0.05, "every": 2} for how in ("sleep", "work", "collect", "evaluate", "save")
    ]
    straight = train_here(**sections)
    paused = train_here(
        **sections, faults={"pause": [*pauses, {"how": "sleep", "seconds": 0.5, "steps": [1]}]}
    )
    assert paused.losses == straight.losses
    assert paused.result["outcome"] == "completed"
    assert paused.metrics[0]["step_time_s"] > 0.5


def test_a_loss_that_is_not_a_number_on_three_steps_ends_the_run(train_here: Callable[..., Trained]) -> None:
    trained = train_here(duration="12 steps", faults={"nan_loss": {"rank": 0, "steps": [3, 4, 5]}})
    assert trained.result["verdict"]["cause"] == "nan_loss"
    assert trained.result["verdict"]["step"] == 5
