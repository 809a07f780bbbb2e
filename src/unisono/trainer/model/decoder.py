"""Attention and MLP of a decoder layer, each as one function with few products and passes over
memory, in bfloat16.

For frozen bfloat16 weights with LoRA or without (evaluation, reference models), and for full
fine-tuning of float32 weights under autocast, whose roundings are kept: products in bfloat16, norms
and what is added up over the layers in float32.

Letters: T tokens, E hidden size, H query heads, K key-value heads, G = H / K, D head size, F
intermediate size; W (out, in) a weight, A (r, in) and B (out, r) of its adapter, s the adapter's
scaling.

Whether a model has such layers is not looked up in a list of names: their parts are recognized by
name and type, and `model.forward` keeps the fast layers only if the model's outputs stay the same.
"""

import copy
import ctypes
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch.distributed.tensor import DTensor

from unisono.trainer.model.attention import Ends
from unisono.trainer.model.kernels import (
    Heads,
    Kernels,
    LayerWeights,
    attend,
    attend_backward,
    place_rows,
    product,
    product_back,
)
from unisono.trainer.model.layers import is_quick, kernels_of, own_gradient
from unisono.trainer.model.quantization import dequantized, state_of

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class Scratch:
    """Memory for the bfloat16 copy of one joined weight at a time.

    What it gives is valid until it is asked again.
    """

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, dtype=torch.bfloat16, device=device)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """(rows, columns), with any values."""
        if self._flat.numel() < rows * columns:
            self._flat = self._flat.new_empty(rows * columns)
        return self._flat[: rows * columns].view(rows, columns)

    def release(self) -> None:
        """Gives the memory back."""
        self._flat = self._flat.new_empty(0)

    def joined(self, weights: list[torch.Tensor], *, more: int = 0) -> torch.Tensor:
        """(out + more, in): copies of weights with the same input one below the other, and `more`
        rows with any values.
        """
        sizes = [len(weight) for weight in weights]
        joined = self.take(sum(sizes) + more, weights[0].shape[1])
        for part, weight in zip(joined.split([*sizes, more]), weights, strict=False):
            part.copy_(weight.detach())
        return joined


class FusedLinear:
    """Adapted layers with the same input: one product x @ [W; s·A]ᵀ gives the outputs of all base
    weights and of all A.

    The base weights become views of the joined weight, so it takes no memory of its own.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        bases = [layer.get_base_layer() for layer in layers]
        names = [next(iter(layer.lora_A)) for layer in layers]
        # The modules, not their weights, which may be replaced: finding them in a layer takes
        # longer than all else of a call.
        self._bases = bases
        self._downs = [layer.lora_A[name] for layer, name in zip(layers, names, strict=True)]
        self._ups = [layer.lora_B[name] for layer, name in zip(layers, names, strict=True)]
        self.sizes = [base.out_features for base in bases]
        self.ranks = [down.weight.shape[0] for down in self._downs]
        self.out = sum(self.sizes)
        self.width = self.out + sum(self.ranks)
        self.scales = [layer.scaling[name] for layer, name in zip(layers, names, strict=True)]
        device = self._ups[0].weight.device
        kernels = kernels_of(device)
        widths = [*self.sizes, bases[0].in_features]
        pairs = [(rank, width) for rank in self.ranks for width in widths]
        self.kernels: Kernels | None = None
        if isinstance(kernels, Kernels) and all(kernels.has_low_rank(*pair) for pair in pairs):
            wide = all(parameter.dtype == torch.float32 for parameter in self.parameters())
            self.kernels = kernels if wide else None
        # (out, r): each B in its rows and columns
        size = (self.out, sum(self.ranks)) if self.kernels is None else (0, 0)
        self.up = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self._join(bases)

    def _join(self, bases: list[Any]) -> None:
        first = bases[0].weight
        self.weight = first.new_empty(self.width, first.shape[1])  # (out + r, in)
        for base, part in zip(bases, self.weight[: self.out].split(self.sizes), strict=True):
            part.copy_(base.weight.data)
            base.weight.data = part

    def parameters(self) -> list[torch.Tensor]:
        """All A, then all B."""
        return [module.weight for module in (*self._downs, *self._ups)]

    def is_usable(self) -> bool:
        """Whether all adapters are switched on, and not merged."""
        return not any(layer.disable_adapters or layer.merged for layer in self.layers)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) → (T, out + r): the outputs of the layers, and s·A·x of all."""
        if self.kernels is not None:
            joint = x.new_empty(len(x), self.width)
            self.kernels.multiply(x, self._adapted(), joint[:, : self.out], joint[:, self.out :])
            return joint
        joint = x @ self._fresh_weight().t()
        self._add_up(joint)
        return joint

    def _adapted(self) -> list[LayerWeights]:
        """The layers as `kernels` takes them, with their own weights."""
        parts = zip(self._bases, self._downs, self._ups, self.scales, strict=True)
        return [LayerWeights(base.weight, down.weight, up.weight, scale) for base, down, up, scale in parts]

    def _stored_ups(self) -> list[torch.Tensor]:
        """The B (out, r) of each layer as it is stored."""
        return [up.weight.detach() for up in self._ups]

    def _add_up(self, joint: torch.Tensor) -> None:
        """Adds the B·s·A·x of each layer to its outputs."""
        if self.kernels is None:
            joint[:, : self.out].addmm_(joint[:, self.out :], self.up.t())
            return
        self.kernels.add_low_rank(joint[:, self.out :], self._stored_ups(), joint[:, : self.out])

    def _fresh_weight(self) -> torch.Tensor:
        """The joined weight (out + r, in), and `up`, with the adapters as they are now."""
        self._take_adapters(self.weight[self.out :])
        return self.weight

    def _same_weight(self) -> torch.Tensor:
        """The joined weight of the forward pass."""
        return self.weight

    def _take_adapters(self, down: torch.Tensor) -> None:
        """Copies all s·A into `down` (r, in), and all B into `up`."""
        for part, module, scale in zip(down.split(self.ranks), self._downs, self.scales, strict=True):
            torch.mul(module.weight.detach(), scale, out=part)
        if self.kernels is not None:
            return
        for part, up in zip(_diagonal(self.up.split(self.ranks, 1), self.sizes), self._ups, strict=True):
            part.copy_(up.weight.detach())

    def input_gradient(self, d_joint: torch.Tensor) -> torch.Tensor:
        """(T, in), from the gradient of the outputs, the first columns of `d_joint` (T, out + r);
        writes that of s·A·x into the others.
        """
        if self.kernels is not None:
            d_x = d_joint.new_empty(len(d_joint), self.layers[0].in_features)
            self.kernels.multiply_back(d_joint[:, : self.out], self._adapted(), d_joint[:, self.out :], d_x)
            return d_x
        self.project(d_joint)
        return d_joint @ self._same_weight()

    def project(self, d_joint: torch.Tensor) -> None:
        """Writes the gradient of s·A·x of each layer, from that of its outputs."""
        if self.kernels is None:
            d_joint[:, self.out :].copy_(d_joint[:, : self.out] @ self.up)
            return
        self.kernels.project_low_rank(d_joint[:, : self.out], self._stored_ups(), d_joint[:, self.out :])

    def gradients(
        self, d_joint: torch.Tensor, x: torch.Tensor, low: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Those of all A, then of all B.

        Args:
            d_joint: (T, out + r), complete.
            x: (T, in).
            low: (T, r), the last columns of the product.
        """
        if self.kernels is not None:
            of_input, of_output = (x, d_joint[:, self.out :]), (d_joint[:, : self.out], low)
            return self.kernels.low_rank_gradients(of_input, of_output, self._stored_ups(), self.scales)
        d_a = (d_joint[:, self.out :].t() @ x).float()
        d_b = (low.t() @ d_joint[:, : self.out]).float()  # (r, out)
        d_a_parts = [part.mul_(scale) for part, scale in zip(d_a.split(self.ranks), self.scales, strict=True)]
        return d_a_parts + _diagonal(d_b.t().split(self.ranks, 1), self.sizes)


def _diagonal(columns: Sequence[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """The rows of its own layer in each of `columns` (out, r)."""
    return [column.split(sizes)[i] for i, column in enumerate(columns)]


class Sharded(FusedLinear):
    """Adapted layers whose weights are whole only while their layer runs: without `kernels` they
    are joined in the scratch for each product.

    The copy takes 2 to 3 % of the time of a product with 720 tokens; torch's products with the
    single weights take 8 to 13 % more than a joined one.
    """

    def __init__(self, layers: list[Any], scratch: Scratch) -> None:
        self._scratch = scratch
        super().__init__(layers)

    def _join(self, bases: list[Any]) -> None:
        del bases

    def _fresh_weight(self) -> torch.Tensor:
        weights = [base.weight for base in self._bases]
        weight = self._scratch.joined(weights, more=self.width - self.out)
        self._take_adapters(weight[self.out :])
        return weight

    def _same_weight(self) -> torch.Tensor:
        return self._fresh_weight()


class FusedQuantizedLinear(FusedLinear):
    """Adapted layers with quantized weights and the same input: each weight is dequantized for its
    product, and freed before the next one.
    """

    def _join(self, bases: list[Any]) -> None:
        shape = (self.width - self.out, bases[0].in_features)  # (r, in)
        self.down = torch.empty(shape, dtype=torch.bfloat16, device=self._ups[0].weight.device)

    def _weights(self, joint: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The columns of `joint` (T, out + r) of each layer, and its weight (out, in), one after
        the other.
        """
        for part, base in zip(joint[:, : self.out].split(self.sizes, 1), self._bases, strict=True):
            yield part, dequantized(base.weight, state_of(base), joint.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) → (T, out + r): the outputs of the layers, and s·A·x of all."""
        self._take_adapters(self.down)
        joint = x.new_empty(len(x), self.width)
        for part, weight in self._weights(joint):
            torch.mm(x, weight.t(), out=part)
            del weight
        torch.mm(x, self.down.t(), out=joint[:, self.out :])
        self._add_up(joint)
        return joint

    def input_gradient(self, d_joint: torch.Tensor) -> torch.Tensor:
        """(T, in), from the gradient of the outputs, the first columns of `d_joint` (T, out + r);
        writes that of s·A·x into the others.
        """
        self.project(d_joint)
        d_x = d_joint[:, self.out :] @ self.down
        for part, weight in self._weights(d_joint):
            d_x.addmm_(part, weight)
            del weight
        return d_x


class Unadapted(ABC):
    """Layers without an adapter that have the same input: one product with their joined bfloat16
    weight.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.out = self.width = sum(self.sizes)

    @abstractmethod
    def _weight(self) -> torch.Tensor:
        """(out, in) bfloat16."""

    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """Those that are trained."""

    @abstractmethod
    def is_usable(self) -> bool:
        """Whether the layers themselves would compute in bfloat16."""

    @abstractmethod
    def gradients(
        self, d_joint: torch.Tensor, x: torch.Tensor, low: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Those of `parameters`. `low` is that of adapters, and not used."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, in) → (T, out)."""
        return product(x, self._weight())

    def input_gradient(self, d_joint: torch.Tensor) -> torch.Tensor:
        """(T, in), from the gradient of the outputs (T, out)."""
        return product_back(d_joint, self._weight())


class Frozen(Unadapted):
    """Frozen layers, whose weights become views of the joined one.

    With a scratch, which is for sharded weights, they are joined there for each product.
    """

    def __init__(self, layers: list[Any], scratch: Scratch | None) -> None:
        super().__init__(layers)
        self._scratch = scratch
        if len(layers) > 1 and scratch is None:
            self._kept = torch.cat([layer.weight.data for layer in layers])
            for layer, part in zip(layers, self._kept.split(self.sizes), strict=True):
                layer.weight.data = part

    def _weight(self) -> torch.Tensor:
        """That of a single layer is the layer's own."""
        if len(self.layers) == 1:
            weight: torch.Tensor = self.layers[0].weight
            return weight
        if self._scratch is None:
            return self._kept
        return self._scratch.joined([layer.weight for layer in self.layers])

    def parameters(self) -> list[torch.Tensor]:
        """None."""
        return []

    def is_usable(self) -> bool:
        """Always."""
        return True

    def gradients(
        self, d_joint: torch.Tensor, x: torch.Tensor, low: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """None."""
        del d_joint, x, low
        return []


class Trained(Unadapted):
    """Trained float32 layers, of whose weights bfloat16 copies are joined for each product, which
    takes a hundredth of its time.

    So the copies are never stale, need no memory that grows with the model, and weights may be
    sharded.
    """

    def __init__(self, layers: list[Any], scratch: Scratch) -> None:
        super().__init__(layers)
        self.scratch = scratch

    def _weight(self) -> torch.Tensor:
        return self.scratch.joined([layer.weight for layer in self.layers])

    def parameters(self) -> list[torch.Tensor]:
        """The weights."""
        return [layer.weight for layer in self.layers]

    def is_usable(self) -> bool:
        """Whether autocast would compute the products in bfloat16, too."""
        kind = self.layers[0].weight.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16

    def gradients(
        self, d_joint: torch.Tensor, x: torch.Tensor, low: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        """Those of the weights; None for one that is frozen.

        `low` is that of adapters, and not used.
        """
        del low
        if not any(layer.weight.requires_grad for layer in self.layers):
            return [None] * len(self.layers)
        parts = (d_joint.t() @ x).split(self.sizes)
        return [
            own_gradient(layer.weight, part) if layer.weight.requires_grad else None
            for part, layer in zip(parts, self.layers, strict=True)
        ]


class Product(torch.autograd.Function):
    """One trained layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Trained, weight: torch.Tensor) -> torch.Tensor:
        """x (T, in) → (T, out)."""
        del weight  # for its gradient
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x and the weight."""
        (x,) = ctx.saved_tensors
        d_x = ctx.layer.input_gradient(grad) if ctx.needs_input_grad[0] else None
        return d_x, None, *ctx.layer.gradients(grad, x, grad)


class Lookup(torch.autograd.Function):
    """The rows of a trained embedding on a CPU.

    Its gradient has few rows, which are added to that of a tied head.
    """

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        """ids (…), weight (V, E) → (…, E)."""
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of the weight, whose sums are those of torch: token by token, from zero."""
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        distinct, places = ids.flatten().unique(return_inverse=True)
        rows = weight.new_zeros(len(distinct), weight.shape[1])
        rows.index_add_(0, places, grad.reshape(-1, weight.shape[1]))
        if ctx.padding is not None:
            rows[distinct == ctx.padding] = 0.0
        if weight.grad is not None and weight.grad_dtype is None and weight.grad.dtype == weight.dtype:
            weight.grad.index_add_(0, distinct, rows)  # each row once
            return None, None, None
        return None, own_gradient(weight, torch.zeros_like(weight).index_add_(0, distinct, rows)), None


# ---- norms


class Norm(torch.autograd.Function):
    """RMSNorm with a frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Any) -> torch.Tensor:
        """x (…, E), weight (E,) → (…, E)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, factor = kernels.norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, factor)
        ctx.kernels = kernels
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of x."""
        rows, weight, factor = ctx.saved_tensors
        d_x = ctx.kernels.norm_backward(grad.reshape(rows.shape).contiguous(), rows, weight, factor)
        return d_x.view(grad.shape), None, None, None


class TrainedNorm(torch.autograd.Function):
    """RMSNorm of float32 values with a float32 weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Any) -> torch.Tensor:
        """x (…, E), weight (E,) → (…, E) bfloat16."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, factor = kernels.wide_norm(rows, weight, eps)
        ctx.save_for_backward(rows, weight, factor)
        ctx.kernels = kernels
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x and the weight, float32."""
        rows, weight, factor = ctx.saved_tensors
        d_x, d_weight = ctx.kernels.wide_norm_backward(
            grad.reshape(rows.shape).contiguous(), rows, weight, factor
        )
        return d_x.view(grad.shape), d_weight if ctx.needs_input_grad[1] else None, None, None


# ---- MLP


class GatedMlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)); silu and product are computed once more in the backward pass
    instead of being kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        wide: FusedLinear | Unadapted,
        down: FusedLinear | Unadapted,
        kernels: Any,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """x (T, E) → (T, E)."""
        joint = wide.product(x)
        size = wide.sizes[0]
        hidden = kernels.gate(joint[:, :size], joint[:, size : 2 * size])
        out = down.product(hidden)
        low = out[:, down.out :].clone()  # no view, even of no columns: it would keep the output in memory
        ctx.save_for_backward(x, joint, low)
        ctx.parts = (wide, down, kernels)
        return out[:, : down.out]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x and of what is trained."""
        x, joint, low = ctx.saved_tensors
        wide, down, kernels = ctx.parts
        size = wide.sizes[0]
        d_out = grad
        if down.width > down.out:
            d_out = grad.new_empty(grad.shape[0], down.width)
            d_out[:, : down.out] = grad
        d_hidden = down.input_gradient(d_out)
        low_of_wide = joint[:, wide.out :].contiguous()
        hidden = kernels.gate_backward(d_hidden, joint[:, :size], joint[:, size : 2 * size])
        d_joint = joint  # in the memory of the outputs, which are not needed any more
        d_x = wide.input_gradient(d_joint)
        of_wide = wide.gradients(d_joint, x, low_of_wide)
        return d_x, None, None, None, *of_wide, *down.gradients(d_out, hidden, low)


# ---- attention


class SelfAttention(torch.autograd.Function):
    """Products for queries, keys and values, rotation, causal attention inside each row."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        places: Any,
        joined: FusedLinear | Unadapted,
        heads: Heads,
        kernels: Any,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        """x (T, E), cosines and sines (T, D) → (T, H · D).

        `places` is what the kernels' attention needs to know of the rows.
        """
        joint = joined.product(x)
        out, kept = attend(_heads_of(joint, joined, heads), rope, places, heads, kernels)
        low = joint[:, joined.out :]
        if not isinstance(places, torch.Tensor | Ends):
            low = low.clone()  # the joint product is not kept
        ctx.save_for_backward(x, low, *rope, *kept)
        ctx.parts = (places, joined, heads, kernels)
        return out.view(len(x), -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x and of what is trained."""
        x, low, cosine, sine, *kept = ctx.saved_tensors
        places, joined, heads, kernels = ctx.parts
        d_joint = x.new_empty(len(x), joined.width)
        grads = _heads_of(d_joint, joined, heads)
        d_out = grad.reshape(len(x), -1, heads.size)
        attend_backward(d_out, kept, (cosine, sine), places, heads, kernels, grads)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = joined.input_gradient(d_joint)
        elif isinstance(joined, FusedLinear):  # the first layer: nothing before it is trained
            joined.project(d_joint)
        return d_x, None, None, None, None, None, *joined.gradients(d_joint, x, low)


def _heads_of(
    joint: torch.Tensor, joined: FusedLinear | Unadapted, heads: Heads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a joint product: q (T, H, D), k and v (T, K, D)."""
    q, k, v = (part.unflatten(1, (-1, heads.size)) for part in joint[:, : joined.out].split(joined.sizes, 1))
    return q, k, v


# ---- the forward of a module


class FastForward:
    """The fast forward of one module; where its conditions do not hold, it calls the module's own.

    Attributes:
        products: the joint products of the module's linear layers.
    """

    def __init__(self, module: Any, kernels: Any, *products: Any) -> None:
        self.module, self.kernels, self.products = module, kernels, products

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the forward of transformers or torch."""
        return type(self.module).forward(self.module, *args, **kwargs)


class _FastNorm(FastForward):
    """RMSNorm."""

    def __call__(self, x: torch.Tensor) -> Any:
        weight = self.module.weight
        wide = x.dtype == torch.float32
        kind = weight.device.type
        if x.dtype != weight.dtype or x.device.type != kind or (wide and not torch.is_autocast_enabled(kind)):
            return self.original(x)
        norm = TrainedNorm if wide else Norm
        return norm.apply(x, weight, self.module.variance_epsilon, self.kernels)


class _FastLinear(FastForward):
    """A linear layer outside of attention and MLP, in full fine-tuning."""

    def __call__(self, x: torch.Tensor) -> Any:
        (layer,) = self.products
        if not layer.is_usable():
            return self.original(x)
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        return Product.apply(rows, layer, self.module.weight).view(*x.shape[:-1], layer.out)


class _FastEmbedding(FastForward):
    """An embedding that is trained."""

    def __call__(self, ids: torch.Tensor) -> Any:
        weight = self.module.weight
        if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
            return self.original(ids)
        return Lookup.apply(ids, weight, self.module.padding_idx)


class _FastMlp(FastForward):
    """A gated MLP."""

    def __call__(self, x: torch.Tensor) -> Any:
        wide, down = self.products
        if isinstance(wide, Trained) and wide.is_usable():
            x = x.to(torch.bfloat16)  # as autocast does
        if x.dtype != torch.bfloat16 or not (wide.is_usable() and down.is_usable()):
            return self.original(x)
        rows = x.reshape(-1, x.shape[-1])
        parameters = (*wide.parameters(), *down.parameters())
        return GatedMlp.apply(rows, wide, down, self.kernels, *parameters).view(x.shape)


class _FastAttention(FastForward):
    """A causal self-attention over rows without padding."""

    def __init__(self, module: Any, kernels: Any, joined: FusedLinear | Unadapted, *, heads: Heads) -> None:
        super().__init__(module, kernels, joined)
        self.heads = heads

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        (joined,) = self.products
        if isinstance(joined, Trained) and joined.is_usable():
            hidden_states = hidden_states.to(torch.bfloat16)
        if hidden_states.dtype != torch.bfloat16 or not (self._takes(kwargs) and joined.is_usable()):
            return self.original(hidden_states, **kwargs)
        rope, ends = kwargs["position_embeddings"], kwargs["cu_seq_lens_q"]
        if isinstance(self.kernels, Kernels):
            turned, lengths = _of_all_layers(*rope, ends)
            places: Any = place_rows(lengths, self.heads, self.kernels)
        else:  # nothing that waits for the device
            turned = tuple(part[0].contiguous() for part in rope)
            places = Ends(ends, kwargs["max_length_q"])
        parts = (turned, places, joined, self.heads, self.kernels)
        with torch.autocast(hidden_states.device.type, enabled=False):
            out = SelfAttention.apply(hidden_states.squeeze(0), *parts, *joined.parameters())
        return self.module.o_proj(out[None]), None

    def _takes(self, kwargs: dict[str, Any]) -> bool:
        """Whether the rows are without padding, each complete and with its own beginning."""
        if any(kwargs.get(name) is None for name in ("position_embeddings", "cu_seq_lens_q", "max_length_q")):
            return False
        cosine, _ = kwargs["position_embeddings"]
        is_whole = kwargs.get("past_key_values") is None and kwargs.get("merged") is None
        return is_whole and cosine.shape[-1] == self.heads.size


# ---- putting them into a model


def speed_up_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Sets the fast forward on the norms, MLPs and attentions that have the expected parts; gives
    the changed modules.

    An attention needs the settings with which it has called `flat_attention` before. In full
    fine-tuning the other linear layers without bias are changed, too. A layer whose weights are
    sharded keeps no joined weight.
    """
    device = next(model.parameters()).device
    kernels = kernels_of(device)
    if kernels is None:
        return []
    trains_all = not any(isinstance(module, LoraLayer) for module in model.modules())
    scratch = Scratch(device)
    changed: dict[torch.nn.Module, Any] = {}
    for module in model.modules():
        fast = _fast_forward(module, kernels, scratch, trains_all=trains_all)
        if fast is not None:
            changed[module] = fast
    # All or none: a GPU's functions are compiled above, which may fail.
    for module, forward in changed.items():
        module.forward = forward
    return list(changed)


def _fast_forward(module: Any, kernels: Any, scratch: Scratch, *, trains_all: bool) -> FastForward | None:
    """The fast forward of a module that has the expected parts, else None."""
    if _is_norm(module, kernels):
        return _FastNorm(module, kernels)
    if _has_parts(module, _MLP) and _is_silu(getattr(module, "act_fn", None)):
        parts = ([module.gate_proj, module.up_proj], [module.down_proj])
        return _FastMlp(module, kernels, *(_join(layers, scratch) for layers in parts))
    if _has_parts(module, _ATTENTION) and hasattr(module, "_flat_settings"):
        heads = _heads(module)
        if heads is not None:
            joined = _join([module.q_proj, module.k_proj, module.v_proj], scratch)
            return _FastAttention(module, kernels, joined, heads=heads)
    if trains_all and _is_looked_up(module):
        return _FastEmbedding(module, kernels)
    if trains_all and _is_wide(module):
        return _FastLinear(module, kernels, Trained([module], scratch))
    return None


def release_originals(model: torch.nn.Module) -> None:
    """Gives the memory of the weights that were joined back to the system; no value changes.

    Sharded weights stay as they are.

    A file of safetensors stays mapped as long as one tensor of it is in use, so the other frozen
    weights are copied out of it. And glibc keeps what is freed between blocks in use: at 135 M
    parameters 185 MB, on top of which came the activations.
    """
    for parameter in model.parameters():
        # Not of a subclass, i.e. of quantized or sharded weights.
        if type(parameter) is not torch.nn.Parameter or parameter.requires_grad:
            continue
        if parameter.untyped_storage().nbytes() <= parameter.nbytes:  # else a view of a joined weight
            parameter.data = parameter.data.clone()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


def release_scratch(changed: list[torch.nn.Module]) -> None:
    """Gives the memory for the copies back: a trial has used the head as a layer, which training
    may not, and its copy is the largest.
    """
    for module in changed:
        forward: Any = module.forward
        for one in forward.products:
            if isinstance(one, Trained):
                one.scratch.release()


def slow_down_layers(changed: list[torch.nn.Module]) -> None:
    """Restores the forward of transformers."""
    for module in changed:
        del module.forward


def _join(layers: list[Any], scratch: Scratch) -> FusedLinear | Unadapted:
    if _is_wide(layers[0]):
        return Trained(layers, scratch)
    if _is_packed(layers[0]):
        return FusedQuantizedLinear(layers)
    base = layers[0].get_base_layer() if isinstance(layers[0], LoraLayer) else layers[0]
    sharded = isinstance(base.weight, DTensor)
    if _is_frozen(layers[0]):
        return Frozen(layers, scratch if sharded else None)
    return Sharded(layers, scratch) if sharded else FusedLinear(layers)


def _is_norm(module: Any, kernels: Any) -> bool:
    """Whether it is RMSNorm with a frozen bfloat16 or a float32 weight: it has its two parts, and
    its forward gives the same values.
    """
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if type(eps) is not float or not isinstance(weight, torch.nn.Parameter) or list(module.children()):
        return False
    if weight.ndim != 1 or (weight.requires_grad and weight.dtype == torch.bfloat16):
        return False
    if len(inspect.signature(type(module).forward).parameters) > 2:  # with a gate, as in layers with a state
        return False
    # Not with the module's own weight, which may be sharded.
    tried = torch.linspace(0.5, 2, len(weight), device=weight.device).to(weight.dtype)
    twin = copy.copy(module)
    torch.nn.Module.__init__(twin)  # without the parameters and hooks of the module
    twin.weight = torch.nn.Parameter(tried, requires_grad=False)
    x = torch.linspace(-2, 3, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)
    if weight.dtype == torch.bfloat16:
        return torch.allclose(kernels.norm(x, tried, eps)[0], type(module).forward(twin, x), rtol=0.02)
    if weight.dtype != torch.float32:
        return False
    return torch.allclose(
        kernels.wide_norm(x, tried, eps)[0].float(), type(module).forward(twin, x), rtol=0.01
    )


def _has_parts(module: Any, names: tuple[str, ...]) -> bool:
    """Whether its children with parameters have exactly these names, and are of one kind."""
    children = {
        name: child for name, child in module.named_children() if next(child.parameters(), None) is not None
    }
    kinds = (_is_dense, _is_packed, _is_frozen, _is_wide)
    return set(children) == set(names) and any(all(map(kind, children.values())) for kind in kinds)


def _is_wide(layer: Any) -> bool:
    """Whether it is torch's linear layer without bias in float32."""
    return type(layer) is torch.nn.Linear and layer.bias is None and layer.weight.dtype == torch.float32


def _is_looked_up(layer: Any) -> bool:
    """Whether it is torch's plain embedding in float32 on a CPU; on a GPU sums would depend on the
    order of its threads.
    """
    if type(layer) is not torch.nn.Embedding or layer.max_norm is not None:
        return False
    plain = not (layer.sparse or layer.scale_grad_by_freq) and layer.weight.device.type == "cpu"
    return plain and layer.weight.dtype == torch.float32


def _is_frozen(layer: Any) -> bool:
    """Whether it is torch's linear layer without bias, with a frozen bfloat16 weight."""
    weight = layer.weight if type(layer) is torch.nn.Linear and layer.bias is None else None
    return weight is not None and weight.dtype == torch.bfloat16 and not weight.requires_grad


def _is_dense(layer: Any) -> bool:
    """Whether it is a quick LoRA layer on a frozen bfloat16 weight without bias."""
    if not isinstance(layer, LoraLinear) or not is_quick(layer):
        return False
    base = layer.get_base_layer()
    return base.bias is None and base.weight.dtype == torch.bfloat16 and not base.weight.requires_grad


def _is_packed(layer: Any) -> bool:
    """Whether it is a quick LoRA layer on a quantized weight without bias, computed in bfloat16."""
    if not isinstance(layer, LoraLayer) or not is_quick(layer, quantized=True):
        return False
    base = layer.get_base_layer()
    return base.bias is None and base.compute_dtype == torch.bfloat16


def _is_silu(function: Any) -> bool:
    values = torch.linspace(-8, 8, 33)
    return callable(function) and torch.equal(function(values), torch.nn.functional.silu(values))


def _heads(module: Any) -> Heads | None:
    """The shape of an attention, if queries fall into equal groups for its key-value heads."""
    scale, window, size = module._flat_settings  # noqa: SLF001 - of model.attention
    queries, keys, values = (getattr(module, name).out_features for name in ("q_proj", "k_proj", "v_proj"))
    if keys != values or keys % size or queries % keys or size % 2:
        return None
    return Heads(keys // size, queries // keys, size, scale, window)


@lru_cache(maxsize=1)  # all layers are given the same tensors
def _of_all_layers(cosine: torch.Tensor, sine: torch.Tensor, ends: torch.Tensor) -> Any:
    """Cosines and sines (T, D) float32, and the lengths of the rows."""
    turned = (cosine[0].float().contiguous(), sine[0].float().contiguous())
    return turned, tuple(ends.diff().tolist())
