"""A tiny random model of each architecture that transformers can load as a causal language model.

Sizes come from the names of the config's keys; what a single architecture needs besides stands in
tiny_models.toml.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "four",
    "cat",
    "dog",
    "bird",
    "sings",
    "runs",
    "sleeps",
    "under",
    "over",
    "the",
    "a",
    "house",
    "tree",
]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>", "<|begin|>"]
_SIZES: dict[int, str] = {
    32: "hidden_size d_model n_embd dim model_dim embed_dim attention_hidden_size decoder_hidden_size embedding_size"
    " word_embed_proj_dim lru_width encoder_hidden_size moe_intermediate_size expert_ffn_hidden_size"
    " expert_intermediate_size moe_latent_size intermediate_size_mlp",
    64: "intermediate_size ffn_hidden_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim dff mlp_hidden_size"
    " shared_expert_intermediate_size shared_intermediate_size ffn_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads num_kv_heads"
    " n_kv_heads linear_num_key_heads num_experts_per_tok moe_k moe_topk num_experts_per_token top_k_experts"
    " experts_per_token mamba_expand zero_expert_num",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts"
    " linear_num_value_heads num_local_experts n_routed_experts moe_num_experts time_step_rank mamba_dt_rank linear_num_heads",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels d_kv attention_head_size rotary_dim d_head"
    " linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim swa_head_dim global_head_dim state_size mamba_d_state"
    " ssm_state_size mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim",
    16: "q_lora_rank kv_lora_rank o_lora_rank index_topk sliding_window attention_window local_attention_window"
    " window_size attention_chunk_size attention_window_size chunk_size block_size mamba_chunk_size",
    1: "n_group topk_group n_shared_experts num_expert_groups moe_num_shared_experts mamba_n_groups n_groups"
    " first_k_dense_replace",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length original_max_position_embeddings",
}  # fmt: skip
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_TOWER = {"image_size": 16, "patch_size": 4, "depth": 2, "out_hidden_size": 32, "temporal_patch_size": 2}
_OVERRIDES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def model_types() -> list[str]:
    """The model types of transformers' mapping."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>", bos_token="<|begin|>"
    )
    fast.chat_template = _TEMPLATE
    return fast


def write_tiny_model(model_type: str, directory: Path) -> PretrainedConfig:
    """Writes a random model with two layers, and a tokenizer."""
    torch.manual_seed(0)
    words = tokenizer()
    config = tiny_config(model_type, words)
    try:
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    except (ImportError, AttributeError, TypeError, ValueError):  # transformers cannot make it alone
        config.save_pretrained(directory)
        save_file({f"none.{i}": torch.zeros(512, 512) for i in range(4)}, directory / "model.safetensors")
    words.save_pretrained(directory)
    return config


def tiny_config(model_type: str, words: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The config of a tiny model."""
    kind = CONFIG_MAPPING[model_type]
    changes = {**_OVERRIDES.get(model_type, {})}
    settings = _small(kind, words) | {n: v for n, v in changes.items() if not isinstance(v, dict)}
    default = _default(kind)
    for name in getattr(kind, "sub_configs", None) or {}:
        part = vars(default).get(name) if default is not None else None
        if part is not None:
            is_text = "text" in name or "decoder" in name
            settings[name] = {
                "model_type": part.model_type,
                **_small(type(part), words, part, more={} if is_text else _TOWER),
                **changes.pop(name, {}),
            }
    if default is not None:
        settings = _layer_lists(default) | settings
    return kind(**settings | changes)


def _default(kind: type[PretrainedConfig]) -> PretrainedConfig | None:
    """The config of an architecture without arguments, where that can be made."""
    try:
        return kind()
    except Exception:  # noqa: BLE001 - of whatever the validators of a config raise
        return None


def _small(
    kind: Any,
    words: PreTrainedTokenizerFast,
    default: PretrainedConfig | None = None,
    *,
    more: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Small values of the keys of a config that are known by name; no dropout."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    tokens = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id,
              "bos_token_id": words.bos_token_id}  # fmt: skip
    settings: dict[str, Any] = {
        name: v for name, v in {**_SIZE_OF, **tokens, **(more or {})}.items() if name in fields
    }
    if "kv_lora_rank" in fields:  # latent attention has no groups of heads
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if "is_decoder" in fields:  # those of encoders, too, can be decoders
        settings["is_decoder"] = True
    for name, field in fields.items():
        if ("drop" in name) and isinstance(field.default, float):
            settings[name] = 0.0
    return (_layer_lists(default) if default is not None else {}) | settings


def _layer_lists(default: PretrainedConfig) -> dict[str, Any]:
    """Lists with an item for each layer, cut to two items that differ where any do."""
    layers = getattr(default, "num_hidden_layers", None)
    lists: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        items = vars(default).get(field.name)  # what differs between layers has no value of the whole
        if isinstance(items, list | tuple) and len(items) == layers and len(items) > 2:
            others = [item for item in items if item != items[0]]
            lists[field.name] = [items[0], others[0] if others else items[0]]
    return lists
