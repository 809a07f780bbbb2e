"""When a step is kept in memory. Run: pytest tests/train/test_kept_steps.py"""

from collections.abc import Callable
from typing import Any

import pytest

from unisono.launch.kept import KeptMemory
from unisono.rundir.metrics import MetricsWriter

Train = Callable[..., Any]
append = MetricsWriter.append


def test_a_step_and_its_evaluation_are_kept_before_anybody_can_see_them(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death between the two would cost a step that was seen: so the memory is read at each line, as after a death there."""
    seen: list[tuple[int, str, bool]] = []

    with KeptMemory([0]) as memory:

        def note(line: dict[str, Any], name: str) -> None:
            kept, _ = memory.read(0)
            lines = kept[0].lines if kept and kept[0].step == line["step"] else []
            seen.append((line["step"], name, line[name] in [other.get(name) for other in lines]))

        def looking(self: MetricsWriter, line: dict[str, Any]) -> None:
            note(line, "eval_loss" if "eval_loss" in line else "loss")
            append(self, line)

        def told(message: dict[str, Any], stop: object) -> None:
            del stop
            if message["kind"] in ("step", "eval") and message["step"] > 0:
                note(message, "loss" if message["kind"] == "step" else "eval_loss")

        monkeypatch.setattr(MetricsWriter, "append", looking)
        sections = {"data": {"eval": 0.2}, "eval": {"every": "2 steps"}, "duration": "4 steps"}
        train_here(on_message=told, snapshot_fd=memory.fd(0), **sections)
    names = [(1, "loss"), (2, "loss"), (2, "eval_loss"), (3, "loss"), (4, "loss"), (4, "eval_loss")]
    assert seen == [(*name, True) for name in names for _ in ("in metrics.jsonl", "told")]
