"""Causal attention for flat rows: all rows of a micro batch lie one after the other, and none sees another.

Letters: T tokens of all rows, H query heads, K key-value heads, G = H / K, D head size, n tokens of one row, b of one block.

The lengths come as `cu_seq_lens_q` (rows + 1,), transformers' own keyword for packed rows, so that any model written to its
attention interface hands them through. On CPU a row is taken in blocks of queries against the keys before them: no padding,
no repeated keys, no dense T × T mask, and the upper triangle is mostly never computed. On GPU torch's variable-length flash
attention does the same.
"""

from typing import Any, NamedTuple

import torch

from unisono.errors import ModelError

FLAT_ATTENTION = "unisono_flat"
_BLOCK = 128  # queries in a block: measured best of 64, 128, 256 on AVX-512 for head sizes 32 to 128
_KEEP_UP_TO = (
    1024  # longer rows compute their probabilities again in the backward pass instead of keeping n² of them
)


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
        tokens, heads, size = q.shape
        kv = k.shape[1]
        # (K, G, T, D) and (K, T, D): a group of query heads shares one batched product with its key head.
        queries = (q * scale).view(tokens, kv, heads // kv, size).permute(1, 2, 0, 3).contiguous()
        keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out = torch.empty_like(queries)
        kept: list[torch.Tensor] = []
        for block in _blocks(lengths, window):
            p = _probabilities(queries, keys, block, window)
            if block.keep:
                kept.append(p)
            first, stop, low = block.first, block.stop, block.low
            mixed = torch.bmm(p.flatten(1, 2), values[:, low:stop])
            out[:, :, first:stop] = mixed.view(kv, heads // kv, stop - first, size)
        ctx.save_for_backward(queries, keys, values, *kept)
        ctx.settings = (lengths, scale, window)
        return out.permute(2, 0, 1, 3).reshape(tokens, heads, size)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of q, k and v."""
        queries, keys, values, *kept = ctx.saved_tensors
        lengths, scale, window = ctx.settings
        kv, group, tokens, size = queries.shape
        d_out = grad.view(tokens, kv, group, size).permute(1, 2, 0, 3).contiguous()
        d_queries, d_keys, d_values = (
            torch.empty_like(queries),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )
        stored = iter(kept)
        for block in _blocks(lengths, window):
            first, stop, low = block.first, block.stop, block.low
            p = next(stored) if block.keep else _probabilities(queries, keys, block, window)
            p = p.flatten(1, 2)  # (K, G·b, keys)
            d_block = d_out[:, :, first:stop].reshape(kv, -1, size)
            d_values[:, low:stop] += torch.bmm(p.transpose(1, 2), d_block)
            d_p = torch.bmm(d_block, values[:, low:stop].transpose(1, 2))
            d_s = torch._softmax_backward_data(d_p, p, -1, p.dtype)  # noqa: SLF001 - what torch's own softmax calls
            d_queries[:, :, first:stop] = torch.bmm(d_s, keys[:, low:stop]).view(
                kv, group, stop - first, size
            )
            d_keys[:, low:stop] += torch.bmm(
                d_s.transpose(1, 2), queries[:, :, first:stop].reshape(kv, -1, size)
            )
        d_q = (d_queries * scale).permute(2, 0, 1, 3).reshape(tokens, kv * group, size)
        return d_q, d_keys.transpose(0, 1), d_values.transpose(0, 1), None, None, None


class _Block(NamedTuple):
    """Some queries of one row, and the keys that they may see, as positions among all T tokens."""

    first: int
    """The first query."""
    stop: int
    """One past the last query, and past the last key."""
    low: int
    """The first key."""
    keep: bool
    """Whether the probabilities are kept for the backward pass."""
    beyond_window: bool
    """Whether some of the keys are too far back for some of the queries."""


def _blocks(lengths: list[int], window: int | None) -> list[_Block]:
    found = []
    start = 0
    for length in lengths:
        for offset in range(0, length, _BLOCK):
            stop = min(offset + _BLOCK, length)
            low = max(0, offset - window + 1) if window else 0
            beyond = window is not None and stop > window
            found.append(_Block(start + offset, start + stop, start + low, length <= _KEEP_UP_TO, beyond))
        start += length
    return found


def _probabilities(
    queries: torch.Tensor, keys: torch.Tensor, block: _Block, window: int | None
) -> torch.Tensor:
    """(K, G, b, keys): softmax of the scores of a block's queries against its keys, causal."""
    kv, group, _, size = queries.shape
    first, stop, low = block.first, block.stop, block.low
    scores = torch.bmm(queries[:, :, first:stop].reshape(kv, -1, size), keys[:, low:stop].transpose(1, 2))
    scores = scores.view(kv, group, stop - first, stop - low)
    row = torch.arange(first, stop, device=scores.device)[:, None]
    column = torch.arange(first, stop, device=scores.device)[None]
    scores[..., first - low :].masked_fill_(column > row, float("-inf"))
    if block.beyond_window and window is not None:
        column = torch.arange(low, stop, device=scores.device)[None]
        scores.masked_fill_(row - column >= window, float("-inf"))
    return torch.softmax(scores, -1)


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


def refuse_unknown(error: UnsupportedAttentionError) -> ModelError:
    """What a user is told if rows cannot be kept apart at all."""
    return ModelError.of("this model's attention cannot keep rows apart", where="model.path", why=str(error))
