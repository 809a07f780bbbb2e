"""Parts of other packages. Run: pytest tests/base/test_extensions.py"""

import json
import math
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from unisono.base.errors import UsageError
from unisono.base.extensions import CONFIG_READERS, SCHEDULES, extensions, load_extension


def test_an_entry_point_is_loaded() -> None:
    assert load_extension(EntryPoint("sqrt", "math:sqrt", SCHEDULES)) is math.sqrt


@pytest.mark.parametrize("value", ["no_such_module:reader", "math:no_such_reader"])
def test_unimportable_extension_is_refused_with_its_package_and_the_fix(value: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_extension(EntryPoint("axolotl", value, CONFIG_READERS))
    text = "\n".join(refused.value.lines())
    assert "config reader axolotl cannot be imported" in text
    assert value in text
    assert "reinstall its package" in text


def test_a_group_that_nobody_fills_is_empty() -> None:
    assert extensions("unisono.nothing") == {}


_MODULE = """
import pathlib
import torch

def halving(step, total, warmup, parameters):
    return 0.5**step

class Plain(torch.optim.SGD):
    def step(self, closure=None):
        with (pathlib.Path(__file__).parent / "steps").open("a") as file:
            file.write("step ")
        return super().step(closure)
"""
_ENTRY_POINTS = """
[unisono.schedules]
halving = plainparts:halving

[unisono.optimizers]
plain = plainparts:Plain
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH, with a package as pip leaves it."""
    folder = tmp_path / "site"
    about = folder / "plainparts-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "plainparts.py").write_text(_MODULE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plainparts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


def test_schedule_and_optimizer_of_an_installed_package_train(tmp_path: Path, installed: Path) -> None:
    rows = [{"prompt": "a b", "response": f"c {number}"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(
        "model: {path: builtin:tiny}\ndata: {train: rows.jsonl}\nduration: 3 steps\noutput_dir: out\n"
        "optim: {lr: 0.01, schedule: halving, kind: plain}\n"
    )
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "train", "run.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    rates = [metrics["lr"] for metrics in map(json.loads, lines) if "lr" in metrics]
    assert rates == [0.005, 0.0025, 0.00125]
    assert (installed / "steps").read_text().count("step") >= 3
