"""Losses and metrics of preference objectives are the same for any packing, micro batch and number
of ranks.

Run: pytest tests/trainer/ranks/test_preferences.py, and with `-m long` on two and three ranks
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.ranks.conftest import PREFERENCES, Done, Workshop

Variants = Callable[[str], dict[tuple[bool, int], dict[str, Any]]]


@pytest.fixture(scope="module")
def variants(workshop: Workshop) -> Variants:
    """A function that gives the sections of an objective's runs by packing and micro batch; each
    step takes all units, packed or not.
    """

    def sections(kind: str, *, packing: bool) -> dict[str, Any]:
        """With as many sequences as can be cut into micro batches of four."""
        for longest in range(64, 128):
            data = {"packing": packing, "eval": 0.2, "max_length": longest}
            found: dict[str, Any] = {
                "data": data,
                "duration": "3 epochs",
                "eval": {"every": "1 steps"},
                "batch": {"global": 8},
            }
            sequences = workshop.plan(kind, **found).data.train.sequences
            if sequences % 4 == 0:
                return {**found, "batch": {"global": sequences}}
        raise AssertionError(kind)

    def of_kind(kind: str) -> dict[tuple[bool, int], dict[str, Any]]:
        found: dict[tuple[bool, int], dict[str, Any]] = {}
        for packing in (False, True):
            more = sections(kind, packing=packing)
            for micro in (1, 4):
                found[packing, micro] = {**more, "batch": {**more["batch"], "micro": micro}}
        assert found[True, 1]["batch"]["global"] <= found[False, 1]["batch"]["global"] // 2
        return found

    return of_kind


def _are_equal(mine: Done, wanted: Done) -> None:
    """A margin is a small difference of log-probabilities of about 50, so it has their absolute
    error.
    """
    assert len(mine.figures) == len(wanted.figures) == 6  # three steps, each with an evaluation
    for line, other in zip(mine.figures, wanted.figures, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", PREFERENCES)
def test_neither_packing_nor_the_micro_batch_changes_losses_and_metrics(
    workshop: Workshop, variants: Variants, kind: str
) -> None:
    runs = [workshop.alone(workshop.plan(kind, **more)) for more in variants(kind).values()]
    assert len({run.plan.data.train.sequences for run in runs}) == 2
    assert runs[0].losses[-1] < runs[0].losses[0]
    for run in runs[1:]:
        _are_equal(run, runs[0])


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 3])
def test_nor_does_the_number_of_ranks(workshop: Workshop, variants: Variants, world: int, way: str) -> None:
    runs = {kind: variants(kind) for kind in PREFERENCES}
    ones = {kind: workshop.alone(workshop.plan(kind, **of_kind[False, 4])) for kind, of_kind in runs.items()}
    plans = [
        (kind, workshop.plan(kind, world=world, strategy=way, **more))
        for kind, of_kind in runs.items()
        for more in of_kind.values()
    ]
    # The starting weights, as a reference that is loaded and sharded beside the model.
    named = runs["dpo"][False, 4] | {"preference": {"reference": str(workshop.model_dir)}}
    plans.append(("dpo", workshop.plan("dpo", world=world, strategy=way, **named)))
    done = workshop.together([plan for _, plan in plans])
    assert len(done) == 4 * len(PREFERENCES) + 1
    for (kind, _), run in zip(plans, done, strict=True):
        _are_equal(run, ones[kind])
