"""Adapters on mixtures of experts whose experts are quantized in their files.

Run: pytest tests/trainer/training/test_stored_experts.py
"""

import json
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.peft_by_hand import loaded_again, losses_by_hand
from tests.stored_files import write_mxfp4, write_stored
from unisono.base.errors import ModelError
from unisono.trainer.model.quantization import StoredExperts, stored_experts, weight_bytes
from unisono.trainer.task.inference import merge_adapter
from unisono.trainer.training.join import quantized_digest

Train = Callable[..., Any]
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
_CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen3_moe": partial(
        transformers.Qwen3MoeConfig, num_experts=4, moe_intermediate_size=48, mlp_only_layers=[], **_SIZES
    ),
    "gpt_oss": partial(transformers.GptOssConfig, num_local_experts=4, **_SIZES),
}
_FILES: dict[str, tuple[str, Callable[[Path, Path], dict[str, torch.Tensor]]]] = {
    "fp8": ("qwen3_moe", partial(write_stored, layout="fp8", block=(16, 16))),
    "int4": (
        "qwen3_moe",
        partial(write_stored, layout="pack-quantized", block=(1, 16), bits=4, symmetric=False),
    ),
    "mxfp4": ("gpt_oss", write_mxfp4),
}


@pytest.fixture
def mixture(model_dir: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """The directories of a model in the files of one of _FILES, and with the same values dense."""

    def made(name: str) -> tuple[Path, Path]:
        kind, write = _FILES[name]
        stored, dense = tmp_path / name, tmp_path / f"{name} dense"
        shutil.copytree(model_dir, dense)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        torch.manual_seed(0)
        config = _CONFIGS[kind](vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(dense)
        values = write(dense, stored)
        file = dense / "model.safetensors"
        save_file(load_file(file) | values, file, {"format": "pt"})
        return stored, dense

    return made


def _five_steps(train_here: Train, directory: Path) -> Any:
    return train_here(
        model={"path": str(directory), "dtype": "float32"},
        adapter={"kind": "lora", "targets": _TARGETS},
        data={"packing": False},
        batch={"global": 4},
        optim={"lr": 1e-2, "schedule": "constant", "warmup": "0%", "max_grad_norm": None},
        duration="5 steps",
    )


@pytest.mark.parametrize("name", _FILES)
def test_adapter_has_peft_losses_on_dense_values_and_merges_exactly(
    train_here: Train, mixture: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str
) -> None:
    stored, dense = mixture(name)
    run = _five_steps(train_here, stored)
    plain = transformers.AutoModelForCausalLM.from_pretrained(dense)
    assert run.losses == pytest.approx(losses_by_hand(run, plain, targets=_TARGETS), rel=1e-5)
    assert run.losses[-1] < run.losses[0], "it trains"
    loaded = loaded_again(run)
    adapters = sum(4 * p.numel() for p in loaded.trainable.values())
    assert weight_bytes(loaded.model) - adapters == pytest.approx(run.plan.memory.weights, rel=0.001)
    assert loaded.parameters - loaded.trainable_parameters == run.plan.model.parameters

    peft.set_peft_model_state_dict(loaded.model, run.weights())
    plain = transformers.AutoModelForCausalLM.from_pretrained(dense)
    settings = loaded.model.peft_config["default"]
    settings.base_model_name_or_path = None
    theirs = peft.get_peft_model(plain, settings)
    peft.set_peft_model_state_dict(theirs, run.weights())
    merge_adapter(loaded.model, where="adapter").save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    merged, before = (load_file(path / "model.safetensors") for path in (tmp_path / "out", dense))
    assert merged.keys() == before.keys()
    wanted = theirs.merge_and_unload().state_dict()
    reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(reread[key], wanted[key], rtol=1e-5, atol=1e-6) for key in wanted)
    assert all(torch.equal(reread[key], wanted[key]) for key in wanted if "experts" in key)


def test_values_of_mxfp4_are_those_of_transformers(mixture: Callable[[str], tuple[Path, Path]]) -> None:
    stored, dense = (load_file(path / "model.safetensors") for path in mixture("mxfp4"))
    for name in [name for name in dense if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), dense[name])


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_dense_matrices_of_one_layer_exist_at_a_time(
    train_here: Train,
    mixture: Callable[[str], tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    loaded = loaded_again(_five_steps(train_here, mixture(name)[0]))
    alive, counts, dense = weakref.WeakSet[Any](), [], StoredExperts.dense

    def counted(stored: StoredExperts) -> torch.Tensor:
        weight = dense(stored)
        alive.add(weight.untyped_storage())
        counts.append(len(alive))
        return weight

    monkeypatch.setattr(StoredExperts, "dense", counted)
    logits = loaded.model(input_ids=torch.tensor([[5, 9, 11, 40, 7]])).logits
    assert len(counts) == 4
    assert not alive, "nothing keeps them for the backward pass"
    logits.square().mean().backward()
    assert len(counts) == 8
    assert max(counts) == 2, "the two parameters of a layer"


def test_flipped_bit_in_experts_or_their_scales_changes_the_digest(
    train_here: Train, mixture: Callable[[str], tuple[Path, Path]]
) -> None:
    loaded = loaded_again(_five_steps(train_here, mixture("mxfp4")[0]))
    before = quantized_digest(loaded.model)
    _, stored = list(stored_experts(loaded.model))[-1]
    for tensor in (stored.weight.data, stored.quant_state.tensors()["scales"]):
        tensor.view(-1)[3] ^= 1
        assert quantized_digest(loaded.model) != before
        tensor.view(-1)[3] ^= 1
    assert quantized_digest(loaded.model) == before


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_adapter_on_quantized_experts_is_refused_with_the_other_targets(
    train_here: Train, mixture: Callable[[str], tuple[Path, Path]], name: str
) -> None:
    with pytest.raises(ModelError, match="experts are quantized in the model's files") as error:
        train_here(model={"path": str(mixture(name)[0])}, adapter={"kind": "lora"})
    assert "adapter.targets: [k_proj, o_proj, q_proj, v_proj]" in error.value.problems[0].fix


def test_experts_that_share_a_scale_are_refused(
    train_here: Train, mixture: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, dense = mixture("fp8")
    write_stored(dense, tmp_path / "stored", layout="fp8", block=(32, 32))  # of 48 outputs
    with pytest.raises(ModelError, match="that are not read"):
        train_here(model={"path": str(tmp_path / "stored")}, adapter={"targets": _TARGETS})
