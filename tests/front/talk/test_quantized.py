"""Results of runs on a quantized base: evaluated, merged.

Run: pytest tests/front/talk/test_quantized.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests import needs
from unisono.trainer.model.quantization import is_quantized
from unisono.trainer.plan.task_requests import EvaluateRequest, ExportRequest, RequestedModel
from unisono.trainer.task import evaluate, export
from unisono.trainer.task.inference import open_for_inference

needs.package("bitsandbytes")
Train = Callable[..., Any]
IDS = torch.tensor([[5, 9, 11, 40, 7, 30]])


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def _on_quantized_base(run: Any) -> torch.Tensor:
    """The logits of the adapter on a base that transformers and bitsandbytes quantize
    themselves.
    """
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        run.plan.model.directory, quantization_config=settings, device_map={"": "cpu"}
    )
    model = peft.PeftModel.from_pretrained(base, run.directory / "adapter")
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it computes in bfloat16, whatever the dtype
    return _logits(model)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("step", [None, 4], ids=["result", "checkpoint"])
def test_merged_model_is_dense_with_logits_of_quantized_base_plus_adapter(
    train_here: Train, model_dir: Path, tmp_path: Path, listening: Any, kind: str, step: int | None
) -> None:
    run = train_here(
        model={"path": str(model_dir), "dtype": "float32", "quantize": "nf4"},
        adapter={"kind": kind, "rank": 4, "alpha": 16},
    )
    model_ = RequestedModel(str(run.directory), step)
    request = ExportRequest(model=model_, out=str(tmp_path / "out"), merge=True)
    result = export.run(request, listening)
    assert (result["what"], result["dequantized"]) == ("merged model", True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(model.config, "quantization_config")
    wanted = _on_quantized_base(run)
    unquantized = peft.AutoPeftModelForCausalLM.from_pretrained(run.directory / "adapter")
    assert (_logits(model) - wanted).abs().max() < 1e-4 * wanted.std()
    assert (_logits(unquantized) - wanted).abs().max() > 1e-2 * wanted.std(), "the base is the quantized one"


def test_eval_generate_and_export_use_the_quantized_base_and_embeddings(
    train_here: Train, model_dir: Path, rows_file: Path, tmp_path: Path, listening: Any
) -> None:
    run = train_here(
        model={"path": str(model_dir), "dtype": "float32", "quantize": "int8", "quantize_embeddings": True},
        data={"train": str(rows_file), "eval": str(rows_file), "max_length": 64},
        eval={"every": None, "exact_match": True},
    )
    model = RequestedModel(str(run.directory))
    body = EvaluateRequest(model=model, data=str(rows_file), cache_dir=tmp_path / "cache")
    figures = evaluate.run(body, listening)["figures"]
    assert figures["loss"] == pytest.approx(run.result["eval"]["loss"], rel=1e-5)
    assert figures["exact_match"] == run.result["eval"]["exact_match"]
    opened = open_for_inference(str(run.directory), report=listening)
    base = opened.forward.loaded.base
    assert is_quantized(base)
    assert opened.forward.quick
    assert opened.forward.head == "chunked"
    assert base.get_input_embeddings().weight.dtype == torch.int8
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    export.run(ExportRequest(model=model, out=str(tmp_path / "out"), merge=True), listening)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    after = evaluate.run(replace(body, model=RequestedModel(str(tmp_path / "out"))), listening)["figures"]
    assert after["loss"] == pytest.approx(figures["loss"], rel=1e-5)


def test_already_quantized_files_are_evaluated_continued_and_merged(
    train_here: Train, model_dir: Path, rows_file: Path, tmp_path: Path, listening: Any
) -> None:
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, quantization_config=settings, device_map={"": "cpu"}
    )
    stored, out = tmp_path / "stored", tmp_path / "out"
    model.save_pretrained(stored)
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(stored)
    body = EvaluateRequest(
        model=RequestedModel(str(stored)), data=str(rows_file), cache_dir=tmp_path / "cache"
    )
    before: dict[str, Any] = evaluate.run(body, listening)["figures"]
    run = train_here(model={"path": str(stored), "dtype": "float32"})
    after: dict[str, Any] = evaluate.run(replace(body, model=RequestedModel(str(run.directory))), listening)[
        "figures"
    ]
    assert after["loss"] < before["loss"]
    export.run(ExportRequest(model=RequestedModel(str(run.directory)), out=str(out), merge=True), listening)
    assert not hasattr(transformers.AutoConfig.from_pretrained(out), "quantization_config")
    merged = evaluate.run(replace(body, model=RequestedModel(str(out))), listening)["figures"]
    assert merged["loss"] == pytest.approx(after["loss"], rel=1e-4)
