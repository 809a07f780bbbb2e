"""Rows that the model makes during the step are trained on by the loop as it is.

Run: pytest tests/trainer/batches/test_rollouts.py

On two ranks: kind `rollouts` of tests/trainer/ranks.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.trainer.batches import rollouts

Train = Callable[..., Any]
_SECTIONS: dict[str, Any] = {
    "objective": f"{rollouts.__file__}:Reinforce", "duration": "8 steps", "batch": {"global": 6, "micro": 1},
    "adapter": {"dropout": 0.1}, "data": {"packing": False, "eval": 0.1}, "checkpoint": {"every": "4 steps"},
}  # fmt: skip


def test_a_source_that_generates_fits_into_sixty_lines() -> None:
    assert len(inspect.getsource(rollouts.Rollouts).splitlines()) <= 60


def test_a_stopped_run_on_generated_rows_resumes_bit_exactly(train_here: Train, tmp_path: Path) -> None:
    straight = train_here(**_SECTIONS)
    assert len(set(straight.losses)) == 8

    def at_step_4(message: dict[str, Any], stop: Any) -> None:
        if message["kind"] == "step" and message["step"] == 4:
            stop.outcome = "preempted"

    stopped = train_here(on_message=at_step_4, **_SECTIONS)
    path = stopped.directory / "checkpoints" / "step-00000004"
    state = json.loads((path / "state.json").read_text())["state"]["batches"]
    assert 0 < state["baseline"] < 1
    resumed = train_here(directory=stopped.directory, resume=(4, path), **_SECTIONS)
    assert resumed.losses == straight.losses
    assert resumed.result["eval"] == straight.result["eval"]
    mine, wanted = resumed.weights(), straight.weights()
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_rows_of_later_steps_come_from_the_trained_weights(train_here: Train) -> None:
    """With a learning rate of almost zero the same prompts get other answers."""
    trained, still = (train_here(**_SECTIONS, optim={"lr": lr}) for lr in (1e-2, 1e-12))
    tokens = [[m["tokens"] for m in run.metrics if "loss" in m] for run in (trained, still)]
    assert tokens[0][0] == tokens[1][0]
    assert tokens[0] != tokens[1]


def test_rows_of_a_table_leave_nothing_in_a_checkpoint(train_here: Train) -> None:
    run = train_here(duration="2 steps", checkpoint={"every": "1 steps"})
    state = json.loads((run.directory / "checkpoints" / "step-00000002" / "state.json").read_text())["state"]
    assert state.keys() == {"train", "optimizer", "kernels", "base"}
