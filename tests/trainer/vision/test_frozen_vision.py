"""Features of a vision part that is not trained are computed once for each picture, and a run with
them is to the bit the run that computes them each time.

Run: pytest tests/trainer/vision/test_frozen_vision.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.trainer.ranks.conftest import Done
from tests.trainer.vision.conftest import RATES, Gallery
from tests.vision_models import FAMILIES
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.families.vision import vision_model
from unisono.trainer.families.vision.sight import drawn
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.frozen_vision import FrozenVision, PictureFeatures
from unisono.trainer.model.multimodal import select_parts

pytestmark = pytest.mark.processes  # pictures are decoded in them

KEEPING = [family for family in FAMILIES if family != "llama4"]
"""Llama 4's decoder gets its features by another name than those of others: they are not kept."""
PARTS = (["language"], ["language", "projector"])
_THREE_EPOCHS: dict[str, Any] = {
    "duration": "18 steps",
    "data": {"packing": False},
    "checkpoint": {"every": "9 steps"},
}


class _Counts:
    """Counts how often the vision part runs for a picture, from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.times = 0
        computed = FrozenVision._computed

        def counted(vision: FrozenVision, tensors: Any) -> PictureFeatures:
            self.times += 1
            return computed(vision, tensors)

        patch.setattr(FrozenVision, "_computed", counted)


def _same(one: Done, two: Done) -> bool:
    weights = two.weights()
    return one.losses == two.losses and all(
        torch.equal(v, weights[name]) for name, v in one.weights().items()
    )


def _vision(directory: Path, parts: Sequence[str], **settings: float) -> FrozenVision | None:
    base = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    for name, value in settings.items():
        setattr(base.config.vision_config, name, value)
    select_parts(base, parts)  # type: ignore[arg-type]
    return FrozenVision.of(base, [PictureProcessor(directory).inputs(drawn())])


@pytest.mark.parametrize("family", KEEPING)
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_from_the_second_epoch_the_vision_part_is_not_run_and_no_bit_changes(
    gallery: Gallery, family: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, third = (gallery.plan(family, train_parts=parts, **_THREE_EPOCHS) for _ in range(2))
    little = {**_THREE_EPOCHS, "data": {"packing": False, "cache_bytes": "1 KB"}}
    other = gallery.plan(family, train_parts=parts, **little)
    counts = _Counts(monkeypatch)

    kept = gallery.alone(plan)
    once = counts.times - 1  # and for the test of `of`
    again = gallery.alone(other)
    monkeypatch.setattr(Forward, "frozen_vision", lambda *_: None)
    plain = gallery.alone(third)

    assert once == plan.data.pictures.number  # type: ignore[union-attr]
    assert counts.times - once - 2 > 2 * once
    assert _same(kept, again)
    # Pictures one by one round otherwise than together, which some families enlarge (see RATES).
    assert kept.losses == pytest.approx(plain.losses, abs=1e-5 if family in RATES else 1e-6)


def test_bfloat16_with_recomputed_activations_and_evaluation_changes_no_bit(
    gallery: Gallery, picture_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {
        **_THREE_EPOCHS,
        "model": {"path": "qwen3_vl", "dtype": "bfloat16"},
        "memory": {"gradient_checkpointing": True},
        "data": {"packing": False, "eval": str(picture_rows)},
        "eval": {"every": "6 steps", "exact_match": True, "samples": 1},
        "train_parts": ["language", "projector"],
    }
    plan, other = (gallery.plan("qwen3_vl", **more) for _ in range(2))

    kept = gallery.alone(plan)
    monkeypatch.setattr(vision_model, "_SHARE", 0)
    again = gallery.alone(other)

    assert _same(kept, again)
    assert kept.figures == again.figures
    assert any("eval_loss" in line for line in kept.figures)


@pytest.mark.parametrize("family", KEEPING)
def test_a_run_resumed_in_a_later_epoch_is_the_uninterrupted_one(gallery: Gallery, family: str) -> None:
    whole = gallery.alone(gallery.plan(family, **_THREE_EPOCHS))
    stopped = whole.directory / "checkpoints" / "step-00000009"

    resumed = gallery.alone(gallery.plan(family, **_THREE_EPOCHS, resume=stopped))

    assert resumed.losses == whole.losses[9:]
    for name, value in resumed.weights().items():
        assert torch.equal(value, whole.weights()[name]), name


@pytest.mark.ranks
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_two_ranks_give_the_losses_of_one_over_epochs(gallery: Gallery, parts: list[str]) -> None:
    families = ("gemma3", "qwen3_vl")
    alone = [gallery.alone(gallery.plan(family, train_parts=parts, **_THREE_EPOCHS)) for family in families]

    plans = [
        gallery.plan(family, world=2, strategy="ddp", train_parts=parts, **_THREE_EPOCHS)
        for family in families
    ]
    together = gallery.together(plans)

    for one, two in zip(alone, together, strict=True):
        assert two.losses == pytest.approx(one.losses, abs=1e-6)


@pytest.mark.parametrize("family", KEEPING)
def test_features_are_never_kept_where_the_vision_part_changes(gallery: Gallery, family: str) -> None:
    directory = gallery.model(family)

    assert _vision(directory, ["language"]) is not None
    assert _vision(directory, ["vision"]) is None
    assert _vision(directory, ["language"], attention_dropout=0.1) is None


@pytest.mark.parametrize("family", KEEPING)
def test_features_are_never_kept_where_the_vision_part_has_an_adapter(
    gallery: Gallery, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = gallery.plan(family, train_parts=["language", "vision"], duration="2 steps")
    counts = _Counts(monkeypatch)

    gallery.alone(plan)

    assert counts.times == 0


def test_memory_for_features_is_bounded(gallery: Gallery) -> None:
    vision = _vision(gallery.model("llava"), ["language"])
    assert vision is not None
    sample = PictureProcessor(gallery.model("llava")).inputs(drawn())
    size = vision.features(0, lambda: sample).bytes

    vision.most_bytes = 2 * size
    for number in range(4):
        vision.features(number, lambda: sample)

    assert list(vision.kept) == [0, 1]
    assert vision.is_full
