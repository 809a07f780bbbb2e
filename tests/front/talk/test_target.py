"""What RUN|MODEL names is found, or refused with a remedy. Run: pytest tests/front/talk/test_target.py"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from unisono.base.errors import IntegrityError, ModelError, UnisonoError, UsageError
from unisono.guard.rundir import MODEL_MANIFEST
from unisono.trainer.task.target import find_target, verify_target

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


def test_unfinished_run_gives_its_newest_intact_checkpoint_and_reports_it(train_here: Train) -> None:
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


def test_a_damaged_checkpoint_that_is_requested_is_refused(train_here: Train) -> None:
    run = train_here()
    damage(run.directory / "checkpoints" / "step-00000002")
    with pytest.raises(IntegrityError, match="step-00000002"):
        find_target(str(run.directory), step=2)


def test_a_run_without_weights_is_refused_with_the_command_that_continues(train_here: Train) -> None:
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
    adapter = train_here().directory / "adapter"
    (adapter / "adapter_model.safetensors").unlink()
    error = refusal(adapter)
    assert error.exit_code == 7
    assert error.problems[0].what == "adapter/adapter_model.safetensors: it is missing"
    (adapter / MODEL_MANIFEST).unlink()
    error = refusal(adapter)
    assert error.exit_code == 2
    assert "adapter_model.safetensors" in error.problems[0].why


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("change", [flip, cut, Path.unlink], ids=["flipped", "cut", "missing"])
@pytest.mark.parametrize("adapter", [{"rank": 4}, None], ids=["adapter", "model"])
def test_altered_file_of_a_result_is_refused_naming_file_and_tensor(
    train_here: Train, listening: Any, change: Callable[[Path], None], adapter: Any
) -> None:
    """Weights, config, tokenizer and template: by the run's name and by the directory's.

    What people edit is only told of.
    """
    run = train_here(adapter=adapter)
    final = run.directory / ("adapter" if adapter else "model")
    whole = run.directory.with_name("whole")
    shutil.copytree(final, whole)
    names = sorted(path.name for path in final.iterdir())
    assert MODEL_MANIFEST in names
    for name in names:
        change(final / name)
        for asked in (run.directory, final):
            heard = type(listening)()
            if name in ("README.md", "generation_config.json"):
                verify_target(find_target(str(asked)), heard)
                reported = [m["text"] for m in heard.of_kind("warning")]
                assert reported == (
                    []
                    if change is Path.unlink
                    else [f"{final / name}: it was edited after it was written; the edited file is used"]
                )
                continue
            if (name, change) == (MODEL_MANIFEST, Path.unlink):
                continue
            with pytest.raises(IntegrityError) as caught:
                verify_target(find_target(str(asked)), heard)
            problem = caught.value.problems[0]
            assert problem.what.startswith(f"{final.name}/{name}: it"), problem.what
            assert problem.where == str(final / name)
            assert f"delete {final / MODEL_MANIFEST}" in problem.fix
            if name.endswith(".safetensors") and change is not Path.unlink:
                last = list(load_file(whole / name))[-1]
                assert last.split(".")[-2] in problem.what
        shutil.rmtree(final)
        shutil.copytree(whole, final)
    verify_target(find_target(str(run.directory)), listening)
    assert listening.of_kind("warning") == []


def test_run_without_its_list_of_files_opens_with_a_warning(train_here: Train, listening: Any) -> None:
    """So does a deliberate change whose list was deleted, and an old run."""
    run = train_here()
    flip(run.directory / "adapter" / "adapter_model.safetensors")
    (run.directory / "adapter" / MODEL_MANIFEST).unlink()
    verify_target(find_target(str(run.directory)), listening)
    (warning,) = listening.of_kind("warning")
    assert "is not verified" in warning["text"]
    verify_target(find_target(str(run.directory / "adapter")), listening)  # also anybody's adapter opens
    assert len(listening.of_kind("warning")) == 1


def test_only_the_base_model_path_in_settings_of_an_adapter_may_be_edited(
    train_here: Train, model_dir: Path, listening: Any
) -> None:
    adapter = train_here().directory / "adapter"
    file = adapter / "adapter_config.json"
    model_dir.rename(model_dir.with_name("moved"))
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": str(model_dir.with_name("moved"))}
    file.write_text(json.dumps(settings))
    verify_target(find_target(str(adapter)), listening)
    assert "base_model_name_or_path was edited" in listening.of_kind("warning")[0]["text"]
    file.write_text(json.dumps(settings | {"lora_alpha": 9}))
    with pytest.raises(IntegrityError, match="adapter_config"):
        verify_target(find_target(str(adapter)), listening)


def test_the_model_beneath_is_verified_where_it_has_a_list(train_here: Train, listening: Any) -> None:
    base = train_here(adapter=None).directory / "model"
    run = train_here(model={"path": str(base), "dtype": "float32"})
    verify_target(find_target(str(run.directory)), listening)
    flip(base / "model.safetensors")
    with pytest.raises(IntegrityError, match="model/model"):
        verify_target(find_target(str(run.directory)), listening)
    with pytest.raises(IntegrityError, match="model/model"):
        train_here(model={"path": str(base), "dtype": "float32"})
    cut(base / "model.safetensors")
    with pytest.raises(IntegrityError, match="model/model"):
        train_here(model={"path": str(base), "dtype": "float32"})


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"world_size": "many"}, "world_size is 'many' and should be a whole number"),
        ({"model": []}, "model is [] and should be an object"),
        ({"config": {}}, "config.model is missing"),
        ({"ranks": 5}, "ranks is 5 and should be a list"),
        ({"strategy": "magic"}, "strategy is 'magic' and should be 'single'"),
        ({"odd_key": 1}, "odd_key is unknown to this version of unisono"),
    ],
)
def test_a_plan_with_wrong_values_is_refused_in_our_words(
    train_here: Train, change: dict[str, Any], printed: str
) -> None:
    run = train_here()
    plan = json.loads((run.directory / "plan.json").read_text())
    (run.directory / "plan.json").write_text(json.dumps(plan | change))
    error = refusal(run.directory)
    assert error.exit_code == 2
    assert printed in error.problems[0].why
    assert "pydantic" not in str(error.lines())


@pytest.mark.parametrize(
    ("data", "printed"),
    [
        (b"", "it is not JSON: line 1, column 1"),
        (b"{} x", "it is not JSON: line 1, column 4"),
        (b"\xff", "it is not UTF-8 text"),
        (b"[]", "it is [] and should be an object"),
    ],
)
def test_a_damaged_plan_is_refused(train_here: Train, data: bytes, printed: str) -> None:
    run = train_here()
    (run.directory / "plan.json").write_bytes(data)
    error = refusal(run.directory)
    assert error.exit_code == 2
    assert printed in error.problems[0].why


def test_what_is_not_there_or_is_not_a_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "empty").mkdir()
    for asked in (tmp_path / "nothing", tmp_path / "empty", "", "builtin:nothing"):
        assert refusal(asked).exit_code == 2
    with pytest.raises(UsageError, match="is not a run"):
        find_target(str(model_dir), step=1)


def test_a_misspelled_run_is_refused_before_the_hub_is_asked(
    train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_here()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my-run").symlink_to(run.directory)
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def locate(name: str) -> Path:
        asked.append(name)
        return tmp_path

    monkeypatch.setattr("unisono.trainer.task.target.locate_model", locate)
    error = refusal(Path("runs/my-rum"))
    assert error.problems[0].what == "there is no directory runs/my-rum"
    assert "did you mean runs/my-run?" in error.problems[0].fix
    error = refusal(Path("runs/other"))
    assert "`unisono runs runs`" in error.problems[0].fix
    monkeypatch.chdir(tmp_path / "runs")
    assert "runs does not exist" in refusal(Path("runs/my-run")).problems[0].why
    assert asked == []
    find_target("Qwen/my-run")
    assert asked == ["Qwen/my-run"], "an owner that is no directory of runs"
