"""Curves to Weights & Biases and SwanLab: what reaches their packages, and what a missing one is
answered with.

Run: pytest tests/trainer/track/test_services.py
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from unisono.base.errors import ConfigError
from unisono.base.events import Reporter
from unisono.trainer.track import ServiceWriter

STAND_IN = """
import json
class Run:
    def __init__(self, **given): self.lines = [given]
    def log(self, values, step): self.lines.append([step, values])
    def finish(self):
        with open(FILE, "w") as file: json.dump(self.lines, file)
def init(**given): return Run(**given)
"""


@pytest.mark.parametrize("service", ["wandb", "swanlab"])
def test_a_missing_package_is_answered_with_the_line_to_type(service: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(service) is not None:
        pytest.skip(f"{service} is installed here")
    with pytest.raises(ConfigError) as caught:
        ServiceWriter(service, tmp_path, Reporter(None), name="first", run_id="id-1")  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].fix.startswith(f"pip install {service}")


@pytest.mark.parametrize(("service", "name_key"), [("wandb", "name"), ("swanlab", "experiment_name")])
def test_points_arrive_under_the_runs_id(
    service: str, name_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a package that writes down what it is given: the real ones need an account."""
    (tmp_path / f"{service}.py").write_text(f"FILE = {str(tmp_path / 'given.json')!r}\n{STAND_IN}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, service, raising=False)
    writer = ServiceWriter(service, tmp_path / "out", Reporter(None), name="first", run_id="id-1")  # type: ignore[arg-type]
    writer.scalars(1, {"train/loss": 2.5, "train/lr": None})
    writer.scalars(2, {"train/loss": 2.0})
    writer.close()
    start, *points = json.loads((tmp_path / "given.json").read_text())
    assert (start["id"], start[name_key], start["resume"]) == ("id-1", "first", "allow")
    assert points == [[1, {"train/loss": 2.5}], [2, {"train/loss": 2.0}]]
    assert (tmp_path / "out").is_dir()
    sys.modules.pop(service)
