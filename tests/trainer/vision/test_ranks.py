"""Rows with pictures on two ranks give the losses of one, also where a rank has none.

Run: pytest tests/trainer/vision/test_ranks.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import FAMILIES
from unisono.base.errors import ConfigError

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


def test_sharded_weights_are_refused_with_pictures(gallery: Gallery) -> None:
    with pytest.raises(ConfigError, match="rows have pictures"):
        gallery.plan("llava", world=2, strategy="fsdp")
