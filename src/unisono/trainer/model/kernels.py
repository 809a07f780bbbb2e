"""Functions of kernels.c, and causal attention with them: tokens are packed so that all products
are batched.

They are built once for a machine by its C compiler, kept in unisono's cache, and called on bfloat16
tensors in host memory. Without a compiler `load_kernels` gives None, and torch's own operations do
the same work, slower. A processor with AVX512_BF16 computes attention as one function instead, and
the products with the low rank of adapters; with AMX torch's products may be faster, so they are
kept. Letters: T tokens of all rows, H query heads, K key-value heads, G = H / K, D head size;
others are those of kernels.c.
"""

import ctypes
import functools
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.guard.facts import read_environment

_SOURCE = Path(__file__).with_name("kernels.c")
COMPILER = "cc"
# NaN and infinities stay what they are.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_WIDE_VECTORS = "-mprefer-vector-width=512"
_LONGEST_BUILD_S = 60
BLOCK = 128  # queries in a block, and maximum tokens of a short row: the fastest of 64, 128, 256 on AVX-512
KEEP_UP_TO = 1024  # longer rows recompute probabilities in the backward pass instead of keeping n² of them
_GROUP_TOKENS = 4096  # in a group, with pads: its probabilities should stay in the cache
_FEW_ROWS = 16  # fewer are left to torch: most of their time would be spent packing the weight
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_RATIO = 1.25  # of the longest to the shortest row of a group


@functools.cache
def load_kernels() -> "Kernels | None":
    """The functions, or None where they cannot be built: no C compiler, not Linux, no folder to
    write to.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        return Kernels(ctypes.CDLL(str(_built())))
    except (OSError, subprocess.SubprocessError):
        return None


def _built() -> Path:
    """The library for this machine: that in the cache, or a new one.

    It has the threads of torch, or one if the compiler cannot use them.
    """
    flags = _flags_of_cpu()
    options = [*_FLAGS, *([_WIDE_VECTORS] if "avx512f" in flags.split() else [])]
    runtime = _openmp_of_torch()
    parts = [" ".join([*options, *(path.name for path in runtime)]).encode(), flags.encode()]
    digest = hashlib.sha256(b"\n".join([_SOURCE.read_bytes(), *parts]))
    target = read_environment().cache_dir / "kernels" / f"{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # ranks may build at the same time
        try:
            made = _compiled(Path(folder), ["-fopenmp", *options], runtime)
        except subprocess.CalledProcessError:
            made = _compiled(Path(folder), ["-fopenmp-simd", *options], [])
        made.replace(target)
    return target


def _openmp_of_torch() -> list[Path]:
    """GNU's OpenMP library that torch has loaded, if any.

    A second one, such as the compiler's own, would have threads of its own.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sorted({Path(line.split(maxsplit=5)[-1]) for line in lines if "/libgomp" in line})[:1]


def _compiled(folder: Path, options: list[str], libraries: list[Path]) -> Path:
    """The library, linked with these; a name that none of them has is an error."""
    code, made = folder / "made.o", folder / "made.so"
    of_code: list[str | Path] = [*options, "-c", _SOURCE, "-o", code]
    for arguments in (of_code, ["-shared", "-Wl,-z,defs", code, *libraries, "-lm", "-o", made]):
        subprocess.run([COMPILER, *arguments], check=True, capture_output=True, timeout=_LONGEST_BUILD_S)
    return made


def _flags_of_cpu() -> str:
    """What the processor supports: a home directory may be shared by machines of several kinds."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = ("flags", "Features", "model name")
    flags = dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in names)
    return " ".join(flags)


class AdamWFigures(NamedTuple):
    """The numbers of an update by AdamW (arXiv:1711.05101) whose moments are in bfloat16, see
    `train.optim.CompactAdamW`.
    """

    decay: float  # factor of the values
    share1: float  # of the gradient in the new first moment, 1 - beta1
    share2: float  # of its square in the new second moment, 1 - beta2
    step_size: float  # learning rate, corrected for the bias of the first moment
    scale: float  # divides the root of the second moment, for its bias
    eps: float  # added to that
    seed: int  # of the hash of each element, below 2³¹


class Kernels:
    """The functions on tensors: bfloat16 where nothing else is said, the last dimension contiguous,
    on the CPU.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # Functions of their own for attention and adapters, instead of torch's products.
        self.has_products = hasattr(library, "attention") and "amx_bf16" not in _flags_of_cpu().split()

    def _call(self, name: str, *values: Any) -> None:
        function = getattr(self._library, name)
        if function.argtypes is None:
            function.argtypes = [_c_type(value) for value in values]
        function(*[value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values])

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of the rows of x (T, E), and the factor of each (T,) float32."""
        y, factor = torch.empty_like(x), torch.empty(x.shape[0])
        self._call("norm_forward", x, weight, eps, *x.shape, y, factor)
        return y, factor

    def norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of x (T, E)."""
        d_x = torch.empty_like(x)
        self._call("norm_backward", grad, x, weight, factor, *x.shape, d_x)
        return d_x

    def wide_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm in bfloat16 of the rows of x (T, E) float32 with a float32 weight, and the factor
        of each (T,) float32.
        """
        y, factor = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape[0])
        self._call("wide_norm_forward", x, weight, eps, *x.shape, y, factor)
        return y, factor

    def wide_norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x (T, E) and of the weight (E,), float32."""
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        self._call("wide_norm_backward", grad, x, weight, factor, *x.shape, d_x, d_weight)
        return d_x, d_weight

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """(T, F): silu(gate) * up; both (T, F) with rows equally far apart."""
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._call("gate_forward", gate, up, gate.stride(0), *gate.shape, out)
        return out

    def gate_backward(self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The forward's output (T, F) once more; the gradients replace gate and up."""
        out = torch.empty(gate.shape, dtype=gate.dtype)
        stride = gate.stride(0)
        self._call("gate_backward", grad, gate, up, stride, *gate.shape, gate, up, stride, out)
        return out

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
        self._call("adamw", values, grad, *moments, len(values), *figures)

    def dequantize(self, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """(out, in) from int8 values (out, in), each row times its float32 scale (out,)."""
        weight = torch.empty(packed.shape, dtype=torch.bfloat16)
        self._call("dequantize", packed.contiguous(), scale, *packed.shape, weight)
        return weight

    def dequantize_groups(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        places: torch.Tensor | None,
        bits: int,
    ) -> torch.Tensor:
        """(out, in) of the bytes of codes, and of float32 scales and uint8 zero points (out,
        groups); see `quantization.Groups`.
        """
        weight = torch.empty(len(packed), packed.shape[1] * 8 // bits, dtype=torch.bfloat16)
        order = 0 if places is None else places
        self._call(
            "dequantize_groups",
            packed.contiguous(),
            scales,
            zeros,
            order,
            *weight.shape,
            zeros.shape[1],
            bits,
            weight,
        )
        return weight

    def pack(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        places: tuple[torch.Tensor, torch.Tensor],
        packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Writes q (T, H, D), k and v (T, K, D), rotated by float32 cosines and sines (T, D) and
        scaled, into their packed layout.
        """
        q, k, v = inputs
        strides = [tensor.stride(0) for tensor in inputs]
        sizes = (*q.shape[:2], k.shape[1], q.shape[2])
        self._call("pack", q, k, v, *strides, *rope, scale, *places, *sizes, *packed)

    def unpack(
        self,
        packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        places: tuple[torch.Tensor, torch.Tensor],
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Writes the gradients of q, k and v, with rows equally far apart, from those of what was
        packed.
        """
        q, k, _ = grads
        sizes = (*q.shape[:2], k.shape[1], q.shape[2])
        self._call("unpack", *packed, *rope, scale, *places, *sizes, *grads, q.stride(0))

    def pack_heads(
        self,
        flat: torch.Tensor,
        packed: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor],
        *,
        kv: int,
        back: bool,
    ) -> None:
        """Copies flat (T, H, D) to the packed layout of queries, or back."""
        tokens, heads, size = flat.shape
        self._call("pack_heads", flat, packed, *places, tokens, heads, kv, size, int(back))

    def softmax(self, scores: torch.Tensor, *, first: int, group: int, window: int | None) -> None:
        """Causal softmax of scores (batch, queries * G, keys) in place; `first` is the first
        query's place among the keys, or their number: of all.
        """
        self._call("softmax", scores, *scores.shape, first, group, window or 0)

    def softmax_backward(
        self, grad: torch.Tensor, p: torch.Tensor, *, first: int, group: int, window: int | None
    ) -> None:
        """Replaces the gradient of probabilities by that of scores."""
        self._call("softmax_backward", grad, p, *grad.shape, first, group, window or 0)

    def attention(
        self,
        inputs: tuple[torch.Tensor, ...],
        rope: tuple[torch.Tensor, torch.Tensor],
        begins: torch.Tensor,
        heads: "Heads",
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output (T, H, D) of q (T, H, D), k and v (T, K, D), rotated by `rope`, and what the
        backward pass needs.
        """
        out = torch.empty(inputs[0].shape, dtype=torch.bfloat16)
        sums = torch.empty(2, out.shape[0] * out.shape[1])
        self._call("attention", *_attention_values(inputs, rope, begins, heads), out, *sums)
        return out, [*inputs, out, sums]

    def attention_backward(
        self,
        grad: torch.Tensor,
        kept: Sequence[torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        begins: torch.Tensor,
        heads: "Heads",
        grads: tuple[torch.Tensor, ...],
    ) -> None:
        """Writes the gradients of q, k and v, with rows equally far apart, from that of the output;
        `kept` is what `attention` gave.
        """
        *inputs, out, sums = kept
        values = _attention_values(inputs, rope, begins, heads)
        self._call("attention_backward", grad, *values, out, *sums, *grads, grads[0].stride(0))

    def has_low_rank(self, rank: int, width: int) -> bool:
        """Whether it has the three functions below for an adapter's B (width, rank), or A (rank,
        width).
        """
        return self.has_products and rank % 8 == 0 and width % 32 == 0

    def add_low_rank(self, low: torch.Tensor, bs: Sequence[torch.Tensor], y: torch.Tensor) -> None:
        """Adds low @ Bᵀ of each adapter, B (width, r) float32, to its columns of y (T, widths); low
        is (T, ranks).
        """
        self._call("add_low_rank", low, low.stride(0), _adapters(bs), len(bs), len(y), y, y.stride(0))

    def project_low_rank(self, y: torch.Tensor, bs: Sequence[torch.Tensor], low: torch.Tensor) -> None:
        """Writes y @ B of each adapter, B (width, r) float32, from its columns of y (T, widths)
        into those of low (T, ranks).
        """
        self._call("project_low_rank", y, y.stride(0), _adapters(bs), len(bs), len(y), low, low.stride(0))

    def multiply(
        self, x: torch.Tensor, layers: Sequence["LayerWeights"], y: torch.Tensor, low: torch.Tensor
    ) -> None:
        """Writes x Wᵀ + low Bᵀ of each layer, x (T, in), into its columns of y (T, widths), and x
        s·Aᵀ of all into low (T, ranks).
        """
        of = _layers(layers)
        self._call(
            "multiply", x, x.stride(0), x.shape[1], of, len(of), len(x), y, y.stride(0), low, low.stride(0)
        )

    def multiply_back(
        self, d_y: torch.Tensor, layers: Sequence["LayerWeights"], d_low: torch.Tensor, d_x: torch.Tensor
    ) -> None:
        """Writes d_y B of each layer, from its columns of d_y (T, widths), into those of d_low (T,
        ranks), and d_y W + d_low s·A, summed over the layers, into d_x (T, in).
        """
        of = _layers(layers)
        widths = (d_low, d_low.stride(0), d_x, d_x.stride(0))
        self._call("multiply_back", d_y, d_y.stride(0), d_x.shape[1], of, len(of), len(d_y), *widths)

    def low_rank_gradients(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        out: tuple[torch.Tensor, torch.Tensor],
        bs: Sequence[torch.Tensor],
        scales: Sequence[float],
    ) -> list[torch.Tensor]:
        """The gradients of all A, then of all B, float32, of adapters with the same input.

        Args:
            x: their input (T, in), and the gradient of s·A·x (T, ranks).
            out: the gradient of their outputs (T, widths), and s·A·x (T, ranks).
            bs: the B (width, r) float32 of each.
            scales: s of each.
        """
        (inputs, d_low), (d_out, low) = x, out
        ranks = [b.shape[1] for b in bs]
        d_a, d_b = torch.empty(sum(ranks), inputs.shape[1]), torch.empty(sum(b.numel() for b in bs))
        of_a = (d_low, d_low.stride(0), inputs, inputs.stride(0), inputs.shape[1])
        of_b = (low, low.stride(0), d_out, d_out.stride(0))
        of = (_adapters(bs), len(bs), (ctypes.c_float * len(scales))(*scales), len(inputs))
        self._call("low_rank_gradients", *of_a, *of_b, *of, d_a, d_b)
        parts = zip(d_b.split([b.numel() for b in bs]), bs, strict=True)
        return [*d_a.split(ranks), *(part.view(b.shape) for part, b in parts)]

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, factor: float) -> torch.Tensor:
        """(N,) float32: the losses of logits (N, V), which their gradients times `factor` replace,
        unless that is 0.
        """
        losses = torch.empty(logits.shape[0])
        self._call("cross_entropy", logits, labels, *logits.shape, factor, losses)
        return losses


def _attention_values(
    inputs: Sequence[torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    begins: torch.Tensor,
    heads: "Heads",
) -> list[torch.Tensor | int | float]:
    strides = [tensor.stride(0) for tensor in inputs]
    sizes = (heads.kv * heads.group, heads.kv, heads.size, heads.window or 0)
    return [*inputs, *strides, *rope, heads.scale, begins, len(begins) - 1, *sizes]


class LayerWeights(NamedTuple):
    """A linear layer with an adapter."""

    weight: torch.Tensor
    """(out, in)."""
    a: torch.Tensor
    """(r, in) float32."""
    b: torch.Tensor
    """(out, r) float32."""
    scale: float


def _without_adapter(x: torch.Tensor, weight: torch.Tensor) -> tuple[list[LayerWeights], torch.Tensor]:
    out, in_ = weight.shape
    none = torch.empty(0)
    return [LayerWeights(weight, none.view(0, in_), none.view(out, 0), 1.0)], x.new_empty(len(x), 0)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (T, in) times the transposed weight (out, in) → (T, out), by `Kernels` if they can, else by
    torch.
    """
    kernels = _of_product(x, weight)
    if kernels is None:
        return x @ weight.t()
    layers, low = _without_adapter(x, weight)
    kernels.multiply(x, layers, y := x.new_empty(len(x), len(weight)), low)
    return y


def product_back(d_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """d_y (T, out) times the weight (out, in) → (T, in), by `Kernels` if they can, else by
    torch.
    """
    kernels = _of_product(d_y, weight)
    if kernels is None:
        return d_y @ weight
    layers, low = _without_adapter(d_y, weight)
    kernels.multiply_back(d_y, layers, low, d_x := d_y.new_empty(len(d_y), weight.shape[1]))
    return d_x


def _of_product(x: torch.Tensor, weight: torch.Tensor) -> Kernels | None:
    """For two bfloat16 matrices on a CPU that no gradient is wanted of, here: a product in C has
    none.
    """
    if (
        x.device.type != "cpu"
        or x.ndim != 2
        or len(x) < _FEW_ROWS
        or not x.dtype == weight.dtype == torch.bfloat16
    ):
        return None
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if wants_gradient or x.stride(1) != 1 or not weight.is_contiguous() or type(weight) not in _PLAIN:
        return None
    kernels = load_kernels()
    fits = kernels is not None and all(kernels.has_low_rank(0, size) for size in weight.shape)
    return kernels if fits else None


class _Adapter(ctypes.Structure):
    """`Adapter` of kernels.c."""

    _fields_ = (
        ("b", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


def _adapters(bs: Sequence[torch.Tensor]) -> "ctypes.Array[_Adapter]":
    return (_Adapter * len(bs))(*(_Adapter(b.data_ptr(), *b.shape, None, None, 1.0) for b in bs))


def _layers(layers: Sequence[LayerWeights]) -> "ctypes.Array[_Adapter]":
    return (_Adapter * len(layers))(
        *(
            _Adapter(b.data_ptr(), *b.shape, weight.data_ptr(), a.data_ptr(), scale)
            for weight, a, b, scale in layers
        )
    )


def _c_type(value: Any) -> Any:
    """The type of an argument: an integer, a float, or an address (of a tensor, an array)."""
    if isinstance(value, int):
        return ctypes.c_int64
    return ctypes.c_float if isinstance(value, float) else ctypes.c_void_p


def group_rows(lengths: Sequence[int], *, window: int | None) -> tuple[list[list[int]], list[int]]:
    """Short rows in groups of similar length, and long rows, each by its number; empty rows are in
    none.
    """
    longest_short = BLOCK if window is None else min(BLOCK, window)
    short = sorted(
        (row for row, n in enumerate(lengths) if 0 < n <= longest_short), key=lambda row: lengths[row]
    )
    groups: list[list[int]] = []
    for row in short:
        fits = groups and lengths[row] <= max(8.0, _MAX_RATIO * lengths[groups[-1][0]])
        if fits and (len(groups[-1]) + 1) * lengths[row] <= _GROUP_TOKENS:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups, [row for row, n in enumerate(lengths) if n > longest_short]


class Heads(NamedTuple):
    """The shape of an attention layer."""

    kv: int
    group: int
    size: int
    scale: float
    window: int | None


@functools.lru_cache(maxsize=8)
def begins_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """(rows + 1,) int64: the first token of each row, and T."""
    return torch.tensor([0, *lengths]).cumsum(0)


def place_rows(lengths: tuple[int, ...], heads: Heads, kernels: Kernels) -> Any:
    """What attention on a CPU needs to know of the rows: where each begins, if it is one function;
    else where tokens are packed.

    The function's threads divide the key-value heads of all rows among them, and torch's products
    divide a single one as well.
    """
    if kernels.has_products and heads.size % 32 == 0 and len(lengths) * heads.kv >= torch.get_num_threads():
        return begins_of(lengths)
    return pack_rows(lengths, heads.kv, heads.window)


class PackedLayout(NamedTuple):
    """Where the tokens of a micro batch are in the packed layout of kernels.c."""

    start: torch.Tensor
    """(T,) int64."""
    length: torch.Tensor
    """(T,) int64."""
    groups: list[tuple[int, int, int]]
    """First place, rows, places of each row."""
    places: int
    """T and the pads."""


@functools.lru_cache(maxsize=8)  # every layer and every backward needs those of the same rows
def pack_rows(lengths: tuple[int, ...], kv: int, window: int | None) -> PackedLayout:
    """Assigns places to the tokens of rows; rows of similar length, if short, form groups with
    pads.
    """
    groups, long_rows = group_rows(lengths, window=window)
    start, length = (torch.zeros(sum(lengths), dtype=torch.int64) for _ in range(2))
    begins = [0]
    for n in lengths:
        begins.append(begins[-1] + n)
    packed_groups, offset = [], 0
    for rows in [*groups, *([row] for row in long_rows)]:
        longest = max(lengths[row] for row in rows)
        packed_groups.append((offset, len(rows), longest))
        for row in rows:
            tokens = slice(begins[row], begins[row + 1])
            start[tokens] = offset * kv + torch.arange(lengths[row])
            length[tokens] = longest
            offset += longest
    return PackedLayout(start, length, packed_groups, offset)


class _QueryBlock(NamedTuple):
    """Queries of one group that are computed together: views of what is packed."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    other: torch.Tensor
    """Where the output goes, or its gradient, in the layout of queries."""
    low: int
    high: int
    first: int
    """The first query's place among the keys low to high."""
    is_whole: bool
    """Whether all queries of the group are in this block."""
    keeps: bool
    """Whether its probabilities are kept for the backward pass."""


def _blocks(packed: PackedLayout, heads: Heads, tensors: tuple[torch.Tensor, ...]) -> Any:
    """The blocks of all groups, in order: views of queries, keys, values and one more tensor like
    queries.
    """
    for offset, rows, longest in packed.groups:
        part = slice(offset * heads.kv, (offset + rows * longest) * heads.kv)
        of_queries = [
            tensor.view(-1, heads.group * heads.size)[part].view(rows * heads.kv, -1, heads.size)
            for tensor in (tensors[0], tensors[3])
        ]
        of_keys = [
            tensor.view(-1, heads.size)[part].view(rows * heads.kv, longest, heads.size)
            for tensor in tensors[1:3]
        ]
        width = longest if rows > 1 else BLOCK
        for first in range(0, longest, width):
            stop = min(first + width, longest)
            low = max(0, first - heads.window + 1) if heads.window else 0
            lines = slice(first * heads.group, stop * heads.group)
            yield _QueryBlock(
                of_queries[0][:, lines],
                of_keys[0],
                of_keys[1],
                of_queries[1][:, lines],
                low,
                stop,
                first - low,
                stop - first == longest,
                longest <= KEEP_UP_TO,
            )


def _probabilities(block: _QueryBlock, heads: Heads, kernels: Kernels) -> torch.Tensor:
    """(rows · K, queries · G, keys)."""
    keys = block.keys[:, block.low : block.high]
    scores = torch.bmm(block.queries, keys.transpose(1, 2))
    kernels.softmax(scores, first=block.first, group=heads.group, window=heads.window)
    return scores


def _attend(
    packed: PackedLayout, heads: Heads, kernels: Kernels, tensors: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """Writes the output into the last of queries, keys, values, output; gives the probabilities to
    keep.
    """
    kept = []
    for block in _blocks(packed, heads, tensors):
        p = _probabilities(block, heads, kernels)
        if block.keeps:
            kept.append(p)
        _product(p, block.values[:, block.low : block.high], block.other)
    return kept


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Writes a @ b into `out`."""
    if out.is_contiguous():
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


def _attend_backward(
    packed: PackedLayout,
    heads: Heads,
    kernels: Kernels,
    tensors: tuple[torch.Tensor, ...],
    kept: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and values, packed, from queries, keys, values and the
    output's gradient.
    """
    adds_up = any(rows == 1 and longest > BLOCK for _, rows, longest in packed.groups)
    d_queries = torch.empty_like(tensors[0])
    d_keys, d_values = (
        (torch.zeros_like if adds_up else torch.empty_like)(tensor) for tensor in tensors[1:3]
    )
    stored = iter(kept)
    blocks = _blocks(packed, heads, tensors)
    grads = _blocks(packed, heads, (d_queries, d_keys, d_values, d_queries))
    for block, grad in zip(blocks, grads, strict=True):
        keys = slice(block.low, block.high)
        p = next(stored) if block.keeps else _probabilities(block, heads, kernels)
        d_scores = torch.bmm(block.other, block.values[:, keys].transpose(1, 2))
        kernels.softmax_backward(d_scores, p, first=block.first, group=heads.group, window=heads.window)
        _product(d_scores, block.keys[:, keys], grad.queries)
        if block.is_whole:
            _product(p.transpose(1, 2), block.other, grad.values)
            _product(d_scores.transpose(1, 2), block.queries, grad.keys)
        else:
            grad.values[:, keys] += torch.bmm(p.transpose(1, 2), block.other)
            grad.keys[:, keys] += torch.bmm(d_scores.transpose(1, 2), block.queries)
    return d_queries, d_keys, d_values


class PackedAttention(torch.autograd.Function):
    """Causal attention inside each row. q (T, H, D), k and v (T, K, D), bfloat16 → (T, H, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: tuple[int, ...],
        heads: Heads,
        kernels: Kernels,
    ) -> torch.Tensor:
        """Also takes the lengths of the rows (sum T)."""
        places = place_rows(lengths, heads, kernels)
        rope = _no_rotation(len(q), heads.size)
        inputs = tuple(tensor if _is_dense(tensor) else tensor.contiguous() for tensor in (q, k, v))
        out, kept = attend(inputs, rope, places, heads, kernels)
        ctx.save_for_backward(*kept)
        ctx.parts = (places, heads, kernels)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of q, k and v."""
        places, heads, kernels = ctx.parts
        tokens, kv = len(grad), heads.kv
        joint = grad.new_empty(tokens, (kv * heads.group + 2 * kv) * heads.size)
        sizes = [kv * heads.group * heads.size, kv * heads.size, kv * heads.size]
        grads = tuple(part.unflatten(1, (-1, heads.size)) for part in joint.split(sizes, 1))
        rope = _no_rotation(tokens, heads.size)
        attend_backward(grad, ctx.saved_tensors, rope, places, heads, kernels, grads)
        return *grads, None, None, None


@functools.lru_cache(maxsize=2)
def _no_rotation(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (T, D) of no rotation."""
    return torch.ones(tokens, size), torch.zeros(tokens, size)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the heads of a token (T, heads, D) lie one after the other."""
    return tensor.stride()[1:] == (tensor.shape[2], 1)


def attend(
    inputs: tuple[torch.Tensor, ...],
    rope: tuple[torch.Tensor, torch.Tensor],
    places: Any,
    heads: Heads,
    kernels: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output (T, H, D), and what the backward pass needs.

    Args:
        inputs: q (T, H, D), k and v (T, K, D).
        rope: cosines and sines (T, D), float32 on a CPU.
        places: of the rows.
        heads: the shape of the layer.
        kernels: the functions.
    """
    if not isinstance(places, PackedLayout):
        results: tuple[torch.Tensor, list[torch.Tensor]] = kernels.attention(inputs, rope, places, heads)
        return results
    tokens, dtype = len(inputs[0]), inputs[0].dtype
    make = torch.empty if places.places == tokens else torch.zeros
    sizes = [heads.kv * heads.group, heads.kv, heads.kv]
    tensors = [make(places.places * n * heads.size, dtype=dtype) for n in sizes]
    queries, keys, values = tensors
    of_tokens = (places.start, places.length)
    q, k, v = inputs
    kernels.pack((q, k, v), rope, heads.scale, of_tokens, (queries, keys, values))
    mixed = torch.empty_like(queries)
    kept = _attend(places, heads, kernels, (queries, keys, values, mixed))
    out = torch.empty(tokens, sizes[0], heads.size, dtype=dtype)
    kernels.pack_heads(out, mixed, of_tokens, kv=heads.kv, back=True)
    return out, [queries, keys, values, *kept]


def attend_backward(
    grad: torch.Tensor,
    kept: Sequence[torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    places: Any,
    heads: Heads,
    kernels: Any,
    grads: tuple[torch.Tensor, ...],
) -> None:
    """Writes the gradients of q, k and v into `grads`, from that of the output, (T, H, D), and what
    `attend` kept.
    """
    grad = grad.contiguous()
    if not isinstance(places, PackedLayout):
        kernels.attention_backward(grad, kept, rope, places, heads, grads)
        return
    inputs = tuple(kept[:3])
    of_tokens = (places.start, places.length)
    make = torch.empty_like if places.places == len(grad) else torch.zeros_like
    d_mixed = make(inputs[0])
    kernels.pack_heads(grad, d_mixed, of_tokens, kv=heads.kv, back=False)
    gradients = _attend_backward(places, heads, kernels, (*inputs, d_mixed), list(kept[3:]))
    kernels.unpack(gradients, rope, heads.scale, of_tokens, grads)
