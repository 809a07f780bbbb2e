"""What kernels.c does for CPUs, for bfloat16 tensors on NVIDIA GPUs: passes over memory in Triton,
attention by torch's flash kernels.

Each function reads and writes every value once. Triton compiles them at their first call, in a
second or two, and keeps them in its cache. Letters: T tokens, E hidden size, H query heads, K
key-value heads, D head size, F intermediate size, N rows of logits, V vocabulary.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from unisono.trainer.model.attention import Ends, flash, flash_backward
from unisono.trainer.model.kernels import AdamWFigures, Heads


@triton.jit
def _norm_rows(x, weight, eps, width, y, factors, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    scaled = value * factor
    if not WIDE:  # where the model's own norm rounds
        scaled = scaled.to(tl.bfloat16).to(tl.float32)
    of_weight = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, (of_weight * scaled).to(tl.bfloat16), mask=inside)
    tl.store(factors + row, factor)


@triton.jit(do_not_specialize=["rows", "programs"])  # of every micro batch different: one compilation for all
def _norm_gradients(
    grad, x, weight, factors, rows, programs, width, d_x, d_weight, TRAINED: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program takes every n-th row, and adds up its part of the weight's gradient."""
    at = tl.arange(0, BLOCK)
    inside = at < width
    of_weight = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, rows, programs):
        row = tl.program_id(0).to(tl.int64) + first
        offsets, within = row * width + at, inside & (row < rows)
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        scaled = tl.load(x + offsets, mask=within, other=0.0).to(tl.float32) * factor
        g = tl.load(grad + offsets, mask=within, other=0.0).to(tl.float32)
        if TRAINED:
            total += g * scaled
        g = g * of_weight
        gradient = factor * (g - scaled * (tl.sum(g * scaled, 0) / width))
        tl.store(d_x + offsets, gradient.to(d_x.dtype.element_ty), mask=within)
    if TRAINED:
        tl.store(d_weight + tl.program_id(0).to(tl.int64) * width + at, total, mask=inside)


@triton.jit
def _gate_values(gate, up, stride, width, out, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(tl.bfloat16).to(tl.float32)
    tl.store(out + row * width + at, (silu * u).to(tl.bfloat16), mask=inside)


@triton.jit
def _gate_gradients(grad, gate, up, grad_stride, stride, width, out, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * grad_stride + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = (g * sigmoid).to(tl.bfloat16).to(tl.float32)
    tl.store(out + row * width + at, (silu * u).to(tl.bfloat16), mask=inside)
    tl.store(up + row * stride + at, (d * silu).to(tl.bfloat16), mask=inside)
    d_silu = (d * u).to(tl.bfloat16).to(tl.float32)
    d_gate = d_silu * sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(gate + row * stride + at, d_gate.to(tl.bfloat16), mask=inside)


@triton.jit
def _rotate_heads(
    source, target, cosine, sine, source_stride, target_stride, heads, size,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads of one token; `BACK` is the transposed rotation, of gradients."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)
    half = size // 2
    of_half = at < half
    cos_1 = tl.load(cosine + token * size + at, mask=of_half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cosine + token * size + half + at, mask=of_half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sine + token * size + at, mask=of_half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sine + token * size + half + at, mask=of_half, other=0.0).to(tl.float32)[None, :]
    inside = (head < heads) & of_half[None, :]
    offsets = head * size + at[None, :]
    first = tl.load(source + token * source_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + token * source_stride + offsets + half, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        turned_1, turned_2 = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    else:
        turned_1, turned_2 = first * cos_1 - second * sin_1, second * cos_2 + first * sin_2
    to = target + token * target_stride + offsets
    tl.store(to, turned_1.to(tl.bfloat16), mask=inside)
    tl.store(to + half, turned_2.to(tl.bfloat16), mask=inside)


@triton.jit
def _cross_entropy_rows(logits, labels, factor, width, losses, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """A label below 0 has no loss, and no gradient."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    label = tl.load(labels + row)
    counts = label >= 0
    of_label = tl.load(start + tl.where(counts, label, 0)).to(tl.float32)
    at = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):  # online softmax (arXiv:1805.02867) in each lane
        value = tl.load(start + first + at, mask=first + at < width, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        total = total * tl.exp(largest - larger) + tl.exp(value - larger)
        largest = larger
    highest = tl.max(largest, 0)
    normalizer = highest + tl.log(tl.sum(total * tl.exp(largest - highest), 0))
    tl.store(losses + row, tl.where(counts, normalizer - of_label, 0.0))
    if GRADIENT:
        times = tl.where(counts, tl.load(factor), 0.0)
        tl.debug_barrier()  # every thread has read the logit of the label before its gradient replaces it
        for first in range(0, width, BLOCK):
            inside = first + at < width
            value = tl.load(start + first + at, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(value - normalizer) - tl.where(first + at == label, 1.0, 0.0)
            tl.store(start + first + at, (gradient * times).to(tl.bfloat16), mask=inside)


class CudaKernels:
    """The functions on tensors: bfloat16 where nothing else is said, the last dimension contiguous,
    on the GPU.
    """

    has_products = True

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of the rows of x (T, E), and the factor of each (T,) float32."""
        return _norm(x, weight, eps, wide=False)

    def norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of x (T, E)."""
        return _norm_backward(grad, x, weight, factor, trained=False)[0]

    def wide_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm in bfloat16 of the rows of x (T, E) float32 with a float32 weight, and the factor
        of each (T,) float32.
        """
        return _norm(x, weight, eps, wide=True)

    def wide_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x (T, E) and of the weight (E,), float32."""
        return _norm_backward(grad, x, weight, factor, trained=True)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """(T, F): silu(gate) * up; both (T, F) with rows equally far apart."""
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        _gate_values[_grid(gate)](gate, up, gate.stride(0), gate.shape[1], out, BLOCK=_COLUMNS)
        return out

    def gate_backward(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The forward's output (T, F) once more; the gradients replace gate and up."""
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        strides = (grad.stride(0), gate.stride(0))
        _gate_gradients[_grid(gate)](grad, gate, up, *strides, gate.shape[1], out, BLOCK=_COLUMNS)
        return out

    def has_low_rank(self, rank: int, width: int) -> bool:
        """Never: cuBLAS computes the products of adapters."""
        del rank, width
        return False

    def attention(
        self,
        inputs: Sequence[torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        places: Ends,
        heads: Heads,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output (T, H, D), and what the backward pass needs; q (T, H, D) and k (T, K, D) are
        rotated in place first.

        Args:
            inputs: q, k, and v (T, K, D).
            rope: cosines and sines (T, D).
            places: of the rows.
            heads: the shape of the layer.
        """
        for part in inputs[:2]:
            _rotate(part, part, rope, back=False)
        return flash(inputs, places, heads)

    def attention_backward(
        self,
        grad: torch.Tensor,
        kept: Sequence[torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        places: Ends,
        heads: Heads,
        grads: Sequence[torch.Tensor],
    ) -> None:
        """Writes the gradients of q, k and v from that of the output; `kept` is what `attention`
        gave.
        """
        *turned, d_v = flash_backward(grad, kept, places, heads)
        for source, target in zip(turned, grads, strict=False):
            _rotate(source, target, rope, back=True)
        grads[2].copy_(d_v)

    def cross_entropy(
        self, logits: torch.Tensor, labels: torch.Tensor, factor: float | torch.Tensor
    ) -> torch.Tensor:
        """(N,) float32: the losses of logits (N, V), which their gradients times `factor` replace,
        unless that is 0.

        Labels below 0 have none.

        Args:
            logits: (N, V).
            labels: (N,) int64.
            factor: a number, or () float32, which the host does not read.
        """
        losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        has_gradient = isinstance(factor, torch.Tensor) or factor != 0
        if len(logits):
            if not isinstance(factor, torch.Tensor):
                factor = torch.full((), factor, device=logits.device)
            parts = (logits, labels, factor, logits.shape[1], losses)
            _cross_entropy_rows[(len(logits),)](*parts, GRADIENT=has_gradient, BLOCK=4096, num_warps=8)
        return losses

    def adamw(
        self,
        values: torch.Tensor,
        grad: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        figures: AdamWFigures,
    ) -> None:
        """An update by AdamW of values (n,) float32, with their gradient (n,) float32 and moments
        (n,) bfloat16.
        """
        if len(values):
            _adamw_values[(triton.cdiv(len(values), 1024),)](
                values, grad, *moments, len(values), *figures, BLOCK=1024
            )


@triton.jit
def _hash(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["seed"])
def _adamw_values(
    values, grad, m, v, count, decay, share1, share2, step_size, scale, eps, seed, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(values + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0)
    first = tl.load(m + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    first += (g - first) * share1
    second += (g * g - second) * share2
    noise = _hash(at.to(tl.uint32) ^ seed.to(tl.uint32))
    low = (first.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) >> 16
    high = (second.to(tl.uint32, bitcast=True) + (noise >> 16)) >> 16
    tl.store(m + at, low.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    tl.store(v + at, high.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    updated = value * decay - step_size * (first / (tl.sqrt(second) / scale + eps))
    tl.store(values + at, updated, mask=inside)


_COLUMNS = 1024  # values of one row that a program of the gate takes


def _grid(rows: torch.Tensor) -> tuple[int, int]:
    return len(rows), triton.cdiv(rows.shape[1], _COLUMNS)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, wide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_rows[(rows,)](x, weight, eps, width, y, factors, WIDE=wide, BLOCK=block, num_warps=_warps(block))
    return y, factors


def _norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor, *, trained: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    d_x = torch.empty_like(x)
    # As many programs as run at once, so that few partial sums are added up, in an order that is
    # always the same.
    programs = min(rows, (2 if trained else 8) * _processors(x.device))
    parts = torch.empty(programs if trained else 0, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_gradients[(programs,)](
        grad, x, weight, factors, rows, programs, width, d_x, parts,
        TRAINED=trained, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return d_x, parts.sum(0)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _rotate(
    source: torch.Tensor, target: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], *, back: bool
) -> None:
    """Writes `source` (T, heads, D), rotated by cosines and sines (T, D), into `target`; both may
    be the same.
    """
    tokens, heads, size = source.shape
    each = min(8, triton.next_power_of_2(heads))
    _rotate_heads[(tokens, triton.cdiv(heads, each))](
        source, target, *rope, source.stride(0), target.stride(0), heads, size,
        BACK=back, HEADS=each, HALF=triton.next_power_of_2(size // 2),
    )  # fmt: skip
