"""What llama.cpp computes by values of its own, whatever config.json says.

A file has no key for such a value, or none that llama.cpp reads: it would be read back as it was
written, and answer otherwise. So a key that llama.cpp does not heed must have the default of its
class in transformers, which is what llama.cpp computes; tests run it.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from unisono.trainer.model.gguf_families import FAMILIES, KEYS, SIZES

Rope = dict[str, Any]  # transformers' rope_parameters
Limit = tuple[str, Any, tuple[Any, ...], str]
"""A key of config.json, its value, those for which llama.cpp computes the same, and what it
does.
"""

_WINDOWS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")
_TRAINING = re.compile(
    "_token_id$|dropout|_pdrop$|initializer|aux_loss|^output_|jitter|^summary_|use_cache|pretraining_tp"
    "|in_fp32$|upcast|^is_decoder$"
)
"""Keys that change nothing, or nothing outside of training."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""A Gemma with so many layers is the one of 27 billion parameters for llama.cpp, whose attention
has another scale.
"""
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}


def find_difference(kind: str, config: Any) -> tuple[str, str, str] | None:
    """The first key of a config whose value llama.cpp does not compute, the value as it is shown,
    and what llama.cpp does.

    Args:
        kind: the `model_type` of a family that can be written.
        config: of the text model.
    """
    limits = (*_rope_limits(kind, config), *_gemma_limits(kind, config), *_limits(kind, config))
    for key, value, expected, why in limits:
        if value not in expected:
            return key, "in this order" if key == "layer_types" else str(value), why
    return None


def longest_context(kind: str, config: Any) -> int:
    """The longest text, in tokens, for which llama.cpp computes the same.

    It has windows for few families only. Up to the length of a window a text does not need one.
    """
    window, context = getattr(config, "sliding_window", None), int(config.max_position_embeddings)
    types = getattr(config, "layer_types", None) or ()
    is_windowed = window and not FAMILIES[kind].windows and ("sliding_attention" in types or not types)
    return min(context, int(window or context)) if is_windowed else context


def _limits(kind: str, config: Any) -> Iterator[Limit]:
    """Keys without a place in the file."""
    family = FAMILIES[kind]
    usual = type(config)(num_hidden_layers=config.num_hidden_layers).to_dict()
    free = {*PretrainedConfig().to_dict(), *SIZES, *KEYS["uint32"], *family.reads, *family.only}
    free.update(_WINDOWS[:1] if family.windows else _WINDOWS)  # see longest_context
    for key, value in family.only.items():
        shown = " or ".join(map(str, family.only[key])) or "null"
        yield key, getattr(config, key), tuple(value) or (None,), f"it computes as for {shown}"
    for key, value in usual.items():
        if key not in free and not _TRAINING.search(key):
            yield key, config.to_dict().get(key), (value,), f"it computes as for {value}"
    if family.exact_heads:
        width = int(config.hidden_size) // int(config.num_attention_heads)
        yield "head_dim", config.head_dim or width, (width,), "it computes it from the other sizes"


def _gemma_limits(kind: str, config: Any) -> Iterator[Limit]:
    if kind in _LAYERS_OF_27B:
        heads = int(config.num_attention_heads)
        is_27b = int(config.num_hidden_layers) == _LAYERS_OF_27B[kind]
        scalar = int(config.hidden_size) // heads if is_27b else int(config.head_dim)
        why = f"it computes the scale of attention from the other sizes, as for {scalar}"
        yield "query_pre_attn_scalar", config.query_pre_attn_scalar, (scalar,), why
    if kind == "gemma2":
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            shown = "null" if getattr(config, name) is None else "a number"
            yield name, shown, ("a number",), "it always caps the logits"


def _rope_limits(kind: str, config: Any) -> Iterator[Limit]:
    family, parameters = FAMILIES[kind], getattr(config, "rope_parameters", None) or {}
    rope = parameters.get("full_attention", parameters)
    scaling = rope.get("rope_type", "default")
    known = ["default", "linear", *family.rope]
    known += ["yarn"] if kind != "gemma3_text" else []  # whose layers with a window would have it, too
    yield "rope_type", scaling, tuple(known), f"{', '.join(known)} can be written"
    if not family.partial:
        part = rope.get("partial_rotary_factor", 1.0)
        yield "partial_rotary_factor", part, (1.0,), "it rotates whole heads"
    if scaling == "yarn":
        yield from _yarn_limits(rope)
    if scaling == "dynamic":
        yield (
            "alpha",
            "null" if not rope.get("alpha") else "a number",
            ("a number",),
            "it does not scale later",
        )
    local = parameters.get("sliding_attention")
    if local is not None:
        why = "layers with a window are never scaled"
        yield "rope_type of sliding_attention", local.get("rope_type", "default"), ("default",), why
    if local is not None and kind != "gemma3_text":
        theta = rope["rope_theta"]
        yield (
            "rope_theta of sliding_attention",
            local["rope_theta"],
            (theta,),
            f"it takes {theta} for all layers",
        )


def _yarn_limits(rope: Rope) -> Iterator[Limit]:
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    factor = rope.get("attention_factor") or usual
    shown = "usual" if math.isclose(factor, usual, rel_tol=1e-6) else factor
    yield "attention_factor", shown, ("usual",), f"it computes {usual:.6g} from the factor"
    for name, value in _YARN.items():
        yield name, rope.get(name, value), (value, None), f"it takes {'none' if value is None else value}"
