# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The functions of the fast layers for CUDA devices, in Triton: each is one pass over memory where torch's operations take several.

They do what `kernels.c` does on CPUs, on bfloat16 tensors with float32 arithmetic; matrix products and attention are torch's own. Triton comes with
torch's builds for CUDA, and compiles them at their first call, into its own cache. With TRITON_INTERPRET=1 they run on CPU tensors, which is how
they are tested without a device. Letters: T tokens, E hidden size, F intermediate size, H query heads, K key-value heads, D head size, N loss tokens, V vocabulary.
"""

import functools

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # of a row in one program of the gate
_VOCABULARY = 4096  # logits in flight in one program of the cross entropy


@functools.cache
def load_triton_kernels(device: torch.device) -> "TritonKernels | None":
    """The functions, or None where they cannot be compiled, or give other values than torch."""
    kernels = TritonKernels(device.type)
    x = torch.linspace(-2, 3, 96, device=device).view(2, 48).bfloat16()
    try:
        found, _ = kernels.norm(x, torch.ones_like(x[0]), 1e-6)
    except Exception:  # noqa: BLE001 - what Triton, the C compiler that it calls, or the driver raises
        return None
    wide = x.float()
    wanted = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    return kernels if torch.allclose(found.float(), wanted, rtol=0.02) else None


class TritonKernels:
    """The functions on tensors: bfloat16 where nothing else is said, the last dimension contiguous, on one type of device."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of the rows of x (T, E), and the factor of each (T,) float32."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        factor = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        _norm[(x.shape[0],)](
            x, weight, y, factor, x.stride(0), x.shape[1], eps, block, num_warps=_warps(block)
        )
        return y, factor

    def norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of x (T, E)."""
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        block = triton.next_power_of_2(x.shape[1])
        strides = (grad.stride(0), x.stride(0))
        _norm_backward[(x.shape[0],)](
            grad, x, weight, factor, found, *strides, x.shape[1], block, num_warps=_warps(block)
        )
        return found

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """(T, F): silu(gate) * up; both (T, F) with rows equally far apart."""
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grid = (gate.shape[0], triton.cdiv(gate.shape[1], _COLUMNS))
        _gate[grid](gate, up, out, gate.stride(0), gate.shape[1], _COLUMNS)
        return out

    def gate_backward(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The forward's output (T, F) once more; the gradients replace gate and up."""
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grid = (gate.shape[0], triton.cdiv(gate.shape[1], _COLUMNS))
        _gate_backward[grid](grad, gate, up, out, grad.stride(0), gate.stride(0), gate.shape[1], _COLUMNS)
        return out

    def rotate(
        self, joint: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], *, heads: int, kv: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (T, H, D), k and v (T, K, D) from the first columns of a joint product (T, …); q and k rotated by cosines and sines (T, D)."""
        made = [joint.new_empty(len(joint), count, size) for count in (heads, kv, kv)]
        self._rotate(joint, rope, (made[0], made[1], made[2]), back=False)
        return made[0], made[1], made[2]

    def rotate_back(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        joint: torch.Tensor,
    ) -> None:
        """Writes the gradients of q, k and v before the rotation into the first columns of `joint` (T, …)."""
        q, k, v = (grad.contiguous() for grad in grads)
        self._rotate(joint, rope, (q, k, v), back=True)

    def _rotate(
        self,
        joint: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        back: bool,
    ) -> None:
        tokens, heads, size = parts[0].shape
        kv = parts[1].shape[1]
        blocks = [triton.next_power_of_2(count) for count in (heads, kv, size // 2)]
        cosine, sine = (part.contiguous() for part in rope)
        _rotation[(tokens,)](
            joint, cosine, sine, *parts, joint.stride(0), heads, kv, size // 2, *blocks, back
        )

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, factor: float) -> torch.Tensor:
        """(N,) float32: the losses of logits (N, V), which their gradients times `factor` replace, unless that is 0."""
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        block = min(_VOCABULARY, triton.next_power_of_2(logits.shape[1]))
        _cross_entropy[(logits.shape[0],)](
            logits, labels, losses, logits.stride(0), factor, logits.shape[1], factor != 0, block, num_warps=8
        )
        return losses


def _warps(block: int) -> int:
    """Warps for a program with so many values: 8 to 16 for a thread."""
    return min(16, max(1, block // 512))


@triton.jit
def _norm(x, weight, y, factor, stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    values = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    own = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + place, (values * own * scale).to(tl.bfloat16), mask=inside)
    tl.store(factor + row, own)


@triton.jit
def _norm_backward(
    grad, x, weight, factor, found, grad_stride, stride, size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    own = tl.load(factor + row)
    normal = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32) * own
    d_normal = tl.load(grad + row * grad_stride + place, mask=inside, other=0.0).to(tl.float32)
    d_normal *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    d_x = (d_normal - normal * (tl.sum(d_normal * normal, 0) / size)) * own
    tl.store(found + row * size + place, d_x.to(tl.bfloat16), mask=inside)


@triton.jit
def _gate(gate, up, out, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + place, (g / (1.0 + tl.exp(-g)) * u).to(tl.bfloat16), mask=inside)


@triton.jit
def _gate_backward(grad, gate, up, out, grad_stride, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * grad_stride + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    silu = g * sigmoid
    tl.store(out + row * size + place, (silu * u).to(tl.bfloat16), mask=inside)
    d_gate = d * u * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(gate + row * stride + place, d_gate.to(tl.bfloat16), mask=inside)
    tl.store(up + row * stride + place, (d * silu).to(tl.bfloat16), mask=inside)


@triton.jit
def _rotation(
    joint, cosine, sine, q, k, v, stride, heads, kv, half,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    size = 2 * half
    own = joint + token * stride
    column = tl.arange(0, HALF)[None, :]
    low = token * size + column
    c1 = tl.load(cosine + low, mask=column < half, other=0.0).to(tl.float32)
    c2 = tl.load(cosine + low + half, mask=column < half, other=0.0).to(tl.float32)
    s1 = tl.load(sine + low, mask=column < half, other=0.0).to(tl.float32)
    s2 = tl.load(sine + low + half, mask=column < half, other=0.0).to(tl.float32)
    head = tl.arange(0, HEADS)[:, None]
    _turn(own, q + token * heads * size, c1, c2, s1, s2, head, column, heads, half, BACK)
    head = tl.arange(0, KV)[:, None]
    _turn(own + heads * size, k + token * kv * size, c1, c2, s1, s2, head, column, kv, half, BACK)
    inside = (head < kv) & (column < half)
    place = head * size + column
    source, target = own + (heads + kv) * size, v + token * kv * size
    if BACK:
        source, target = target, source
    tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)
    tl.store(target + place + half, tl.load(source + place + half, mask=inside), mask=inside)


@triton.jit
def _turn(
    joint, part, c1, c2, s1, s2, head, column, heads, half, BACK: tl.constexpr
):  # fmt: skip
    """Rotates the heads of one token, from `joint` to `part`; or gradients back, from `part` to `joint`."""
    inside = (head < heads) & (column < half)
    place = head * (2 * half) + column
    if BACK:
        x1 = tl.load(part + place, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(part + place + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(joint + place, (x1 * c1 + x2 * s2).to(tl.bfloat16), mask=inside)
        tl.store(joint + place + half, (x2 * c2 - x1 * s1).to(tl.bfloat16), mask=inside)
    else:
        x1 = tl.load(joint + place, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(joint + place + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(part + place, (x1 * c1 - x2 * s1).to(tl.bfloat16), mask=inside)
        tl.store(part + place + half, (x2 * c2 + x1 * s2).to(tl.bfloat16), mask=inside)


@triton.jit
def _cross_entropy(
    logits, labels, losses, stride, factor, SIZE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * stride
    wanted = tl.load(labels + row)
    picked = tl.load(own + wanted).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    # A maximum and a sum for each lane; what lies beyond the row counts as good as nothing in the end.
    largest = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SIZE, BLOCK):
        values = tl.load(own + first + lane, mask=first + lane < SIZE, other=-1e30).to(tl.float32)
        now = tl.maximum(largest, values)
        total = total * tl.exp(largest - now) + tl.exp(values - now)
        largest = now
    top = tl.max(largest, 0)
    normaliser = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(losses + row, normaliser - picked)
    if GRADIENT:
        for first in range(0, SIZE, BLOCK):
            inside = first + lane < SIZE
            values = tl.load(own + first + lane, mask=inside, other=-1e30).to(tl.float32)
            share = tl.exp(values - normaliser)
            share = tl.where(first + lane == wanted, share - 1.0, share)
            tl.store(own + first + lane, (share * factor).to(tl.bfloat16), mask=inside)
