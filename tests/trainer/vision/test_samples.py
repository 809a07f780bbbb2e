"""Samples of a run on pictures: each answer with small copies of its row's pictures.

Run: pytest tests/trainer/vision/test_samples.py
"""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

from tests.trainer.vision.conftest import Gallery
from unisono.trainer.data.pictures.store import read_pictures

pytestmark = pytest.mark.processes  # pictures are decoded in them


def test_a_sample_has_thumbnails_of_the_pictures_of_its_row(gallery: Gallery) -> None:
    sections: dict[str, Any] = {
        "data": {"eval": 18, "max_length": 256},
        "eval": {"samples": 18, "sample_tokens": 4},
    }
    plan = gallery.plan("llava", duration="1 steps", **sections)

    done = gallery.alone(plan)

    samples = [message for message in done.ended.messages[0] if message["kind"] == "sample"]
    counts = {len(sample.get("pictures", ())) for sample in samples}
    assert {0, 1} <= counts, "rows with and without pictures"
    folder = done.directory / "samples" / "thumbnails"
    named = {name for sample in samples for name in sample.get("pictures", ())}
    assert {file.name for file in folder.iterdir()} == named
    by_digest = {f"{one.digest}.jpg": one for one in read_pictures(Path(plan.data.cache_dir))}
    for name in named:
        with Image.open(folder / name) as small:
            assert small.format == "JPEG"
            assert max(small.size) <= 256
            differences = ImageChops.difference(small, by_digest[name].pixels().resize(small.size))
            assert max(ImageStat.Stat(differences).mean) < 8  # of JPEG
