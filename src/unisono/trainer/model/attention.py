"""Causal attention for flat rows: the rows of a micro batch are concatenated, and no row attends to
a different one.

Letters: T tokens of all rows, H query heads, K key-value heads, D head size; R rows and L tokens of
a group.

The lengths come as `cu_seq_lens_q` (rows + 1,), the keyword argument of transformers for packed
rows, so any model that uses its attention interface passes them on. On CPU there is no padding to
the longest row, no repetition of keys, and no dense T × T mask: short rows of similar length form
groups with few pads, and long rows are computed in blocks of queries. On GPU torch's
variable-length flash attention does the same.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from unisono.trainer.model.kernels import BLOCK, KEEP_UP_TO, Heads, PackedAttention, group_rows, load_kernels

FLAT_ATTENTION = "unisono_flat"


def attention_of(base: Any) -> str:
    """The name of the attention that a model of transformers computes."""
    return str(base.config._attn_implementation)  # noqa: SLF001 - transformers 5.23 has only a public setter


def set_attention(base: Any, name: str) -> None:
    """Sets the attention that the decoder of a model computes; that of a vision part stays."""
    is_text = base.config.get_text_config() is base.config
    base.set_attn_implementation(name if is_text else {"": name, "text_config": name})


class UnsupportedAttentionError(Exception):
    """The model needs an attention feature that the flat form does not support; padded rows are
    used then.
    """


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
        """Also takes the lengths of the rows (sum T), the factor of the scores, and the sliding
        window in tokens, if any.
        """
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


# ---- rows with common beginnings

# Both sides of a pair begin with the same prompt, whose tokens go through the model once. Every
# layer but attention treats tokens one by one, and causal attention makes a token depend on those
# before it only. So equal beginnings of two rows have equal hidden states in both, and equal
# gradients add up. Attention itself sees all rows complete: it gathers the common tokens for both,
# and drops the second output. S of the T tokens are computed.


class Merged(NamedTuple):
    """Which tokens are computed."""

    kept: torch.Tensor
    """(S,) int64: their places among the T tokens."""
    place: torch.Tensor
    """(T,) int64: for each token, its own place or that of its equal among the S."""
    again: torch.Tensor
    """(T - S,) int64: the places of the other tokens among the T."""


def merge(lengths: Sequence[int], common: Sequence[int], device: torch.device) -> Merged:
    """Merges common beginnings.

    Args:
        lengths: tokens of each row.
        common: for each row, how many tokens it has in common with the row before it; that row has
            none itself.
        device: of the rows.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)  # (T,)
    starts = np.cumsum([0, *lengths])[:-1]
    positions = np.arange(len(rows)) - starts[rows]
    is_again = positions < np.asarray(common)[rows]
    source = np.where(is_again, starts[rows - 1] + positions, np.arange(len(rows)))
    position = (np.cumsum(~is_again) - 1)[source]
    indices = (np.flatnonzero(~is_again), position, np.flatnonzero(is_again))
    return Merged(*(to_device(values, device) for values in indices))


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values on a device.

    The host does not wait for the copy: from memory that is not pinned it would, and for all work
    of the device before it.
    """
    tensor = torch.from_numpy(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class Spread(torch.autograd.Function):
    """Values of the computed tokens (S, …) for all tokens (T, …); gradients of equal tokens add
    up.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, merged: Merged) -> torch.Tensor:
        """(T, …)."""
        ctx.merged = merged
        return values.index_select(0, merged.place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(S, …)."""
        kept, position, again = ctx.merged
        d_kept = grad.index_select(0, kept)
        # A token occurs twice at most, so no place occurs twice here.
        twice = position.index_select(0, again)
        d_kept.index_copy_(0, twice, d_kept.index_select(0, twice) + grad.index_select(0, again))
        return d_kept, None


class Keep(torch.autograd.Function):
    """Values of all tokens (T, …) for the computed ones (S, …)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, merged: Merged) -> torch.Tensor:
        """(S, …)."""
        ctx.kept, ctx.shape = merged.kept, values.shape
        return values.index_select(0, merged.kept)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(T, …), zero for the other tokens."""
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.kept, grad), None


# ---- the attention function


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
    merged: Merged | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. query (1, H, T, D), key and value (1, K, T,
    D) → (1, T, H, D).

    With `merged` there are S tokens instead of T.

    Raises:
        UnsupportedAttentionError: for soft-capped scores, attention sinks, dropout on
            probabilities, an attention that is not causal, or, on a GPU, float32 or a size of heads
            that the flash kernels do not take.
    """
    unsupported = [
        name for name in ("softcap", "s_aux", "position_bias", "head_mask") if others.get(name) is not None
    ]
    if (
        unsupported
        or dropout
        or not getattr(module, "is_causal", True)
        or cu_seq_lens_q is None
        or query.shape[0] != 1
    ):
        raise UnsupportedAttentionError(
            ", ".join(unsupported) or (f"dropout of {dropout:g}" if dropout else type(module).__name__)
        )
    if query.is_cuda and value.dtype == torch.float32:
        raise UnsupportedAttentionError("bfloat16 or float16 on a GPU")
    if query.is_cuda and not (has_flash(query.shape[3]) and value.shape[3] == query.shape[3]):
        raise UnsupportedAttentionError(f"heads of {query.shape[3]} values, which flash attention lacks")
    if attention_mask is not None:  # transformers makes none for a custom attention
        raise UnsupportedAttentionError("a mask that it makes itself")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    module._flat_settings = (scale, sliding_window, query.shape[-1])  # noqa: SLF001 - for model.decoder
    # Under autocast rotary embeddings give float32 queries and keys beside bfloat16 values; one
    # dtype for all three.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        if merged is not None:
            q, k, v = (Spread.apply(tensor, merged) for tensor in (q, k, v))
        if query.is_cuda:
            heads = Heads(k.shape[1], q.shape[1] // k.shape[1], q.shape[2], scale, sliding_window)
            out = FlashAttention.apply(q, k, v, Ends(cu_seq_lens_q, max_length_q or 0), heads)
        else:
            out = _on_cpu(q, k, v, cu_seq_lens_q.diff().tolist(), scale, sliding_window)
        if merged is not None:
            out = Keep.apply(out, merged)
    return out[None], None


def _on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
) -> Any:
    """(T, H, D) → (T, H, D), in the fastest way that there is for this dtype on this machine."""
    kernels = load_kernels() if q.dtype == torch.bfloat16 and q.shape[2] % 2 == 0 else None
    if kernels is None or k.shape != v.shape:
        return RowAttention.apply(q, k, v, lengths, scale, window)
    heads = Heads(k.shape[1], q.shape[1] // k.shape[1], q.shape[2], scale, window)
    return PackedAttention.apply(q, k, v, tuple(lengths), heads, kernels)


# ---- attention on a GPU

_ALIGNED = 8  # values: the flash kernels read 16 bytes at a time
_LARGEST_HEAD = 256


class Ends(NamedTuple):
    """Where the rows of a micro batch end."""

    tokens: torch.Tensor
    """(R + 1,) int32 on the device: 0, and one past the last token of each row."""
    longest: int


def has_flash(size: int) -> bool:
    """Whether the flash kernels take heads of this size."""
    return size % _ALIGNED == 0 and size <= _LARGEST_HEAD


def flash(
    inputs: Sequence[torch.Tensor], places: Ends, heads: Heads
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Causal attention inside each row by torch's flash kernels (arXiv:2307.08691): the output (T,
    H, D), and what the backward pass needs.
    """
    q, k, v = map(_aligned, inputs)
    # torch 2.13 has a public one, attention.varlen, with an autograd of its own.
    results = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        q, k, v, *_rows_of(places), 0.0, heads.window is None, False, **_settings_of(heads)
    )  # fmt: skip
    return results[0], [q, k, v, *results[:4]]


def flash_backward(
    grad: torch.Tensor, kept: Sequence[torch.Tensor], places: Ends, heads: Heads
) -> Sequence[torch.Tensor]:
    """The gradients of q, k and v."""
    q, k, v, out, sums, state, unused = kept
    with _deterministic():
        return torch.ops.aten._flash_attention_backward(  # noqa: SLF001 - as above
            grad, q, k, v, out, sums, *_rows_of(places), 0.0, heads.window is None, state, unused, **_settings_of(heads)
        )  # fmt: skip


class FlashAttention(torch.autograd.Function):
    """Causal attention inside each row. q (T, H, D), k and v (T, K, D), bfloat16 or float16 → (T,
    H, D).
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: Ends, heads: Heads
    ) -> torch.Tensor:
        """Also takes the ends of the rows."""
        out, kept = flash((q, k, v), places, heads)
        ctx.save_for_backward(*kept)
        ctx.parts = (places, heads)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of q, k and v."""
        return *flash_backward(grad.contiguous(), ctx.saved_tensors, *ctx.parts), None, None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor (T, heads, D), or a copy of it where the flash kernels could not read 16 bytes at
    a time.
    """
    fits = tensor.stride(0) % _ALIGNED == 0 and tensor.data_ptr() % (2 * _ALIGNED) == 0
    return tensor if fits and tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _rows_of(places: Ends) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return places.tokens, places.tokens, places.longest, places.longest


def _settings_of(heads: Heads) -> dict[str, float]:
    window = {"window_size_left": heads.window - 1, "window_size_right": 0} if heads.window else {}
    return {"scale": heads.scale, **window}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Lets the flash kernels add up the gradient of queries in a fixed order, so that a resumed run
    computes the same.

    Not by `torch.use_deterministic_algorithms`, which in torch 2.13 imports the compiler.
    """
    before = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


# ---- the last layer

_TOKENWISE = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def shorten_last_layer(body: Any) -> Callable[[], None] | None:
    """Lets the last layer compute what follows its attention at wanted tokens only; gives what
    undoes it, or None without the usual parts.

    Its attention needs the keys and values of all tokens, but the rest of its work reaches the loss
    from the loss tokens alone. They are the keyword argument `wanted_tokens` of the body's forward,
    (N,) int64 among T, whose result is then (1, N, E).
    """
    layers = getattr(body, "layers", None)
    last: Any = layers[-1] if isinstance(layers, torch.nn.ModuleList) and len(layers) else None
    if last is None or {name for name, _ in last.named_children()} != _TOKENWISE:
        return None
    kind = type(last)

    def forward(
        layer: Any, hidden_states: torch.Tensor, *, wanted_tokens: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        if wanted_tokens is None:
            return kind.forward(layer, hidden_states, **kwargs)
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        hidden_states = (hidden_states + attended).index_select(1, wanted_tokens)
        return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

    # A subclass, not a method of the instance: transformers wraps the forward of a class for
    # gradient checkpointing.
    last.__class__ = type(kind.__name__, (kind,), {"forward": forward})

    def undo() -> None:
        last.__class__ = kind

    return undo


def register() -> None:
    """Registers FLAT_ATTENTION with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLAT_ATTENTION, flat_attention)


class RowGroup(NamedTuple):
    """Short rows that are computed together."""

    index: torch.Tensor
    """(R · L,) int64: the index among the T tokens for each place; pads repeat a token of their
    row.
    """
    pads: torch.Tensor
    """(R · L,) bool: True for pads."""
    real: torch.Tensor
    """The places that are not pads."""
    tokens: torch.Tensor
    """The token at each of these places; each token of the group once."""
    rows: int
    length: int


class Plan(NamedTuple):
    """The groups and long rows of a micro batch."""

    groups: list[RowGroup]
    long_rows: list[tuple[int, int]]
    """First and one past the last token of each."""


@functools.lru_cache(maxsize=8)  # every layer and every backward needs the plan of the same rows
def plan_rows(lengths: tuple[int, ...], *, window: int | None) -> Plan:
    """Assigns rows to groups of similar length, or to the long rows."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups, long_rows = group_rows(lengths, window=window)
    return Plan(
        [_group([(starts[row], lengths[row]) for row in members]) for members in groups],
        [(starts[row], starts[row + 1]) for row in long_rows],
    )


def _group(members: list[tuple[int, int]]) -> RowGroup:
    longest = max(n for _, n in members)
    starts = torch.tensor([start for start, _ in members])[:, None]
    lengths = torch.tensor([n for _, n in members])[:, None]
    offsets = torch.arange(longest)[None]
    index = (starts + torch.minimum(offsets, lengths - 1)).flatten()
    pads = (offsets >= lengths).flatten()
    real = (~pads).nonzero()[:, 0]
    return RowGroup(index, pads, real, index[real], len(members), longest)


def group_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: RowGroup, out: torch.Tensor
) -> torch.Tensor:
    """Writes the output of a group's tokens into `out` (T, H, D); gives its probabilities (K · R, G
    · L, L).

    q (T, H, D) is already scaled; k and v are (T, K, D).
    """
    queries, keys, values = (_gather(tensor, k.shape[1], group) for tensor in (q, k, v))
    length = group.length
    scores = torch.bmm(queries, keys.transpose(1, 2))
    causal = torch.ones(length, length, dtype=torch.bool).triu_(1)
    scores.view(-1, queries.shape[1] // length, length, length).masked_fill_(causal, float("-inf"))
    p = torch.softmax(scores, -1)
    _scatter(torch.bmm(p, values), group, out)
    return p


def group_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    p: torch.Tensor,
    group: RowGroup,
    grads: tuple[torch.Tensor, ...],
) -> None:
    """Writes the gradients of a group's tokens into `grads`, those of q, k and v."""
    kv = inputs[1].shape[1]
    queries, keys, values = (_gather(tensor, kv, group) for tensor in inputs)
    d_out = _gather(grad, kv, group, zero_pads=True)
    d_scores = _softmax_backward(torch.bmm(d_out, values.transpose(1, 2)), p)
    _scatter(torch.bmm(d_scores, keys), group, grads[0])
    _scatter(torch.bmm(d_scores.transpose(1, 2), queries), group, grads[1])
    _scatter(torch.bmm(p.transpose(1, 2), d_out), group, grads[2])


def _gather(tensor: torch.Tensor, kv: int, group: RowGroup, *, zero_pads: bool = False) -> torch.Tensor:
    """(T, heads, D) → (K · R, heads / K · L, D): the tokens of a group, with its pads."""
    taken = tensor.index_select(0, group.index)
    if zero_pads:
        taken.masked_fill_(group.pads[:, None, None], 0.0)
    size = tensor.shape[2]
    taken = taken.view(group.rows, group.length, kv, -1, size).permute(2, 0, 3, 1, 4)
    return taken.reshape(kv * group.rows, -1, size)


def _scatter(tensor: torch.Tensor, group: RowGroup, out: torch.Tensor) -> None:
    """The inverse: (K · R, heads / K · L, D) to the tokens of `out` (T, heads, D), without the
    pads.
    """
    heads, size = out.shape[1:]
    kv = tensor.shape[0] // group.rows
    spread = tensor.view(kv, group.rows, heads // kv, group.length, size).permute(1, 3, 0, 2, 4)
    flat = spread.reshape(group.rows * group.length, heads, size)
    out.index_copy_(0, group.tokens, flat.index_select(0, group.real))


class _RowBlock(NamedTuple):
    """Some queries of a long row, and the keys that they may attend to."""

    first: int
    stop: int
    """One past the last query, and past the last key."""
    low: int
    """The first key."""
    beyond_window: bool
    """Whether some keys are outside the window of some queries."""


def _blocks(length: int, window: int | None) -> Iterator[_RowBlock]:
    for first in range(0, length, BLOCK):
        stop = min(first + BLOCK, length)
        low = max(0, first - window + 1) if window else 0
        yield _RowBlock(first, stop, low, window is not None and stop > window)


def row_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, out: torch.Tensor
) -> list[torch.Tensor]:
    """Writes the output of one long row into `out` (n, H, D); gives the probabilities to keep for
    the backward pass.
    """
    queries = _spread(q, k.shape[1])
    keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    kept = []
    mixed = torch.empty_like(queries)
    for block in _blocks(len(q), window):
        p = _probabilities(queries, keys, block, window)
        if len(q) <= KEEP_UP_TO:
            kept.append(p)
        part = torch.bmm(p, values[:, block.low : block.stop])
        mixed[:, :, block.first : block.stop] = part.view(*queries.shape[:2], -1, queries.shape[3])
    out.copy_(_gathered(mixed))
    return kept


def row_backward(
    grad: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    kept: Iterator[torch.Tensor],
    window: int | None,
    grads: tuple[torch.Tensor, ...],
) -> None:
    """Writes the gradients of one long row into `grads`, those of q, k and v; takes the kept
    probabilities from `kept`.
    """
    q, k, v = inputs
    kv = k.shape[1]
    queries, d_out = _spread(q, kv), _spread(grad, kv)
    keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    d_queries, d_keys, d_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for block in _blocks(len(q), window):
        first, stop, low = block.first, block.stop, block.low
        p = next(kept) if len(q) <= KEEP_UP_TO else _probabilities(queries, keys, block, window)
        d_block = d_out[:, :, first:stop].reshape(kv, -1, q.shape[2])
        d_values[:, low:stop] += torch.bmm(p.transpose(1, 2), d_block)
        d_scores = _softmax_backward(torch.bmm(d_block, values[:, low:stop].transpose(1, 2)), p)
        d_queries[:, :, first:stop] = torch.bmm(d_scores, keys[:, low:stop]).view_as(
            d_queries[:, :, first:stop]
        )
        d_keys[:, low:stop] += torch.bmm(
            d_scores.transpose(1, 2), queries[:, :, first:stop].reshape(kv, -1, q.shape[2])
        )
    for target, gradient in zip(
        grads, (_gathered(d_queries), d_keys.transpose(0, 1), d_values.transpose(0, 1)), strict=True
    ):
        target.copy_(gradient)


def _probabilities(
    queries: torch.Tensor, keys: torch.Tensor, block: _RowBlock, window: int | None
) -> torch.Tensor:
    """(K, G · b, keys): softmax of the scores of a block's queries against its keys, causal."""
    kv, group, _, size = queries.shape
    first, stop, low = block.first, block.stop, block.low
    scores = torch.bmm(queries[:, :, first:stop].reshape(kv, -1, size), keys[:, low:stop].transpose(1, 2))
    shaped = scores.view(kv, group, stop - first, stop - low)
    row = torch.arange(first, stop)[:, None]
    shaped[..., first - low :].masked_fill_(torch.arange(first, stop)[None] > row, float("-inf"))
    if block.beyond_window and window is not None:
        shaped.masked_fill_(row - torch.arange(low, stop)[None] >= window, float("-inf"))
    return torch.softmax(scores, -1)


def _softmax_backward(grad: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch._softmax_backward_data(grad, p, -1, p.dtype)  # noqa: SLF001 - torch 2.13: called by its softmax


def _spread(tensor: torch.Tensor, kv: int) -> torch.Tensor:
    """(n, H, D) → (K, G, n, D): a group of query heads shares one batched product with its key
    head.
    """
    n, heads, size = tensor.shape
    return tensor.view(n, kv, heads // kv, size).permute(1, 2, 0, 3).contiguous()


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """(K, G, n, D) → (n, H, D)."""
    kv, group, n, size = tensor.shape
    return tensor.permute(2, 0, 1, 3).reshape(n, kv * group, size)
