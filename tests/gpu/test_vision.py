"""The losses of three steps in bfloat16 on one CUDA device are those of plain transformers and peft,
for each family that reads pictures.

Run: pytest -m gpu tests/gpu/test_vision.py
"""

from pathlib import Path

import pytest
import torch

from tests.trainer.vision.conftest import Gallery, gallery, picture_rows
from tests.trainer.vision.test_parity import by_hand
from tests.vision_models import FAMILIES

__all__ = ["gallery", "picture_rows"]  # fixtures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_in_bfloat16_are_those_of_transformers(
    gallery: Gallery,
    picture_rows: Path,
    family: str,
) -> None:
    plan = gallery.plan(
        family, device="cuda", model={"path": family, "dtype": "bfloat16"}, duration="3 steps"
    )

    losses = gallery.alone(plan).losses

    # Both round to 8 bits in other places; a loss is about 6.
    assert losses == pytest.approx(by_hand(plan, picture_rows, device="cuda"), rel=2e-2)
