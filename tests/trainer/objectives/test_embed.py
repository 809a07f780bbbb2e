"""Runs with `objective: embed`: the losses of plain transformers, and rows that are refused.

Run: pytest tests/trainer/objectives/test_embed.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer.objectives.labelled import similar_rows, write_rows
from unisono.base.errors import DataError
from unisono.trainer.plan import SequenceStream

Train = Callable[..., Any]
STEPS, BATCH, TEMPERATURE = 5, 8, 0.05
_PREFIXES = {"anchor": "ask : ", "positive": "", "negative": ""}
_OPTIM = {
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "eps": 1e-4,  # the usual one amplifies rounding where a gradient is nearly 0
    "schedule": "constant",
    "warmup": "0%",
    "weight_decay": 0.0,
    "max_grad_norm": 1e9,
}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """The config of a run on triplets."""
    train = write_rows(tmp_path / "rows.jsonl", similar_rows(24))
    unseen = write_rows(tmp_path / "unseen.jsonl", similar_rows(12, seed=1))
    return {
        "objective": "embed",
        "data": {"train": str(train), "eval": str(unseen), "packing": False},
        "embed": {"query_prefix": _PREFIXES["anchor"]},
        "checkpoint": {"every": "3 steps"},
    }


def _embeddings(model: Any, tokenizer: Any, texts: list[str], pooling: str) -> torch.Tensor:
    """(texts, E), each text alone through the model."""
    states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    pooled = [state[-1] if pooling == "last" else state.mean(0) for state in states]
    return torch.nn.functional.normalize(torch.stack(pooled), dim=-1)


def _loss(model: Any, tokenizer: Any, rows: list[dict[str, str]], pooling: str) -> torch.Tensor:
    """That of sentence-transformers' MultipleNegativesRankingLoss with a scale of 20."""
    parts = [
        _embeddings(model, tokenizer, [_PREFIXES[part] + row[part] for row in rows], pooling)
        for part in rows[0]
    ]
    similarities = parts[0] @ torch.cat(parts[1:]).T / TEMPERATURE
    return torch.nn.functional.cross_entropy(similarities, torch.arange(len(rows)))


@pytest.mark.parametrize(("pooling", "texts", "micro"), [("last", 3, 2), ("mean", 3, 4), ("last", 2, 8)])
def test_the_losses_of_five_steps_are_those_of_the_whole_batch_in_transformers(
    train_here: Train,
    model_dir: Path,
    run: dict[str, Any],
    tmp_path: Path,
    pooling: str,
    texts: int,
    micro: int,
) -> None:
    rows = similar_rows(24, texts=texts)
    run["data"]["train"] = str(write_rows(tmp_path / "some.jsonl", rows))
    run["data"]["eval"] = None
    run["embed"]["pooling"] = pooling
    batch = {"global": BATCH, "micro": micro}
    mine = train_here(**run, adapter=None, optim=_OPTIM, duration=f"{STEPS} steps", batch=batch)
    model = transformers.AutoModel.from_pretrained(model_dir)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.0)
    stream = SequenceStream(len(rows), seed=0)
    theirs = []
    for step in range(1, STEPS + 1):
        chosen = stream.step(step, global_batch=BATCH, total_sequences=10**6)
        loss = _loss(model, tokenizer, [rows[i] for i in chosen], pooling)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert abs(theirs[-1] - theirs[0]) > 1e-2 * theirs[0], "the updates show"
    assert mine.losses == pytest.approx(theirs, rel=1e-5)


def test_micro_batches_and_packing_change_no_figure(train_here: Train, run: dict[str, Any]) -> None:
    whole = train_here(**run, batch={"global": 24}, duration="3 steps")
    small = train_here(**run, batch={"global": 24, "micro": 3}, duration="3 steps")
    run["data"] |= {"packing": True, "max_length": 32}
    sequences = train_here(**run, duration="1 steps").plan.data.train.sequences
    assert sequences < 16
    packed = train_here(**run, batch={"global": sequences, "micro": 1}, duration="3 steps")
    for line, *others in zip(*(one.metrics for one in (whole, small, packed)), strict=True):
        for other in others:
            # A step of packed rows has all rows, but an evaluation then has other batches.
            for name in {"loss", "accuracy", "grad_norm"} & line.keys():
                assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-5), name
        if "eval_loss" in line:
            assert others[0]["eval_loss"] == pytest.approx(line["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("adapter", [{"rank": 4, "alpha": 8}, None], ids=["lora", "full"])
def test_a_resumed_run_is_the_straight_one(
    train_here: Train, run: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    run["batch"] = {"global": 8, "micro": 2}
    straight = train_here(**run, adapter=adapter)
    checkpoint = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(**run, adapter=adapter, resume=(3, checkpoint))
    assert resumed.losses == straight.losses[3:]
    wanted = straight.weights()
    assert all(torch.equal(value, wanted[name]) for name, value in resumed.weights().items())


def test_rows_that_cannot_be_compared_are_named_with_their_lines(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    def refused(bad: dict[str, Any], why: str) -> None:
        rows = [dict(row) for row in similar_rows(12)]
        rows.insert(4, bad)
        run["data"]["train"] = str(write_rows(tmp_path / "some.jsonl", rows))
        with pytest.raises(DataError) as error:
            train_here(**run)
        problem = error.value.problems[0]
        assert why in problem.why
        assert problem.where.endswith("some.jsonl:5")

    refused({"anchor": "rose", "positive": "tree"}, "it has no negative")
    refused({"anchor": "rose", "positive": " ", "negative": "car"}, "the positive is empty")
    refused({"anchor": "rose", "positive": 3, "negative": "car"}, "positive is a number, not text")
    refused({"anchor": " ".join(["rose"] * 90), "positive": "a", "negative": "b"}, "tokens, max_length is 64")
