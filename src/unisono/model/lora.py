"""LoRA layers in one product: base weight and adapter together, with gradients for the input and the adapter alone.

Letters: W (out, in) a frozen base weight, A (r, in) and B (out, r) of its adapter, s the adapter's scaling: the layer computes W + s·B·A.
"""

import types
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from unisono.model.quantization import adapted_layers, dequantized, state_of


class LoraProduct(torch.autograd.Function):
    """x (…, in), W, bias (out,) or None frozen, A, B, s → (…, out).

    W is a dense weight, with the state None; or a packed one with the state of its layer, which is dequantized for each product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        state: Any,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """The product in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        down, up = (a * scaling).to(x.dtype), b.to(x.dtype)
        low = rows @ down.t()
        out = torch.nn.functional.linear(rows, _dense(weight, state, x.dtype), bias)
        out.addmm_(low, up.t())
        ctx.save_for_backward(rows, low, weight, down, up)
        ctx.state, ctx.scaling, ctx.shape = state, scaling, x.shape
        ctx.dtypes = (a.dtype, b.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x, A and B."""
        rows, low, weight, down, up = ctx.saved_tensors
        d_out = grad.reshape(-1, grad.shape[-1])
        d_low = d_out @ up
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = d_out @ _dense(weight, ctx.state, d_out.dtype)
            d_x.addmm_(d_low, down)
            d_x = d_x.view(ctx.shape)
        d_a = (d_low.t() @ rows).to(ctx.dtypes[0]).mul_(ctx.scaling)
        return d_x, None, None, None, d_a, (d_out.t() @ low).to(ctx.dtypes[1]), None


def _dense(weight: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a product. A quantized one is a new tensor: nothing may keep it."""
    return weight if state is None else dequantized(weight, state, dtype)


def speed_up_lora(model: torch.nn.Module) -> int:
    """Sets the fast forward on every plain LoRA layer of a peft model; gives the number of these layers.

    Layers with dropout, DoRA, several adapters, or a base that is neither torch's Linear nor quantized keep peft's forward.
    """
    quantized = {id(layer) for layer in adapted_layers(model)}
    count = 0
    for layer in model.modules():
        if id(layer) in quantized and _is_plain(layer):
            layer.forward = types.MethodType(_forward_of_quantized, layer)
        elif isinstance(layer, LoraLinear) and _is_linear(layer) and _is_plain(layer):
            layer.forward = types.MethodType(_forward_of_linear, layer)
        else:
            continue
        count += 1
    return count


def _is_plain(layer: Any) -> bool:
    """Whether the adapter is one pair of matrices, and nothing else."""
    names = list(layer.lora_A)
    return (
        len(names) == 1
        and list(layer.active_adapters) == names
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], torch.nn.Identity)
        and layer.lora_B[names[0]].bias is None
    )


def _is_linear(layer: LoraLinear) -> bool:
    return type(layer.get_base_layer()) is torch.nn.Linear and not layer.fan_in_fan_out


def _forward_of_linear(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        return LoraLinear.forward(layer, x, *args, **kwargs)
    (name,) = layer.lora_A
    base = layer.get_base_layer()
    if x.dtype != base.weight.dtype:  # under autocast, or after a float32 norm
        x = x.to(base.weight.dtype)
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    return LoraProduct.apply(x, base.weight, None, base.bias, a, b, layer.scaling[name])


def _forward_of_quantized(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        found: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return found
    (name,) = layer.lora_A
    base = layer.get_base_layer()
    dtype = base.compute_dtype
    bias = None if base.bias is None else base.bias.to(dtype)
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    out = LoraProduct.apply(x.to(dtype), base.weight, state_of(base), bias, a, b, layer.scaling[name])
    return out.to(x.dtype)
