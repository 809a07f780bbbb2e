"""The curve is drawn while a run is going, and at its end.

Run: pytest tests/jobs/runs/test_curve_drawing.py
"""

import json
import time
from pathlib import Path

import pytest

from unisono.guard.rundir import RunDir
from unisono.jobs.runs import curve_drawing
from unisono.jobs.runs.curve_drawing import CurveDrawing


def test_curve_is_drawn_beside_the_front_and_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last drawing has what came meanwhile."""
    monkeypatch.setattr(curve_drawing, "_EVERY_S", 0.0)
    run = RunDir(tmp_path)
    drawing = CurveDrawing(run, title="a run: a model")
    lines = [json.dumps({"step": step, "loss": 5.0 - step / 10, "lr": 0.1}) for step in range(1, 20)]
    run.metrics.write_text("\n".join(lines) + "\n")
    drawing.again()
    limit = time.monotonic() + 60
    while not run.curve.exists():
        assert time.monotonic() < limit, "it was never drawn"
        time.sleep(0.01)
    assert "a run: a model" in run.curve.read_text()
    assert "evaluation" not in run.curve.read_text()
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 19, "eval_loss": 4.5}) + "\n")
    drawing.again()
    drawing.again()
    drawing.finish()
    assert "evaluation" in run.curve.read_text()
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_run_of_seconds_is_drawn_once_at_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    drawing = CurveDrawing(run, title="a run")
    run.metrics.write_text(json.dumps({"step": 1, "loss": 5.0}) + "\n")
    drawing.again()
    assert drawing._process is None
    drawing.finish()
    assert run.curve.exists()


def test_without_metrics_there_is_no_curve(tmp_path: Path) -> None:
    drawing = CurveDrawing(RunDir(tmp_path), title="a run")
    drawing.again()
    drawing.finish()
    assert not list(tmp_path.iterdir())
