"""Answers with a weight between 0 and 1: their tokens' part of the loss.

Run: pytest tests/trainer/training/test_weights_of_answers.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import DataError

Train = Callable[..., Any]


def _rows(weight: float) -> str:
    """Eight rows with two answers each, of which the first has a weight."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {'a' * i}"},
                {"role": "assistant", "content": "one two", "weight": weight},
                {"role": "user", "content": "more"},
                {"role": "assistant", "content": "three" * i},
            ]
        }
        for i in range(1, 9)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def train(train_here: Train, tmp_path: Path) -> Train:
    """One step on all rows; `weight` is that of the first answers."""

    def run(weight: float, **more: Any) -> Any:
        file = tmp_path / f"rows-{weight}.jsonl"
        file.write_text(_rows(weight))
        data = {"train": str(file), "max_length": 128, "packing": False}
        return train_here(data=data, duration="1 step", **more)

    return run


@pytest.mark.parametrize(
    "more", [{}, {"batch": {"global": 8, "micro": 1}}, {"optim": {"lr": 1e-2, "loss_weight": "dft"}}]
)
def test_the_loss_is_the_weighted_sum_over_the_number_of_loss_tokens(
    train: Train, more: dict[str, Any]
) -> None:
    sums = {}
    tokens = {}
    for weight in (0, 0.25, 1):
        (line,) = [one for one in train(weight, **more).metrics if "loss" in one]
        sums[weight], tokens[weight] = line["loss"] * line["loss_tokens"], line["loss_tokens"]
    assert tokens[0.25] == tokens[1] > tokens[0]
    assert sums[0.25] == pytest.approx(sums[0] + 0.25 * (sums[1] - sums[0]), rel=1e-5)


def test_a_loss_without_weights_of_tokens_refuses_them(train: Train) -> None:
    with pytest.raises(DataError, match="answers have a weight between 0 and 1") as caught:
        train(0.25, optim={"lr": 1e-2, "label_smoothing": 0.1})
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].where == "optim.label_smoothing"
    train(1, optim={"lr": 1e-2, "label_smoothing": 0.1})


def test_rows_in_the_cache_are_refused_likewise(train: Train) -> None:
    train(0.25)
    with pytest.raises(DataError, match="answers have a weight between 0 and 1"):
        train(0.25, optim={"lr": 1e-2, "label_smoothing": 0.1})
