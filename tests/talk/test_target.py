"""What RUN|MODEL names is found, or refused with a remedy. Run: pytest tests/talk/test_target.py"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import IntegrityError, ModelError, UnisonoError, UsageError
from unisono.task.target import find_target

Train = Callable[..., Any]


def refusal(asked: object, *, step: int | None = None) -> UnisonoError:
    with pytest.raises(UnisonoError) as found:
        find_target(str(asked), step=step)
    assert all(problem.what and problem.where and problem.fix for problem in found.value.problems)
    return found.value


def damage(checkpoint: Path) -> None:
    file = checkpoint / "trainable.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_finished_run_gives_its_result_and_its_steps(train_here: Train) -> None:
    run = train_here()
    found = find_target(str(run.directory))
    assert (found.source, found.weights, found.notes) == ("adapter", run.directory / "adapter", ())
    found = find_target(str(run.directory), step=2)
    assert (found.source, found.weights.name) == ("checkpoint", "step-00000002")
    error = refusal(run.directory, step=3)
    assert error.exit_code == 2
    assert "2, 4" in error.problems[0].fix


def test_an_unfinished_run_gives_its_newest_intact_checkpoint_and_says_so(train_here: Train) -> None:
    run = train_here()
    run.unfinish()
    found = find_target(str(run.directory))
    assert found.weights.name == "step-00000004"
    assert "not finished" in found.notes[0]
    damage(found.weights)
    found = find_target(str(run.directory))
    assert found.weights.name == "step-00000002"
    assert any("step-00000004" in note for note in found.notes)
    damage(found.weights)
    shutil.rmtree(run.directory / "adapter")
    error = refusal(run.directory)
    assert isinstance(error, IntegrityError)
    assert error.exit_code == 7


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(train_here: Train) -> None:
    run = train_here()
    damage(run.directory / "checkpoints" / "step-00000002")
    with pytest.raises(IntegrityError, match="step-00000002"):
        find_target(str(run.directory), step=2)


def test_a_run_without_weights_is_refused_with_the_command_that_goes_on(train_here: Train) -> None:
    run = train_here()
    run.unfinish()
    shutil.rmtree(run.directory / "adapter")
    shutil.rmtree(run.directory / "checkpoints")
    error = refusal(run.directory)
    assert error.exit_code == 2
    assert f"unisono train {run.directory / 'config.yaml'}" in error.problems[0].fix


def test_the_directory_of_a_checkpoint_leads_to_its_run(train_here: Train) -> None:
    run = train_here()
    error = refusal(run.directory / "checkpoints" / "step-00000002")
    assert f"{run.directory} --step 2" in error.problems[0].fix


def test_an_adapter_finds_the_model_beneath_it(train_here: Train, model_dir: Path) -> None:
    run = train_here()
    found = find_target(str(run.directory / "adapter"))
    assert (found.source, found.base, found.plan) == ("adapter", model_dir.resolve(), None)


def test_an_adapter_without_its_model_is_refused_naming_the_line_to_change(
    train_here: Train, model_dir: Path
) -> None:
    run = train_here()
    model_dir.rename(model_dir.with_name("moved"))
    error = refusal(run.directory / "adapter")
    assert isinstance(error, ModelError)
    assert "base_model_name_or_path" in error.problems[0].where


def test_an_adapter_whose_weights_are_missing_is_refused(train_here: Train) -> None:
    run = train_here()
    (run.directory / "adapter" / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(run.directory / "adapter").problems[0].why


def test_a_damaged_plan_is_refused(train_here: Train) -> None:
    run = train_here()
    (run.directory / "plan.json").write_text(json.dumps({"schema": 1}))
    assert refusal(run.directory).exit_code == 2


def test_what_is_not_there_or_is_no_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "empty").mkdir()
    for asked in (tmp_path / "nothing", tmp_path / "empty", "", "builtin:nothing"):
        assert refusal(asked).exit_code == 2
    with pytest.raises(UsageError, match="no run"):
        find_target(str(model_dir), step=1)
