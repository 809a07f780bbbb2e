"""What llama.cpp computes by values of its own, whatever config.json says.

A file has no key for such a value, or none that llama.cpp reads: it would be read back as it was
written, and answer otherwise. The list follows what llama.cpp does with each architecture, and
tests run it.
"""

import math
from collections.abc import Iterator
from typing import Any

Rope = dict[str, Any]  # transformers' rope_parameters
Limit = tuple[str, Any, tuple[Any, ...], str]
"""A key of config.json, its value, those for which llama.cpp computes the same, and what it
does.
"""

GEMMAS = ("gemma", "gemma2", "gemma3_text")
_LLAMAS = ("llama", "mistral")
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_WINDOWED_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""Layers with a window: all but each second, or sixth."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
"""A Gemma with so many layers is the one of 27 billion parameters for llama.cpp, whose attention
has another scale.
"""
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}


def find_difference(kind: str, config: Any) -> tuple[str, str, str] | None:
    """The first key of a config whose value llama.cpp does not compute, the value as it is shown,
    and what llama.cpp does.

    Args:
        kind: the `model_type` of an architecture that can be written.
        config: of the text model.
    """
    for key, value, expected, why in (*_rope_limits(kind, config), *_limits(kind, config)):
        if value not in expected:
            return key, "in this order" if key == "layer_types" else str(value), why
    return None


def longest_context(kind: str, config: Any) -> int:
    """The longest text, in tokens, for which llama.cpp computes the same.

    It has windows for Gemmas only. Up to the length of a window a text does not need one.
    """
    window, context = getattr(config, "sliding_window", None), int(config.max_position_embeddings)
    types = getattr(config, "layer_types", None) or ()
    is_windowed = window and kind not in GEMMAS and ("sliding_attention" in types or not types)
    return min(context, int(window or context)) if is_windowed else context


def _limits(kind: str, config: Any) -> Iterator[Limit]:
    activation = "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"
    function = "gelu_pytorch_tanh" if kind in GEMMAS else "silu"
    yield activation, getattr(config, activation), (function,), f"it computes {function}"
    if kind != "llama":
        biases = getattr(config, "attention_bias", False)
        yield "attention_bias", biases, (False,), "it reads no such biases"
    both_ways = getattr(config, "use_bidirectional_attention", None)
    yield "use_bidirectional_attention", both_ways, (None, False), "a token sees those before it"
    if kind in _WINDOWED_EVERY:
        yield from _gemma_limits(kind, config)


def _gemma_limits(kind: str, config: Any) -> Iterator[Limit]:
    count, period = int(config.num_hidden_layers), _WINDOWED_EVERY[kind]
    heads = int(config.num_attention_heads)
    scalar = int(config.hidden_size) // heads if count == _LAYERS_OF_27B[kind] else int(config.head_dim)
    why = f"it computes the scale of attention from the other sizes, as for {scalar}"
    yield "query_pre_attn_scalar", config.query_pre_attn_scalar, (scalar,), why
    types = tuple("sliding_attention" if (i + 1) % period else "full_attention" for i in range(count))
    why = f"one in {period} layers, the last, has no window"
    yield "layer_types", tuple(config.layer_types), (types,), why
    for name in _SOFTCAPS:
        value = getattr(config, name, None)
        if kind == "gemma2":
            yield name, "null" if value is None else "a number", ("a number",), "it always caps the logits"
        else:
            yield name, value, (None,), "it never caps the logits"


def _rope_limits(kind: str, config: Any) -> Iterator[Limit]:
    parameters = config.rope_parameters or {}
    rope = parameters.get("full_attention", parameters)
    scaling = rope.get("rope_type", "default")
    known = ["default", "linear", *(["llama3"] if kind in _LLAMAS else [])]
    known += ["yarn"] if kind != "gemma3_text" else []  # whose layers with a window would have it, too
    yield "rope_type", scaling, tuple(known), f"{', '.join(known)} can be written"
    if kind != "phi3":
        part = rope.get("partial_rotary_factor", 1.0)
        yield "partial_rotary_factor", part, (1.0,), "it rotates whole heads"
    if scaling == "yarn":
        yield from _yarn_limits(rope)
    if kind == "gemma3_text":
        local_type = parameters["sliding_attention"].get("rope_type", "default")
        yield (
            "rope_type of sliding_attention",
            local_type,
            ("default",),
            "layers with a window are never scaled",
        )


def _yarn_limits(rope: Rope) -> Iterator[Limit]:
    usual = 0.1 * math.log(rope["factor"]) + 1.0
    factor = rope.get("attention_factor") or usual
    shown = "usual" if math.isclose(factor, usual, rel_tol=1e-6) else factor
    yield "attention_factor", shown, ("usual",), f"it computes {usual:.6g} from the factor"
    for name, value in _YARN.items():
        yield name, rope.get(name, value), (value, None), f"it takes {'none' if value is None else value}"
