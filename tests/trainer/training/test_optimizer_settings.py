"""Each setting of the optimizer has its effect, and resumes exactly.

Run: pytest tests/trainer/training/test_optimizer_settings.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.training.optim import build_optimizers

Train = Callable[..., Any]

SETTINGS: list[dict[str, Any]] = [
    {"schedule": "cosine_with_restarts", "cycles": 3},
    {"schedule": "polynomial", "power": 2.0},
    {"schedule_start": 0, "warmup": "2 steps"},
    {"lora_b_ratio": 16.0},
    {"eps": 1e-3},
    {"state_dtype": "bfloat16"},
    {"label_smoothing": 0.1},
]


COMMON: dict[str, Any] = {"duration": "6 steps", "checkpoint": {"every": "3 steps"}}


@pytest.fixture(scope="module")
def plain_losses(train_in: Callable[[Path], Train], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of a run without any of the settings."""
    found: list[float] = train_in(tmp_path_factory.mktemp("plain"))(**COMMON).losses
    return found


@pytest.mark.parametrize("optim", SETTINGS, ids=lambda optim: next(iter(optim)))
def test_a_setting_changes_the_losses_and_resumes_to_the_same_bits(
    train_here: Train, plain_losses: list[float], optim: dict[str, Any]
) -> None:
    straight = train_here(optim=optim, **COMMON)
    assert straight.losses != plain_losses
    path = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(optim=optim, resume=(3, path), **COMMON)
    assert resumed.losses == straight.losses[3:]
    mine, wanted = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_first_update_of_b_is_scaled_by_the_ratio_and_the_rest_unchanged(
    train_here: Train,
) -> None:
    """AdamW's first update is the learning rate times the gradient's sign; B begins at zero."""
    common: dict[str, Any] = {
        "duration": "1 steps",
        "adapter": {"modules_to_save": ["norm"]},
        "data": {"packing": False},
    }
    plain = train_here(optim={"warmup": "0%", "schedule": "constant"}, **common).weights()
    plus = train_here(optim={"warmup": "0%", "schedule": "constant", "lora_b_ratio": 4.0}, **common).weights()
    for name, tensor in plain.items():
        factor = 4.0 if "lora_B" in name else 1.0
        assert torch.allclose(plus[name], factor * tensor, atol=1e-6), name
    assert any("lora_B" in name for name in plain)


def test_an_update_to_b_decays_it_by_its_own_learning_rate() -> None:
    """As in AdamW: the decay is the learning rate of the group times weight_decay."""
    a, b = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    section = OptimSection(lr=0.1, lora_b_ratio=2.0, weight_decay=0.5)
    optimizers = build_optimizers(
        section, {"x.lora_A.default.weight": a, "x.lora_B.default.weight": b}, not_matrices=set()
    )
    optimizers.set_factor(0.5)
    a.grad, b.grad = torch.zeros(2, 2), torch.zeros(2, 2)
    optimizers.step()
    assert torch.allclose(a, torch.full((2, 2), 1 - 0.05 * 0.5))
    assert torch.allclose(b, torch.full((2, 2), 1 - 0.10 * 0.5))


def test_muons_update_has_the_size_that_muon_scale_says() -> None:
    """Both scales multiply the same direction: √max(1, rows / columns) and 0.2 × √max(rows,
    columns).
    """
    moved: dict[str, torch.Tensor] = {}
    for scale in ("original", "adamw"):
        weight = torch.nn.Parameter(torch.zeros(8, 2))
        weight.grad = torch.arange(16.0).reshape(8, 2)
        section = OptimSection.model_validate({"kind": "muon", "muon_lr": 0.1, "muon_scale": scale})
        build_optimizers(section, {"w": weight}, not_matrices=set()).step()
        moved[scale] = weight.detach()
    assert torch.allclose(moved["adamw"], moved["original"] * (0.2 * 8**0.5 / 4**0.5), rtol=1e-5)
