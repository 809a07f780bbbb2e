"""What a run leaves is loaded by plain transformers and peft.

Run: pytest tests/trainer/training/test_result.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from unisono.base.text import parse_bytes

Train = Callable[..., Any]


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_an_adapter_on_its_base_gives_the_loss_that_the_run_measured(
    train_here: Train, model_dir: Path, kind: str
) -> None:
    run = train_here(adapter={"kind": kind}, data={"eval": 0.2, "packing": False}, optim={"lr": 3e-2})
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, run.directory / "adapter").eval()
    assert _eval_loss(model, run) == pytest.approx(run.result["eval"]["loss"], rel=1e-5)


def test_a_whole_model_gives_the_loss_that_the_run_measured(train_here: Train) -> None:
    run = train_here(adapter=None, data={"eval": 0.2}, optim={"lr": 3e-3})
    model = AutoModelForCausalLM.from_pretrained(run.directory / "model").eval()
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert _eval_loss(model, run) == pytest.approx(run.result["eval"]["loss"], rel=1e-5)


def test_a_whole_model_is_stored_in_the_dtype_it_came_in_and_reports_it(train_here: Train) -> None:
    run = train_here(adapter=None, model={"weights": "random", "dtype": "bfloat16"})
    config = json.loads((run.directory / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(run.directory / "model")
    assert model.dtype == torch.bfloat16


def test_model_larger_than_the_file_limit_becomes_several_with_an_index(train_here: Train) -> None:
    whole = train_here(adapter=None)
    parts = train_here(adapter=None, checkpoint={"max_shard_size": "40 kB"})
    assert parse_bytes(whole.plan.config.checkpoint.max_shard_size) == 10**9
    assert [file.name for file in whole.directory.glob("model/*.safetensors*")] == ["model.safetensors"]
    index = json.loads((parts.directory / "model" / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in parts.directory.glob("model/*.safetensors")}
    assert len(files) > 2
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert all(
        sum(tensor.nbytes for tensor in tensors.values()) <= 40_000
        for tensors in files.values()
        if len(tensors) > 1
    )
    found, wanted = (
        AutoModelForCausalLM.from_pretrained(run.directory / "model").state_dict() for run in (parts, whole)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_result_talks_in_the_template_that_it_was_trained_with(train_here: Train, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    run = train_here(data={"template": str(template)})
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "adapter")
    assert tokenizer.chat_template == template.read_text()


def _eval_loss(model: Any, run: Any) -> float:
    from unisono.trainer.data.token_table import TokenTable

    table = TokenTable.open(Path(run.plan.data.cache_dir), "eval")
    total = count = 0.0
    for row in range(table.rows):
        ids, targets = (torch.from_numpy(array.copy()) for array in table.row(row))
        with torch.no_grad():
            logits = model(input_ids=ids[None].long()).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:].long(), reduction="none")
        total += float(losses[targets[1:]].sum())
        count += int(targets.sum())
    return total / count
