"""A quicker way through peft's LoRA layers. The modules and their parameters stay peft's; only the arithmetic is one step.

    y = x Wᵀ + (x (s·A)ᵀ) Bᵀ        (LoRA, arXiv:2106.09685)

peft casts x to float32 for A and back, keeps each intermediate for autograd, and adds in a pass of its own. Here W is frozen, so its
gradient and those passes are never made.
"""

import types
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear


class LoraProduct(torch.autograd.Function):
    """x (…, in), W (out, in) frozen, bias (out,) or None frozen, A (r, in), B (out, r), scaling s → (…, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """The product in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        down, up = (a * scaling).to(x.dtype), b.to(x.dtype)
        low = rows @ down.t()
        out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        out.addmm_(low, up.t())
        ctx.save_for_backward(rows, low, weight, down, up)
        ctx.scaling, ctx.shape = scaling, x.shape
        ctx.dtypes = (a.dtype, b.dtype)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x, A and B."""
        rows, low, weight, down, up = ctx.saved_tensors
        d_out = grad.reshape(-1, weight.shape[0])
        d_low = d_out @ up
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = d_out @ weight
            d_x.addmm_(d_low, down)
            d_x = d_x.view(ctx.shape)
        d_a = (d_low.t() @ rows).to(ctx.dtypes[0]).mul_(ctx.scaling)
        return d_x, None, None, d_a, (d_out.t() @ low).to(ctx.dtypes[1]), None


def hasten_lora(model: torch.nn.Module) -> int:
    """Gives every plain LoRA layer of a peft model the quick way; gives the number of them.

    Layers with dropout, DoRA, several adapters, or a base that is not torch's Linear keep peft's own.
    """
    count = 0
    for layer in model.modules():
        if isinstance(layer, LoraLinear) and _is_plain(layer):
            layer.forward = types.MethodType(_quick_forward, layer)
            count += 1
    return count


def _is_plain(layer: LoraLinear) -> bool:
    names = list(layer.lora_A)
    return (
        len(names) == 1
        and list(layer.active_adapters) == names
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], torch.nn.Identity)
        and type(layer.get_base_layer()) is torch.nn.Linear
        and layer.lora_B[names[0]].bias is None
        and not layer.fan_in_fan_out
    )


def _quick_forward(layer: LoraLinear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        return LoraLinear.forward(layer, x, *args, **kwargs)
    (name,) = layer.lora_A
    base = layer.get_base_layer()
    if x.dtype != base.weight.dtype:  # autocast is on, or a float32 norm came before
        x = x.to(base.weight.dtype)
    return LoraProduct.apply(
        x, base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    )
