"""Adapters on base models in the files of fp8 with scales of blocks, and of compressed-tensors.

Run: pytest tests/trainer/training/test_stored_weights.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.peft_by_hand import loaded_again, losses_by_hand
from tests.stored_files import write_stored
from unisono.base.errors import ModelError
from unisono.trainer.model import file_settings
from unisono.trainer.model.directory import inspect_model
from unisono.trainer.model.quantization import dequantized, quantized_layers, state_of, weight_bytes
from unisono.trainer.training.join import quantized_digest

Train = Callable[..., Any]
_MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_FILES: dict[str, dict[str, Any]] = {
    "fp8, blocks": {"layout": "fp8", "block": (16, 16)},
    "fp8, blocks that do not divide": {"layout": "fp8", "block": (24, 12)},
    "fp8, exponents": {"layout": "fp8", "block": (16, 16), "scales": torch.float8_e8m0fnu},
    "fp8, one scale": {"layout": "fp8"},
    "float-quantized, rows": {"layout": "float-quantized", "block": (1, 0), "scales": torch.bfloat16},
    "float-quantized, blocks": {"layout": "float-quantized", "block": (16, 16)},
    "int-quantized": {"layout": "int-quantized", "block": (1, 0)},
    "pack-quantized, 4 bits": {"layout": "pack-quantized", "block": (1, 16), "bits": 4},
    "pack-quantized, zero points": {"layout": "pack-quantized", "block": (1, 16), "bits": 4, "symmetric": False},
    "pack-quantized, 8 bits": {"layout": "pack-quantized", "block": (1, 0), "bits": 8},
}  # fmt: skip


@pytest.fixture(scope="session")
def stored(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a model in the files of one of _FILES; made once."""
    folder = tmp_path_factory.mktemp("stored")

    def made(name: str) -> Path:
        if not (folder / name).exists():
            save_file(write_stored(model_dir, folder / name, **_FILES[name]), folder / f"{name}.safetensors")
        return folder / name

    return made


def _exact(directory: Path) -> dict[str, torch.Tensor]:
    """The values of the quantized weights of such a model."""
    return load_file(directory.with_name(f"{directory.name}.safetensors"))


@pytest.mark.parametrize("name", _FILES)
def test_weights_have_the_values_of_the_files_and_the_estimated_memory(
    train_here: Train, stored: Callable[..., Path], name: str
) -> None:
    run = train_here(model={"path": str(stored(name))}, duration="1 steps")
    loaded, wanted = loaded_again(run), _exact(stored(name))
    layers = {n.replace(".base_layer", ".weight"): layer for n, layer in quantized_layers(loaded.base)}
    assert layers.keys() == wanted.keys()
    for weight, layer in layers.items():
        assert torch.equal(dequantized(layer.weight, state_of(layer), torch.float32), wanted[weight]), weight
        rounded = dequantized(layer.weight, state_of(layer), torch.bfloat16)
        assert torch.equal(rounded, wanted[weight].bfloat16()), weight
    adapters = sum(4 * p.numel() for p in loaded.trainable.values())
    assert weight_bytes(loaded.model) - adapters == pytest.approx(run.plan.memory.weights, rel=0.001)
    assert loaded.parameters - loaded.trainable_parameters == run.plan.model.parameters
    unread = run.plan.config.model_copy(
        update={"model": run.plan.config.model.model_copy(update={"weights": "random"})}
    )
    assert inspect_model(unread).quantized_bits == run.plan.model.quantized_bits


@pytest.mark.parametrize("name", ["fp8, blocks", "fp8, exponents", "fp8, one scale"])
def test_values_of_fp8_are_those_of_transformers(stored: Callable[..., Path], name: str) -> None:
    tensors, wanted = load_file(stored(name) / "model.safetensors"), _exact(stored(name))
    for weight, values in wanted.items():
        pair = {"weight": [tensors[weight]], "weight_scale_inv": [tensors[f"{weight}_scale_inv"]]}
        theirs = Fp8Dequantize(None).convert(pair)["weight"]
        assert torch.equal(theirs, values.to(theirs.dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("fp8, blocks", "float32", "lora"),
        ("fp8, blocks", "bfloat16", "rslora"),
        ("float-quantized, rows", "float32", "dora"),
        ("pack-quantized, 4 bits", "float32", "lora"),
    ],
)
def test_five_steps_have_the_losses_of_peft_on_the_values_of_the_files(
    train_here: Train, model_dir: Path, stored: Callable[..., Path], name: str, dtype: str, kind: str
) -> None:
    run = train_here(
        model={"path": str(stored(name)), "dtype": dtype},
        adapter={"kind": kind},
        data={"packing": False},
        batch={"global": 4},
        optim={"lr": 1e-2, "schedule": "constant", "warmup": "0%", "max_grad_norm": None},
        duration="5 steps",
    )
    (ready,) = run.of_kind("ready")
    assert ready["facts"]["quick"] is (kind != "dora")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    model.load_state_dict(_exact(stored(name)), strict=False)
    theirs = losses_by_hand(run, model.to(getattr(torch, dtype)), targets=_MATRICES)
    assert run.losses == pytest.approx(theirs, rel=1e-3 if dtype == "bfloat16" else 1e-5)
    assert run.losses[-1] < run.losses[0], "it trains"


@pytest.mark.parametrize("name", ["fp8, blocks", "pack-quantized, zero points"])
def test_resumed_run_is_bit_equal_and_checkpoint_names_the_method(
    train_here: Train, stored: Callable[..., Path], name: str
) -> None:
    model = {"path": str(stored(name))}
    straight = train_here(model=model, checkpoint={"every": "3 steps"})
    path = straight.directory / "checkpoints" / "step-00000003"
    base = json.loads((path / "state.json").read_text())["state"]["base"]
    assert base["quantized"] == name.partition(",")[0].replace("pack-quantized", "compressed-tensors")
    resumed = train_here(model=model, checkpoint={"every": "3 steps"}, resume=(3, path))
    assert resumed.losses == straight.losses[3:]
    assert all(torch.equal(resumed.weights()[name], tensor) for name, tensor in straight.weights().items())
    assert not [m for m in resumed.of_kind("warning") if m["code"] == "quantized_differently"]


@pytest.mark.parametrize("name", ["fp8, blocks", "fp8, exponents"])
def test_flipped_bit_in_weights_or_scales_changes_the_digest(
    train_here: Train, stored: Callable[..., Path], name: str
) -> None:
    loaded = loaded_again(train_here(model={"path": str(stored(name))}, duration="1 steps"))
    before = quantized_digest(loaded.model)
    layer = loaded.base.model.layers[1].mlp.up_proj.base_layer
    for tensor in (layer.weight.data, layer.quant_state.scales):
        tensor.view(torch.uint8).view(-1)[3] ^= 1
        assert quantized_digest(loaded.model) != before
        tensor.view(torch.uint8).view(-1)[3] ^= 1
    assert quantized_digest(loaded.model) == before


def _compressed(layout: str = "pack-quantized", bits: int = 4, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, **more}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (_compressed("nvfp4-pack-quantized"), "in the layout 'nvfp4-pack-quantized'"),
        (_compressed(bits=3), "to 3 bits"),
        (_compressed(config_groups={}), "in the layout 'pack-quantized'"),
        (_compressed(transform_config={"config_groups": {}}), "with rotated or sparse weights"),
        (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "with rotated or sparse weights"),
        ({"quant_method": "quanto"}, "with 'quanto'"),
    ],
)
def test_other_methods_and_layouts_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ModelError, match=what) as error:
        file_settings.stored_quantization(tmp_path, {"quantization_config": settings})
    assert "use the model's original files" in error.value.problems[0].fix
