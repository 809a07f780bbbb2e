"""What we write tensor by tensor is what save_pretrained writes.

Run: pytest tests/trainer/training/test_weights.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from unisono.trainer.plan.resolve import FUSED_TYPES
from unisono.trainer.training.weights import MODEL_INDEX, model_layout, write_adapter, write_model

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"tie_word_embeddings": True},
    "qwen2": _SMALL | {"tie_word_embeddings": False},
    "gpt2": {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "mixtral": _SMALL | {"num_local_experts": 3},  # one tensor of the model is six of the files
    "qwen3_moe": _SMALL | {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8},
    "hrm_text": _SMALL,  # several tensors of the model are one of the files
}


def made(kind: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for _, name, tensor in _all(folder)}


def _all(folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield path.name, name, file.get_tensor(name)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_written_as_save_pretrained_writes_it(tmp_path: Path, kind: str, dtype: str) -> None:
    base = made(kind)
    write_model(base, tmp_path / "ours", dtype=dtype, max_file_bytes=10**9)
    base.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    names = {file.name for file in (tmp_path / "theirs").iterdir()}
    assert {file.name for file in (tmp_path / "ours").iterdir()} == names
    ours, theirs = ((tmp_path / side / "config.json").read_text() for side in ("ours", "theirs"))
    assert json.loads(ours) == json.loads(theirs)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == getattr(torch, dtype)
    same(dict(again.state_dict()), dict(base.state_dict()))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_several_files_are_those_of_save_pretrained(tmp_path: Path, kind: str) -> None:
    base = made(kind)
    write_model(base, tmp_path / "ours", dtype="float32", max_file_bytes=5000)
    base.save_pretrained(tmp_path / "theirs", max_shard_size=5000)
    ours, theirs = ((tmp_path / side / MODEL_INDEX).read_text() for side in ("ours", "theirs"))
    assert json.loads(ours) == json.loads(theirs)
    found, wanted = ({(file, name) for file, name, _ in _all(tmp_path / side)} for side in ("ours", "theirs"))
    assert found == wanted
    assert len({file for file, _ in found}) > 3
    same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_several_files_of_converted_tensors_load_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    base = made(kind)
    write_model(base, tmp_path / "ours", dtype="float32", max_file_bytes=5000)
    assert all(file.stat().st_size < 8000 for file in tmp_path.glob("ours/*.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    same(dict(again.state_dict()), dict(base.state_dict()))


def test_tensors_that_are_made_of_several_are_left_to_transformers(tmp_path: Path) -> None:
    assert model_layout(made("hrm_text"), dtype=torch.float32, max_file_bytes=10**9) is None
    assert model_layout(made("mixtral"), dtype=torch.float32, max_file_bytes=10**9) is not None


def test_plan_knows_every_language_model_type_whose_files_fuse_tensors() -> None:
    """It must warn before torch is imported; so it has a list, which a new transformers may make
    too short.
    """
    fused = {
        kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if any(
            isinstance(rule, WeightConverter) and len(rule.target_patterns) > 1
            for rule in get_checkpoint_conversion_mapping(kind) or ()
        )
    }  # fmt: skip
    assert fused == FUSED_TYPES


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True, "modules_to_save": ["norm"]}, {"use_rslora": True, "modules_to_save": ["embed_tokens"]}],
    ids=["lora", "dora", "rslora"],
)  # fmt: skip
def test_an_adapter_is_written_as_save_pretrained_writes_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    model: Any = get_peft_model(
        made("qwen2"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    )
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    (tmp_path / "ours").mkdir()
    write_adapter(model, tmp_path / "ours", base_name="base")
    model.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    same(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    for name in ("adapter_config.json", "README.md"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    again = PeftModel.from_pretrained(made("qwen2"), tmp_path / "ours").state_dict()
    kept = {name for name in again if "lora_" in name or "modules_to_save.default" in name}
    same({name: again[name] for name in kept}, {name: model.state_dict()[name] for name in kept})
