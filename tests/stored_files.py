"""Models in the files of fp8 with scales of blocks, of MXFP4, and of compressed-tensors, written by
the definition of their layouts: weights rounded to the nearest number of their block.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_LARGEST = 448.0
"""Of fp8 with four bits of exponent."""


def write_stored(
    source: Path, out: Path, *, layout: str, block: tuple[int, int] = (0, 0), **options: Any
) -> dict[str, torch.Tensor]:
    """Quantizes the linear layers of a model; gives their exact values (out, in) float32 by name.

    Args:
        source: of a model with dense weights.
        out: a new directory.
        layout: fp8, or one of compressed-tensors.
        block: outputs and inputs that share a scale; 0 are all.
        options: `scales`, the dtype of the scales; `bits`, and whether values are `symmetric`, of
            packed words.
    """
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    values: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        rows, columns = (size or of for size, of in zip(block, weight.shape, strict=True))
        write = _words if layout == "pack-quantized" else _bytes
        parts, values[name] = write(weight, (rows, columns), layout, **options)
        tensors |= {f"{name}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = _settings(layout, block, options.get("bits", 8))
    (out / "config.json").write_text(json.dumps(config))
    return values


def _settings(layout: str, block: tuple[int, int], bits: int) -> dict[str, Any]:
    if layout == "fp8":
        size = list(block) if all(block) else None
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": size,
        }
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": block[1] or None,
    }
    if layout == "float-quantized":
        weights = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block",
            "block_structure": [*block],
        }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def _spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """One number for each weight."""
    return torch.kron(scales.float(), torch.ones(block))[: shape[0], : shape[1]]


def _largest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest absolute value of each block."""
    return torch.stack(
        [
            torch.stack([part.abs().amax() for part in rows.split(block[1], 1)])
            for rows in weight.split(block[0])
        ]
    )


def _bytes(
    weight: torch.Tensor, block: tuple[int, int], layout: str, *, scales: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a file, and the values they stand for."""
    most = 127.0 if layout == "int-quantized" else _LARGEST
    found = _largest(weight, block) / most
    found = found.log2().ceil().exp2() if scales == torch.float8_e8m0fnu else found
    wide = _spread(found.to(scales), block, weight.shape)
    codes = (weight / wide).clamp(-most, most)
    codes = codes.round().to(torch.int8) if layout == "int-quantized" else codes.to(torch.float8_e4m3fn)
    name = "_scale_inv" if layout == "fp8" else "_scale"
    stored = found.to(scales).reshape(()) if layout == "fp8" and found.numel() == 1 else found.to(scales)
    return {"": codes, name: stored}, codes.float() * wide


def _words(
    weight: torch.Tensor, block: tuple[int, int], _layout: str, *, bits: int = 4, symmetric: bool = True
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Codes of `bits` in words of 32; bfloat16 scales, as llm-compressor stores them."""
    half = 1 << (bits - 1)
    scales = (_largest(weight, block) / (half - 1 if symmetric else half / 2)).bfloat16()
    zeros = torch.zeros_like(scales, dtype=torch.int64)
    if not symmetric:
        zeros = (torch.arange(zeros.numel()).reshape(zeros.shape) % half) - half // 2
    wide, zero = _spread(scales, block, weight.shape), _spread(zeros, block, weight.shape)
    codes = (weight / wide + zero).round().clamp(-half, half - 1)
    parts = {
        "_packed": _packed(codes + half, bits),
        "_scale": scales,
        "_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["_zero_point"] = _packed((zeros + half).t(), bits).t()
    return parts, (codes - zero) * wide


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(n, m) → (n, m · bits / 32) int32: the first code in the lowest bits."""
    per = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per), dtype=np.int64)
    for position in range(per):
        words += codes[:, position::per].numpy().astype(np.int64) << (bits * position)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of the first eight codes; those of the other eight are the same, below 0."""


def write_mxfp4(source: Path, out: Path) -> dict[str, torch.Tensor]:
    """Quantizes the experts of a gpt-oss; gives the exact values of their parameters (experts, in,
    out) float32 by name.
    """
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    values: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks = tensors.pop(name).float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = (blocks.abs().amax(-1) / 6.0).log2().ceil()
        scaled = blocks / exponents.exp2()[..., None]
        nearest = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
        numbers = _FP4[nearest] * scaled.sign()
        codes = (nearest + 8 * (numbers < 0)).to(torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        values[name] = (numbers * exponents.exp2()[..., None]).flatten(2).transpose(1, 2).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))
    return values
