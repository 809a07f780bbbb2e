"""What a run has written is loaded again and gives the logits of the trained model, or the run has
failed.

Run: pytest tests/trainer/training/test_read_back.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests import needs
from unisono.base.errors import IntegrityError
from unisono.base.events import Reporter
from unisono.guard.rundir import MODEL_MANIFEST
from unisono.guard.rundir.records import Progress
from unisono.guard.supervise.interrupts import Interrupts
from unisono.jobs.runs.read_back import read_back_result
from unisono.jobs.runs.run_records import Ending
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.checkpoint.verify import write_model_manifest
from unisono.trainer.model.result_logits import ResultLogits
from unisono.trainer.plan.task_requests import (
    ExportRequest,
    ReadBackRequest,
    RequestedModel,
)
from unisono.trainer.task import export, read_back
from unisono.trainer.training.weights import entries_of

Train = Callable[..., Any]
SILENT = Reporter(None)
EXPERTS: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip


def read(run: Any) -> dict[str, Any]:
    """As the task does after the ranks have ended."""
    (run.directory / "plan.json").write_text(json.dumps(run.plan.to_json()))
    return dict(read_back.run(ReadBackRequest(run.directory), SILENT))


def change(run: Any, *, listed: bool) -> Path:
    """Changes a tensor of the result; with `listed` the list of digests agrees with it, as if it
    had been written so.
    """
    file = Path(next(run.directory.glob("[am][do]*/*.safetensors")))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(("lora_B.weight", "v_proj.weight")))
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    if listed:
        (file.parent / MODEL_MANIFEST).unlink()
        write_model_manifest(file.parent, entries_of(file.parent))
    return file


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"adapter": {"kind": "dora"}},
        {"adapter": {"modules_to_save": ["embed_tokens", "lm_head"]}},
        {"adapter": {"init": "pissa"}},
        {"model": {"rope": {"kind": "yarn", "factor": 2}}},
        {"adapter": None},
        {"adapter": None, "objective": "pretrain"},
    ],
    ids=["lora", "dora", "modules_to_save", "pissa", "rope", "model", "pretrained model"],
)
def test_the_logits_of_a_result_are_those_of_the_trained_model(
    train_here: Train, sections: dict[str, Any]
) -> None:
    found = read(train_here(optim={"lr": 3e-2}, duration="3 steps", **sections))
    assert found["compared"] == "logits"
    assert found["differs_by"] < 2e-6
    assert found["tolerance"] == 1e-5


@pytest.mark.parametrize("adapter", [{"rank": 4}, None], ids=["adapter", "model"])
def test_16_bits_are_compared_within_their_rounding(
    train_here: Train, adapter: dict[str, Any] | None
) -> None:
    found = read(
        train_here(adapter=adapter, model={"dtype": "bfloat16"}, optim={"lr": 3e-2}, duration="3 steps")
    )
    assert found["differs_by"] < found["tolerance"] == 2e-2


def test_a_model_trained_in_32_bits_and_stored_in_16_is_that_of_its_files(
    train_here: Train, model_dir: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_dir).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "tokenizer": str(model_dir), "dtype": "float32"}
    found = read(train_here(adapter=None, model=model, duration="2 steps"))
    assert found["differs_by"] < 2e-6


def test_the_values_of_a_reward_model_are_compared(train_here: Train, pair_files: tuple[Path, Path]) -> None:
    data = {"train": str(pair_files[0])}
    for adapter in ({"rank": 4}, None):
        run = train_here(objective="reward", data=data, adapter=adapter, duration="2 steps")
        assert read(run)["differs_by"] < 2e-6
        change(run, listed=True)
        with pytest.raises(IntegrityError):
            read(run)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("adapter", [{"rank": 2}, None], ids=["adapter", "model"])
def test_experts_are_compared(
    train_here: Train, model_dir: Path, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **EXPERTS))
    base.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "tokenizer": str(model_dir)}
    found = read(train_here(adapter=adapter, model=model, duration="2 steps"))
    assert found["differs_by"] < 2e-6


def test_an_adapter_is_compared_on_its_quantized_base(train_here: Train) -> None:
    needs.package("bitsandbytes")
    found = read(train_here(model={"quantize": "nf4", "dtype": "float32"}, duration="2 steps"))
    assert found["compared"] == "logits"
    assert found["differs_by"] < 1e-5


@pytest.mark.parametrize("adapter", [{"rank": 4}, None], ids=["adapter", "model"])
def test_another_model_in_the_files_is_damage_of_that_file(
    train_here: Train, adapter: dict[str, Any] | None
) -> None:
    run = train_here(adapter=adapter, optim={"lr": 3e-2}, duration="2 steps")
    file = change(run, listed=True)
    with pytest.raises(IntegrityError, match="is not the model that was trained") as caught:
        read(run)
    assert (caught.value.exit_code, caught.value.problems[0].where) == (7, str(file))
    assert "rounding in float32 explains 1e-05" in caught.value.problems[0].why
    assert file.exists()


def test_a_file_that_differs_from_its_digest_is_named_before_it_is_loaded(train_here: Train) -> None:
    run = train_here(duration="1 steps")
    file = change(run, listed=False)
    with pytest.raises(IntegrityError) as caught:
        read(run)
    assert caught.value.problems[0].where == str(file)


def test_files_that_no_library_loads_are_damage(train_here: Train) -> None:
    run = train_here(duration="1 steps")
    settings = run.directory / "adapter" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"peft_type": "NOPE"}))
    (settings.parent / MODEL_MANIFEST).unlink()
    write_model_manifest(settings.parent, entries_of(settings.parent))
    with pytest.raises(IntegrityError, match="cannot be loaded again"):
        read(run)


def test_without_memory_for_the_model_digests_are_compared(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_here(duration="1 steps")
    monkeypatch.setattr(read_back, "_free", lambda _device: 1000)
    found = read(run)
    assert (found["compared"], found["differs_by"]) == ("digests", None)
    assert found["why"].endswith("and 1 kB are free")
    change(run, listed=False)
    with pytest.raises(IntegrityError):
        read(run)


def test_run_without_read_back_keeps_no_logits_and_removes_older_ones(train_here: Train) -> None:
    run = train_here(duration="1 steps")
    kept = run.directory / "result_logits.safetensors"
    assert kept.stat().st_mode & 0o777 == 0o600
    train_here(duration="1 steps", directory=run.directory, checkpoint={"read_back": False})
    assert not kept.exists()


def test_a_model_that_fails_on_the_rows_keeps_its_result(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such position")

    monkeypatch.setattr(ResultLogits, "of", fail)
    run = train_here(duration="1 steps")
    assert run.result["outcome"] == "completed"
    assert not (run.directory / "result_logits.safetensors").exists()
    assert read(run)["compared"] == "digests"


def ended(run: Any) -> Ending:
    """What the front makes of a run whose ranks have ended well, with a real task."""
    (run.directory / "plan.json").write_text(json.dumps(run.plan.to_json()))
    request = TrainRequest(run.directory / "config.yaml")
    ending = Ending(0, Progress(1, weights=run.result["weights"]))
    with Interrupts() as interrupts:
        return read_back_result(
            run.plan, ending, request=request, leftovers={}, interrupts=interrupts, show=lambda _: None
        )


def test_the_run_ends_as_corrupt_and_everything_stays(train_here: Train) -> None:
    run = train_here(duration="1 steps")
    ending = ended(run)
    assert (ending.exit_code, ending.outcome) == (0, "completed")
    read_back = ending.progress.read_back
    assert read_back is not None
    assert read_back.compared == "logits"
    assert read_back.differs_by is not None
    assert read_back.tolerance is not None
    assert 0 <= read_back.differs_by <= read_back.tolerance
    file = change(run, listed=True)
    before = sorted(run.directory.rglob("*"))
    ending = ended(run)
    assert (ending.exit_code, ending.outcome) == (7, "corrupt")
    assert ending.error is not None
    assert str(file) in str(ending.error)
    assert ending.progress.weights == str(file.parent)
    assert sorted(run.directory.rglob("*")) == before


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_is_read_back_and_stays_where_it_differs(
    train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, merge: bool
) -> None:
    run = train_here(optim={"lr": 3e-2}, duration="3 steps", checkpoint={"every": "2 steps"})
    read(run)
    (run.directory / "result.json").write_text(json.dumps({"schema": 1, "outcome": "completed"}))
    request = ExportRequest(model=RequestedModel(str(run.directory)), out="", merge=merge)
    for name, step in (("result", None), ("checkpoint", 2)):
        model = RequestedModel(str(run.directory), step)
        found = export.run(replace(request, model=model, out=str(tmp_path / name)), SILENT)["read_back"]
        assert found is not None
        assert found["compared"] == "logits"
        assert found["differs_by"] is not None
        assert found["differs_by"] < 2e-6
    skipped = replace(request, out=str(tmp_path / "skipped"), read_back=False)
    assert export.run(skipped, SILENT)["read_back"] is None

    def write(directory: Path, known: Any) -> None:
        file = next(directory.glob("*.safetensors"))
        tensors = {name: tensor * 1.5 for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        write_model_manifest(directory, entries_of(directory))
        del known

    monkeypatch.setattr(export, "write_model_manifest", write)  # a defect of ours in what is written
    out = tmp_path / "other"
    with pytest.raises(IntegrityError, match="is not the model that was trained"):
        export.run(ExportRequest(model=RequestedModel(str(run.directory)), out=str(out), merge=merge), SILENT)
    assert next(out.glob("*.safetensors")).exists()
