"""A classifier is measured, exported and loaded in transformers with the same probabilities; no
answers are asked of it.

Run: pytest tests/front/talk/test_classifiers.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests import front_server
from tests.front.talk.conftest import Listening
from tests.trainer.objectives.labelled import LABELS, labelled_rows, write_rows
from unisono.base.errors import DataError, UsageError
from unisono.trainer.plan.task_requests import EvaluateRequest, ExportRequest, RequestedModel
from unisono.trainer.task import evaluate, export
from unisono.trainer.task.inference import open_requested

Train = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    """The config of a run on rows with one label."""
    train = write_rows(tmp_path / "rows.jsonl", labelled_rows(40))
    unseen = write_rows(tmp_path / "unseen.jsonl", labelled_rows(20, seed=1))
    return {
        "objective": "classify",
        "data": {"train": str(train), "eval": str(unseen), "max_length": 64},
        "classify": {"class_weights": "balanced"},
        "checkpoint": {"every": "4 steps"},
        "optim": {"lr": 3e-3},
    }


def _evaluated(target: object, run: dict[str, Any], folder: Path, step: int | None = None) -> dict[str, Any]:
    model = RequestedModel(str(target), step)
    request = EvaluateRequest(model=model, data=run["data"]["eval"], cache_dir=folder / "cache", each=True)
    return dict(evaluate.run(request, Listening()))


def _probabilities(model: Any, directory: Path) -> torch.Tensor:
    """(rows, labels) of the rows for evaluation, from transformers' own forward of each row."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model.eval()
    with torch.no_grad():
        rows = [tokenizer(row["text"], return_tensors="pt") for row in labelled_rows(20, seed=1)]
        return torch.cat([model(**row).logits for row in rows]).softmax(1)


def test_an_evaluation_of_the_run_is_that_of_its_training(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    done = train_here(**run)
    measured = _evaluated(done.directory, run, tmp_path)
    figures, last = measured["figures"], done.result["eval"]
    assert figures["rows"] == 20
    # The mean is over the weights of the rows measured, and the weights are those of the training.
    for name in ("loss", "accuracy", "f1"):
        assert figures[name] == pytest.approx(last[name], rel=1e-5), name
    assert [one["label"] for one in measured["labels"]] == LABELS
    right = [row["predicted"] == row["label"] for row in measured["rows"]]
    assert sum(right) == sum(one["right"] for one in measured["labels"]) == round(20 * figures["accuracy"])
    assert sum(one["rows"] for one in measured["labels"]) == 20


@pytest.mark.parametrize("merge", [True, False])
def test_an_export_gives_the_same_probabilities_and_names(
    train_here: Train, run: dict[str, Any], tmp_path: Path, *, merge: bool
) -> None:
    done = train_here(**run)
    out = tmp_path / "out"
    request = ExportRequest(model=RequestedModel(str(done.directory), 4), out=str(out), merge=merge)
    result = export.run(request, Listening())
    assert (result["reward"], result["labels"]) == (False, LABELS)
    settings = json.loads((out / "config.json").read_text())
    assert settings["id2label"] == {str(number): name for number, name in enumerate(LABELS)}
    assert settings["problem_type"] == "single_label_classification"
    assert settings["architectures"] == ["LlamaForSequenceClassification"]
    assert not (out / "generation_config.json").exists()
    if merge:
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    else:
        model = peft.AutoPeftModelForSequenceClassification.from_pretrained(out, num_labels=3)
    wanted = [
        [row["probabilities"][name] for name in LABELS]
        for row in _evaluated(done.directory, run, tmp_path, step=4)["rows"]
    ]
    assert torch.allclose(_probabilities(model, out), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    alone = _evaluated(out, run, tmp_path)  # without its run, so without the weights of labels
    again = [[row["probabilities"][name] for name in LABELS] for row in alone["rows"]]
    assert torch.allclose(torch.tensor(again), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def test_what_needs_answers_refuses_a_classifier_by_name(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    done = train_here(**run)
    model = RequestedModel(str(done.directory))
    with pytest.raises(UsageError, match="is a classifier: it labels texts and writes no answers"):
        open_requested(model, Listening())
    write_rows(tmp_path / "unseen.jsonl", [{"text": "the moon", "label": "moon"}])
    with pytest.raises(DataError) as error:
        _evaluated(done.directory, run, tmp_path)
    assert "'moon' is not a label of the training" in error.value.problems[0].why


def _unisono(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return front_server.run(command, input="hello\n", timeout=240, env=environment)


@pytest.mark.slow  # five processes that import torch
def test_the_commands_know_a_classifier(run: dict[str, Any], tmp_path: Path) -> None:
    out, config = tmp_path / "labels", tmp_path / "train.yaml"
    data = run["data"]
    config.write_text(
        "objective: classify\nmodel: {path: 'builtin:tiny', dtype: float32}\nadapter: {rank: 4, alpha: 8}\n"
        f"data: {{train: {data['train']}, eval: {data['eval']}, max_length: 64}}\noptim: {{lr: 0.01}}\n"
        f"duration: 8 steps\nbatch: {{global: 8}}\ndevice: cpu\noutput_dir: {out}\n"
    )
    trained = _unisono("train", config)
    assert trained.returncode == 0, trained.stderr
    assert "unisono eval" in trained.stdout
    assert "unisono chat" not in trained.stdout
    measured = _unisono("eval", out, "--data", data["eval"])
    assert measured.returncode == 0, measured.stderr
    assert "macro F1" in measured.stdout
    assert sum(name in measured.stdout for name in LABELS) == 3
    exported = _unisono("export", out, tmp_path / "adapter")
    assert "num_labels=3" in exported.stdout, exported.stderr
    for words in (("chat", out), ("export", out, tmp_path / "g", "--format", "gguf")):
        refused = _unisono(*words)
        assert refused.returncode == 2
        assert "is a classifier" in refused.stderr
