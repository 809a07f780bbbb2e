"""Rows with pictures on two ranks give the losses of one, also where a rank has none.

Run: pytest tests/trainer/vision/test_ranks.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES
from unisono.trainer.plan import SequenceStream

pytestmark = pytest.mark.ranks


def _one_of_four(rows: Path, folder: Path) -> Path:
    """Rows of which every fourth has a picture."""
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    seeing = [row for row in read if len(row.get("images", ())) == 1]
    text = [row for row in read if not row.get("images")]
    mixed = [
        (seeing if i % 4 == 0 else text)[i // 4 % len(seeing if i % 4 == 0 else text)] for i in range(24)
    ]
    for row in mixed:
        row["images"] = [str(rows.parent / name) for name in row.get("images", ())]
    file = folder / "mixed.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in mixed))
    return file


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_losses_of_one(
    gallery: Gallery, picture_rows: Path, tmp_path: Path, family: str
) -> None:
    mixed = str(_one_of_four(picture_rows, tmp_path))
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"data": {"train": mixed, "packing": False}, "batch": {"global": 2, "micro": 1}},
    )
    alone = [gallery.alone(gallery.plan(family, **more)) for more in kinds]

    plans = [gallery.plan(family, world=2, strategy="ddp", **more) for more in kinds]
    together = gallery.together(plans)

    for one, two in zip(alone, together, strict=True):
        assert two.losses == pytest.approx(one.losses, abs=1e-6)


_ALL = ["language", "projector", "vision"]
_DECAYS = {
    "lr": 1e-4, "eps": 1e-3, "weight_decay": 0.5, "schedule": "constant", "warmup": "0 steps",
}  # fmt: skip
"""A gradient of 0 where one rank has none would be an update; the usual `eps` amplifies rounding where
a gradient is nearly 0, as do larger steps: with 1e-3, two micro batches on one rank give other losses
than one batch of two rows (2e-4 after seven steps of Gemma 4).
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_weights_give_the_losses_of_one_rank(
    gallery: Gallery, picture_rows: Path, tmp_path: Path, family: str
) -> None:
    mixed = str(_one_of_four(picture_rows, tmp_path))
    one_by_one: dict[str, Any] = {
        "data": {"train": mixed, "packing": False}, "batch": {"global": 2, "micro": 1}, "duration": "8 steps",
    }  # fmt: skip
    kinds: tuple[dict[str, Any], ...] = (
        {},
        one_by_one,
        {**one_by_one, "train_parts": ["language", "projector"], "batch": {"global": 4, "micro": 1}},
        {**one_by_one, "train_parts": _ALL, "optim": _DECAYS},
        {**one_by_one, "train_parts": _ALL, "optim": _DECAYS, "adapter": None},
        {**one_by_one, "train_parts": ["projector"], "optim": _DECAYS, "adapter": None},
    )
    alone = [gallery.alone(gallery.plan(family, **more)) for more in kinds]

    together = gallery.together([gallery.plan(family, world=2, strategy="fsdp", **more) for more in kinds])

    for one, two in zip(alone, together, strict=True):
        assert two.plan.mesh.shards_weights
        assert two.losses == pytest.approx(one.losses, abs=1e-6)
    for one, two in list(zip(alone, together, strict=True))[3:]:
        weights = one.weights()
        for name, value in two.weights().items():
            assert torch.allclose(value, weights[name], atol=2e-6), name


def _text_first(rows: Path, folder: Path) -> tuple[Path, int]:
    """Rows of which the last four have a picture, and a seed with which the first three steps of
    two rows have none, and one of the next three has.
    """
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    seeing = [row for row in read if len(row.get("images", ())) == 1][:4]
    text = [row for row in read if not row.get("images")]
    for row in seeing:
        row["images"] = [str(rows.parent / name) for name in row["images"]]
    mixed = [text[i % len(text)] for i in range(8)] + seeing
    file = folder / "text-first.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in mixed))
    for seed in range(100):
        order = SequenceStream(12, seed)
        steps = [order.step(step, global_batch=2, total_sequences=12) for step in range(1, 7)]
        if max(max(step) for step in steps[:3]) < 8:
            return file, seed
    raise AssertionError("no seed has such an order")


@pytest.mark.parametrize("adapter", [{"rank": 4}, None], ids=["lora", "full"])
def test_a_run_whose_vision_part_saw_no_picture_is_resumed(
    gallery: Gallery, picture_rows: Path, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    """Its optimizer has no state for the vision part yet."""
    file, seed = _text_first(picture_rows, tmp_path)
    more: dict[str, Any] = {
        "data": {"train": str(file), "packing": False}, "batch": {"global": 2, "micro": 1}, "seed": seed,
        "duration": "6 steps", "train_parts": _ALL, "optim": _DECAYS, "adapter": adapter,
    }  # fmt: skip
    whole = gallery.alone(gallery.plan("qwen3_vl", **more))
    checkpoint = whole.directory / "checkpoints" / "step-00000003"
    ways = ("ddp", "fsdp")
    straight = gallery.together([gallery.plan("qwen3_vl", world=2, strategy=way, **more) for way in ways])

    resumed = [gallery.alone(gallery.plan("qwen3_vl", resume=checkpoint, **more))]
    resumed += gallery.together(
        [gallery.plan("qwen3_vl", world=2, strategy=way, resume=checkpoint, **more) for way in ways]
        + [
            gallery.plan(
                "qwen3_vl",
                world=2,
                strategy=way,
                resume=run.directory / "checkpoints" / "step-00000003",
                **more,
            )
            for way, run in zip(ways, straight, strict=True)
        ]
    )

    for run in straight:
        assert run.losses == pytest.approx(whole.losses, abs=1e-6)
    for run in resumed:
        assert run.losses == pytest.approx(whole.losses[3:], abs=1e-6)
