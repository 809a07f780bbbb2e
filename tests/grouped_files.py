"""Models in the files of GPTQ and AWQ, written by the definition of their layouts: weights rounded
to the nearest of their group's numbers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of which of eight outputs the bits of an AWQ word are, from the lowest four on."""


def write_grouped(
    source: Path,
    out: Path,
    *,
    layout: str,
    bits: int = 4,
    group: int = 16,
    shuffled: bool = False,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Quantizes the linear layers of a model; gives their exact values (out, in) float32 by name.

    Args:
        source: of a model with dense weights.
        out: a new directory.
        layout: gptq, gptq_v2, or gemm (AWQ).
        bits: of a weight.
        group: inputs that share a scale.
        shuffled: the groups are of inputs in any order (`desc_act` of GPTQ).
        settings: more keys of `quantization_config`.
    """  # fmt: skip
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    values: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        members = torch.arange(tensors[name].shape[1]) // group
        if shuffled:
            members = members[
                torch.randperm(len(members), generator=torch.Generator().manual_seed(len(values)))
            ]
        parts, values[name] = _quantized(tensors.pop(name).float(), members, layout, bits)
        tensors |= {f"{layer}.{part}": torch.from_numpy(np.ascontiguousarray(p)) for part, p in parts.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    named = {"version": layout, "quant_method": "awq"} if layout == "gemm" else {"checkpoint_format": layout, "quant_method": "gptq"}  # fmt: skip
    config["quantization_config"] = {
        "bits": bits,
        "group_size": group,
        "desc_act": shuffled,
        **named,
        **settings,
    }
    (out / "config.json").write_text(json.dumps(config))
    return values


def _quantized(
    weight: torch.Tensor, members: torch.Tensor, layout: str, bits: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """The tensors of a file, and the values they stand for."""
    groups, most = int(members.max()) + 1, 2**bits - 1
    low, high = _ranges(weight, members, groups)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(0, most)
    wide, z = scales.float()[:, members], zeros[:, members]
    codes = (weight / wide + z).round().clamp(0, most)
    less = 1 if layout == "gptq" else 0
    pack = _awq if layout == "gemm" else _words
    packed = _awq(codes.t()) if layout == "gemm" else _words(codes, bits).T
    parts = {"qweight": packed, "qzeros": pack(zeros.t(), bits, less), "scales": scales.t().numpy()}
    if layout != "gemm":
        parts["g_idx"] = members.int().numpy()
    return parts, (codes - z) * wide


def _ranges(weight: torch.Tensor, members: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number of each group, (out, groups); 0 is between them."""
    parts = [weight[:, members == g] for g in range(groups)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    return low, torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)


def _words(codes: torch.Tensor, bits: int, less: int = 0) -> Any:
    """(n, m) → (n, m · bits / 32) int32: the first code in the lowest bits.

    `less` is taken from each, with a borrow from the next.
    """
    per = 32 // bits
    found = np.zeros((codes.shape[0], codes.shape[1] // per), dtype=np.int64)
    for place in range(per):
        found += (codes[:, place::per].numpy().astype(np.int64) - less) << (bits * place)
    return (found % 2**32).astype(np.uint32).view(np.int32)


def _awq(codes: torch.Tensor, bits: int = 4, less: int = 0) -> Any:
    """(n, m) → (n, m / 8) int32."""
    words = codes.unflatten(1, (-1, 8))[:, :, list(_ORDER)].flatten(1)
    return _words(words, bits, less)
