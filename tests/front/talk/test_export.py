"""What is exported loads in plain transformers and peft, and says what the run says.

Run: pytest tests/front/talk/test_export.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unisono.base.errors import IntegrityError, ModelError, UnisonoError
from unisono.guard.rundir import MODEL_MANIFEST
from unisono.trainer.checkpoint.verify import check_model, read_model_manifest
from unisono.trainer.data import template
from unisono.trainer.plan.task_requests import Exported, ExportRequest, RequestedModel
from unisono.trainer.task import export

Train = Callable[..., Any]
IDS = torch.tensor([[5, 9, 11, 40, 7, 30]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def exported(target: object, out: Path, listening: Any, *, step: int | None = None, **more: Any) -> Exported:
    return export.run(ExportRequest(model=RequestedModel(str(target), step), out=str(out), **more), listening)


def with_adapter(run: Any) -> torch.Tensor:
    return logits(peft.AutoPeftModelForCausalLM.from_pretrained(run.directory / "adapter"))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("step", [None, 4], ids=["result", "checkpoint"])
def test_a_merged_model_gives_the_logits_of_base_plus_adapter(
    train_here: Train, tmp_path: Path, listening: Any, kind: str, step: int | None
) -> None:
    run = train_here(adapter={"kind": kind, "rank": 4, "alpha": 16})
    result = exported(run.directory, tmp_path / "out", listening, merge=True, step=step)
    assert result["what"] == "merged model"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    base = logits(transformers.AutoModelForCausalLM.from_pretrained(run.plan.model.directory))
    wanted = with_adapter(run)
    # float32: one rounding of each weight. The adapter itself must show far above that.
    assert (logits(model) - wanted).abs().max() < 1e-4 * wanted.std()
    assert (base - wanted).abs().max() > 1e-2 * wanted.std()


def test_tied_weights_stay_tied_and_are_written_once(
    train_here: Train, tmp_path: Path, listening: Any
) -> None:
    run = train_here()
    exported(run.directory, tmp_path / "out", listening, merge=True)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_merged_model_has_the_dtype_of_its_base(
    train_here: Train, make_model: Callable[..., Any], model_dir: Path, tmp_path: Path, listening: Any
) -> None:
    make_model().to(torch.bfloat16).save_pretrained(model_dir)
    run = train_here()
    result = exported(run.directory, tmp_path / "out", listening, merge=True)
    assert result["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))
    wanted = with_adapter(run)
    assert (
        merged - wanted
    ).square().mean().sqrt() < 0.06 * wanted.std()  # weights of 8 bits, over all layers


@pytest.mark.parametrize("step", [None, 4], ids=["result", "checkpoint"])
def test_an_exported_adapter_loads_in_plain_peft(
    train_here: Train, tmp_path: Path, listening: Any, step: int | None
) -> None:
    run = train_here()
    result = exported(run.directory, tmp_path / "out", listening, step=step)
    assert result["what"] == "adapter"
    assert torch.equal(
        logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")), with_adapter(run)
    )


@pytest.mark.parametrize("step", [None, 4], ids=["result", "checkpoint"])
def test_a_fully_trained_run_exports_its_model(
    train_here: Train, tmp_path: Path, listening: Any, step: int | None
) -> None:
    run = train_here(adapter=None)
    result = exported(run.directory, tmp_path / "out", listening, step=step, merge=True)
    assert result["what"] == "model"
    assert any(message["code"] == "nothing_to_merge" for message in listening.of_kind("warning"))
    wanted = logits(transformers.AutoModelForCausalLM.from_pretrained(run.directory / "model"))
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), wanted)


@pytest.mark.parametrize("adapter", [{"rank": 4}, None], ids=["adapter", "model"])
def test_export_of_an_older_step_equals_the_result_of_a_run_ending_there(
    train_here: Train, tmp_path: Path, listening: Any, adapter: dict[str, Any] | None
) -> None:
    same = {"adapter": adapter, "optim": {"lr": 2e-2, "schedule": "constant", "warmup": "0%"}}
    short, long = (train_here(duration=f"{steps} steps", **same) for steps in (2, 4))
    exported(long.directory, tmp_path / "out", listening, step=2)
    (older,) = (load_file(file) for file in (tmp_path / "out").glob("*.safetensors"))
    ended, last = (
        load_file(file) for run in (short, long) for file in run.directory.glob("[am]*/*model.safetensors")
    )
    assert older.keys() == ended.keys()
    assert all(torch.equal(older[name], ended[name]) for name in ended)
    assert not all(torch.equal(older[name], last[name]) for name in last)


@pytest.mark.parametrize("what", ["adapter", "merged", "model", "checkpoint"])
def test_export_lists_its_files_and_is_verified_when_it_is_read(
    train_here: Train, tmp_path: Path, listening: Any, what: str
) -> None:
    run = train_here(adapter=None if what == "model" else {"rank": 4})
    out = tmp_path / "out"
    exported(run.directory, out, listening, merge=what == "merged", step=2 if what == "checkpoint" else None)
    checked = check_model(out)
    assert (checked.listed, checked.findings) == (True, [])
    listing = read_model_manifest(out)
    assert listing is not None
    assert set(listing.files) == {file.name for file in out.iterdir()} - {MODEL_MANIFEST}
    (weights,) = out.glob("*.safetensors")
    assert listing.files[weights.name].tensors.keys() == load_file(weights).keys()
    again = tmp_path / "again"
    exported(out, again, listening)  # of what was exported
    assert check_model(again).intact
    weights.write_bytes(weights.read_bytes()[:-500])
    with pytest.raises(IntegrityError, match="truncated"):
        exported(out, tmp_path / "third", listening)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("merge", [True, False])
def test_template_and_stop_tokens_of_the_run_come_with_it(
    train_here: Train, model_dir: Path, rows_file: Path, tmp_path: Path, listening: Any, *, merge: bool
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|system|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    run = train_here(data={"train": str(rows_file), "max_length": 64, "template": str(template)})
    exported(run.directory, tmp_path / "out", listening, merge=merge)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template.read_text()
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == sorted(tokenizer.convert_tokens_to_ids(["<|end|>", "<|system|>"]))
    assert settings.pad_token_id == tokenizer.pad_token_id


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    "adapter",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"targets": ["q_proj", "lm_head"]},
    ],
    ids=["both", "head", "embedding", "LoRA on the head"],
)
def test_a_head_that_was_trained_apart_from_its_embedding_is_written_apart(
    train_here: Train, tmp_path: Path, listening: Any, adapter: dict[str, Any]
) -> None:
    run = train_here(adapter={"rank": 2, **adapter}, optim={"lr": 3e-2})
    assert any("embedding and head share one matrix" in warning for warning in run.plan.warnings)
    exported(run.directory, tmp_path / "out", listening, merge=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    wanted = with_adapter(run)
    merged = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (merged - wanted).abs().max() < 1e-4 * wanted.std()


def test_a_plan_has_no_word_of_a_head_that_stays_with_its_embedding(train_here: Train) -> None:
    assert not any("share one matrix" in warning for warning in train_here(duration="1 steps").plan.warnings)


MOE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ROUTED: dict[str, Any] = MOE | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": ROUTED | {"num_experts": 4, "head_dim": 8},
    "mixtral": MOE | {"num_local_experts": 4, "bos_token_id": None},
    "olmoe": MOE | {"num_experts": 4, "num_experts_per_tok": 2},
    "dots1": ROUTED | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 8},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of its own
@pytest.mark.parametrize("kind", EXPERTS)
def test_an_adapter_on_experts_is_merged_into_each_of_them(
    train_here: Train, model_dir: Path, tmp_path: Path, listening: Any, kind: str
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **EXPERTS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    run = train_here(optim={"lr": 3e-2}, duration="2 steps")
    adapter = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    assert any(".experts." in name for name in adapter)
    result = exported(run.directory, tmp_path / "out", listening, merge=True)
    assert result["logits_differ_by"] < 1e-5
    wanted, base = with_adapter(run), load_file(model_dir / "model.safetensors")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (logits(merged) - wanted).abs().max() < 1e-4 * wanted.std()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == base.keys()
    experts = [name for name in base if ".experts." in name]
    assert experts
    assert not any(torch.equal(written[name], base[name]) for name in experts)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of its own
@pytest.mark.parametrize("settings", [{"init": "pissa"}, {"merge": True}], ids=["pissa", "merge"])
def test_settings_unfit_for_experts_are_refused_with_targets_that_work(
    train_here: Train, model_dir: Path, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **EXPERTS["qwen3_moe"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    targets = ["q_proj", "v_proj"]
    if "merge" in settings:
        first = train_here(adapter={"rank": 2, "targets": targets}, duration="1 steps")
        settings = {"merge": [str(first.directory)]}
    with pytest.raises(ModelError) as caught:
        train_here(adapter={"rank": 2, **settings}, duration="1 steps")
    (problem,) = caught.value.problems
    assert "experts" in problem.what
    assert "q_proj" in problem.fix
    train_here(adapter={"rank": 2, "targets": targets, **settings}, duration="1 steps")


def test_an_empty_directory_is_taken_and_a_full_one_refused(
    model_dir: Path, tmp_path: Path, listening: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    exported(model_dir, out, listening)
    assert (out / "model.safetensors").is_file()
    before = sorted(file.stat().st_mtime_ns for file in out.iterdir())
    for taken in (out, out / "config.json"):
        with pytest.raises(UnisonoError, match="already exists") as found:
            exported(model_dir, taken, listening)
        assert found.value.exit_code == 2
    assert sorted(file.stat().st_mtime_ns for file in out.iterdir()) == before


def test_a_place_that_cannot_be_written_ends_with_exit_code_6(
    model_dir: Path, tmp_path: Path, listening: Any
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnisonoError) as found:
        exported(model_dir, tmp_path / "file" / "out", listening)
    assert found.value.exit_code == 6


def _settings(**changes: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        value = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))

    return change


def _weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        (adapter / name).write_bytes(data)

    return change


LORA_A = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (_write("adapter_config.json", b"{}"), "adapter_config.json has no peft_type"),
        (_write("adapter_config.json", b"hello"), "it is not JSON: line 1, column 1"),
        (_settings(peft_type="NOPE"), "peft says: "),
        (_settings(r=None), "has the shape (4, 32), but adapter_config.json and the base model require (8, 32)"),
        (_settings(r="many"), "peft says: "),
        (_settings(target_modules=["nothing"]), "peft says: "),
        (_settings(target_modules=r"(\w+\.?)+Z"), "the regular expressions in target_modules of adapter_config.json do not terminate"),
        (_settings(rank_pattern={r"(\w+\.?)+Z": 4}), "the regular expressions in rank_pattern of adapter_config.json do not terminate"),
        (_settings(r=10**9), "adapter_config.json has the rank 1,000,000,000, and adapter_model.safetensors matrices of rank 4"),
        (_write("adapter_model.safetensors", b""), "it is empty"),
        (_weights(lambda tensors: tensors.pop(LORA_A)), "1 tensors of the adapter are missing from its file: base_model.model.model.layers.0.mlp.down_proj.lora_A"),
        (_weights(lambda tensors: tensors[LORA_A].fill_(float("nan"))), f"{LORA_A} contains NaN"),
    ],
)  # fmt: skip
def test_an_adapter_of_others_that_is_broken_is_refused_by_key_and_tensor(
    train_here: Train,
    tmp_path: Path,
    listening: Any,
    change: Callable[[Path], None],
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "CPU_S", 1.0)
    adapter = train_here().directory / "adapter"
    (adapter / MODEL_MANIFEST).unlink()
    change(adapter)
    with pytest.raises(ModelError) as caught:
        exported(adapter, tmp_path / "out", listening, merge=True)
    assert printed in "\n".join(caught.value.lines())
    assert all(problem.where and problem.fix for problem in caught.value.problems)
