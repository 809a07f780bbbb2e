"""Where a wish to stop finds the loop. Run: pytest tests/trainer/training/test_stop.py"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Trained
from unisono.trainer.training.front_io import StopRequest

Train = Callable[..., Trained]
Hear = Callable[[dict[str, Any], StopRequest], None]


def asked_at(kind: str, **fields: Any) -> Hear:
    """Wishes to stop as soon as such a message is sent."""

    def hear(message: dict[str, Any], stop: StopRequest) -> None:
        if message["kind"] == kind and all(message.get(name) == value for name, value in fields.items()):
            stop.outcome = "preempted"

    return hear


def test_after_the_last_step_completing_wins(train_here: Train) -> None:
    trained = train_here(on_message=asked_at("step", step=6))
    assert (trained.result["outcome"], trained.result["exit_code"]) == ("completed", 0)
    assert trained.result["weights"]


def test_before_the_last_step_the_run_saves_and_goes(train_here: Train) -> None:
    trained = train_here(on_message=asked_at("step", step=5))
    assert (trained.result["outcome"], trained.result["exit_code"]) == ("preempted", 75)
    assert (trained.result["step"], trained.result["weights"]) == (5, None)
    assert trained.result["checkpoint"].endswith("step-00000005")


def test_an_answer_that_is_being_generated_is_not_waited_for(train_here: Train) -> None:
    """The wish comes between an evaluation and its samples."""
    sections = {"data": {"eval": 0.1}, "eval": {"every": "2 steps", "samples": 3}}
    undisturbed = train_here(**sections)
    assert any(m["kind"] == "sample" and m["step"] == 2 for m in undisturbed.messages)
    trained = train_here(on_message=asked_at("eval", step=2), **sections)
    assert trained.result["outcome"] == "preempted"
    assert (trained.result["step"], trained.result["checkpoint"][-1]) == (2, "2")
    assert not [m for m in trained.messages if m["kind"] == "sample" and m["step"] == 2]


@pytest.mark.slow
def test_what_is_measured_after_the_last_step_is_left_for_the_next_start(train_here: Train) -> None:
    sections = {"data": {"eval": 0.1}, "eval": {"every": "3 steps", "exact_match": True}}
    trained = train_here(on_message=asked_at("eval", step=6), **sections)
    assert (trained.result["outcome"], trained.result["step"]) == ("preempted", 6)
    assert trained.result["weights"] is None
    path = trained.directory / "checkpoints" / "step-00000006"
    again = train_here(resume=(6, path), directory=trained.directory, **sections)
    assert (again.result["outcome"], again.result["step"]) == ("completed", 6)
    assert again.result["weights"]
    assert again.result["eval"]["exact_match"] is not None


def test_evaluation_cut_short_by_a_stop_is_written_once(
    train_here: Train,
) -> None:
    """The checkpoint says that it is due.

    The next start makes it, and dies before there is a newer checkpoint.
    """
    sections = {
        "data": {"eval": 0.2}, "eval": {"every": "3 steps"}, "checkpoint": {"every": "100 steps"},
    }  # fmt: skip
    stopped = train_here(on_message=asked_at("step", step=3), **sections)
    assert (stopped.result["outcome"], stopped.result["step"]) == ("preempted", 3)
    again = {
        "resume": (3, stopped.directory / "checkpoints" / "step-00000003"),
        "directory": stopped.directory,
    }

    def die(message: dict[str, Any], stop: StopRequest) -> None:
        del stop
        if message["kind"] == "step" and message["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_here(on_message=die, **again, **sections)
    ended = train_here(**again, **sections)
    assert [line["step"] for line in ended.metrics if "eval_loss" in line] == [3, 6]
    assert [line["step"] for line in ended.metrics if "eval_loss" not in line] == [1, 2, 3, 4, 5, 6]
