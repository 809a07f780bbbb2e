"""What an adapter changes in mixtures of experts and in other kinds of models, part by part.

pytest tests/trainer/model/test_parts.py
"""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from unisono.base.errors import ModelError
from unisono.trainer.config.model_sections import AdapterSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.families.text.rows import with_parts
from unisono.trainer.model.adapter import add_adapter
from unisono.trainer.model.directory import inspect_model
from unisono.trainer.model.parts import (
    adaptable_weights,
    count_parts,
    omitted_weights,
    targeted_weights,
)
from unisono.trainer.plan.memory import estimate_memory
from unisono.trainer.plan.run_plan import ModelFacts
from unisono.trainer.task.inference import merge_adapter

_SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_TWO = {"num_experts_per_tok": 2}
_ROUTED = _SMALL | _TWO | {"moe_intermediate_size": 16}
_SHARED = _ROUTED | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DELTA = {
    "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
_DENSE: dict[str, dict[str, Any]] = {
    "llama": _SMALL, "qwen2": _SMALL,
    "mamba": {
        "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "eos_token_id": 1, "pad_token_id": 0,
    },
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _ROUTED | {"num_experts": 4, "head_dim": 8},  # peft renames targets by itself
    "deepseek_v3": _SHARED | _LATENT,  # and takes those of dense layers for experts
    "gpt_oss": _SMALL | _TWO | {"num_local_experts": 4, "head_dim": 8},  # in and out swapped
    "jetmoe": _SMALL | _TWO | {"num_local_experts": 4, "kv_channels": 8},  # experts in attention, too
    "phimoe": _SMALL | _TWO | {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "mixtral": _SMALL | {"num_local_experts": 4},
    "qwen2_moe": _ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    "olmoe": _SMALL | _TWO | {"num_experts": 4},
    "granitemoe": _SMALL | _TWO | {"num_local_experts": 4},
    "granitemoehybrid": _SMALL | _TWO | {
        "num_local_experts": 4, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "shared_intermediate_size": 16,
    },
    "glm4_moe": _SHARED | {"head_dim": 8},
    "dots1": _SHARED | {"head_dim": 8},
    "lfm2_moe": _ROUTED | {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "jamba": _SMALL | _TWO | {
        "num_experts": 4, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2,
        "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "ernie4_5_moe": _ROUTED | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": _ROUTED | {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "minimax_m2": _SMALL | _TWO | {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 8},
    "qwen3_next": _ROUTED | _DELTA,
    "qwen3_5_moe_text": _ROUTED | _DELTA,
    "gemma4_text": _ROUTED | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "head_dim": 8, "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
    },
    "llama4_text": _SMALL | {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48, "moe_layers": [0, 1]},
    "mimo_v2_flash": _ROUTED | {
        "n_routed_experts": 4, "head_dim": 8, "v_head_dim": 8, "swa_head_dim": 8, "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "n_group": 1, "topk_group": 1,
        "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
    },
    "nemotron_h": {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
_IDS = torch.arange(128).reshape(2, 64) * 37 % 298 + 2


def _made(kind: str, directory: Path | None = None) -> Any:
    """A model of a kind with weights drawn at random; read from a directory, if it is given."""
    torch.manual_seed(0)
    settings = (_KINDS | _MORE | _DENSE)[kind]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    if directory is None:
        return model
    model.save_pretrained(directory)
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(_IDS, use_cache=False).logits
    return logits


def _stepped(model: Any, *, steps: int = 2) -> dict[str, bool]:
    """Whether each trained tensor has a gradient in the last step, by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model.train()(input_ids=_IDS, labels=_IDS, use_cache=False).loss.backward()
        optimizer.step()
    return {name: p.grad is not None and bool(p.grad.any()) for name, p in trained.items()}


def _adapted(model: Any) -> set[str]:
    """The full names of the base weights that an adapter changes."""
    layers = (
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    )
    return {
        f"{name.replace('.base_layer', '').removeprefix('base_model.model.')}.{getattr(layer, 'parameter_name', 'weight')}"
        for name, layer in layers
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*_KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in _MORE)])
def test_experts_are_adapted_trained_and_merged_and_routers_are_not(kind: str, tmp_path: Path) -> None:
    base = _made(kind, tmp_path / "base")
    before, weights = _logits(base), adaptable_weights(base)
    expected = {
        weight.parameter for weight in weights if weight.part not in ("router", "head") and not weight.refused
    }
    assert all(part in {weight.part for weight in weights} for part in ("attention", "experts", "router"))
    model: Any = add_adapter(base, AdapterSection(rank=2), seed=0)[0]
    assert _adapted(model) == expected
    gradients = _stepped(model)
    experts = [name for name in gradients if ".experts." in name or "put_linear." in name]
    assert experts
    assert all(gradients[name] for name in experts)
    trained = _logits(model)
    assert (trained - before).abs().max() > 1e-2 * before.std()
    model.save_pretrained(str(tmp_path / "adapter"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|adapter).*")
        again = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")
        )
    assert (_logits(again) - trained).abs().max() < 1e-5 * trained.std()
    merge_adapter(model, where="model").save_pretrained(tmp_path / "merged")
    merged = _logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (merged - trained).abs().max() < 1e-5 * trained.std()


@pytest.mark.parametrize(
    ("words", "parts"),
    [("attention", {"attention"}), ("experts+router", {"experts", "router"}),
     ("all-linear+router", {"attention", "mlp", "experts", "router"})],
)  # fmt: skip
def test_words_name_parts(words: str, parts: set[str]) -> None:
    base = _made("deepseek_v3")
    weights = adaptable_weights(base)
    model = add_adapter(base, AdapterSection(rank=2, targets=words), seed=0)[0]
    assert _adapted(model) == {weight.parameter for weight in weights if weight.part in parts}
    assert all(_stepped(model).values())


def test_patterns_name_linear_layers_and_experts_weights() -> None:
    base = _made("deepseek_v3")
    section = AdapterSection(rank=2, targets=["shared_experts.gate_proj", "experts.down_proj$"])
    assert _adapted(add_adapter(base, section, seed=0)[0]) == {
        "model.layers.1.mlp.shared_experts.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.1.mlp.experts.down_proj",
    }


def test_a_part_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        targeted_weights(adaptable_weights(_made("mamba")), "experts")
    (problem,) = caught.value.problems
    assert problem.where == "adapter.targets"
    assert problem.fix == "use attention"


@pytest.mark.parametrize(("key", "value"), [("dropout", 0.1), ("kind", "dora")])
def test_what_peft_lacks_for_experts_is_refused_with_targets_that_work(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        add_adapter(_made("qwen3_moe"), AdapterSection.model_validate({key: value}), seed=0)
    (problem,) = caught.value.problems
    assert problem.where == f"adapter.{key}"
    assert problem.fix.endswith("adapter.targets: attention")
    section = AdapterSection.model_validate({key: value, "rank": 2, "targets": "attention"})
    assert all(_stepped(add_adapter(_made("qwen3_moe"), section, seed=0)[0]).values())


def test_what_peft_refuses_is_omitted_from_words_with_its_reason() -> None:
    weights = adaptable_weights(_made("mamba"))
    omitted = omitted_weights(weights, "all-linear")
    assert omitted.keys() == {"out_proj"}
    assert "incompatible with Mamba" in omitted["out_proj"]
    adapted = _adapted(add_adapter(_made("mamba"), AdapterSection(rank=2), seed=0)[0])
    assert {name.split(".")[-2] for name in adapted} == {"in_proj", "x_proj", "dt_proj"}
    assert omitted_weights(weights, ["out_proj"]) == {}


def _facts(directory: Path, **adapter: Any) -> ModelFacts:
    tree = {
        "model": {"path": str(directory)},
        "data": {"train": "x.jsonl"},
        "output_dir": "o",
        "adapter": adapter,
    }
    config = RunConfig.model_validate(tree)
    return with_parts(config, inspect_model(config))


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("deepseek_v3", "all-linear"), ("deepseek_v3", ["q_a_proj", "gate_proj"]), ("jetmoe", "experts+router"),
     ("qwen2", "all-linear"), ("qwen2", ["q_proj", "lm_head"]), ("llama", "mlp")],
)  # fmt: skip
def test_a_plan_counts_each_part_and_its_adapter(kind: str, targets: Any, tmp_path: Path) -> None:
    base, section = _made(kind, tmp_path), AdapterSection(rank=2, targets=targets)
    facts = _facts(tmp_path, **section.model_dump(exclude_defaults=True))
    assert facts.parts == count_parts(base)
    parts = {weight.name: weight.part for weight in adaptable_weights(base)}
    model = add_adapter(base, section, seed=0)[0]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 2 * sum(facts.adapted_in_out.values()) == trained
    assert facts.adapted_in_out.keys() <= set(parts.values())


def test_memory_has_the_sums_of_experts_and_their_adapters(tmp_path: Path) -> None:
    _made("qwen3_moe", tmp_path)
    experts, attention = (_facts(tmp_path, targets=word) for word in ("all-linear", "attention"))
    assert experts.summed_parameters == experts.parts["experts"]
    assert attention.summed_parameters == 0
    kept = [
        estimate_memory(
            facts,
            dtype="bfloat16",
            adapter_rank=2,
            micro_tokens=8,
            longest_row=8,
            gradient_checkpointing=False,
        )
        for facts in (experts, attention)
    ]
    assert kept[0].activations - kept[1].activations == experts.parts["experts"] * 2 * 3 // 2
    added = 16 * 2 * experts.adapted_in_out["experts"]
    assert kept[0].trainable - kept[1].trainable == added


def test_memory_has_the_experts_of_one_layer_if_they_are_quantized(tmp_path: Path) -> None:
    _made("qwen3_moe", tmp_path)
    layer = _facts(tmp_path, targets="attention").parts["experts"] // 2 * 2  # of two; bytes in bfloat16
    estimates = {
        (word, again): estimate_memory(
            _facts(tmp_path, targets=word).model_copy(update={"quantized": "nf4"}),
            dtype="bfloat16",
            adapter_rank=2,
            micro_tokens=8,
            longest_row=8,
            gradient_checkpointing=again,
        )
        for word in ("experts", "attention")
        for again in (True, False)
    }
    experts, attention = (estimates[word, False] for word in ("experts", "attention"))
    assert attention.dequantized - experts.dequantized == layer
    assert experts.activations - attention.activations == 2 * layer, "the sums, and their gradient"
    again = estimates["experts", True].activations - estimates["attention", True].activations
    assert again == 2 * layer
