"""The estimate of memory against models on the meta device, and the page made of it. Run: pytest tests/plan/test_memory.py"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

import memory_page
from tests import needs
from unisono.config import RunConfig
from unisono.events import Reporter
from unisono.plan import DataSummary, DeviceChoice, ModelFacts, PlanInputs, RankPlace, RunPlan, resolve_plan
from unisono.task import data_tasks


class _Without(Reporter):
    def __init__(self) -> None:
        super().__init__(None)

    def send(self, kind: str, **fields: Any) -> None:
        del kind, fields


def _on_meta(shape: str) -> Any:
    """The model with quantized layers, without data."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**memory_page.SHAPES[shape]))
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    return replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=settings)


@pytest.mark.parametrize("shape", ["8 B", "70 B"])
def test_weights_and_adapter_of_an_estimate_are_those_of_the_model(shape: str) -> None:
    bitsandbytes = needs.package("bitsandbytes")
    model = _on_meta(shape)
    matrices = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    packed = sum(layer.in_features * layer.out_features for layer in matrices)
    rest = sum(p.numel() for p in model.parameters()) - packed
    blocks = packed / 64
    wanted = packed / 2 + blocks + 4 * blocks / 256 + 2 * rest
    found = memory_page.estimate(shape, "QLoRA", devices=1)
    assert found.weights == pytest.approx(wanted, rel=1e-3)
    assert memory_page.estimate(shape, "LoRA", devices=1).weights == 2 * (packed + rest)
    adapter = sum(memory_page.RANK * (layer.in_features + layer.out_features) for layer in matrices)
    assert found.trainable == 16 * adapter


def test_a_model_with_heads_of_a_size_of_its_own_is_counted_exactly() -> None:
    shape = memory_page.SHAPES["0.6 B"]
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    norms_of_heads = 2 * 128 * 28  # too few to matter, and not in the estimate
    assert memory_page.facts("0.6 B", "LoRA").parameters == model.num_parameters() - norms_of_heads


def _planned(folder: Path, model_dir: Path, rows_file: Path, shape: str, quantize: str | None) -> RunPlan:
    """The plan of a dry run on eight devices."""
    model = folder / "model"
    model.mkdir()
    for file in model_dir.glob("token*"):
        shutil.copyfile(file, model / file.name)
    shutil.copyfile(model_dir / "chat_template.jinja", model / "chat_template.jinja")
    (model / "config.json").write_text(
        json.dumps({**memory_page.SHAPES[shape], "model_type": "llama", "max_position_embeddings": 8192})
    )
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "weights": "random", "quantize": quantize, "dtype": "bfloat16"},
            "adapter": {"rank": memory_page.RANK},
            "data": {"train": str(rows_file), "max_length": memory_page.TOKENS},
            "batch": {"global": 8, "micro": 1},
            "memory": {"gradient_checkpointing": True},
            "parallel": {"strategy": "fsdp"},
            "output_dir": str(folder / "out"),
        }
    )
    body = {"config": config.model_dump(mode="json", by_alias=True), "cache_dir": str(folder / "cache"), "output_dir": None}  # fmt: skip
    prepared = data_tasks.prepare(body, _Without())
    device = DeviceChoice(kind="cuda", name="gpu", memory_bytes=80 * 10**9, bfloat16=True)
    data = DataSummary.model_validate(prepared["data"])
    split = data.train.model_copy(
        update={"longest_sequence": memory_page.TOKENS, "longest_row": memory_page.TOKENS}
    )
    ranks = [
        RankPlace(rank=rank, node_rank=0, local_rank=rank, host="here", device=device) for rank in range(8)
    ]
    return resolve_plan(
        PlanInputs(
            config=config, run_id="test", output_dir="out", host="here", threads=1, threads_origin="", device=device, ranks=ranks,
            model=ModelFacts.model_validate(prepared["model"]), data=data.model_copy(update={"train": split}), resume=None,
            resume_reason="",
        )
    )  # fmt: skip


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("shape", ["8 B", "70 B"])
def test_a_dry_run_of_random_weights_has_the_figures_of_the_page(
    tmp_path: Path, model_dir: Path, rows_file: Path, shape: str, quantize: str | None
) -> None:
    if quantize:
        needs.package("bitsandbytes")
    plan = _planned(tmp_path, model_dir, rows_file, shape, quantize)
    assert plan.memory == memory_page.estimate(shape, "QLoRA" if quantize else "LoRA", devices=8)
