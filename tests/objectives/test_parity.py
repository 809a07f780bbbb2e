"""The first five steps of each objective have the losses and metrics of TRL's trainers. Run: pytest tests/objectives/test_parity.py

The same rows, weights and optimizer, float32, one rank, all of a batch in one micro batch. TRL gets the rows in the order of unisono's
stream. The mismatched answer of KTO is that of the row before in the file here, and in the batch there: both are equal if all rows of the
file are one batch, which TRL gets in the order of the file.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import front_server
from unisono.plan import Stream
from unisono.supervise.child_process import child_environment

pytestmark = pytest.mark.slow  # a process that imports TRL

Train = Callable[..., Any]
_STEPS = 5
_OPTIM = {
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "eps": 1e-4,
    "schedule": "constant",
    "warmup": "0%",
    "weight_decay": 0.0,
}
_OF_TRL = {
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-4,  # the usual one amplifies rounding where a gradient is nearly 0
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}


@dataclass(frozen=True)
class Case:
    """An objective with its settings here and in TRL."""

    objective: str
    preference: dict[str, Any] = field(default_factory=dict)
    of_trl: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    optim: dict[str, Any] = field(default_factory=dict)


CASES = {
    "dft": Case("sft", of_trl={"loss_type": "dft"}, optim={"loss_weight": "dft"}),
    "sigmoid": Case("dpo", {"beta": 0.3}, {"beta": 0.3}),
    "hinge": Case("dpo", {"loss": "hinge", "beta": 0.3}, {"loss_type": ["hinge"], "beta": 0.3}),
    "ipo": Case("dpo", {"loss": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
    "kto": Case(
        "kto",
        {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
        {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
        batch=24,
    ),
    "reward": Case("reward"),
    "orpo": Case("orpo", {"beta": 0.2}, {"beta": 0.2}),
    "simpo": Case(
        "simpo",
        {"beta": 2.0, "gamma": 0.7},
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7},
    ),
}
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


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _pairs(file: Path) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [_message("user", row["prompt"])],
            **{side: [_message("assistant", row[side])] for side in ("chosen", "rejected")},
        }
        for row in map(json.loads, file.read_text().splitlines())
    ]


def _rated(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
        for i, row in enumerate(pairs)
    ]


def _answers(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` are for unisono, the rest for TRL."""
    return [
        {"messages": row["prompt"] + row["chosen"], "prompt": row["prompt"], "completion": row["chosen"]}
        for row in pairs
    ]


def _without_messages(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "messages"}


@dataclass
class Both:
    """The same training here and in TRL."""

    losses: list[float]
    steps: list[dict[str, Any]]
    trl_losses: list[float]
    trl_steps: list[dict[str, Any]]


@pytest.fixture(scope="module")
def both(
    model_dir: Path,
    pair_files: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    train_in: Callable[[Path], Train],
) -> dict[str, Both]:
    """Each case; all of TRL in one process."""
    folder = tmp_path_factory.mktemp("parity")
    classifier = folder / "classifier"
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(classifier)
    tokenizer.save_pretrained(classifier)
    pairs = _pairs(pair_files[0])
    train, specs, runs = train_in(folder), [], []
    for case in CASES.values():
        start = classifier if case.objective == "reward" else model_dir
        rows = {"kto": _rated(pairs)[: case.batch], "sft": _answers(pairs)}.get(case.objective, pairs)
        file = folder / f"{case.objective}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(
            train(
                objective=case.objective, model={"path": str(start), "dtype": "float32"}, adapter=None, optim=_OPTIM | case.optim,
                data={"train": str(file), "format": "messages" if case.objective == "sft" else "auto", "max_length": 256, "packing": False}, duration=f"{_STEPS} steps",
                batch={"global": case.batch, "micro": case.batch}, **({"preference": case.preference} if case.preference else {}),
            )
        )  # fmt: skip
        order = [
            i
            for step in range(1, _STEPS + 1)
            for i in Stream(len(rows), seed=0).step(step, global_batch=case.batch, total_sequences=10**6)
        ]
        specs.append(
            {
                "trainer": case.objective, "model": str(start), "steps": _STEPS, "batch": case.batch,
                "rows": rows if case.objective == "kto" else [_without_messages(rows[i]) for i in order], "settings": _OF_TRL | case.of_trl,
            }
        )  # fmt: skip
    (folder / "specs.json").write_text(json.dumps(specs))
    command = [sys.executable, "-m", "tests.objectives.trl_losses", str(folder / "specs.json"), str(folder / "results.json")]  # fmt: skip
    with front_server.start_rank(
        command, env=child_environment(threads=1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, printed[-4000:]
    found = json.loads((folder / "results.json").read_text())
    return {
        name: Both(
            run.losses, [line for line in run.metrics if "loss" in line], trl["losses"], trl["metrics"]
        )
        for name, run, trl in zip(CASES, runs, found, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_five_steps_are_those_of_trl(both: dict[str, Both], name: str) -> None:
    found = both[name]
    assert len(found.losses) == len(found.trl_losses) == _STEPS
    assert abs(found.losses[-1] - found.losses[0]) > 1e-3 * abs(found.losses[0]), "the updates show"
    assert found.losses == pytest.approx(found.trl_losses, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "dft"])
def test_the_metrics_of_five_steps_are_those_of_trl(both: dict[str, Both], name: str) -> None:
    compared = 0
    for mine, theirs in zip(both[name].steps, both[name].trl_steps, strict=True):
        for key, value in theirs.items():
            is_tie = "accurac" in key and mine["reward_margin"] == 0  # ½ here, and 0 in TRL
            if key in _NAMES and not is_tie:
                # A margin is a small difference of log-probabilities of about 100, which have errors of 1e-5.
                assert mine[_NAMES[key]] == pytest.approx(value, rel=1e-5, abs=2e-5), key
                compared += 1
    assert compared >= 2 * _STEPS
    assert name != "kto" or both[name].steps[-1]["kl"] > 0.01, [line["kl"] for line in both[name].steps]
