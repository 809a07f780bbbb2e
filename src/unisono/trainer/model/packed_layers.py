"""Linear layers on a CPU with their weights in the order in which oneDNN's products read them.

torch's own order costs a copy of the weight in each product of bfloat16, and the product of float32
is that of MKL, which on a processor of AMD does not use AVX-512. Products of 1 to 256 rows take
0.4 to 0.7 of the time (float32), or 0.6 to 0.9 (bfloat16). The packed weights are copies,
because adapters read the others (DoRA, merging), so they are made only where twice as much memory
is available.

The operators are those that torch.compile uses in the same place (`_inductor/mkldnn_lowerings.py`,
torch 2.13).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from unisono.guard.facts.limits import available_memory


@contextlib.contextmanager
def packed_layers(model: torch.nn.Module) -> Iterator[None]:
    """A context in which the model computes with packed weights, where this machine has such
    products and the memory. The weights must not change in it, and there must be no gradients.
    """
    layers = [module for module in model.modules() if _is_plain(module)]
    usable = {dtype for dtype in {layer.weight.dtype for layer in layers} if _has_products(dtype)}
    packed = [layer for layer in layers if layer.weight.dtype in usable]
    if 2 * sum(layer.weight.nbytes for layer in packed) > available_memory():
        packed = []
    for module in packed:
        module.forward = _PackedForward(module.weight, module.bias)
    try:
        yield
    finally:
        for module in packed:
            del module.forward


class _PackedForward:
    """The forward of one layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001 - no public name
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - no public name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in) → (…, out)."""
        out: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return out


def _is_plain(module: Any) -> bool:
    """Whether it is torch's linear layer on a CPU, with nothing around it."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    return type(weight) is torch.nn.Parameter and weight.device.type == "cpu"


def _has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in a dtype, with the values of torch; found by trying."""
    x, weight = (torch.linspace(-1, 1, rows * 64).to(dtype).view(rows, 64) for rows in (3, 32))
    try:
        # It would be emulated.
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
            return False
        product = _PackedForward(weight, None)(x)
    except (RuntimeError, AttributeError):  # not in this build of torch
        return False
    return torch.allclose(product, torch.nn.functional.linear(x, weight), rtol=0.02, atol=0.02)
