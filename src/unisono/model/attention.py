"""Causal attention for flat rows: all rows of a micro batch lie one after the other, and none sees another.

Letters: T tokens of all rows, H query heads, K key-value heads, D head size.

The lengths come as `cu_seq_lens_q` (rows + 1,), transformers' own keyword for packed rows, so that any model written to its
attention interface hands them through. On CPU the products are those of `model.row_kernels`: no padding to the longest row, no repeated
keys, no dense T × T mask. On GPU torch's variable-length flash attention does the same.
"""

from typing import Any

import torch

from unisono.model.row_kernels import group_backward, group_forward, plan_rows, row_backward, row_forward

FLAT_ATTENTION = "unisono_flat"


class UnsupportedAttentionError(Exception):
    """The model wants of its attention what the flat form does not do; the loader then takes padded rows."""


class RowAttention(torch.autograd.Function):
    """Causal attention inside each row. q (T, H, D), k and v (T, K, D) → (T, H, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: list[int],
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Takes the lengths of the rows (sum T), the factor of the scores, and the sliding window in tokens, if any."""
        plan = plan_rows(tuple(lengths), window=window)
        scaled = q * scale
        out = torch.empty_like(scaled)
        kept = [group_forward(scaled, k, v, group, out) for group in plan.groups]
        for start, stop in plan.long_rows:
            kept += row_forward(scaled[start:stop], k[start:stop], v[start:stop], window, out[start:stop])
        ctx.save_for_backward(scaled, k, v, *kept)
        ctx.settings = (plan, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of q, k and v."""
        scaled, k, v, *kept = ctx.saved_tensors
        plan, scale, window = ctx.settings
        inputs, grads = (scaled, k, v), tuple(torch.empty_like(tensor) for tensor in (scaled, k, v))
        stored = iter(kept)
        for group in plan.groups:
            group_backward(grad, inputs, next(stored), group, grads)
        for start, stop in plan.long_rows:
            of_row = tuple(tensor[start:stop] for tensor in inputs)
            row_backward(
                grad[start:stop], of_row, stored, window, tuple(tensor[start:stop] for tensor in grads)
            )
        return grads[0].mul_(scale), grads[1], grads[2], None, None, None


def flat_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. query (1, H, T, D), key and value (1, K, T, D) → (1, T, H, D).

    Raises:
        UnsupportedAttentionError: for soft-capped scores, attention sinks, dropout on probabilities, or an attention that is not causal.
    """
    wanted = [
        name for name in ("softcap", "s_aux", "position_bias", "head_mask") if others.get(name) is not None
    ]
    if (
        wanted
        or dropout
        or not getattr(module, "is_causal", True)
        or cu_seq_lens_q is None
        or query.shape[0] != 1
    ):
        raise UnsupportedAttentionError(
            ", ".join(wanted) or f"{type(module).__name__} with dropout {dropout}"
        )
    del attention_mask  # none is made for an attention that transformers does not know
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Under autocast rotary embeddings give float32 queries and keys beside bfloat16 values; one dtype for all three.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if query.is_cuda:
            out = _flash(q, k, v, cu_seq_lens_q, max_length_q or 0, scale, sliding_window)
        else:
            out = RowAttention.apply(q, k, v, cu_seq_lens_q.diff().tolist(), scale, sliding_window)
    return out[None], None


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """torch's variable-length flash attention, (T, H, D) → (T, H, D)."""
    from torch.nn.attention.varlen import varlen_attn

    left = window - 1 if window else -1
    return varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def register() -> None:
    """Makes FLAT_ATTENTION known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLAT_ATTENTION, flat_attention)
