"""A vocabulary grows with an adapter, too: embedding and head are trained and saved.

Run: pytest tests/trainer/training/test_new_tokens.py
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.logits import logits_of_probe
from unisono.trainer.task.inference import load_target, merge_adapter
from unisono.trainer.task.target import find_target

Train = Callable[..., Any]
_NEW = ["<one>", "<two>", "<three>"]


@pytest.fixture
def tokenizer_dir(model_dir: Path, tmp_path: Path) -> Path:
    """The model's tokenizer with three tokens more."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(_NEW)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows whose answers have the new tokens."""
    file = tmp_path / "new.jsonl"
    lines = [{"prompt": f"say {i}", "completion": _NEW[i % 3] * 2} for i in range(24)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _untied(model_dir: Path, folder: Path) -> Path:
    """The model with a head of its own."""
    copy = Path(shutil.copytree(model_dir, folder / "untied"))
    config = LlamaConfig.from_pretrained(copy)
    config.tie_word_embeddings = False
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(copy)
    return copy


@pytest.mark.parametrize("tied", [True, False])
def test_the_result_has_the_new_rows_wherever_it_is_loaded(
    train_here: Train, model_dir: Path, tokenizer_dir: Path, rows: Path, tmp_path: Path, *, tied: bool
) -> None:
    place = model_dir if tied else _untied(model_dir, tmp_path)
    sections: dict[str, Any] = {
        "model": {"path": str(place), "tokenizer": str(tokenizer_dir), "resize_vocabulary": True},
        "data": {"train": str(rows), "packing": False}, "checkpoint": {"every": "3 steps"},
    }  # fmt: skip
    run = train_here(**sections)
    assert run.of_kind("ready")[0]["facts"]["head"] == "chunked"
    old = AutoModelForCausalLM.from_pretrained(place).get_input_embeddings().weight
    saved = load_file(run.directory / "adapter" / "adapter_model.safetensors")
    (embedding,) = [tensor for name, tensor in saved.items() if name.endswith("embed_tokens.weight")]
    assert embedding.shape == (len(old) + 3, 32)
    assert not torch.equal(embedding[: len(old)], old), "the known rows are trained, too"

    path = run.directory / "checkpoints" / "step-00000003"
    resumed = train_here(resume=(3, path), **sections)
    assert resumed.losses == run.losses[3:]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.weights().items())

    (run.directory / "plan.json").write_text(json.dumps(run.plan.model_dump(mode="json", by_alias=True)))
    (run.directory / "result.json").write_text(json.dumps({"outcome": "completed"}))
    of_run, at_step = (find_target(str(run.directory), step=step) for step in (None, 6))
    assert (of_run.source, at_step.source) == ("adapter", "checkpoint")
    loaded = [
        load_target(target, dtype="float32", device=torch.device("cpu")).model for target in (of_run, at_step)
    ]
    logits = [logits_of_probe(model) for model in loaded]
    assert torch.allclose(*logits, atol=1e-6)
    assert logits[0].shape[-1] == len(old) + 3

    merged = merge_adapter(loaded[-1], where="here")
    assert torch.allclose(logits_of_probe(merged), logits[0], atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(place)
    base.resize_token_embeddings(len(old) + 3)
    by_peft = PeftModel.from_pretrained(base, run.directory / "adapter")
    assert torch.allclose(logits_of_probe(by_peft.eval()), logits[0], atol=1e-6)


def test_the_new_tokens_are_learned(
    train_here: Train, model_dir: Path, tokenizer_dir: Path, rows: Path
) -> None:
    run = train_here(
        model={"path": str(model_dir), "tokenizer": str(tokenizer_dir), "resize_vocabulary": True},
        data={"train": str(rows), "packing": False},
        duration="30 steps",
        optim={"lr": 2e-2},
    )
    assert run.losses[-1] < run.losses[0] / 3


def test_without_new_tokens_the_adapter_is_a_plain_one(train_here: Train, model_dir: Path) -> None:
    grown = train_here(model={"path": str(model_dir), "resize_vocabulary": True})
    assert grown.losses == train_here().losses
    assert all("lora_" in name for name in grown.weights())
