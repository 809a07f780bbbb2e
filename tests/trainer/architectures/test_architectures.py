"""Architectures do what docs/reference/models.md says of them: those that stand for a kind of
model in each run of the tests, all others with `-m long`.

Run: pytest tests/trainer/architectures
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.architectures.cells import Architecture, cells
from tests.trainer.architectures.tiny_models import model_types

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
RESULTS = Path(__file__).parents[3] / "bench" / "results" / "models.json"
KINDS = {
    "llama": "grouped queries",
    "gemma2": "windows, capped logits",
    "gpt2": "learned positions, Conv1D",
    "bloom": "ALiBi: padded rows",
    "electra": "an encoder as a decoder",
    "mixtral": "experts",
    "gpt_oss": "experts with biases, attention sinks",
    "deepseek_v3": "latent attention, shared experts",
    "qwen3_next": "linear attention",
    "mamba2": "state space",
    "granitemoehybrid": "state space, attention and experts",
    "qwen3_5": "a checkpoint with a vision tower",
}


def _table() -> dict[str, Any]:
    types: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["types"]
    return types


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, id=name, marks=() if name in KINDS else (pytest.mark.long,))
        for name in model_types()
    ],
)
def test_an_architecture_does_what_the_table_says(model_type: str, tmp_path: Path) -> None:
    outcomes = dict(cells(Architecture(model_type, tmp_path)))
    table = _table()[model_type]["cells"]
    assert {name: (cell.outcome, cell.reason) for name, cell in outcomes.items()} == {
        name: (cell["outcome"], cell.get("reason", "")) for name, cell in table.items()
    }


def test_nothing_crashes_and_nothing_is_wrong() -> None:
    table = _table()
    bad = {
        f"{name}: {cell}": outcome["reason"]
        for name, tried in table.items()
        for cell, outcome in tried["cells"].items()
        if outcome["outcome"] not in ("yes", "refused")
    }
    assert table.keys() == set(model_types())
    assert not bad


def test_most_architectures_train_with_an_adapter_and_in_full() -> None:
    table = _table().values()
    trained = [t for t in table if all(t["cells"][cell]["outcome"] == "yes" for cell in ("lora", "full"))]
    assert len(trained) >= 0.85 * len(table)


def test_layers_that_got_no_gradient_are_named_at_the_end(tmp_path: Path) -> None:
    """transformers' Mamba takes the weight of dt_proj, and does not call the layer."""
    run = Architecture("mamba", tmp_path).lora
    (warning,) = [message for message in run.of_kind("warning") if message["code"] == "adapter_unchanged"]
    assert "2 of 6 adapted layers got no gradient" in warning["text"]
    assert "mixer.dt_proj" in warning["text"]
