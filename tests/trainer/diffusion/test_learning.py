"""A LoRA learns what captions say: a tiny pipeline draws two classes of shapes, and after training
on pictures of a third class that one, too.

Run: pytest tests/trainer/diffusion/test_learning.py -m long

It trains the pipeline itself, from random weights: about five minutes of one core.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import front_server, needs

needs.package("diffusers")
Image = needs.package("PIL.Image")

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "images"


def _unisono(*words: str, cwd: Path) -> None:
    env = os.environ | {
        "XDG_CACHE_HOME": str(cwd / "cache"),
        "XDG_CONFIG_HOME": str(cwd / "keys"),
        "OMP_NUM_THREADS": "1",
    }
    done = front_server.run([sys.executable, "-m", "unisono", *words], cwd=cwd, env=env, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]


def _share(model: str, *, cwd: Path, out: str) -> float:
    """The share of 32 pictures of the third class's caption that show it."""
    from examples.images.make_shapes import class_of

    _unisono(
        "generate",
        model,
        "green cross",
        "--out",
        out,
        "--number",
        "32",
        "--steps",
        "20",
        "--guidance",
        "1",
        cwd=cwd,
    )
    counts = Counter(class_of(Image.open(file)) for file in (cwd / out).glob("*.png"))
    assert counts.total() == 32
    return counts["green cross"] / 32


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(3600)
def test_a_lora_teaches_a_class_that_the_pipeline_did_not_draw(tmp_path: Path) -> None:
    from examples.images.make_shapes import make

    make(tmp_path / "demo-images")
    assert _share("demo-images/model", cwd=tmp_path, out="before") <= 0.2
    _unisono("train", str(EXAMPLE / "shapes.yaml"), cwd=tmp_path)
    assert _share("runs/demo-images", cwd=tmp_path, out="after") >= 0.9
