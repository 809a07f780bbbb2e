"""Each optimizer does on two ranks what it does on one; muon with sharded weights, too.

Run: pytest tests/trainer/ranks/test_optimizers.py
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.trainer.ranks.conftest import Done, Workshop
from unisono.trainer.config.optimizers import OPTIMIZERS

pytestmark = pytest.mark.ranks

RATES = {"prodigy": 1.0, "lion": 2e-3, "lion_8bit": 2e-3, "muon": 1e-3}
TOLERANCES = {"muon": 3e-5}
"""torch's Muon orthogonalizes in bfloat16, of which one rounding is 4e-3 of an update."""
INSTALLED = [
    name for name, kind in OPTIMIZERS.items() if not kind.package or find_spec(kind.package) is not None
]
RUNS = [(name, "ddp") for name in INSTALLED] + [("muon", "fsdp")]
Both = tuple[Done, Done]


def sections(kind: str) -> dict[str, Any]:
    optim: dict[str, Any] = {
        "kind": kind,
        "lr": RATES.get(kind, 1e-2),
        "schedule": "constant",
        "weight_decay": 0.01,
    }
    optim["options"] = {"d0": 1e-3} if kind == "prodigy" else {}  # eight steps are too few to find it
    more: dict[str, Any] = {} if OPTIMIZERS[kind].trains_adapters else {"adapter": None}
    return {
        "optim": optim,
        "duration": "8 steps",
        "checkpoint": {"every": "8 steps"},
        "data": {"eval": None},
        "eval": {},
    } | more


@pytest.fixture(scope="module")
def runs(workshop: Workshop) -> dict[tuple[str, str], Both]:
    """By optimizer and strategy, the run on one rank and that on two."""
    alone = {kind: workshop.alone(workshop.plan("lora", **sections(kind))) for kind in INSTALLED}
    plans = [workshop.plan("lora", world=2, strategy=way, **sections(kind)) for kind, way in RUNS]
    done = workshop.together(plans)
    return {(kind, way): (alone[kind], run) for (kind, way), run in zip(RUNS, done, strict=True)}


@pytest.mark.parametrize(("kind", "way"), RUNS)
def test_two_ranks_give_the_losses_of_one(runs: dict[tuple[str, str], Both], kind: str, way: str) -> None:
    one, two = runs[kind, way]
    assert two.plan.strategy == way
    assert two.losses == pytest.approx(one.losses, rel=TOLERANCES.get(kind, 1e-6))
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize(("kind", "way"), RUNS)
def test_their_results_are_equal(runs: dict[tuple[str, str], Both], kind: str, way: str) -> None:
    one, two = runs[kind, way]
    mine, theirs = two.weights(), one.weights()
    assert mine.keys() == theirs.keys()
    bound = 2e-2 if kind == "muon" else 2e-4
    assert all(torch.allclose(mine[name], theirs[name], atol=bound) for name in theirs)
