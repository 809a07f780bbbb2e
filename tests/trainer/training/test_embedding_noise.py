"""Noise on input embeddings is that of the paper, in training only, and the same however a step is
computed.

Run: pytest tests/trainer/training/test_embedding_noise.py
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.trainer.training.run import embedding_noise

Train = Callable[..., Any]
CPU = torch.device("cpu")


def test_noise_is_uniform_within_alpha_over_root_of_length_times_width() -> None:
    noise = embedding_noise(
        5.0, seed=1, places=[3, 9], tokens=[30, 20], lengths=[10, 20, 20], hidden_size=64, device=CPU
    )
    for part, length in zip(noise.split([10, 20, 20]), (10, 20, 20), strict=True):
        bound = 5.0 / (length * 64) ** 0.5
        assert part.abs().max() <= bound
        assert part.abs().max() > 0.97 * bound
        assert part.abs().mean() == pytest.approx(bound / 2, rel=0.1)


def test_noise_of_a_sequence_depends_on_its_place_and_not_its_company() -> None:
    common: dict[str, Any] = {"seed": 1, "hidden_size": 8, "device": CPU}
    both = embedding_noise(5.0, places=[3, 9], tokens=[6, 4], lengths=[6, 4], **common)
    first, second = (
        embedding_noise(5.0, places=[place], tokens=[n], lengths=[n], **common)
        for place, n in ((3, 6), (9, 4))
    )
    assert torch.equal(both, torch.cat([first, second]))
    elsewhere = embedding_noise(5.0, places=[4], tokens=[6], lengths=[6], **common)
    assert not torch.equal(first, elsewhere)


@pytest.mark.parametrize("adapter", [{"rank": 4}, None])
@pytest.mark.parametrize("packing", [False, True])
def test_noise_changes_training_not_evaluation_and_resumes_to_same_bits(
    train_here: Train, adapter: dict[str, Any] | None, *, packing: bool
) -> None:
    noisy = {"model": {"embedding_noise": 5.0}}
    common: dict[str, Any] = {
        "adapter": adapter, "data": {"eval": 0.2, "packing": packing}, "checkpoint": {"every": "3 steps"}, "optim": {"lr": 1e-3},
    }  # fmt: skip
    quiet, straight = train_here(**common), train_here(**common, **noisy)
    assert straight.losses[0] != quiet.losses[0]
    assert straight.losses[0] == pytest.approx(quiet.losses[0], rel=0.2)
    before = [run.of_kind("eval")[0]["eval_loss"] for run in (quiet, straight)]
    assert before[0] == before[1], "no noise in the evaluation"
    path = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(resume=(3, path), **common, **noisy)
    assert resumed.losses == straight.losses[3:]
    mine, wanted = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


def test_micro_batches_of_one_and_of_eight_have_the_same_noise(train_here: Train) -> None:
    common: dict[str, Any] = {"model": {"embedding_noise": 20.0}, "data": {"packing": False}}
    one, eight = (train_here(batch={"micro": micro}, **common) for micro in (1, 8))
    assert one.losses == pytest.approx(eight.losses, abs=1e-5)
