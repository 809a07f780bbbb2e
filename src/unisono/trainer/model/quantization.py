"""Base models with quantized linear layers (QLoRA, arXiv:2305.14314) and embeddings: loading,
products with their weights, merging.

Letters: T tokens, W (out, in) a base weight, A (r, in) and B (out, r) of its adapter, s the
adapter's scaling; of embedding and head V vocabulary, E hidden size.

A quantized weight is dequantized for each product, in the forward pass and again in the backward
pass, and freed before the next one: at most one weight exists in full. `forward` of bitsandbytes is
not used: in evaluation mode on a CPU with AVX512-BF16, bitsandbytes 0.50 packs the weights in
memory differently, and later products with them have no gradient.
"""

import contextlib
import ctypes
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from unisono.base.errors import ModelError
from unisono.trainer.config.model_sections import ModelSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.directory import read_model_config
from unisono.trainer.model.file_settings import (
    ORIGINAL,
    Quantization,
    StoredShape,
    quantization_of,
    stored_shapes,
)
from unisono.trainer.model.files import read_safetensors_header, weight_files
from unisono.trainer.model.kernels import load_kernels, product, product_back
from unisono.trainer.model.parts import count_experts

_LARGEST_INT8 = 127.0
_READER = "unisono_stored"  # our names among the methods of transformers
_QUANTIZER = "unisono_bitsandbytes"
_AT_A_TIME = 1 << 18  # weights of which all steps are done before the next ones on a CPU, in its cache
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in 32 bits the weights of eight outputs are
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_FP4 = torch.float4_e2m1fn_x2
_ROWS = 1024  # of an embedding that are dequantized at a time: their bfloat16 copy stays in a CPU's cache
_ROWS_ON_GPU = 16_384  # fewer kernels; not measured


@dataclass(frozen=True)
class QuantizedLoad:
    """How to load a model with quantized weights.

    Attributes:
        how: data type, and whether the files are quantized already.
        compute: dtype that weights are dequantized to.
        device: where weights are quantized, and stay.
    """

    how: Quantization
    compute: torch.dtype
    device: torch.device

    def options(self, directory: Path, settings: Any) -> dict[str, object]:
        """The keyword arguments of `from_pretrained`, for the files of a directory; changes their
        config where unisono reads them itself.

        Raises:
            ModelError: if bitsandbytes does not support the device.
        """
        if self.how.layout:
            _register_reader()
            how = {"directory": str(directory), "how": asdict(self.how)}
            settings.quantization_config = {"quant_method": _READER, **how}
            return {}
        self._check_device()
        options: dict[str, object] = {"device_map": {"": str(self.device)}}
        return options if self.how.stored else {**options, "quantization_config": self._settings()}

    def _settings(self) -> Any:
        from transformers import BitsAndBytesConfig

        _register_quantizers()
        if self.how.kind == "int8":
            settings = BitsAndBytesConfig(load_in_8bit=True)
        else:
            settings = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=self.how.kind,
                bnb_4bit_use_double_quant=self.how.double,
                bnb_4bit_compute_dtype=self.compute,
            )
        settings.quant_method = f"{_QUANTIZER}_{settings.quantization_method()}"
        return settings

    def _check_device(self) -> None:
        import bitsandbytes

        known = sorted(bitsandbytes.supported_torch_devices)
        if self.device.type not in known:
            raise ModelError.of(
                f"bitsandbytes {bitsandbytes.__version__} does not support the device {self.device.type}",
                where=f"model.quantize: {self.how.kind}",
                why=f"it supports {', '.join(known)}",
                fix="set model.quantize: null, or device: cpu",
            )


def quantized_load(
    config: RunConfig | None, directory: Path, *, dtype: str, device: torch.device
) -> QuantizedLoad | None:
    """How the weights of a model's directory are quantized in memory, by a run's config and its
    files; None if they are not.

    Raises:
        ModelError: if files and config contradict each other, or a library is missing.
    """
    section = config.model if config is not None else ModelSection(path=str(directory))
    how = quantization_of(section, directory, read_model_config(directory))
    if how is None:
        return None
    compute = section.quantize_compute
    return QuantizedLoad(how, getattr(torch, dtype if compute == "auto" else compute), device)


@contextlib.contextmanager
def without_heap() -> Iterator[None]:
    """A context in which glibc gives each tensor above 1 MB memory of its own, and returns it to
    the system when it is freed.

    While a model is quantized, parts of freed weights stay in the heap between what lives on: at
    135 M parameters up to 500 MB, differently in each run. Afterwards the heap is used again, which
    is faster, with the thresholds that glibc finds for itself after large tensors.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    set_threshold = mallopt or (lambda _name, _bytes: 0)
    set_threshold(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_threshold(_M_MMAP_THRESHOLD, 32 << 20)
        set_threshold(_M_TRIM_THRESHOLD, 64 << 20)


def set_products(model: torch.nn.Module, load: QuantizedLoad, *, where: str) -> None:
    """Replaces the forward of the quantized layers by `DequantizedProduct`.

    Raises:
        ModelError: if most of the model's matrices are not linear layers, so that they are not
            quantized.
    """
    _pack_files(model, load, where=where)
    _put_quantized_experts(model)
    layers = [layer for _, layer in quantized_layers(model)]
    _refuse_other_weights(model, layers, load, where=where)
    for layer in layers:
        state = state_of(layer)
        if not isinstance(state, torch.Tensor | Scales):  # of bitsandbytes in 4 bits
            state.dtype = load.compute
        layer.compute_dtype = load.compute
        if not isinstance(layer, QuantizedExperts):
            layer.forward = types.MethodType(_forward, layer)
    if load.how.embeddings:
        _pack_embeddings(model)
    if not load.how.stored:
        _release_files(model)


def _pack_files(model: torch.nn.Module, load: QuantizedLoad, *, where: str) -> None:
    """Makes weights of the tensors of files that unisono reads itself."""
    for _, layer in quantized_layers(model):
        if isinstance(layer, StoredLinear):
            layer.pack(load.how.layout, load.device, where=where)
    for experts, quantized in quantized_experts(model):
        if isinstance(quantized, StoredExperts):
            quantized.pack(experts, load.device)


def _refuse_other_weights(
    model: torch.nn.Module, layers: list[Any], load: QuantizedLoad, *, where: str
) -> None:
    """Refuses a model if most of its matrices are not those of its quantized layers."""
    inside = sum(layer.in_features * layer.out_features for layer in layers)
    outside = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 2}
    if inside > 0 and sum(outside.values()) <= inside:
        return
    largest = max(outside, key=lambda name: outside[name], default="")
    raise ModelError.of(
        f"the weights of this model cannot be quantized as {load.how.kind}",
        where=where,
        why=(
            f"most of them are not in linear layers, e.g. {largest}"
            if largest
            else "it has no linear layers besides its head"
        ),
        fix=ORIGINAL if load.how.stored else "set model.quantize: null",
    )


def _release_files(model: torch.nn.Module) -> None:
    """Copies the weights that are not quantized, which otherwise keep whole files mapped into
    memory, and returns freed memory to the system.
    """
    packed = {id(layer.weight) for _, layer in quantized_layers(model)}
    for parameter in model.parameters():
        if id(parameter) not in packed and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    # Of glibc; without it the memory stays with the process, for later use.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def quantized_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each linear layer with a quantized weight, and of the matrices of
    experts.
    """
    for name, module in model.named_modules():
        # By name: bitsandbytes may not be installed. The layers of peft that wrap them have the
        # same names, and no compute_dtype or state.
        kind = type(module)
        is_theirs = kind.__module__.startswith("bitsandbytes.")
        if isinstance(module, StoredLinear | QuantizedExperts) or (
            is_theirs and kind.__name__ in ("Linear4bit", "Linear8bitLt")
        ):
            yield name, module


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether it has quantized layers."""
    return next(quantized_layers(model), None) is not None


def count_parameters(model: torch.nn.Module) -> int:
    """The number of weights, tied ones counted once; a packed byte may hold several."""
    packed = {
        id(layer.weight): layer.in_features * layer.out_features for _, layer in quantized_layers(model)
    }
    return sum(packed.get(id(parameter), parameter.numel()) for parameter in model.parameters())


def scales_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors by which quantized weights are dequantized, by name.

    With the packed weights they determine the values.
    """
    scales: dict[str, torch.Tensor] = {}
    for name, layer in quantized_layers(model):
        state = state_of(layer)
        if isinstance(state, torch.Tensor):
            scales[f"{name}.weight.scale"] = state
            continue
        if isinstance(state, Scales):
            scales |= {f"{name}.weight.{part}": tensor for part, tensor in state.tensors().items()}
            continue
        scales[f"{name}.weight.absmax"] = state.absmax
        if state.nested:
            scales[f"{name}.weight.nested_absmax"] = state.state2.absmax
            scales[f"{name}.weight.nested_offset"] = state.offset
    return scales | {f"{name}.weight.scale": table.scale for name, table in _tables(model)}


def packed_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The quantized weights as they are stored, by name: bytes, not numbers."""
    return {f"{name}.weight": module.weight for name, module in [*quantized_layers(model), *_tables(model)]}


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights in memory: tied ones once, quantized ones with their scales."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*model.parameters(), *scales_of(model).values()]
    }
    return sum(storages.values())


def state_of(layer: Any) -> Any:
    """What dequantizes its weight: the state of bitsandbytes, or of int8 the largest value of each
    row, (out,) float32.
    """
    if hasattr(layer, "quant_state"):
        return layer.quant_state
    scale = layer.state.SCB
    return layer.weight.SCB if scale is None else scale


def keep_scales(model: torch.nn.Module, device: torch.device) -> None:
    """Moves the scales of quantized weights to a device, and keeps them at their layers: sharding
    replaces the parameters that hold them.
    """
    for _, layer in quantized_layers(model):
        state = state_of(layer)
        if isinstance(layer, QuantizedExperts) and isinstance(state, torch.Tensor):
            layer.quant_state = state.to(device)
        elif isinstance(state, torch.Tensor):
            layer.state.SCB = state.to(device)
        else:
            state.to(device)


def dequantized(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """W (out, in), a new tensor.

    Args:
        packed: the weight as it is stored.
        state: of its layer.
        dtype: of the result.
    """
    if isinstance(state, torch.Tensor):
        scale = state * (1.0 / _LARGEST_INT8)
        # torch multiplies bfloat16 by float32 numbers in place 30 times slower on a CPU, with the
        # same result.
        compiled = dtype == torch.bfloat16 and packed.device.type == "cpu"
        kernels = load_kernels() if compiled else None
        return kernels.dequantize(packed, scale) if kernels else packed.to(dtype).mul_(scale[:, None])
    if isinstance(state, Scales):
        return state.dequantized(packed, dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed.data, state).to(dtype)


class DequantizedProduct(torch.autograd.Function):
    """x (…, in), W (out, in) packed and frozen, bias (out,) or None frozen → (…, out)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: Any, bias: Any) -> torch.Tensor:
        """The product in the dtype of x."""
        ctx.save_for_backward(packed)
        ctx.state = state
        return torch.nn.functional.linear(x, dequantized(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of x."""
        (packed,) = ctx.saved_tensors
        return grad @ dequantized(packed, ctx.state, grad.dtype), None, None, None


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a quantized layer without an adapter of its own, in the dtype of x."""
    dtype = layer.compute_dtype
    with torch.autocast(x.device.type, enabled=False):  # it would change the dtype of the product
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return DequantizedProduct.apply(x.to(dtype), layer.weight, state_of(layer), bias).to(x.dtype)


def adapted_layers(model: torch.nn.Module) -> Iterator[Any]:
    """The peft layers whose base layer is quantized."""
    from peft.tuners.lora.layer import LoraLayer

    quantized = {id(layer) for _, layer in quantized_layers(model)}
    for module in model.modules():
        if isinstance(module, LoraLayer) and id(module.get_base_layer()) in quantized:
            yield module


# ---- files that unisono reads itself


class Scales(ABC):
    """What dequantizes a weight of such files."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device) -> None:
        """Moves the tensors."""
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))

    @abstractmethod
    def dequantized(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """W (out, in) of the bytes (out, in · bits / 8), rounded once from float32."""


@dataclass
class Groups(Scales):
    """What dequantizes a weight of GPTQ, AWQ or packed words: W[o, i] = scales[o, g] · (codes[o, i]
    − zeros[o, g]), where g is the group of input i.

    Attributes:
        bits: of a code; a byte has several, the first one in its lowest bits.
        scales: (out, groups) in the dtype of the files.
        zeros: (out, groups) uint8.
        places: (in,) int64, where among the codes, which are in the order of groups, each input is;
            None if inputs are in that order.
    """

    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor
    places: torch.Tensor | None

    def dequantized(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """W (out, in) of the bytes (out, in · bits / 8).

        Differences and products are exact in float32, and rounded once.
        """
        outs, width = packed.shape[0], packed.shape[1] * 8 // self.bits
        compiled = dtype == torch.bfloat16 and packed.device.type == "cpu"
        whole_bytes = width // self.scales.shape[1] * self.bits % 8 == 0
        if compiled and whole_bytes and (kernels := load_kernels()):
            return kernels.dequantize_groups(packed, self.scales.float(), self.zeros, self.places, self.bits)
        weight = torch.empty(outs, width, dtype=dtype, device=packed.device)
        step = max(1, _AT_A_TIME // width) if packed.device.type == "cpu" else outs
        for first in range(0, outs, step):
            rows = slice(first, first + step)
            scales, zeros = self.scales[rows, :, None], self.zeros[rows, :, None]
            codes = _unpacked(packed[rows], self.bits).unflatten(1, (scales.shape[1], -1))
            values = codes.float().sub_(zeros).mul_(scales).flatten(1)
            weight[rows] = values if self.places is None else values[:, self.places]
        return weight


@dataclass
class Blocks(Scales):
    """What dequantizes a weight with a scale for each block: W[o, i] = scales[o // rows, i //
    columns] · number[o, i].

    Attributes:
        dtype: of the numbers, of which a byte has one, or two of 4 bits.
        block: rows and columns.
        scales: (out / rows, in / columns), rounded up; uint8 are exponents of 2, less 127.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    scales: torch.Tensor

    def dequantized(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """W (out, in) of the bytes; products are rounded once from float32."""
        outs, width = len(packed), packed.shape[1] * (2 if self.dtype == _FP4 else 1)
        weight = torch.empty(outs, width, dtype=dtype, device=packed.device)
        step = max(1, _AT_A_TIME // width) if packed.device.type == "cpu" else outs
        rows = torch.arange(outs, device=packed.device) // self.block[0]
        for part, to, of in zip(packed.split(step), weight.split(step), rows.split(step), strict=True):
            scales = self.scales[of]
            wide = _numbers(scales, torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales.float()
            numbers = _numbers(part, self.dtype)
            to.copy_(numbers.mul_(wide.repeat_interleave(self.block[1], 1)[:, :width]))
        return weight


def _numbers(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (out, in) float32 of bytes (out, …).

    By a table: on a CPU torch converts fp8 at a third of the speed, and it has no conversion of
    fp4.
    """
    table = _table(dtype, packed.device)
    return table.index_select(0, packed.reshape(-1).int()).view(torch.float32).view(len(packed), -1)


@cache
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The number of each byte, (256,) float32; of fp4 two numbers in the bits of one float64."""
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype != _FP4:
        return codes.view(dtype).float().to(device)
    halves = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([halves, -halves])[_unpacked(codes[:, None], 4).long()]
    return numbers.view(torch.float64)[:, 0].contiguous().to(device)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """(…, n) bytes → (…, n · 8 / bits) codes, uint8."""
    if bits == 8:
        return packed
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes (out, in · bits / 8) of codes (out, in)."""
    parts = [codes[..., position :: 8 // bits] << (position * bits) for position in range(8 // bits)]
    return torch.stack(parts).sum(0, dtype=torch.uint8)


class StoredLinear(torch.nn.Linear):
    """A linear layer with a quantized weight of files that unisono reads itself.

    It has the tensors of the files until `pack` makes one weight of them.

    It is a `Linear`, so that peft adapts it, and has the interface of HQQ's layers, from which peft
    gets dense weights for DoRA.
    """

    def __init__(self, linear: torch.nn.Linear, shape: StoredShape) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bits = shape.ins, shape.outs, shape.bits
        self.bias, self.compute_dtype, self.block = linear.bias, torch.float32, shape.block
        self.weight: torch.nn.Parameter
        self.register_parameter("weight", None)
        for name, header in shape.parts.items():
            dtype = _DTYPES[header.dtype]
            tensor = torch.empty(header.shape, dtype=dtype, device=linear.weight.device)
            if name == "weight":
                self.weight = torch.nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)

    def pack(self, layout: str, device: torch.device, *, where: str) -> None:
        """Makes the weight and its state of the tensors of the files.

        Raises:
            ModelError: if the groups of inputs differ in size.
        """
        parts = {name: tensor.to(device) for name, tensor in self.named_buffers(recurse=False)}
        for name in parts:
            delattr(self, name)
        if self.weight is not None:
            parts["weight"] = self.weight.data.to(device)
        packed, state = _read_stored(layout, parts, self.bits, self.block)
        index = parts.get("g_idx", parts.get("weight_g_idx"))
        if index is not None and isinstance(state, Groups):
            packed, state.places = self._by_group(packed, index.long(), state.zeros.shape[1], where)
        self.quant_state = state
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def _by_group(
        self, packed: torch.Tensor, index: torch.Tensor, groups: int, where: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The codes in the order of the groups (in,) of inputs, and where each input is then."""
        sizes = index.clamp(min=0).bincount(minlength=groups)
        if not torch.equal(sizes, torch.full_like(index[:groups], len(index) // groups)):
            raise ModelError.of(
                f"the {len(index)} numbers of a g_idx do not form {groups} groups of equal size",
                where=where,
                fix="copy the weights again, or use the model's original files",
            )
        order = index.argsort(stable=True)
        if torch.equal(order, torch.arange(len(order), device=order.device)):
            return packed, None
        return _packed(_unpacked(packed, self.bits)[:, order], self.bits), order.argsort()

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802 - peft's
        """The packed weight; peft calls `dequantize` where there is one of this name."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """W (out, in), for peft."""
        return self.quant_state.dequantized(self.weight, self.compute_dtype)


_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_UNUSED = {
    "weight_shape",
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
}


def _read_stored(
    layout: str, parts: dict[str, torch.Tensor], bits: int, block: tuple[int, int]
) -> tuple[torch.Tensor, Scales]:
    """The bytes (out, …) of a weight, and what dequantizes them, of the tensors of its files."""
    if "weight" in parts:
        return parts["weight"].view(torch.uint8), Blocks(
            parts["weight"].dtype, block, _scales_of_blocks(parts)
        )
    if "blocks" in parts:
        return parts["blocks"].flatten(1), Blocks(_FP4, block, parts["scales"])
    packed, zeros, scales = (
        _read_words(parts, bits) if "weight_packed" in parts else _read_grouped(layout, parts, bits)
    )
    return packed, Groups(bits, scales.contiguous(), zeros.contiguous(), None)


_Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # bytes (out, …), zeros and scales (out, groups)


def _read_grouped(layout: str, parts: dict[str, torch.Tensor], bits: int) -> _Codes:
    """The weight of GPTQ or AWQ."""
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].t()
    if layout == "gemm":
        return _packed(_awq_codes(packed).t(), bits), _awq_codes(zeros).t(), scales
    if layout == "gptq":  # stored less one, as one number of 32 bits
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    zeros = _unpacked(zeros.contiguous().view(torch.uint8), bits)
    return packed.t().contiguous().view(torch.uint8), zeros.t(), scales


def _read_words(parts: dict[str, torch.Tensor], bits: int) -> _Codes:
    """The weight of compressed-tensors: codes and zero points with half of their range added."""
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    if zeros is None:
        middle = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
        return parts["weight_packed"].contiguous().view(torch.uint8), middle, scales
    zeros = _unpacked(zeros.t().contiguous().view(torch.uint8), bits).t()
    return parts["weight_packed"].contiguous().view(torch.uint8), zeros, scales


def _scales_of_blocks(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The scales of a matrix (blocks of rows, blocks of columns); exponents as bytes."""
    scales = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    scales = scales.reshape(*scales.shape, *[1] * (2 - scales.ndim))
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def _awq_codes(packed: torch.Tensor) -> torch.Tensor:
    """(n, out / 8) int32 → (n, out) uint8."""
    codes = _unpacked(packed.contiguous().view(torch.uint8), 4)
    return codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)


@cache
def _register_reader() -> None:
    """Makes transformers read quantized files into layers of ours.

    Its own ways need gptqmodel or compressed-tensors, and a CUDA device for most kernels; on others
    it dequantizes fp8 on loading.
    """
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(_READER)
    class _Settings(QuantizationConfigMixin):
        def __init__(self, quant_method: str, directory: str, how: Mapping[str, object]) -> None:
            self.quant_method, self.directory, self.how = quant_method, directory, how

    @register_quantizer(_READER)
    class _Reader(HfQuantizer):
        is_trainable = False

        def is_serializable(self, *_args: Any, **_kwargs: Any) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: Any, **_kwargs: Any) -> None:
            settings = self.quantization_config
            names = _put_stored_layers(model, Path(settings.directory), Quantization(**settings.how))
            self.serialized_names = {"weight": names}

        def _process_model_after_weight_loading(self, model: Any, **_kwargs: Any) -> None:
            pass


def _put_stored_layers(model: Any, directory: Path, how: Quantization) -> list[str]:
    """Replaces the linear layers and experts of which the files have quantized weights; the model
    is on the meta device.

    Gives the last names of the tensors that transformers has to join for experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    headers = [header for file in weight_files(directory) for header in read_safetensors_header(file)]
    linear = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    fused = {name: p for name, p in model.named_parameters() if p.ndim == 3}
    steps = get_model_conversion_mapping(model)
    of_experts: dict[str, list[StoredShape]] = {}
    for stored, shape in stored_shapes(how, headers, str(directory)).items():
        name = stored if "blocks" in shape.parts else f"{stored}.weight"
        for step in steps:
            name, _ = step.rename_source_key(name)
        if name in fused:
            of_experts.setdefault(name, []).append(shape)
            continue
        layer = linear.get(name.removesuffix(".weight"))
        if layer is None or tuple(layer.weight.shape) != (shape.outs, shape.ins):
            has = "no such linear layer" if layer is None else f"({layer.out_features}, {layer.in_features})"
            raise ModelError.of(
                f"the files have a quantized weight of shape ({shape.outs}, {shape.ins}) for {stored}, but the"
                f" model has {has}",
                where=str(directory),
                why="layers of experts, for example, are one tensor in this version of transformers",
                fix="use the model's original files",
            )
        model.set_submodule(name.removesuffix(".weight"), StoredLinear(layer, shape))
    for name, shapes in of_experts.items():
        _put_stored_experts(model, name, shapes, where=str(directory))
    if of_experts:
        unused = rf"experts\..*\.({'|'.join(_UNUSED)})$"
        before = model._keys_to_ignore_on_load_unexpected  # noqa: SLF001 - 5.23
        model._keys_to_ignore_on_load_unexpected = {*(before or ()), unused}  # noqa: SLF001 - 5.23
    parts = {part for shapes in of_experts.values() for part in shapes[0].parts if part not in _UNUSED}
    return ["weight", *sorted(parts - {"weight"})]


# ---- experts whose matrices are one parameter


class QuantizedExperts(torch.nn.Module):
    """The quantized matrices of all experts for one parameter of their module, e.g. `gate_up_proj`.

    It is a child of that module, which keeps the place of the parameter and, as a plain attribute,
    a tensor of its shape, dtype and device without values: peft reads these.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        dtype: of the parameter.
        adapters: the wrappers of peft on it.
    """

    def __init__(
        self, experts: torch.nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, ins: int
    ) -> None:
        super().__init__()
        self.name, self.shape, self.dtype, self.turned = name, shape, dtype, False
        self.compute_dtype, self.bias = torch.float32, None
        self.in_features, self.out_features = ins, math.prod(shape) // ins
        self.adapters: list[Any] = []
        self.quant_state: Any = None
        self.weight: torch.nn.Parameter
        self.register_parameter("weight", None)
        setattr(experts, name, None)

    def hold(self, experts: torch.nn.Module, packed: torch.Tensor, state: Any) -> None:
        """Takes the weight and what dequantizes it, and replaces the forward of the module."""
        self.weight, self.quant_state = torch.nn.Parameter(packed, requires_grad=False), state
        self.put_outline(experts)
        experts.forward = types.MethodType(_forward_of_experts, experts)

    def put_outline(self, experts: torch.nn.Module) -> None:
        """Gives the module the tensor without values."""
        vars(experts)[self.name] = self.weight.new_empty((), dtype=self.dtype).expand(self.shape)

    def dense(self) -> torch.Tensor:
        """The parameter as the module of transformers has it."""
        weight = dequantized(self.weight, self.quant_state, self.compute_dtype).to(self.dtype)
        if self.turned:
            return weight.view(self.shape[0], -1, self.in_features).transpose(1, 2)
        return weight.view(self.shape)

    def adapted(self) -> torch.Tensor:
        """W + s·B·A of each expert, in the dtype of the parameter, as peft computes it on dense
        experts.
        """
        weight = self.dense()
        for wrapper in self.adapters:
            names = [] if wrapper.disable_adapters else wrapper.active_adapters
            for name in set(names) & set(wrapper.lora_A):
                left, right, scaling = wrapper.get_delta_factors(name)
                with torch.autocast(weight.device.type, enabled=False):
                    weight = torch.baddbmm(weight, left, right, alpha=scaling)
        return weight


class StoredExperts(QuantizedExperts):
    """Those that are quantized in the files, one matrix below the other; until `pack` the module
    has the tensors of the files.
    """

    def __init__(self, experts: torch.nn.Module, name: str, shapes: list[StoredShape]) -> None:
        first, parameter = shapes[0], experts.get_parameter(name)
        super().__init__(experts, name, tuple(parameter.shape), parameter.dtype, first.ins)
        self.bits, self.block = first.bits, first.block
        self.turned = "blocks" in first.parts  # the parameter is (experts, in, out)
        self.parts: dict[str, str] = {}  # the names of the tensors in the module
        for part, header in first.parts.items():
            if part in _UNUSED:
                continue
            self.parts[part] = f"{name}_{part}" if self.turned else f"{name}{part.removeprefix('weight')}"
            rows = header.shape[0] * len(shapes) // self.shape[0]
            shape = header.shape if self.turned else (self.shape[0], rows, *header.shape[1:])
            tensor = torch.empty(shape, dtype=_DTYPES[header.dtype], device=parameter.device)
            experts.register_parameter(self.parts[part], torch.nn.Parameter(tensor, requires_grad=False))

    def pack(self, experts: torch.nn.Module, device: torch.device) -> None:
        """Makes the weight and its state of the tensors of the files."""
        parts = {part: getattr(experts, name).data.to(device) for part, name in self.parts.items()}
        for name in self.parts.values():
            if name == self.name:
                setattr(experts, name, None)
            else:
                delattr(experts, name)
        rows = {part: tensor.flatten(0, 1) for part, tensor in parts.items()}
        self.hold(experts, *_read_stored("", rows, self.bits, self.block))


def _put_stored_experts(model: Any, name: str, shapes: list[StoredShape], *, where: str) -> None:
    """Replaces the parameter of a module of experts.

    Raises:
        ModelError: if the matrices in the files are not those of the parameter.
    """
    owner, _, last = name.rpartition(".")
    experts, first = model.get_submodule(owner), shapes[0]
    count, *sizes = experts.get_parameter(last).shape
    outs, ins = (len(shapes) * first.outs // count, first.ins)
    fits = len({(shape.outs, shape.ins, shape.bits, shape.block) for shape in shapes}) == 1
    if "blocks" not in first.parts:  # matrices that are joined must not share a scale
        fits = fits and first.outs % first.block[0] == 0
        fits = fits and all(len(part.shape) == 2 for key, part in first.parts.items() if key not in _UNUSED)
    if not fits or sizes != ([ins, outs] if "blocks" in first.parts else [outs, ins]):
        raise ModelError.of(
            f"the files have quantized weights for {name} that are not read",
            where=where,
            why=f"{len(shapes)} matrices ({first.outs}, {first.ins}) do not make up the model's ({count},"
            f" {sizes[0]}, {sizes[1]}), or share a scale",
            fix="use the model's original files",
        )
    experts.add_module(f"{last}_quantized", StoredExperts(experts, last, shapes))
    experts._is_hf_initialized = True  # noqa: SLF001 - otherwise transformers 5.23 draws the parameter


_READ_BY_DTYPE = ("weights_proj",)
"""Layers that stay dense: the indexers of DeepSeek V3.2 and its kin cast what they read to the type
of these weights, which would be bytes.
"""


@cache
def _register_quantizers() -> None:
    """Makes transformers quantize experts with the linear layers: each parameter when all of its
    tensors are read, before those of the next one.

    `bitsandbytes.nn.parametrize` quantizes parameters of a model that is in memory, and dequantizes
    them at each access: four times in a forward with an adapter of peft.
    """
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    class _Quantize(ConversionOps):
        def __init__(self, linear: Any, quantizer: Any) -> None:
            self.linear, self.quantizer = linear, quantizer

        def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, Any]:
            if not self.quantizer.experts.keys() & input_dict.keys():
                converted: dict[str, Any] = self.linear.convert(input_dict, model=model, **kwargs)
                return converted
            return {name: self._packed(name, value, model) for name, value in input_dict.items()}

        def _packed(self, name: str, value: Any, model: Any) -> torch.nn.Parameter:
            weight = value[0] if isinstance(value, list) else value
            parameter = model.get_parameter(name)
            model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = True  # noqa: SLF001 - 5.23
            packed, state = _quantize(weight, self.quantizer.quantization_config)
            self.quantizer.experts[name] = (tuple(weight.shape), parameter.dtype, state)
            return torch.nn.Parameter(packed, requires_grad=False)

    class _Experts:
        def get_modules_to_not_convert(self, model: Any, *args: Any, **kwargs: Any) -> list[str]:
            left: list[str] = super().get_modules_to_not_convert(model, *args, **kwargs)  # type: ignore[misc]
            return [*left, *_READ_BY_DTYPE]

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, **kwargs)  # type: ignore[misc]
            self.experts: dict[str, Any] = {  # what dequantizes a parameter, once it is loaded
                f"{name}.{leaf}": None
                for name, module in model.named_modules()
                if count_experts(name, module) and should_convert_module(name, self.modules_to_not_convert)  # type: ignore[attr-defined]
                for leaf, parameter in module.named_parameters(recurse=False)
                if parameter.ndim == 3
            }

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return param_name in self.experts or super().param_needs_quantization(model, param_name, **kwargs)  # type: ignore[misc]

        def get_quantize_ops(self) -> Any:
            return _Quantize(super().get_quantize_ops(), self)  # type: ignore[misc]

    for kind, theirs in {
        "nf4": Bnb4BitHfQuantizer,
        "fp4": Bnb4BitHfQuantizer,
        "llm_int8": Bnb8BitHfQuantizer,
    }.items():
        register_quantizer(f"{_QUANTIZER}_{kind}")(type(f"_Quantizer_{kind}", (_Experts, theirs), {}))


def _quantize(weight: torch.Tensor, settings: Any) -> tuple[torch.Tensor, Any]:
    """The bytes of the matrices of experts, and what dequantizes them: a scale for each row in 8
    bits.
    """
    if settings.load_in_8bit:
        packed, scale = _in_eight_bits(weight.flatten(0, 1))
        return packed.data, scale
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(
        weight.contiguous(),
        compress_statistics=settings.bnb_4bit_use_double_quant,
        quant_type=settings.bnb_4bit_quant_type,
    )


def _put_quantized_experts(model: Any) -> None:
    """Replaces the parameters of experts that were quantized on loading."""
    loaded = getattr(getattr(model, "hf_quantizer", None), "experts", {})
    for name, parameter in [(n, p) for n, p in model.named_parameters() if loaded.get(n) is not None]:
        owner, _, last = name.rpartition(".")
        experts, (shape, dtype, state) = model.get_submodule(owner), loaded.pop(name)
        quantized = QuantizedExperts(experts, last, shape, dtype, shape[-1])
        quantized.hold(experts, parameter.data, state)
        experts.add_module(f"{last}_quantized", quantized)


def quantized_experts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, QuantizedExperts]]:
    """Each module of experts that has quantized matrices, with these."""
    for module in model.modules():
        for child in list(module.children()):
            if isinstance(child, QuantizedExperts):
                yield module, child


@contextlib.contextmanager
def parameters_of_experts(base: torch.nn.Module) -> Iterator[None]:
    """A context in which quantized experts have parameters, without values, which peft can adapt.
    Afterwards their module adds the adapters to the weights that it dequantizes.

    Args:
        base: of transformers.
    """
    both = list(quantized_experts(base))
    for experts, quantized in both:
        outline = vars(experts).pop(quantized.name)
        experts.register_parameter(quantized.name, torch.nn.Parameter(outline, requires_grad=False))
    try:
        yield
    finally:
        for experts, quantized in both:
            setattr(experts, quantized.name, None)
            quantized.put_outline(experts)
        if both:
            _take_adapters(base, {(id(experts), of.name): of for experts, of in both})


def _take_adapters(base: torch.nn.Module, quantized: dict[tuple[int, str], QuantizedExperts]) -> None:
    """Has experts, by the id of their module and the name of the parameter, compute with the
    adapters that peft has put around their module.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for of in quantized.values():
        of.adapters = []
    for wrapper in base.modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        experts = quantized.get((id(wrapper.get_base_layer()), wrapper.parameter_name))
        if experts is not None:
            experts.adapters.append(wrapper)
            wrapper.forward = types.MethodType(_forward_of_base, wrapper)


def _forward_of_base(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """That of the module in it, which adds the adapter itself."""
    return wrapper.base_layer(*args, **kwargs)


def _forward_of_experts(experts: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of transformers with dense matrices, which nothing keeps for the backward pass:
    it computes the layer again.
    """
    if not torch.is_grad_enabled():
        return _with_dense_matrices(experts, *args, **kwargs)
    return checkpoint(_with_dense_matrices, experts, *args, use_reentrant=False, **kwargs)


def _with_dense_matrices(experts: Any, *args: Any, **kwargs: Any) -> Any:
    quantized = [child for child in experts.children() if isinstance(child, QuantizedExperts)]
    vars(experts).update({child.name: child.adapted() for child in quantized})
    try:
        return type(experts).forward(experts, *args, **kwargs)
    finally:
        for child in quantized:
            child.put_outline(experts)


# ---- embedding and head in 8 bits


class QuantizedEmbedding(torch.nn.Module):
    """An embedding or a head (V, E) in int8 with one scale for each token: the largest value of its
    row, (V,) float32.

    Quantized by unisono, not by bitsandbytes, whose function divides by 0 for a row of zeros and
    needs float16 on a GPU.
    """

    def __init__(self, weight: torch.nn.Parameter, scale: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.scale: torch.Tensor
        self.register_buffer("scale", scale, persistent=False)
        self.dtype = dtype

    def dense(self, dtype: torch.dtype) -> torch.nn.Parameter:
        """(V, E): the values that are computed with."""
        return torch.nn.Parameter(
            dequantized(self.weight, self.scale, self.dtype).to(dtype), requires_grad=False
        )


class PackedEmbedding(QuantizedEmbedding):
    """Embeds with a table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (…) int64 → (…, E); only the rows of these tokens are dequantized."""
        flat = ids.flatten()
        return dequantized(self.weight[flat], self.scale[flat], self.dtype).view(*ids.shape, -1)


class PackedHead(QuantizedEmbedding):
    """The logits by a table, for what does not compute them in chunks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, E) → (…, V)."""
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)
        logits: torch.Tensor = _TableProduct.apply(rows, self.weight, self.scale)
        return logits.view(*x.shape[:-1], -1)


class _TableProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return times_transposed(x, weight, scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return times(grad, *ctx.saved_tensors), None, None


def times_transposed(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x (n, E) times the transposed head (V, E) → (n, V); one in int8 is dequantized in blocks of
    tokens of the vocabulary.
    """
    if scale is None:
        return product(x, weight)
    y = x.new_empty(len(x), len(weight))
    size = _ROWS_ON_GPU if x.is_cuda else _ROWS
    for out, packed, of_rows in zip(y.split(size, 1), weight.split(size), scale.split(size), strict=True):
        torch.mm(x, dequantized(packed, of_rows, x.dtype).t(), out=out)
    return y


def times(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x (n, V) times the head (V, E) → (n, E); blocks of one in int8 are added up in float32."""
    if scale is None:
        return product_back(x, weight)
    total = x.new_zeros(len(x), weight.shape[1], dtype=torch.float32)
    size = _ROWS_ON_GPU if x.is_cuda else _ROWS
    for columns, packed, of_rows in zip(x.split(size, 1), weight.split(size), scale.split(size), strict=True):
        total += columns @ dequantized(packed, of_rows, x.dtype)
    return total.to(x.dtype)


def _tables(model: torch.nn.Module) -> Iterator[tuple[str, QuantizedEmbedding]]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedEmbedding):
            yield name, module


def _pack_embeddings(model: Any) -> None:
    """Replaces embedding and head by tables in int8; tied ones share theirs.

    Raises:
        ModelError: if one is more than a matrix.
    """
    names = {id(module): name for name, module in model.named_modules()}
    made: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
    for module, plain, kind in (
        (model.get_input_embeddings(), torch.nn.Embedding, PackedEmbedding),
        (model.get_output_embeddings(), torch.nn.Linear, PackedHead),  # None in a reward model
    ):
        if module is None:
            continue
        if type(module) is not plain or getattr(module, "bias", None) is not None:
            raise ModelError.of(
                f"{names[id(module)]} of this model cannot be quantized",
                where="model.quantize_embeddings: true",
                why=f"it is more than one matrix: {module}",
                fix="set model.quantize_embeddings: false",
            )
        weight = module.weight
        if id(weight) not in made:
            made[id(weight)] = _in_eight_bits(weight.data)
        model.set_submodule(names[id(module)], kind(*made[id(weight)], weight.dtype))


def _in_eight_bits(weight: torch.Tensor) -> tuple[torch.nn.Parameter, torch.Tensor]:
    """(V, E) int8 and the scales (V,) of a matrix."""
    packed = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    for rows, to, of_rows in zip(weight.split(_ROWS), packed.split(_ROWS), scale.split(_ROWS), strict=True):
        wide = rows.float()
        of_rows.copy_(wide.abs().amax(1))
        factor = _LARGEST_INT8 / of_rows.clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros stays 0
        to.copy_(wide.mul_(factor[:, None]).round_())
    return torch.nn.Parameter(packed, requires_grad=False), scale


# ---- the dense model that a quantized one computes with


def make_dense(model: Any, base: Any, *, dtype: torch.dtype) -> None:
    """Replaces quantized layers by linear ones, in place; an adapter on them is merged.

    Sums are in float32, and rounded once.

    Args:
        model: of peft, or `base` itself.
        base: of transformers; it is an ordinary model afterwards.
        dtype: of the new weights.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    adapted = {id(layer.get_base_layer()): layer for layer in adapted_layers(model)}
    names = {id(module): name for name, module in model.named_modules()}
    joined: list[Any] = []  # how transformers parts the experts again when it saves
    for experts, quantized in list(quantized_experts(model)):
        delattr(experts, f"{quantized.name}_quantized")
        del vars(experts)[quantized.name]
        dense = quantized.dense().to(dtype).contiguous()
        experts.register_parameter(quantized.name, torch.nn.Parameter(dense, requires_grad=False))
        vars(experts).pop("forward", None)
        for wrapper in quantized.adapters:
            del wrapper.forward
        if isinstance(quantized, StoredExperts):
            steps = get_model_conversion_mapping(base)
            joined = [step for step in steps if isinstance(step, WeightConverter)]
    for _, layer in list(quantized_layers(model)):
        with torch.device("meta"):
            dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        weight = dequantized(layer.weight, state_of(layer), layer.compute_dtype).float()
        around = adapted.get(id(layer))
        if around is not None:
            weight = _merged(around, weight)
        dense.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        if layer.bias is not None:
            dense.bias = layer.bias
        model.set_submodule(names[id(layer if around is None else around)], dense)
    dense_of: dict[int, torch.nn.Parameter] = {}  # tied ones stay tied
    for name, table in list(_tables(model)):
        weight = dense_of.setdefault(id(table.weight), table.dense(dtype))
        with torch.device("meta"):
            shape = tuple(weight.shape)
            plain = (
                torch.nn.Embedding(*shape)
                if isinstance(table, PackedEmbedding)
                else torch.nn.Linear(*shape[::-1], bias=False)
            )
        plain.weight = weight
        model.set_submodule(name, plain)
    base.hf_quantizer.remove_quantization_config(base)
    # transformers reverses what it did on loading when it saves, and cannot reverse the reading of
    # packed values; 5.23 has no public name for these steps.
    steps = getattr(base, "_weight_conversions", None)
    if steps is not None:
        steps = [step for step in steps if not _reads_packed(step)]
        base._weight_conversions = steps + joined  # noqa: SLF001 - 5.23
    base.is_loaded_in_4bit = base.is_loaded_in_8bit = False


def _reads_packed(step: Any) -> bool:
    """Whether a conversion of transformers is one of bitsandbytes."""
    return any(type(part).__module__.endswith(".bitsandbytes") for part in getattr(step, "operations", ()))


def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight (out, in) float32 with the update of the adapter on it."""
    (name,) = layer.active_adapters
    update = layer.get_delta_weight(name).float()
    if name not in layer.lora_variant:
        return weight + update
    magnitude = layer.lora_magnitude_vector[name]  # DoRA: rows have the trained length
    length = torch.linalg.norm(weight + update, dim=1)
    return (magnitude.weight.float() / length)[:, None] * (weight + update)
