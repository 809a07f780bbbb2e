"""`unisono eval` of a run on preferences gives what the run itself measured.

Run: pytest tests/front/talk/test_preference_figures.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.front.talk.conftest import Listening
from unisono.trainer.plan.task_requests import EvaluateRequest, RequestedModel
from unisono.trainer.task import evaluate

Train = Callable[..., Any]
_LORA = {"rank": 4, "alpha": 8}


def _measured(target: object, unseen: Path, folder: Path, **more: Any) -> dict[str, Any]:
    model = RequestedModel(str(target), more.pop("step", None))
    request = EvaluateRequest(model=model, data=str(unseen), cache_dir=folder / "cache", **more)
    return dict(evaluate.run(request, Listening()))


def _agrees(run: Any, figures: dict[str, Any], *, unit: str = "pairs") -> None:
    """With the evaluation at the end of the run; stored and computed in float32."""
    own = {name: value for name, value in run.result["eval"].items() if not name.endswith("_before")}
    assert set(figures) == {*own, unit, "tokens", "loss_tokens"}
    for name, value in own.items():
        assert figures[name] == pytest.approx(value, rel=2e-5, abs=2e-5), name


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": "dpo"},
        {"objective": "dpo", "adapter": None},
        {"objective": "dpo", "preference": {"loss": "ipo", "beta": 0.3, "sft_weight": 0.5}},
        {"objective": "dpo", "adapter": {**_LORA, "init": "pissa"}},
        {"objective": "orpo", "adapter": None},
        {"objective": "simpo", "preference": {"gamma": 1.0}},
    ],
    ids=["lora", "full", "ipo", "pissa", "orpo", "simpo"],
)
def test_the_figures_of_pairs_are_those_of_the_run(
    train_here: Train, pair_files: tuple[Path, Path], tmp_path: Path, sections: dict[str, Any]
) -> None:
    train, unseen = pair_files
    data = {"train": str(train), "eval": str(unseen), "max_length": 128}
    run = train_here(**{"adapter": _LORA, **sections}, data=data, optim={"lr": 3e-3})
    before = run.result["eval"]["loss_before"]
    assert abs(run.result["eval"]["loss"] - before) > 1e-3 * before
    _agrees(run, _measured(run.directory, unseen, tmp_path)["figures"])
    _agrees(run, _measured(run.directory, unseen, tmp_path, step=4)["figures"])


def test_the_reference_is_the_one_that_the_run_names(
    train_here: Train, pair_files: tuple[Path, Path], tmp_path: Path
) -> None:
    train, unseen = pair_files
    data = {"train": str(train), "eval": str(unseen), "max_length": 128}
    other = train_here(adapter=None)
    for adapter in (_LORA, {**_LORA, "merge": [str(train_here(adapter=_LORA).directory)]}):
        named = train_here(
            objective="dpo",
            adapter=adapter,
            data=data,
            optim={"lr": 3e-3},
            preference={"reference": str(other.directory / "model")},
        )
        auto = train_here(objective="dpo", adapter=adapter, data=data, optim={"lr": 3e-3})
        assert named.result["eval"]["loss"] != pytest.approx(auto.result["eval"]["loss"], rel=1e-3)
        for run in (named, auto):
            _agrees(run, _measured(run.directory, unseen, tmp_path)["figures"])


def test_rated_answers_share_one_estimate_of_the_divergence(
    train_here: Train, pair_files: tuple[Path, Path], tmp_path: Path
) -> None:
    files = []
    for file in pair_files:
        pairs = [json.loads(line) for line in file.read_text().splitlines()]
        rated = [
            {
                "prompt": pair["prompt"],
                "completion": pair["rejected" if i % 3 else "chosen"],
                "label": not i % 3,
            }
            for i, pair in enumerate(pairs)
        ]
        files.append(tmp_path / f"rated-{file.name}")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rated))
    data = {"train": str(files[0]), "eval": str(files[1]), "max_length": 128}
    run = train_here(objective="kto", adapter=_LORA, data=data, optim={"lr": 3e-3})
    assert run.result["eval"]["kl"] > 0
    _agrees(run, _measured(run.directory, files[1], tmp_path)["figures"], unit="rows")
    measured = _measured(run.directory, files[1], tmp_path, each=True)
    _agrees(run, measured["figures"], unit="rows")
    assert ["rewards_chosen" in row for row in measured["rows"]] == [not i % 3 for i in range(12)]


def test_each_pair_has_its_own_figures(
    train_here: Train, pair_files: tuple[Path, Path], tmp_path: Path
) -> None:
    train, unseen = pair_files
    run = train_here(objective="simpo", data={"train": str(train), "eval": str(unseen), "max_length": 128})
    measured = _measured(run.directory, unseen, tmp_path, each=True, limit=5)
    rows, figures = measured["rows"], measured["figures"]
    assert [row["row"] for row in rows] == [f"{unseen}:{i}" for i in range(1, 6)]
    assert figures["pairs"] == 5
    for name in ("loss", "reward_margin", "reward_accuracy", "logps_chosen"):
        assert sum(row[name] for row in rows) / 5 == pytest.approx(figures[name], rel=1e-5)
