"""Functions of kernels.c: built once for a machine by its C compiler, kept in unisono's cache, called on bfloat16 tensors in host memory.

Letters are those of kernels.c. Without a compiler `load_kernels` gives None, and torch's own operations do the same work, slower.
"""

import ctypes
import functools
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from unisono.facts import read_environment

_SOURCE = Path(__file__).with_name("kernels.c")
_COMPILER = "cc"
_FLAGS = (
    *(
        "-O3",
        "-march=native",
        "-fno-math-errno",
        "-fno-trapping-math",
    ),  # NaN and infinities stay what they are
    *("-fopenmp", "-shared", "-fPIC"),
)
_WIDE_VECTORS = "-mprefer-vector-width=512"
_LONGEST_BUILD_S = 60


@functools.cache
def load_kernels() -> "Kernels | None":
    """The functions, or None where they cannot be built: no C compiler, not Linux, no folder to write to."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return Kernels(ctypes.CDLL(str(_built())))
    except (OSError, subprocess.SubprocessError):
        return None


def has_kernels(dtype: str, device: torch.device) -> bool | None:
    """Whether a computation on text uses them; None where it would not in any case: other dtypes and devices."""
    return load_kernels() is not None if dtype == "bfloat16" and device.type == "cpu" else None


def _built() -> Path:
    """The library for this machine: that in the cache, or a new one."""
    flags = _flags_of_cpu()
    options = [*_FLAGS, *([_WIDE_VECTORS] if "avx512f" in flags.split() else [])]
    digest = hashlib.sha256(b"\n".join([_SOURCE.read_bytes(), " ".join(options).encode(), flags.encode()]))
    target = read_environment().cache_dir / "kernels" / f"{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # ranks may build at the same time
        made = Path(folder) / "made.so"
        command = [_COMPILER, *options, str(_SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_BUILD_S)
        made.replace(target)
    return target


def _flags_of_cpu() -> str:
    """What the processor supports: a home directory may be shared by machines of several kinds."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    wanted = ("flags", "Features", "model name")
    found = dict.fromkeys(line for line in lines if line.split("\t")[0].split(":")[0].strip() in wanted)
    return " ".join(found)


class Kernels:
    """The functions on tensors: bfloat16, the last dimension contiguous, on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _call(self, name: str, *values: torch.Tensor | int | float) -> None:
        getattr(self._library, name)(*(_c_value(value) for value in values))

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of the rows of x (T, E), and the factor of each (T,) float32."""
        y, factor = torch.empty_like(x), torch.empty(x.shape[0])
        self._call("norm_forward", x, weight, eps, *x.shape, y, factor)
        return y, factor

    def norm_backward(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of x (T, E)."""
        found = torch.empty_like(x)
        self._call("norm_backward", grad, x, weight, factor, *x.shape, found)
        return found

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

    def pack(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rope: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        places: tuple[torch.Tensor, torch.Tensor],
        packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Writes q (T, H, D), k and v (T, K, D), rotated and scaled, into their packed layout."""
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
        """Writes the gradients of q, k and v, with rows equally far apart, from those of what was packed."""
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
        """Causal softmax of scores (batch, queries * G, keys) in place; `first` is the first query's place among the keys."""
        self._call("softmax", scores, *scores.shape, first, group, window or 0)

    def softmax_backward(
        self, grad: torch.Tensor, p: torch.Tensor, *, first: int, group: int, window: int | None
    ) -> None:
        """Replaces the gradient of probabilities by that of scores."""
        self._call("softmax_backward", grad, p, *grad.shape, first, group, window or 0)

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor, factor: float) -> torch.Tensor:
        """(N,) float32: the losses of logits (N, V), which their gradients times `factor` replace, unless that is 0."""
        losses = torch.empty(logits.shape[0])
        self._call("cross_entropy", logits, labels, *logits.shape, factor, losses)
        return losses


def _c_value(value: torch.Tensor | int | float) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
