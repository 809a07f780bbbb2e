"""An embedding model is measured, and exported with what sentence-transformers reads; no answers are
asked of it.

Run: pytest tests/front/talk/test_embedding_models.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.trainer.objectives.labelled import similar_rows, write_rows
from unisono.base.errors import UsageError
from unisono.base.events import Reporter
from unisono.trainer.plan.task_requests import EvaluateRequest, ExportRequest, RequestedModel
from unisono.trainer.task import evaluate, export
from unisono.trainer.task.inference import open_requested

Train = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """The config of a run on triplets."""
    train = write_rows(tmp_path / "rows.jsonl", similar_rows(24))
    unseen = write_rows(tmp_path / "unseen.jsonl", similar_rows(12, seed=1))
    return {
        "objective": "embed",
        "data": {"train": str(train), "eval": str(unseen), "packing": False},
        "embed": {"query_prefix": "ask : "},
        "batch": {"global": 8},
    }


def _loss(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> torch.Tensor:
    """The loss of a batch, from each text alone through the model of transformers."""

    def embedding(text: str) -> torch.Tensor:
        state = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(state, dim=-1)

    anchors = torch.stack([embedding("ask : " + row["anchor"]) for row in rows])
    others = torch.stack([embedding(row[part]) for part in ("positive", "negative") for row in rows])
    return torch.nn.functional.cross_entropy(anchors @ others.T / 0.05, torch.arange(len(rows)))


@pytest.mark.parametrize("merge", [True, False])
def test_the_export_has_the_files_of_sentence_transformers(
    train_here: Train, run: dict[str, Any], tmp_path: Path, *, merge: bool
) -> None:
    run["embed"] |= {"pooling": "mean", "normalize": False}
    done = train_here(**run)
    out, again = tmp_path / "out", tmp_path / "again"
    for source, target in ((done.directory, out), (out, again)):
        request = ExportRequest(model=RequestedModel(str(source)), out=str(target), merge=merge)
        assert export.run(request, Reporter(None))["embeds"]
    for directory in (done.directory / "adapter", out, again):
        modules = json.loads((directory / "modules.json").read_text())
        kinds = ["", "1_Pooling"]
        assert [module["path"] for module in modules] == kinds
        assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling"]
        pooling = json.loads((directory / "1_Pooling" / "config.json").read_text())
        modes = [name for name in pooling if name.startswith("pooling_mode") and pooling[name]]
        assert modes == ["pooling_mode_mean_tokens"]
        settings = json.loads((directory / "config_sentence_transformers.json").read_text())
        assert settings["prompts"] == {"query": "ask : ", "document": ""}
        assert settings["similarity_fn_name"] == "dot"


def test_an_evaluation_of_the_run_is_that_of_its_training(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    done = train_here(**run, adapter=None)
    request = EvaluateRequest(
        model=RequestedModel(str(done.directory)), data=run["data"]["eval"], cache_dir=tmp_path / "cache", each=True
    )  # fmt: skip
    measured = evaluate.run(request, Reporter(None))
    for name in ("loss", "accuracy"):
        assert measured["figures"][name] == pytest.approx(done.result["eval"][name], rel=1e-5), name
    assert len(measured["rows"]) == 12
    model = transformers.AutoModel.from_pretrained(done.directory / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.directory / "model")
    rows = similar_rows(12, seed=1)
    with torch.no_grad():  # batches of 8 and of 4, each a mean
        parts = [len(part) * _loss(model, tokenizer, part) for part in (rows[:8], rows[8:])]
    assert measured["figures"]["loss"] == pytest.approx(float(sum(parts)) / 12, rel=1e-5)
    with pytest.raises(UsageError, match="is an embedding model: it writes no answers"):
        open_requested(request.model, Reporter(None))
