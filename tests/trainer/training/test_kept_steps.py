"""When a step is kept in memory. Run: pytest tests/trainer/training/test_kept_steps.py"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.guard.rundir.records import MetricsWriter
from unisono.guard.supervise.local_ranks import SharedMemory
from unisono.jobs.remote_checkpoint.rescue import RescuedStep
from unisono.trainer.training.memory_snapshots import LIMIT, MemorySnapshots
from unisono.trainer.training.process_group import Alone

Train = Callable[..., Any]
append = MetricsWriter.append


def test_a_step_and_its_evaluation_are_kept_before_anybody_can_see_them(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death between the two would cost a step that was seen: so the memory is read at each line,
    as after a death there.
    """
    seen: list[tuple[int, str, bool]] = []

    with SharedMemory([0]) as memory:

        def note(line: dict[str, Any], name: str) -> None:
            kept = RescuedStep.of_node(memory).steps[0]
            lines = kept[0].lines if kept and kept[0].step == line["step"] else []
            seen.append((line["step"], name, line[name] in [other.get(name) for other in lines]))

        def looking(self: MetricsWriter, line: dict[str, Any]) -> None:
            note(line, "eval_loss" if "eval_loss" in line else "loss")
            append(self, line)

        def on_message(message: dict[str, Any], stop: object) -> None:
            del stop
            if message["kind"] in ("step", "eval") and message["step"] > 0:
                note(message, "loss" if message["kind"] == "step" else "eval_loss")

        monkeypatch.setattr(MetricsWriter, "append", looking)
        sections = {"data": {"eval": 0.2}, "eval": {"every": "2 steps"}, "duration": "4 steps"}
        train_here(on_message=on_message, snapshot_fd=memory.fd(0), **sections)
    names = [(1, "loss"), (2, "loss"), (2, "eval_loss"), (3, "loss"), (4, "loss"), (4, "eval_loss")]
    assert seen == [(*name, True) for name in names for _ in ("in metrics.jsonl", "told")]


def test_costly_snapshots_keep_every_fourth_evaluated_and_last_step(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps are all kept: they are measured."""

    def decide(self: MemorySnapshots, run: Any, share: float) -> int:
        del run
        assert share > 0
        self._every = 4
        return 4

    monkeypatch.setattr(MemorySnapshots, "_decide", decide)
    newest: dict[int, tuple[int, list[list[str]]]] = {}
    with SharedMemory([0]) as memory:

        def on_message(message: dict[str, Any], stop: object) -> None:
            del stop
            if message["kind"] in ("step", "eval") and message["step"] > 0:
                rescued = RescuedStep.of_node(memory)
                found = rescued.steps[0]
                assert rescued.damage[0] == []
                names: list[list[str]] = [
                    [name for name in ("loss", "eval_loss") if name in line] for line in found[0].lines
                ]
                newest[message["step"]] = found[0].step, names

        sections = {"data": {"eval": 0.2}, "eval": {"every": "7 steps"}, "duration": "23 steps"}
        run = train_here(on_message=on_message, snapshot_fd=memory.fd(0), **sections)
    steps = {step: kept for step, (kept, _) in newest.items()}
    first = {step: step for step in range(1, 12)}
    assert steps == first | {
        12: 12,
        13: 12,
        14: 14,
        15: 14,
        16: 16,
        17: 16,
        18: 16,
        19: 16,
        20: 20,
        21: 21,
        22: 21,
        23: 23,
    }
    assert newest[14][1] == [["loss"], ["eval_loss"]]
    assert newest[20][1] == [["loss"]]
    (ready,) = [message for message in run.messages if message["kind"] == "ready"]
    assert ready["facts"]["kept_every"] == 4


class Ranks(Alone):
    """The shares of other ranks beside one's own."""

    def __init__(self, others: list[float], limit: float) -> None:
        self._others, self._limit, self._every = others, limit, 1

    def any(self, statement: bool) -> bool:  # noqa: FBT001
        found = statement or any(share > self._limit * self._every for share in self._others)
        self._every *= 2
        return found


@pytest.mark.parametrize(
    ("shares", "every"),
    [
        ([0.002], 1),
        ([0.01], 1),
        ([0.014], 2),
        ([0.002, 0.014], 2),
        ([0.03, 0.001], 4),
        ([0.6], 64),
        ([0.001, 0.7], None),
    ],
)
def test_most_costly_rank_decides_for_all_and_cost_stays_below_the_limit(
    shares: list[float], every: int | None
) -> None:
    for number, share in enumerate(shares):
        run: Any = SimpleNamespace(group=Ranks([*shares[:number], *shares[number + 1 :]], LIMIT))
        assert MemorySnapshots(None)._decide(run, share) == every
