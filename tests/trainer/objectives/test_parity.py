"""The first five steps of each objective have the losses and metrics of TRL's trainers.

Run: pytest tests/trainer/objectives/test_parity.py

Of templates that write something after the stop token some are tried here;
test_parity_of_families.py tries all objectives with all families.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.trainer.objectives.families import FAMILIES, of_family, write_models
from tests.trainer.objectives.parity import (
    KTO,
    ORPO,
    SIGMOID,
    SIMPO,
    STEPS,
    Both,
    Case,
    Start,
    Train,
    pairs_of,
    train_both,
)

pytestmark = pytest.mark.slow  # a process that imports TRL

CASES = {
    "dft": Case("sft", of_trl={"loss_type": "dft"}, optim={"loss_weight": "dft"}),
    "pretrain": Case("pretrain"),
    "sigmoid": SIGMOID,
    "hinge": Case("dpo", {"loss": "hinge", "beta": 0.3}, {"loss_type": ["hinge"], "beta": 0.3}),
    "ipo": Case("dpo", {"loss": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
    "kto": KTO,
    "reward": Case("reward"),
    "orpo": ORPO,
    "simpo": SIMPO,
}
_OF_FAMILIES = [("qwen2.5", SIGMOID), ("qwen3", ORPO), ("gemma3", KTO)]
"""Each writes a newline after the stop token."""
_NAMES = {
    "rewards/chosen": "rewards_chosen",
    "rewards/rejected": "rewards_rejected",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "logps/chosen": "logps_chosen",
    "logps/rejected": "logps_rejected",
    "kl": "kl",
    "margin": "reward_margin",
    "accuracy": "reward_accuracy",
}


def _starts(model: Path, folder: Path) -> dict[str, tuple[Case, Start]]:
    classifier = folder / "classifier"
    torch.manual_seed(0)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded.config.pad_token_id = tokenizer.pad_token_id
    loaded.save_pretrained(classifier)
    tokenizer.save_pretrained(classifier)
    found = {
        name: (case, Start(classifier if case.objective == "reward" else model))
        for name, case in CASES.items()
    }
    plain, _ = write_models(folder)
    for name, case in _OF_FAMILIES:
        start = Start(of_family(plain, folder / name, FAMILIES[name]), FAMILIES[name])
        found[f"{case.objective} of {name}"] = case, start
    return found


@pytest.fixture(scope="module")
def both(
    model_dir: Path,
    pair_files: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    train_in: Callable[[Path], Train],
) -> dict[str, Both]:
    """Each case; all of TRL in one process."""
    folder = tmp_path_factory.mktemp("parity")
    cases = _starts(model_dir, folder)
    return dict(
        zip(
            cases,
            train_both(folder, train_in(folder), list(cases.values()), pairs_of(pair_files[0])),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", [*CASES, *(f"{case.objective} of {name}" for name, case in _OF_FAMILIES)])
def test_the_losses_of_five_steps_are_those_of_trl(both: dict[str, Both], name: str) -> None:
    found = both[name]
    assert len(found.losses) == len(found.trl_losses) == STEPS
    assert abs(found.losses[-1] - found.losses[0]) > 1e-3 * abs(found.losses[0]), "the updates show"
    assert found.losses == pytest.approx(found.trl_losses, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("dft", "pretrain")])
def test_the_metrics_of_five_steps_are_those_of_trl(both: dict[str, Both], name: str) -> None:
    compared = 0
    for mine, theirs in zip(both[name].steps, both[name].trl_steps, strict=True):
        for key, value in theirs.items():
            is_tie = "accurac" in key and mine["reward_margin"] == 0  # ½ here, and 0 in TRL
            if key in _NAMES and not is_tie:
                # A margin is a small difference of log-probabilities of about 100, which have
                # errors of 1e-5.
                assert mine[_NAMES[key]] == pytest.approx(value, rel=1e-5, abs=2e-5), key
                compared += 1
    assert compared >= 2 * STEPS
    assert name != "kto" or both[name].steps[-1]["kl"] > 0.01, [line["kl"] for line in both[name].steps]
