"""NaN and unusable results of an objective of the user's own are blamed on its file.

Run: pytest tests/trainer/training/test_own_objective.py

How its file ends a rank is in tests/front/api/test_own_objective.py and tests/jobs/runs/test_postmortem.py.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from unisono.base.events import describe_crash, own_frame

Train = Callable[..., Any]
SOUND = """\
import torch
import unisono


class Own(unisono.Objective):
    metrics = ("log_prob",)
    calls = 0

    def loss(self, forward, micro, *, counts, known=0.0):
        Own.calls += 1
        log_probs = forward.log_probs(micro.rows)
        loss = -log_probs.sum() / counts.loss_tokens
        sums = torch.stack([log_probs.detach().sum(), loss.new_tensor(float(len(log_probs)))])
        return unisono.Part(loss, sums)
"""
LINE = 9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "own.py"


def said(run: Any) -> str:
    """All that the run says of its skipped steps, and of its end."""
    warnings = [m["text"] + m["fix"] for m in run.of_kind("warning") if m["code"] == "nan_step"]
    assert warnings
    return str(run.result["verdict"]) + "".join(warnings)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (("-log_probs.sum()", "log_probs.sum() * float('nan')"), 1),
        (("-log_probs.sum()", "-(log_probs * 0).sqrt().sum()"), 1),
        (("-log_probs.sum()", "-log_probs.sum() / (Own.calls < 8)"), 6),
    ],
    ids=["the loss", "only its gradient", "after updates"],
)
def test_nan_of_own_objective_from_finite_outputs_is_blamed_on_its_file(
    train_here: Train, file: Path, change: tuple[str, str], first: int
) -> None:
    """The blame is certain: neither the rate, the dtype, the weights nor the rows are suspected."""
    file.write_text(SOUND.replace(*change))
    run = train_here(objective=f"{file}:Own", duration="8 steps", batch={"global": 8, "micro": 8})
    verdict = run.result["verdict"]
    assert (verdict["cause"], verdict["ranks"]) == ("nan_loss", [])
    assert f"the objective {file}:{LINE} gives a NaN or infinite" in verdict["summary"]
    assert "all outputs of the model are finite" in verdict["summary"]
    assert f"{file}:{LINE}" in verdict["fix"][0]
    assert not any(
        word in said(run) for word in ("optim.lr", "model.dtype", "different weights", "check the rows")
    )
    assert first == min(m["step"] for m in run.of_kind("warning") if m["code"] == "nan_step")


def test_nan_of_the_model_is_not_blamed_on_an_own_objective(
    train_here: Train, file: Path, model_dir: Path, tmp_path: Path
) -> None:
    file.write_text(SOUND)
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = 3e38  # logits overflow
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    run = train_here(objective=f"{file}:Own", model={"path": str(broken), "dtype": "float32"})
    verdict = run.result["verdict"]
    assert f"the model {broken}" in verdict["summary"]
    assert "values overflow" in verdict["evidence"][0]["text"]
    assert "different weights" in verdict["fix"][0]


def test_where_the_outputs_are_not_known_the_file_is_the_likely_origin(train_here: Train, file: Path) -> None:
    by_hand = "next(iter(forward.loaded.trainable.values())).flatten()"
    file.write_text(
        SOUND.replace("forward.log_probs(micro.rows)", by_hand).replace(
            "-log_probs.sum()", "log_probs.sum() * float('nan')"
        )
    )
    verdict = train_here(objective=f"{file}:Own").result["verdict"]
    assert f"whose likely origin is the objective {file}:{LINE}" in verdict["summary"]
    assert f"{file}:{LINE}" in verdict["fix"][0]


@pytest.mark.parametrize(
    ("change", "name", "line"),
    [
        (("return unisono.Part(loss, sums)", "return None"), "loss", LINE),
        (("return unisono.Part(loss, sums)", "return loss"), "loss", LINE),
        (("-log_probs.sum()", "-log_probs"), "loss", LINE),
        (("-log_probs.sum()", "-log_probs.detach().sum()"), "loss", LINE),
        (("-log_probs.sum() / counts.loss_tokens", "0.0"), "log_prob", LINE + 4),
        (("(loss, sums)", "(loss, sums[:1])"), "loss", LINE),
        (("    def loss", "    def figures(self, sums, *, known=0.0): pass\n    def loss"), "figures", LINE),
        (("    def loss", "    first_sides = (0,)\n    def first(self, forward, micro): pass\n    def loss"), "first", LINE + 1),
        (("log_probs.detach().sum(), ", "log_probs.missing, "), "missing", LINE + 4),
        (("Own.calls += 1", "raise SystemExit(0)"), "sys.exit(0)", LINE + 1),
    ],
)  # fmt: skip
def test_bad_result_or_exception_of_own_objective_leads_to_its_line(
    train_here: Train, file: Path, change: tuple[str, str], name: str, line: int
) -> None:
    file.write_text(SOUND.replace(*change))
    with pytest.raises((TypeError, AttributeError, RuntimeError)) as raised:
        train_here(objective=f"{file}:Own", duration="2 steps")
    crash = describe_crash(raised.value)
    assert own_frame(crash["traceback"], {str(file): "the objective"}) == f"the objective, {file}:{line}"
    assert name in crash["error"] or line != LINE
