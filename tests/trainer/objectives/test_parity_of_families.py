"""Losses of TRL's trainers with the templates of ten families, for each objective.

Run: pytest -m long tests/trainer/objectives/test_parity_of_families.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.trainer.objectives.families import FAMILIES, POSITIONS, of_family, texts, write_models
from tests.trainer.objectives.parity import (
    KTO,
    ORPO,
    SIGMOID,
    SIMPO,
    Both,
    Case,
    Start,
    Train,
    message,
    run_trl,
    train_both,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

OBJECTIVES = {
    "sft": Case("sft"),
    "dpo": SIGMOID,
    "kto": KTO,
    "orpo": ORPO,
    "simpo": SIMPO,
    "reward": Case("reward"),
}
_STEPS = 3


def _pairs() -> list[dict[str, Any]]:
    sides = zip(texts(40, seed=1), texts(40, seed=2), texts(40, seed=3), strict=True)
    return [
        {
            "prompt": [message("user", prompt)],
            "chosen": [message("assistant", f"{chosen} tree")],
            "rejected": [message("assistant", f"{rejected} dog")],
        }
        for prompt, chosen, rejected in sides
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """The language model and the reward model of each family."""
    folder = tmp_path_factory.mktemp("families")
    plain = write_models(folder)
    return {
        (name, is_reward): of_family(plain[is_reward], folder / f"{name}-{is_reward}", family)
        for name, family in FAMILIES.items()
        for is_reward in (False, True)
    }


@pytest.fixture(scope="module")
def both(
    models: dict[tuple[str, bool], Path],
    tmp_path_factory: pytest.TempPathFactory,
    train_in: Callable[[Path], Train],
) -> dict[tuple[str, str], Both]:
    """Each objective with each family."""
    folder = tmp_path_factory.mktemp("parity")
    keys = [(name, objective) for name in FAMILIES for objective in OBJECTIVES]
    cases = [
        (OBJECTIVES[objective], Start(models[name, objective == "reward"], FAMILIES[name]))
        for name, objective in keys
    ]
    return dict(zip(keys, train_both(folder, train_in(folder), cases, _pairs(), steps=_STEPS), strict=True))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_losses_are_those_of_trl(both: dict[tuple[str, str], Both], name: str, objective: str) -> None:
    found = both[name, objective]
    assert len(found.losses) == len(found.trl_losses) == _STEPS
    assert abs(found.losses[-1] - found.losses[0]) > 1e-4 * abs(found.losses[0]), "the updates show"
    assert found.losses == pytest.approx(found.trl_losses, rel=1e-5)


def test_trl_counts_what_a_template_writes_after_the_stop_token(
    models: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    """What docs/how-to/from-trl.md says of it.

    The day that this fails, the tests above can give TRL the conversations of all families.
    """
    specs = [
        {"trainer": "dpo", "model": str(models[name, False]), "steps": 0, "batch": 8, "max_length": POSITIONS, "rows": _pairs()[:8], "settings": {}}
        for name in FAMILIES
    ]  # fmt: skip
    for (name, family), found in zip(FAMILIES.items(), run_trl(tmp_path, specs), strict=True):
        tokenizer = AutoTokenizer.from_pretrained(models[name, False])
        for ids in found["answers"]:
            assert tokenizer.decode(ids).endswith(family.stop + family.tail), name
