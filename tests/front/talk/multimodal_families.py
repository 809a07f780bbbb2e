"""Tiny configs of multimodal models, each with one picture as its class takes it."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as T  # noqa: N812 - many classes

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
"""Four layers: from twenty adapted layers on, peft shortens their names."""
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
EYE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_EYE = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": 14,
}  # fmt: skip
TOKENS = {
    "image_token_id": 316,
    "video_token_id": 317,
    "vision_start_token_id": 318,
    "vision_end_token_id": 319,
}


def _pixels(*shape: int) -> dict[str, Any]:
    values = torch.linspace(-1, 1, int(torch.Size(shape).numel())).reshape(shape)
    return {"pixel_values": values}


PATCHES = _pixels(4, 3 * 2 * 14 * 14) | {"image_grid_thw": torch.tensor([[1, 2, 2]])}
PICTURE = _pixels(1, 3, 28, 28)
TILES = _pixels(1, 1, 3, 28, 28)


def _text(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **TEXT, **more}


FAMILIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "qwen3_5": (
        lambda: T.Qwen3_5Config(text_config=TEXT | LINEAR, vision_config=QWEN_EYE, **TOKENS),
        PATCHES,
    ),
    "qwen2_5_vl": (
        lambda: T.Qwen2_5_VLConfig(
            text_config=TEXT | MROPE, vision_config=QWEN_EYE | {"fullatt_block_indexes": [0]}, **TOKENS
        ),
        PATCHES,
    ),
    "qwen3_vl": (
        lambda: T.Qwen3VLConfig(
            text_config=TEXT | MROPE, vision_config=QWEN_EYE | {"deepstack_visual_indexes": [0]}, **TOKENS
        ),
        PATCHES,
    ),
    "gemma3": (
        lambda: T.Gemma3Config(
            text_config=TEXT | {"query_pre_attn_scalar": 8, "sliding_window": 16},
            vision_config=EYE,
            image_token_index=316,
            mm_tokens_per_image=4,
        ),
        PICTURE,
    ),
    "gemma4": (
        lambda: T.Gemma4Config(
            text_config=TEXT
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320, "global_head_dim": 8},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
            },
            audio_config=None,
            image_token_id=316,
        ),
        {},
    ),
    "llama4": (
        lambda: T.Llama4Config(
            text_config=TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 2},
            vision_config=EYE
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            image_token_index=316,
        ),
        {},
    ),
    "mistral3": (
        lambda: T.Mistral3Config(
            text_config=_text("mistral"),
            vision_config={"model_type": "pixtral", "head_dim": 8, **EYE},
            image_token_index=316,
        ),
        {},
    ),
    "llava": (
        lambda: T.LlavaConfig(
            text_config=_text("llama"),
            vision_config={"model_type": "clip_vision_model", **EYE},
            image_token_index=316,
        ),
        PICTURE,
    ),
    "idefics3": (
        lambda: T.Idefics3Config(text_config=_text("llama"), vision_config=EYE, image_token_id=316),
        TILES,
    ),
    "smolvlm": (
        lambda: T.SmolVLMConfig(text_config=_text("llama"), vision_config=EYE, image_token_id=316),
        TILES,
    ),
    "internvl": (
        lambda: T.InternVLConfig(
            text_config=_text("qwen2"),
            vision_config=EYE | {"image_size": [28, 28], "patch_size": [14, 14]},
            image_token_id=316,
        ),
        PICTURE,
    ),
    "lfm2_vl": (
        lambda: T.Lfm2VlConfig(
            text_config=_text("lfm2"),
            vision_config={"model_type": "siglip2_vision_model", **EYE},
            image_token_id=316,
        ),
        {},
    ),
    "glm4v": (
        lambda: T.Glm4vConfig(text_config=TEXT | MROPE, vision_config=QWEN_EYE, image_token_id=316),
        PATCHES,
    ),
    "qwen2_audio": (
        lambda: T.Qwen2AudioConfig(
            text_config=_text("qwen2"),
            audio_config={
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
            },
            audio_token_index=316,
        ),
        {},
    ),
    "paligemma": (
        lambda: T.PaliGemmaConfig(
            text_config=_text("gemma"),
            vision_config={"model_type": "siglip_vision_model", "projection_dim": 32, **EYE},
            image_token_index=316,
            projection_dim=32,
        ),
        {},
    ),
}
"""By name: what makes the config, and what its `get_image_features` takes; empty if it takes more
than pixels.
"""
