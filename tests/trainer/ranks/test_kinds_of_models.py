"""Mixtures of experts, multimodal checkpoints and models in quantized files train on two ranks as on
one: replicated, and sharded with no layer kept whole, as in a large model.

Run: pytest tests/trainer/ranks/test_kinds_of_models.py
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from tests import needs
from tests.conftest import Listening
from tests.front.talk.multimodal_families import FAMILIES
from tests.front.talk.test_multimodal import PROCESSOR, assert_alike, assert_whole, logits, opened, tensors
from tests.stored_files import write_mxfp4, write_stored
from tests.trainer.architectures.tiny_models import write_tiny_model
from tests.trainer.ranks.conftest import Done, MadeOnDemand, Workshop
from unisono.base.errors import ConfigError
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel
from unisono.trainer.task import export

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

_COMMON: dict[str, Any] = {
    "duration": "3 steps", "batch": {"global": 6, "micro": 1}, "checkpoint": {"every": "2 steps", "keep": 9},
    "optim": {"lr": 1e-3, "warmup": "0 steps", "schedule": "constant"},
}  # fmt: skip
_RECOMPUTED: dict[str, Any] = {"memory": {"gradient_checkpointing": True}}
_SOME = {"targets": ["q_proj", "v_proj"]}
_NF4 = {"quantize": "nf4", "dtype": "float32"}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}),
    "experts_in_full": ("gpt_oss", {"adapter": None, **_RECOMPUTED}),
    "mxfp4": ("mxfp4", {}),
    "experts_nf4": ("qwen3_moe", {"model": _NF4}),
    "multimodal": ("gemma3", {"adapter": {"kind": "dora", "modules_to_save": ["norm"]}}),
    "multimodal_in_full": ("qwen3_5", {"adapter": None}),
    "multimodal_nf4": ("gemma3", {"model": _NF4}),
    "experts_recomputed": ("gpt_oss", _RECOMPUTED),
    "fp8": ("fp8", _RECOMPUTED),
    "int4": ("int4", {"adapter": _SOME}),
}
_LONG = ("experts_recomputed", "fp8", "int4")
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in _LONG)) for kind in _KINDS]
)
_STORED: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "mxfp4": ("gpt_oss", write_mxfp4),
    "fp8": ("qwen3_moe", partial(write_stored, layout="fp8", block=(16, 16))),
    "int4": (
        "qwen3_moe",
        partial(write_stored, layout="pack-quantized", block=(1, 16), bits=4, symmetric=False),
    ),
}


@dataclass
class _Runs:
    """The same run on one rank, on two in both ways, and sharded from the checkpoint of step 2 on."""

    alone: Done
    ddp: Done
    fsdp: Done
    resumed: Done


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models, each made when a test first asks for it."""
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> dict[str, Path]:
        directory = folder / name
        if name in _STORED:
            source, write = _STORED[name]
            write(made[source], directory)
        elif name in FAMILIES:
            _write_multimodal(name, model_dir, directory)
        else:
            write_tiny_model(name, directory)
        return {name: directory}

    made = MadeOnDemand(make)
    return made


def _write_multimodal(name: str, tokenizer: Path, directory: Path) -> None:
    shutil.copytree(tokenizer, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(FAMILIES[name][0]())
    model.save_pretrained(directory, max_shard_size="60KB")
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


@pytest.fixture(scope="module")
def shop(
    model_dir: Path, rows_file: Path, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Workshop:
    """Where runs are made."""
    shop = Workshop(model_dir, {"sft": rows_file}, tmp_path_factory.mktemp("ranks"))

    def make(kind: str) -> dict[str, dict[str, Any]]:
        model, sections = _KINDS[kind]
        path = {"path": str(models[model]), "dtype": "float32"}
        return {kind: _COMMON | sections | {"model": path | sections.get("model", {})}}

    shop.kinds = MadeOnDemand(make)
    return shop


@pytest.fixture(scope="module")
def runs(shop: Workshop) -> dict[str, _Runs]:
    """The runs of each kind; those of two ranks in one start."""

    def make(kind: str) -> dict[str, _Runs]:
        if kind.endswith("nf4"):
            needs.package("bitsandbytes")
        ddp, fsdp = (shop.plan(kind, world=2, strategy=way) for way in ("ddp", "fsdp"))
        checkpoint = Path(fsdp.output_dir) / "checkpoints" / "step-00000002"
        resumed = shop.plan(kind, world=2, strategy="fsdp", resume=checkpoint)
        done = shop.together([ddp, fsdp, resumed], "--kept-whole-bytes", "0")
        return {kind: _Runs(shop.alone(shop.plan(kind)), *done)}

    return MadeOnDemand(make)


def _tensors(run: Done) -> dict[str, torch.Tensor]:
    (directory,) = [*run.directory.glob("adapter"), *run.directory.glob("model")]
    return tensors(directory)


@each_kind
def test_two_ranks_have_the_losses_and_the_result_of_one(runs: dict[str, _Runs], kind: str) -> None:
    alone, wanted = runs[kind].alone, _tensors(runs[kind].alone)
    for run in (runs[kind].ddp, runs[kind].fsdp):
        assert run.losses == pytest.approx(alone.losses, abs=1e-5)
        result = _tensors(run)
        assert result.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert result[name].dtype == tensor.dtype
            assert torch.allclose(result[name].float(), tensor.float(), atol=1e-5), name
    assert len(set(alone.losses)) == 3, "it trains"


@each_kind
def test_sharded_ranks_continue_to_the_same_bits(runs: dict[str, _Runs], kind: str) -> None:
    straight, resumed = runs[kind].fsdp, runs[kind].resumed
    assert resumed.losses == straight.losses[2:]
    mine, wanted = _tensors(resumed), _tensors(straight)
    assert all(torch.equal(mine[name], tensor) for name, tensor in wanted.items())


def _merged(run: Done, out: Path) -> Path:
    request = ExportRequest(model=RequestedModel(str(run.directory / "adapter")), out=str(out), merge=True)
    export.run(request, Listening())
    return out


def test_experts_of_sharded_ranks_are_merged_as_peft_does(
    runs: dict[str, _Runs], models: dict[str, Path], tmp_path: Path
) -> None:
    run = runs["experts"].fsdp
    assert any(".experts." in name for name in run.weights())
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    before = logits(load(models["qwen3_moe"]).eval())
    wanted = logits(PeftModel.from_pretrained(load(models["qwen3_moe"]), run.directory / "adapter").eval())
    assert not torch.equal(wanted, before)
    assert_alike(logits(load(_merged(run, tmp_path / "merged")).eval()), wanted)


def test_experts_trained_by_sharded_ranks_load_in_transformers(runs: dict[str, _Runs]) -> None:
    directory = runs["experts_in_full"].fsdp.directory / "model"
    _, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_multimodal_checkpoint_of_ranks_is_whole(
    runs: dict[str, _Runs], models: dict[str, Path], tmp_path: Path, way: str
) -> None:
    """In full, and merged."""
    run: Done = getattr(runs["multimodal_in_full"], way)
    directory = run.directory / "model"
    assert_whole(directory, models["qwen3_5"], FAMILIES["qwen3_5"][1], text=logits(opened(directory)))

    run = getattr(runs["multimodal"], way)
    adapted = PeftModel.from_pretrained(opened(models["gemma3"]), run.directory / "adapter").eval()
    merged = _merged(run, tmp_path / "merged")
    assert_whole(merged, models["gemma3"], FAMILIES["gemma3"][1], text=logits(adapted))


def test_dora_of_quantized_files_is_refused_before_sharding(shop: Workshop) -> None:
    section: dict[str, Any] = {"adapter": {"kind": "dora", **_SOME}}
    assert shop.plan("mxfp4", world=2, **section).strategy == "ddp"
    with pytest.raises(ConfigError, match=r"adapter\.kind dora, and the weights are quantized") as refused:
        shop.plan("mxfp4", world=2, strategy="fsdp", **section)
    assert "parallel.strategy to ddp" in refused.value.problems[0].fix
