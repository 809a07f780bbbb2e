"""The estimate of memory counts the vision part.

Run: pytest tests/trainer/vision/test_memory.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES, draw
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.pictures.store import read_pictures
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers
from unisono.trainer.families import training_of
from unisono.trainer.model.multimodal import vision_facts, with_vision
from unisono.trainer.plan import RunPlan, estimate_memory
from unisono.trainer.plan.families import family_of

pytestmark = pytest.mark.processes  # pictures are decoded in them


def _activations(plan: RunPlan, **more: Any) -> int:
    settings: dict[str, Any] = {
        "dtype": "float32", "adapter_rank": None, "micro_tokens": 0, "longest_row": 1, "gradient_checkpointing": False,
    }  # fmt: skip
    return estimate_memory(plan.model, **{**settings, **more}).activations


def _kept_bytes(base: Any, pixels: dict[str, torch.Tensor]) -> int:
    """Bytes that the vision part keeps for the backward; parameters are not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in base.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with_vision(base).get_image_features(**pixels)
    return sum(kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_trained_vision_part_keeps_is_estimated(gallery: Gallery, family: str) -> None:
    plan = gallery.plan(family, train_parts=["vision"], adapter=None)
    directory = gallery.model(family)
    base = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    processor = PictureProcessor(directory)
    pixels = processor.inputs(draw("red", "circle", size=(200, 150)))
    values = processor.count_values((200, 150))
    assert values == pixels["pixel_values"].numel()

    kept = _kept_bytes(base, pixels)
    estimate = _activations(plan, train_parts=["vision"], pixel_values=values)

    # Gemma 4 has norms of heads and after each block, too.
    assert (0.5 if family == "gemma4" else 0.8) < estimate / kept < 1.3


def test_the_row_with_most_pixels_is_counted(gallery: Gallery) -> None:
    plan = gallery.plan("idefics3", data={"packing": False})
    cache = Path(plan.data.cache_dir)
    pictures, of_rows = read_pictures(cache), read_picture_numbers(cache)
    table = TokenTable.open(cache, "train")
    rows = [of_rows[stored] for stored in table.columns["stored"].tolist()]
    tokens = sorted(sum(pictures[n].tokens for n in row) for row in rows if row)
    values = [sum(pictures[n].values for n in row) for row in rows]

    summary = plan.data.pictures

    assert summary is not None
    assert summary.most_tokens == tokens[-1] == np.percentile(tokens, 100)
    assert summary.median_tokens in (tokens[len(tokens) // 2 - 1], tokens[len(tokens) // 2])
    assert summary.most_values == max(values) > summary.largest_values
    assert f"most: {tokens[-1]})" in family_of(plan.model).size(plan.data)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "parts", [["language"], ["projector"], ["vision"], ["language", "projector", "vision"]], ids="+".join
)
@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["full", "adapter"])
def test_trained_values_of_parts_are_those_of_the_loaded_model(
    gallery: Gallery, family: str, parts: list[str], adapter: dict[str, Any] | None
) -> None:
    if adapter is not None and parts == ["projector"]:
        return  # refused: nothing is left for the adapter
    plan = gallery.plan(family, train_parts=parts, adapter=adapter, duration="1 steps")

    loaded = training_of(plan).load(plan, torch.device("cpu"))

    trained = sum(value.numel() for value in loaded.trainable.values())
    assert plan.memory.trainable == pytest.approx(trained * 16, abs=600)  # a few buffers, and `image_newline`


def test_a_frozen_vision_part_needs_one_picture_at_a_time(gallery: Gallery) -> None:
    plan = gallery.plan("llava")
    vision = plan.model.vision
    assert vision is not None
    base = AutoModelForImageTextToText.from_pretrained(gallery.model("llava"))
    assert vision == vision_facts(base)
    values = 16 * vision.patch_values

    one, many = (
        _activations(plan, adapter_rank=4, pixel_values=n * values, largest_picture=values) - 4 * n * values
        for n in (1, 9)
    )

    assert one == many == 16 * 4 * (6 * vision.hidden_size + 2 * vision.intermediate_size)
    trained = _activations(plan, adapter_rank=4, train_parts=["vision"], pixel_values=9 * values)
    assert trained - 36 * values > 9 * one
