"""Layers that replace those of peft and transformers: LoRA in one product, the head at loss tokens
in chunks, and scaled positions (RoPE, arXiv:2104.09864).

Letters: W (out, in) a frozen base weight, A (r, in) and B (out, r) of its adapter, s the adapter's
scaling: the layer computes W + s·B·A. Of the head, whose N × V logits never exist at once: N loss
tokens, E hidden size, V vocabulary.
"""

import functools
import math
import shutil
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from unisono.base.errors import ModelError
from unisono.base.text import one_line
from unisono.guard.facts.machine import triton_trouble
from unisono.trainer.config.model_sections import RopeSection
from unisono.trainer.model.files import read_json_object
from unisono.trainer.model.kernels import COMPILER, Kernels, LayerWeights, load_kernels
from unisono.trainer.model.quantization import adapted_layers, dequantized, state_of, times, times_transposed
from unisono.trainer.plan.memory import LOGITS_ON_GPU

if TYPE_CHECKING:
    from unisono.trainer.model.cuda_kernels import CudaKernels


def kernels_of(device: torch.device) -> "Kernels | CudaKernels | None":
    """The functions for tensors on a device: those of kernels.c, or of cuda_kernels for an NVIDIA
    GPU; None where they cannot be used.
    """
    if device.type == "cpu":
        return load_kernels()
    return _on_gpu()[0] if device.type == "cuda" and torch.version.hip is None else None


@functools.cache
def _on_gpu() -> "tuple[CudaKernels | None, str]":
    """None and the reason without Triton, or where it cannot compile: it needs a C compiler,
    Python's headers, and a folder to write to.

    The cross entropy is tried here, as losses use it whatever the layers of a model are;
    `model.forward` tries the others in the model.
    """
    try:
        from unisono.trainer.model.cuda_kernels import CudaKernels

        kernels = CudaKernels()
        logits = torch.linspace(-3, 5, 96, dtype=torch.bfloat16, device="cuda").view(2, 48)
        labels, wide = torch.tensor([3, 40], device="cuda"), logits.float()
        gradients = torch.softmax(wide, 1) - torch.nn.functional.one_hot(labels, 48)
        losses = kernels.cross_entropy(logits, labels, 1.0)
        expected = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
        is_right = torch.allclose(losses, expected, rtol=1e-3) and torch.allclose(
            logits.float(), gradients, atol=1e-2
        )
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises: torch's own operations do the same work
        trouble = triton_trouble() or f"Triton cannot compile (update it): {type(error).__name__}: {error}"
        return None, one_line(trouble, limit=300)
    return (
        (kernels, "") if is_right else (None, "Triton's cross entropy differs from torch's (update Triton)")
    )


def has_kernels(dtype: str, device: torch.device) -> bool | None:
    """Whether a computation uses them; None where it would not in any case: other dtypes and
    devices.
    """
    usable = dtype == "bfloat16" and (
        device.type == "cpu" or (device.type == "cuda" and not torch.version.hip)
    )
    return kernels_of(device) is not None if usable else None


def why_no_kernels(dtype: str, device: torch.device) -> str:
    """Why a computation that could use them does not, with the fix; empty unless `has_kernels` is
    False.
    """
    if has_kernels(dtype, device) is not False:
        return ""
    if device.type == "cuda":
        return _on_gpu()[1]
    if shutil.which(COMPILER) is None:
        return f"there is no C compiler (install {COMPILER})"
    return (
        f"the C compiler ({COMPILER}) cannot build them (install the headers of C, e.g. libc6-dev, or free"
        " space on the disk of the cache)"
    )


def own_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
    """What a backward pass gives autograd for a weight: its gradient in the weight's dtype; None if
    it is in `weight.grad` already.

    It is put there as it is, e.g. in bfloat16, if the weight's `grad_dtype` is None. Autograd would
    add up two of them in bfloat16; here the second one makes the sum float32. See
    `train.gradient_sync.NoSync`.
    """
    if not weight.is_leaf or weight.grad_dtype is not None:
        return gradient.to(weight.dtype)
    weight.grad = gradient if weight.grad is None else weight.grad.to(weight.dtype).add_(gradient)
    return None


class LoraProduct(torch.autograd.Function):
    """x (…, in), W, bias (out,) or None frozen, A, B, s → (…, out).

    W is a dense weight, with the state None; or a packed one with the state of its layer, which is
    dequantized for each product.
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
        dense = _dense(weight, state, x.dtype)
        ctx.kernels = _kernels_of(rows, a, b)
        if ctx.kernels is None:
            down, up = (a * scaling).to(x.dtype), b.to(x.dtype)
            low = rows @ down.t()
            out = torch.nn.functional.linear(rows, dense, bias).addmm_(low, up.t())
        else:
            down, up = a.detach(), b.detach()
            out, low = (rows.new_empty(len(rows), n) for n in (len(up), len(down)))
            ctx.kernels.multiply(rows, [LayerWeights(dense, down, up, scaling)], out, low)
            out = out if bias is None else out.add_(bias)
        ctx.save_for_backward(rows, low, weight, down, up)
        ctx.state, ctx.scaling, ctx.shape = state, scaling, x.shape
        ctx.dtypes = (a.dtype, b.dtype)
        # A model may change the output in place (Gemma 3n does), which autograd forbids for a view.
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))  # noqa: SLF001

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x, A and B."""
        rows, low, weight, down, up = ctx.saved_tensors
        d_out = grad.reshape(-1, grad.shape[-1])
        kernels, needs_input = ctx.kernels, ctx.needs_input_grad[0]
        d_x = None
        if kernels is not None:
            d_out, d_low = d_out.contiguous(), torch.empty_like(low)
            if needs_input:
                d_x = rows.new_empty(rows.shape)
                dense = _dense(weight, ctx.state, d_out.dtype)
                kernels.multiply_back(d_out, [LayerWeights(dense, down, up, ctx.scaling)], d_low, d_x)
                d_x = d_x.view(ctx.shape)
            else:
                kernels.project_low_rank(d_out, [up], d_low)
            d_a, d_b = kernels.low_rank_gradients((rows, d_low), (d_out, low), [up], [ctx.scaling])
            return d_x, None, None, None, d_a, d_b, None
        d_low = d_out @ up
        if needs_input:
            d_x = (d_out @ _dense(weight, ctx.state, d_out.dtype)).addmm_(d_low, down).view(ctx.shape)
        d_a = (d_low.t() @ rows).to(ctx.dtypes[0]).mul_(ctx.scaling)
        return d_x, None, None, None, d_a, (d_out.t() @ low).to(ctx.dtypes[1]), None


def _kernels_of(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Kernels | None:
    """Those that have functions for these adapters."""
    if x.dtype != torch.bfloat16 or {a.dtype, b.dtype} != {torch.float32}:
        return None
    kernels = kernels_of(x.device)
    if isinstance(kernels, Kernels) and all(kernels.has_low_rank(len(a), n) for n in (x.shape[1], len(b))):
        return kernels
    return None


def _dense(weight: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a product. A quantized one is a new tensor: nothing may keep it."""
    return weight if state is None else dequantized(weight, state, dtype)


def speed_up_lora(model: torch.nn.Module) -> int:
    """Sets the fast forward on every plain LoRA layer of a peft model; gives the number of these
    layers.

    Layers with dropout, DoRA, several adapters, or a base that is neither torch's Linear nor
    quantized keep peft's forward.
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


def is_quick(layer: Any, *, quantized: bool = False) -> bool:
    """Whether a LoRA layer has the fast forward, on a weight that is quantized or not."""
    forward = getattr(vars(layer).get("forward"), "__func__", None)
    return forward is (_forward_of_quantized if quantized else _forward_of_linear)


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
        output: torch.Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return output
    (name,) = layer.lora_A
    base = layer.get_base_layer()
    dtype = base.compute_dtype
    bias = None if base.bias is None else base.bias.to(dtype)
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    out = LoraProduct.apply(x.to(dtype), base.weight, state_of(base), bias, a, b, layer.scaling[name])
    return out.to(x.dtype)


# Rows of logits in memory at a time; N × V logits at once cost 10 to 30 % of a step and most of its
# memory. A head in int8 is dequantized once more for each chunk, a tenth of the time of its
# products on a CPU; with twice as many rows the step at 135 M parameters needs 13 MB more.
_CHUNK = 128


_TRAINED_CHUNK = 256  # where the head is trained, too: its gradient is in memory once for each chunk
# Where logits are in bfloat16 and their gradient takes their place: a product packs the head once
# for all rows of a chunk.
_LOGITS = 15 << 20  # less than 32 MiB, from which on glibc gives a tensor's memory back each time
_MOST_ROWS = 510
_BLOCK = 4096  # tokens of the vocabulary whose part of that gradient is computed at a time


def _rows_at_a_time(weight: torch.Tensor, *, on_cpu: int) -> int:
    """Rows of logits under a head (V, E) that are in memory at a time."""
    return max(on_cpu, LOGITS_ON_GPU // len(weight) // 128 * 128) if weight.is_cuda else on_cpu


def _rows_in_place(hidden: torch.Tensor, weight: torch.Tensor, least: int) -> int:
    """Rows of logits at a time on a CPU where their gradient takes their place, in chunks of equal
    size; else 0.
    """
    if hidden.device.type != "cpu" or hidden.dtype != torch.bfloat16 or load_kernels() is None:
        return 0
    chunks = -(-len(hidden) // max(least, min(_MOST_ROWS, _LOGITS // len(weight))))
    return -(-len(hidden) // max(chunks, 1)) or 1


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of a linear head whose logits never exist all at once.

    The gradients are computed in the forward pass, chunk by chunk, while the logits exist; that of
    the weight in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        labels: torch.Tensor,
        count: int | torch.Tensor,
        smoothing: float,
    ) -> torch.Tensor:
        """hidden (N, E), weight (V, E), labels (N,) int64 → the loss, a float32 scalar; products in
        the dtype of `hidden`.

        `scale` (V,) is that of a weight in int8, else None.
        """
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.empty_like(weight, dtype=torch.float32) if needs_weight else None
        ctx.weight = weight if needs_weight else None
        weight = weight.to(hidden.dtype) if scale is None else weight
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        needs_gradient = needs_hidden or needs_weight
        least = _CHUNK if d_weight is None else _TRAINED_CHUNK
        in_place = 0 if smoothing else _rows_in_place(hidden, weight, least)
        chunk = in_place or _rows_at_a_time(weight, on_cpu=least)
        for first in range(0, hidden.shape[0], chunk):
            rows, targets = hidden[first : first + chunk], labels[first : first + chunk]
            losses, d_logits = _losses(
                times_transposed(rows, weight, scale),
                targets,
                count,
                smoothing,
                needs_gradient=needs_gradient,
            )
            total += losses.sum()
            if not needs_gradient:
                continue
            if d_hidden is not None:
                d_hidden[first : first + chunk] = times(d_logits, weight, scale)
            if d_weight is not None:
                _add_product(d_weight, d_logits, rows, is_first=first == 0)
            del d_logits  # before the next chunk is computed
        if d_weight is not None and not len(hidden):
            d_weight.zero_()
        ctx.save_for_backward(*(t for t in (d_hidden, d_weight) if t is not None))
        ctx.has = (d_hidden is not None, d_weight is not None)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients computed in forward, times the incoming gradient."""
        saved = list(ctx.saved_tensors)
        d_hidden = saved.pop(0) if ctx.has[0] else None
        d_weight = saved.pop(0) if ctx.has[1] else None
        return (
            None if d_hidden is None else d_hidden * grad.to(d_hidden.dtype),
            None if d_weight is None else own_gradient(ctx.weight, d_weight.mul_(grad)),
            None,
            None,
            None,
            None,
        )


def _add_product(
    d_weight: torch.Tensor, d_logits: torch.Tensor, rows: torch.Tensor, *, is_first: bool
) -> None:
    """Writes d_logitsᵀ @ rows, from (n, V) and (n, E), into d_weight (V, E) float32, or adds it, in
    blocks that stay in a CPU's cache.
    """
    block = len(d_weight) if d_weight.is_cuda else _BLOCK
    for of_weight, of_logits in zip(d_weight.split(block), d_logits.split(block, 1), strict=True):
        product = of_logits.t() @ rows
        of_weight.copy_(product) if is_first else of_weight.add_(product)


def _losses(
    logits: torch.Tensor, labels: torch.Tensor, count: Any, smoothing: float, *, needs_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses (n,) of logits (n, V), and the gradient of their sum / count, in the dtype of the
    logits; the logits are overwritten.
    """
    kernels = kernels_of(logits.device) if logits.dtype == torch.bfloat16 and not smoothing else None
    if kernels is not None:
        return (
            kernels.cross_entropy(logits, labels.contiguous(), 1 / count if needs_gradient else 0.0),
            logits,
        )
    dtype, logits, targets = logits.dtype, logits.float(), labels[:, None]
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    picked = logits.gather(1, targets)
    if smoothing:
        picked = (1 - smoothing) * picked + smoothing * logits.mean(1, keepdim=True)
    losses = normaliser - picked
    if not needs_gradient:
        return losses, logits
    # d loss / d logits = (softmax - target) / count, in the memory of the logits; the target is one
    # hot unless it is smoothed
    logits.sub_(normaliser).exp_()
    logits.scatter_add_(1, targets, torch.full_like(targets, smoothing - 1, dtype=logits.dtype))
    if smoothing:
        logits.sub_(smoothing / logits.shape[1])
    return losses, logits.div_(count).to(dtype)


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of labels under a linear head whose logits never exist all at once.

    Each log-probability depends on its own hidden state only, so with a frozen head the gradients
    of the hidden states are computed in the forward pass, while the logits exist, and are scaled
    row by row in the backward pass. A trained head needs the incoming gradients to sum over rows,
    so its logits are computed once more.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        """hidden (N, E), weight (V, E), labels (N,) int64 → (N,) float32.

        `scale` (V,) is that of a weight in int8, else None.
        """
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needs_hidden and not needs_weight else None
        chunk = _rows_at_a_time(weight, on_cpu=_CHUNK)
        for first in range(0, hidden.shape[0], chunk):
            part = slice(first, first + chunk)
            logits, targets = times_transposed(hidden[part], weight, scale).float(), labels[part, None]
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            log_probs[part] = (logits.gather(1, targets) - normaliser)[:, 0]
            if d_hidden is not None:
                d_logits = _d_logits(logits, normaliser, targets).to(hidden.dtype)
                d_hidden[part] = times(d_logits, weight, scale)
        ctx.recomputes = needs_weight
        if needs_weight:
            ctx.save_for_backward(hidden, weight, labels)
        else:
            ctx.save_for_backward(*(t for t in (d_hidden,) if t is not None))
        return log_probs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients for the incoming ones, (N,)."""
        if not ctx.recomputes:
            (d_hidden,) = ctx.saved_tensors
            return d_hidden * grad[:, None].to(d_hidden.dtype), None, None, None
        hidden, weight, labels = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        chunk = _rows_at_a_time(weight, on_cpu=_TRAINED_CHUNK)
        for first in range(0, hidden.shape[0], chunk):
            part = slice(first, first + chunk)
            logits = (hidden[part] @ weight.t()).float()
            normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
            d_logits = _d_logits(logits, normaliser, labels[part, None]).mul_(grad[part, None])
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            _add_product(d_weight, d_logits, hidden[part], is_first=False)
        return d_hidden, d_weight.to(weight.dtype), None, None


def _d_logits(logits: torch.Tensor, normaliser: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The derivative of a log-probability by its logits, one hot - softmax, in the memory of the
    logits (n, V).
    """
    logits.sub_(normaliser).exp_().neg_()
    return logits.scatter_add_(1, targets, torch.ones_like(targets, dtype=logits.dtype))


def head_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(N,) float32: log-probabilities of labels (N,) from hidden states (N, E) under a linear head
    (V, E); products in `dtype`.
    """
    weight = weight.to(dtype) if scale is None else weight
    log_probs: torch.Tensor = ChunkedLogProbs.apply(hidden.to(dtype), weight, scale, labels)
    return log_probs


def head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    count: int | torch.Tensor,
    dtype: torch.dtype,
    smoothing: float = 0.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of hidden states (N, E) under a linear head (V, E), as a float32 scalar; products in
    `dtype`.

    `scale` (V,) is that of a head in int8.
    """
    if not torch.is_grad_enabled():
        weight = weight.detach()  # its gradient would be computed in the forward pass
    return ChunkedCrossEntropy.apply(hidden.to(dtype), weight, scale, labels, count, smoothing)


def logits_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(N,) float32: log-probabilities of labels (N,) from logits (N, V), for heads that are more
    than one matrix.
    """
    logits = logits.float()
    return logits.gather(1, labels[:, None])[:, 0] - torch.logsumexp(logits, dim=1)


def logits_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, count: int, smoothing: float = 0.0
) -> torch.Tensor:
    """The loss of logits (N, V), for heads that are more than one matrix."""
    total = torch.nn.functional.cross_entropy(
        logits.float(), labels, reduction="sum", label_smoothing=smoothing
    )
    return total / count


# ---- positions: a model reads longer rows than it was trained on

# The frequencies between which llama3 interpolates: the values of Llama 3.1's own config are 1 and
# 4.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_KEPT = ("rope_theta", "partial_rotary_factor")


def scale_rope(settings: Any, section: RopeSection, *, max_length: int) -> None:
    """Sets the RoPE parameters of a model's config, before the model is made from it.

    linear: arXiv:2306.15595; dynamic: NTK-aware scaling by the length of each row; yarn:
    arXiv:2309.00071; llama3: as in Llama 3.1.

    Args:
        settings: of transformers; changed in place.
        section: `model.rope` of the config.
        max_length: tokens of the longest row.

    Raises:
        ModelError: if the model has no RoPE, or several kinds.
    """
    text = settings.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(parameters, dict) or "rope_theta" not in parameters or not isinstance(positions, int):
        several = isinstance(parameters, dict) and any(
            isinstance(value, dict) for value in parameters.values()
        )
        raise ModelError.of(
            f"the RoPE of {settings.model_type} cannot be scaled",
            where="model.rope",
            why="its layers have several kinds of RoPE" if several else "its config has no RoPE parameters",
            fix="remove model.rope",
        )
    original = int(parameters.get("original_max_position_embeddings") or positions)
    factor = rope_factor(section, original=original, max_length=max_length)
    if factor <= 1:
        return
    new = {name: parameters[name] for name in _KEPT if name in parameters}
    new |= {"rope_type": section.kind, "factor": factor}
    if section.kind in ("yarn", "llama3"):
        new["original_max_position_embeddings"] = original
    if section.kind == "llama3":
        new |= _LLAMA3
    text.rope_parameters = new
    # With dynamic, rows longer than this number are scaled.
    text.max_position_embeddings = original if section.kind == "dynamic" else math.ceil(original * factor)


def rope_factor(section: RopeSection, *, original: int, max_length: int) -> float:
    """The factor; with `auto` the multiple of the model's positions that the longest row needs, and
    1 if it fits.

    Args:
        section: `model.rope` of the config.
        original: positions that the model was trained on.
        max_length: tokens of the longest row.
    """
    return float(math.ceil(max_length / original)) if section.factor == "auto" else section.factor


def take_rope(settings: Any, *, directory: Path) -> None:
    """Sets the RoPE parameters with which an adapter was trained, if config.json beside it has
    them.

    Args:
        settings: of the base model, of transformers; changed in place.
        directory: of the adapter.

    Raises:
        ModelError: if that config.json is damaged.
    """
    file = directory / "config.json"
    if not file.is_file():
        return
    stored = read_json_object(file, fix="copy the whole directory of the adapter again")
    stored = stored.get("text_config", stored)
    text = settings.get_text_config()
    for name in ("rope_parameters", "max_position_embeddings"):
        if name in stored:
            setattr(text, name, stored[name])


def context_of(text: Any) -> int | None:
    """The maximum number of positions by a model's config, if RoPE is scaled dynamically; else
    None.
    """
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, dict) or parameters.get("rope_type") != "dynamic":
        return None
    return math.ceil(text.max_position_embeddings * parameters["factor"])


def scale_rows_apart(base: torch.nn.Module) -> list[torch.nn.Module]:
    """Lets dynamic RoPE depend on the length of each row; gives the changed modules.

    transformers scales by the longest row of a batch, and by longer ones before: the loss of a row
    would depend on other rows.
    """
    modules = [module for module in base.modules() if getattr(module, "rope_type", None) == "dynamic"]
    for module in modules:
        module.forward = types.MethodType(_row_by_row, module)
    return modules


def scale_rows_together(modules: list[torch.nn.Module]) -> None:
    """Restores the forward of transformers, for generation with a cache."""
    for module in modules:
        del module.forward


@torch.no_grad()  # type: ignore[untyped-decorator]
def _row_by_row(
    rotary: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (1, T, d) for rows one after the other, each from position 0."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    positions = position_ids[0]
    begins = (positions == 0).nonzero()[:, 0].tolist()
    lengths = [end - begin for begin, end in zip(begins, [*begins[1:], len(positions)], strict=True)]
    frequencies = [
        ROPE_INIT_FUNCTIONS["dynamic"](rotary.config, x.device, seq_len=length)[0].expand(length, -1)
        for length in lengths
    ]
    angles = positions[:, None].float() * torch.cat(frequencies)
    both = torch.cat((angles, angles), dim=-1)[None]
    return (both.cos() * rotary.attention_scaling).to(x.dtype), (both.sin() * rotary.attention_scaling).to(
        x.dtype
    )
