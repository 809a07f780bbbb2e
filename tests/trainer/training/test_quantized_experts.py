"""Adapters on mixtures of experts whose experts are quantized: on loading, or in their files.

Run: pytest tests/trainer/training/test_quantized_experts.py
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

from tests import needs
from tests.peft_by_hand import loaded_again, losses_by_hand
from tests.stored_files import write_mxfp4, write_stored
from unisono.base.errors import ModelError
from unisono.trainer.model.quantization import QuantizedExperts, quantized_experts, weight_bytes
from unisono.trainer.task.inference import merge_adapter
from unisono.trainer.training.join import quantized_digest

bitsandbytes = needs.package("bitsandbytes")
Train = Callable[..., Any]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
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
_ON_LOADING = {"nf4": ("qwen3_moe", "nf4"), "fp4": ("gpt_oss", "fp4"), "int8": ("qwen3_moe", "int8")}
Mixture = Callable[[str], tuple[dict[str, Any], Path]]


@pytest.fixture
def mixture(model_dir: Path, tmp_path: Path) -> Mixture:
    """`model` of a config with quantized experts, by a name of _FILES or _ON_LOADING, and the
    directory of a model with the same values dense.
    """

    def made(name: str) -> tuple[dict[str, Any], Path]:
        kind, how = _FILES[name] if name in _FILES else _ON_LOADING[name]
        plain, dense, stored = (tmp_path / f"{name} {which}" for which in ("plain", "dense", "stored"))
        shutil.copytree(model_dir, plain)
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        torch.manual_seed(0)
        config = _CONFIGS[kind](vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        model.save_pretrained(plain)
        shutil.copytree(plain, dense)
        if isinstance(how, str):
            with torch.no_grad():
                _round(model, how)
            model.save_pretrained(dense)
            return {"path": str(plain), "dtype": "float32", "quantize": how}, dense
        values = how(plain, stored)
        file = dense / "model.safetensors"
        save_file(load_file(file) | values, file, {"format": "pt"})
        return {"path": str(stored), "dtype": "float32"}, dense

    return made


def _round(model: Any, kind: str) -> None:
    """Gives the matrices of linear layers and experts the values that bitsandbytes has for them; in
    8 bits, for experts, the nearest multiples of 1/127 of the largest value of a row.
    """
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    for weight in [layer.weight for layer in layers] + [p for p in model.parameters() if p.ndim == 3]:
        if kind != "int8":
            packed, state = bitsandbytes.functional.quantize_4bit(
                weight, compress_statistics=True, quant_type=kind
            )
            weight.copy_(bitsandbytes.functional.dequantize_4bit(packed, state))
        elif weight.ndim == 3:
            step = weight.abs().amax(-1, keepdim=True) / 127
            weight.copy_((weight / step).round() * step)
        else:
            codes, largest, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
            weight.copy_(codes * (largest[:, None] / 127))


def _five_steps(train_here: Train, model: dict[str, Any], *, experts: bool = True, **sections: Any) -> Any:
    return train_here(
        model=model,
        adapter={"kind": "lora", "targets": "all-linear" if experts else _ATTENTION},
        data={"packing": False},
        batch={"global": 4},
        optim={"lr": 1e-2, "schedule": "constant", "warmup": "0%", "max_grad_norm": None},
        duration="5 steps",
        **sections,
    )


_EACH = [*_FILES, *_ON_LOADING]


@pytest.mark.parametrize(
    ("name", "experts"), [*((name, True) for name in _EACH), ("nf4", False), ("mxfp4", False)]
)
def test_adapter_has_peft_losses_on_dense_values_and_merges_exactly(
    train_here: Train, mixture: Mixture, tmp_path: Path, *, name: str, experts: bool
) -> None:
    model, dense = mixture(name)
    run = _five_steps(train_here, model, experts=experts)
    adapted = any(".experts." in key for key in run.weights())
    assert adapted is experts
    plain = transformers.AutoModelForCausalLM.from_pretrained(dense)
    parameters = _EXPERTS if experts else None
    by_hand = losses_by_hand(run, plain, targets=_ATTENTION, parameters=parameters)
    assert run.losses == pytest.approx(by_hand, rel=1e-5)
    assert run.losses[-1] < run.losses[0], "it trains"
    loaded = loaded_again(run)
    adapters = sum(4 * p.numel() for p in loaded.trainable.values())
    # The routers are matrices in the files, and not quantized.
    routers = sum(p.numel() for key, p in loaded.base.named_parameters() if key.endswith("router.weight"))
    routers += sum(p.numel() for key, p in loaded.base.named_parameters() if key.endswith("mlp.gate.weight"))
    assert weight_bytes(loaded.model) - adapters == pytest.approx(
        run.plan.memory.weights + 4 * routers * (name in _ON_LOADING), rel=0.02
    )
    assert loaded.parameters - loaded.trainable_parameters == run.plan.model.parameters

    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(dense), run.directory / "adapter"
    )
    peft.set_peft_model_state_dict(loaded.model, run.weights())
    out = tmp_path / "out"
    merge_adapter(loaded.model, where="adapter").save_pretrained(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged, before = (load_file(path / "model.safetensors") for path in (out, dense))
    assert merged.keys() == before.keys()
    wanted = theirs.merge_and_unload().state_dict()
    reread = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.allclose(reread[key], wanted[key], rtol=1e-5, atol=1e-6) for key in wanted)
    if not experts and name in _FILES:
        assert all(torch.equal(reread[key], wanted[key]) for key in wanted if "experts" in key)


def test_values_of_mxfp4_are_those_of_transformers(mixture: Mixture) -> None:
    model, dense = mixture("mxfp4")
    stored, values = (load_file(Path(path) / "model.safetensors") for path in (model["path"], dense))
    for name in [name for name in values if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), values[name])


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nf4"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_dense_matrices_of_one_layer_exist_at_a_time(
    train_here: Train, mixture: Mixture, monkeypatch: pytest.MonkeyPatch, *, name: str, recomputed: bool
) -> None:
    run = _five_steps(train_here, mixture(name)[0])
    loaded = loaded_again(run)
    if recomputed:
        loaded.base.activation_checkpointing_enable()
        loaded.model.train()
    alive, counts, adapted = weakref.WeakSet[Any](), [], QuantizedExperts.adapted

    def counted(quantized: QuantizedExperts) -> torch.Tensor:
        weight = adapted(quantized)
        alive.add(weight.untyped_storage())
        counts.append(len(alive))
        return weight

    monkeypatch.setattr(QuantizedExperts, "adapted", counted)
    logits = loaded.model(input_ids=torch.tensor([[5, 9, 11, 40, 7]])).logits
    assert len(counts) == 4
    assert not alive, "nothing keeps them for the backward pass"
    logits.square().mean().backward()
    assert len(counts) >= 8
    assert max(counts) == 2, "the two parameters of a layer"
    assert all(p.grad is not None and p.grad.any() for n, p in loaded.trainable.items() if "lora_B" in n)


def test_an_adapter_that_is_switched_off_leaves_the_quantized_experts(
    train_here: Train, mixture: Mixture
) -> None:
    """As for the reference of a preference run."""
    model, dense = mixture("nf4")
    loaded = loaded_again(run := _five_steps(train_here, model))
    peft.set_peft_model_state_dict(loaded.model, run.weights())
    ids = torch.tensor([[5, 9, 11, 40, 7]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    loaded.model.eval()
    with torch.no_grad():
        wanted, adapted = plain(input_ids=ids).logits, loaded.model(input_ids=ids).logits
        with loaded.model.disable_adapter():
            without = loaded.model(input_ids=ids).logits
    assert torch.allclose(without, wanted, atol=1e-5)
    assert not torch.allclose(adapted, wanted, atol=1e-3)


def test_a_stopped_run_continues_to_the_same_bits(
    train_here: Train, mixture: Mixture, tmp_path: Path
) -> None:
    model, _ = mixture("nf4")
    straight = _five_steps(train_here, model, checkpoint={"every": "2 steps", "keep": 9})
    checkpoint = straight.directory / "checkpoints" / "step-00000002"
    again = _five_steps(train_here, model, checkpoint={"every": "2 steps", "keep": 9}, resume=(2, checkpoint))
    assert again.losses == straight.losses[2:]
    mine, wanted = again.weights(), straight.weights()
    assert all(torch.equal(mine[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", ["mxfp4", "nf4"])
def test_flipped_bit_in_experts_or_their_scales_changes_the_digest(
    train_here: Train, mixture: Mixture, name: str
) -> None:
    loaded = loaded_again(_five_steps(train_here, mixture(name)[0]))
    before = quantized_digest(loaded.model)
    _, quantized = list(quantized_experts(loaded.model))[-1]
    state = quantized.quant_state
    for tensor in (quantized.weight.data, state.absmax if name == "nf4" else state.tensors()["scales"]):
        tensor.view(-1)[3] ^= 1
        assert quantized_digest(loaded.model) != before
        tensor.view(-1)[3] ^= 1
    assert quantized_digest(loaded.model) == before


@pytest.mark.parametrize("name", ["fp8", "nf4"])
def test_dora_and_dropout_on_quantized_experts_are_refused(
    train_here: Train, mixture: Mixture, name: str
) -> None:
    model, _ = mixture(name)
    for key, value in (("kind", "dora"), ("dropout", 0.1)):
        with pytest.raises(ModelError, match=rf"adapter\.{key}: {value} is not possible on") as error:
            train_here(model=model, adapter={key: value})
        assert "adapter.targets: attention" in error.value.problems[0].fix


def test_experts_that_share_a_scale_are_refused(train_here: Train, mixture: Mixture, tmp_path: Path) -> None:
    _, dense = mixture("fp8")
    write_stored(dense, tmp_path / "stored", layout="fp8", block=(32, 32))  # of 48 outputs
    with pytest.raises(ModelError, match="that are not read"):
        train_here(model={"path": str(tmp_path / "stored")}, adapter={"targets": _ATTENTION})
