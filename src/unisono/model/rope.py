"""Scales rotary position embeddings (RoPE, arXiv:2104.09864), so that a model reads longer rows than it was trained on."""

import math
import types
from pathlib import Path
from typing import Any

import torch

from unisono.config.schema import RopeSection
from unisono.errors import ModelError
from unisono.model.files import read_json_object

# The frequencies between which llama3 interpolates: the values of Llama 3.1's own config are 1 and 4.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_KEPT = ("rope_theta", "partial_rotary_factor")


def scale_rope(settings: Any, section: RopeSection, *, max_length: int) -> None:
    """Sets the RoPE parameters of a model's config, before the model is made from it.

    linear: arXiv:2306.15595; dynamic: NTK-aware scaling by the length of each row; yarn: arXiv:2309.00071; llama3: as in Llama 3.1.

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
    """The factor; with `auto` the multiple of the model's positions that the longest row needs, and 1 if it fits.

    Args:
        section: `model.rope` of the config.
        original: positions that the model was trained on.
        max_length: tokens of the longest row.
    """
    return float(math.ceil(max_length / original)) if section.factor == "auto" else section.factor


def take_rope(settings: Any, *, directory: Path) -> None:
    """Sets the RoPE parameters with which an adapter was trained, if config.json beside it has them.

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
    """The maximum number of positions by a model's config, if RoPE is scaled dynamically; else None."""
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, dict) or parameters.get("rope_type") != "dynamic":
        return None
    return math.ceil(text.max_position_embeddings * parameters["factor"])


# ---- dynamic scaling of flat rows


def scale_rows_apart(base: torch.nn.Module) -> list[torch.nn.Module]:
    """Lets dynamic RoPE depend on the length of each row; gives the changed modules.

    transformers scales by the longest row of a batch, and by longer ones before: the loss of a row would depend on other rows.
    """
    found = [module for module in base.modules() if getattr(module, "rope_type", None) == "dynamic"]
    for module in found:
        module.forward = types.MethodType(_row_by_row, module)
    return found


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
