"""Models in quantized files, and results of runs on them: evaluated, answering, merged.

Run: pytest tests/front/talk/test_gptq_and_awq.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.grouped_files import write_grouped
from tests.stored_files import write_stored
from unisono.trainer.model.quantization import is_quantized
from unisono.trainer.plan.task_requests import EvaluateRequest, ExportRequest, RequestedModel
from unisono.trainer.task import evaluate, export
from unisono.trainer.task.inference import open_for_inference

IDS = torch.tensor([[5, 9, 11, 40, 7, 30]])


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


_WRITERS: dict[str, Callable[[Path, Path], dict[str, torch.Tensor]]] = {
    "gptq": partial(write_grouped, layout="gptq"),
    "awq": partial(write_grouped, layout="gemm"),
    "fp8": partial(write_stored, layout="fp8", block=(16, 16)),
    "int4": partial(write_stored, layout="pack-quantized", block=(1, 16), bits=4, symmetric=False),
}


@pytest.mark.parametrize(
    ("files", "kind"), [("gptq", "lora"), ("awq", "dora"), ("fp8", "lora"), ("int4", "dora")]
)
def test_a_run_on_such_files_is_evaluated_answers_and_is_merged(
    train_here: Callable[..., Any], model_dir: Path, rows_file: Path, tmp_path: Path, listening: Any, files: str, kind: str
) -> None:  # fmt: skip
    stored, out = tmp_path / "stored", tmp_path / "out"
    values = _WRITERS[files](model_dir, stored)
    body = EvaluateRequest(
        model=RequestedModel(str(stored)), data=str(rows_file), cache_dir=tmp_path / "cache"
    )
    before: dict[str, Any] = evaluate.run(body, listening)["figures"]
    run = train_here(
        model={"path": str(stored), "dtype": "float32"}, adapter={"kind": kind, "rank": 4, "alpha": 16}
    )
    after: dict[str, Any] = evaluate.run(replace(body, model=RequestedModel(str(run.directory))), listening)[
        "figures"
    ]
    assert after["loss"] < before["loss"]
    opened = open_for_inference(str(run.directory), report=listening)
    assert is_quantized(opened.forward.loaded.base)
    assert opened.forward.quick is (kind == "lora")
    result = export.run(
        ExportRequest(model=RequestedModel(str(run.directory)), out=str(out), merge=True), listening
    )
    assert (result["what"], result["dequantized"], result["dtype"]) == ("merged model", True, "float32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert not hasattr(merged.config, "quantization_config")
    dense = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    dense.load_state_dict(values, strict=False)
    wanted = _logits(peft.PeftModel.from_pretrained(dense, run.directory / "adapter"))
    assert (_logits(merged) - wanted).abs().max() < 1e-4 * wanted.std()
    again = evaluate.run(replace(body, model=RequestedModel(str(out))), listening)["figures"]
    assert again["loss"] == pytest.approx(after["loss"], rel=1e-4)
