"""A reward model is measured, exported and loaded in transformers with the same scores; no answers
are asked of it.

Run: pytest tests/front/talk/test_reward_models.py
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
from safetensors.torch import load_file

from tests import front_server
from tests.front.talk.conftest import Listening
from unisono.trainer.plan.task_requests import EvaluateRequest, ExportRequest, RequestedModel
from unisono.trainer.task import evaluate, export

Train = Callable[..., Any]


@pytest.fixture
def pairs(pair_files: tuple[Path, Path]) -> dict[str, Any]:
    """The config of a run on pairs."""
    train, unseen = pair_files
    return {"objective": "reward", "data": {"train": str(train), "eval": str(unseen), "max_length": 128}}


def _evaluated(target: object, pairs: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    model = RequestedModel(str(target), more.pop("step", None))
    request = EvaluateRequest(model=model, data=pairs["data"]["eval"], cache_dir=folder / "cache", **more)
    return dict(evaluate.run(request, Listening()))


def _scores(model: Any, directory: Path, pairs: dict[str, Any]) -> torch.Tensor:
    """(pairs, 2) of the rows for evaluation, from transformers' own forward of a padded batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    talks = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in map(json.loads, Path(pairs["data"]["eval"]).read_text().splitlines())
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer.apply_chat_template(
        talks, padding=True, padding_side="right", return_tensors="pt", return_dict=True
    )
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.shape == (len(talks), 1)
    return logits.view(-1, 2)


@pytest.mark.parametrize(
    "adapter",
    [
        {"rank": 4, "alpha": 8},
        {"rank": 4, "kind": "dora", "targets": ["."]},
        {"rank": 4, "init": "pissa", "modules_to_save": ["score"]},
        None,
    ],
    ids=["lora", "dora", "pissa", "full"],
)
def test_the_result_loads_in_transformers_and_gives_the_same_scores(
    train_here: Train, pairs: dict[str, Any], tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    run = train_here(**pairs, adapter=adapter)
    before, after = run.result["eval"]["loss_before"], run.result["eval"]["loss"]
    assert after < before
    if adapter is None:
        directory = run.directory / "model"
        model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
        assert model.config.architectures == ["LlamaForSequenceClassification"]
        assert (model.config.num_labels, model.config.pad_token_id) == (1, 0)
        names = load_file(directory / "model.safetensors")
        assert not any("lm_head" in name for name in names)
    else:
        directory = run.directory / "adapter"
        settings = json.loads((directory / "adapter_config.json").read_text())
        assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
        model = peft.AutoPeftModelForSequenceClassification.from_pretrained(
            directory, num_labels=1, pad_token_id=0
        )
    found = _scores(model, directory, pairs)
    margins = found[:, 0] - found[:, 1]

    measured = _evaluated(run.directory, pairs, tmp_path, each=True)
    rows = torch.tensor([[row["rewards_chosen"], row["rewards_rejected"]] for row in measured["rows"]])
    assert torch.allclose(rows, found, rtol=1e-5, atol=1e-5)
    figures = measured["figures"]
    assert figures["pairs"] == 12
    assert (
        figures["reward_accuracy"]
        == float((margins > 0).double().mean())
        == run.result["eval"]["reward_accuracy"]
    )
    assert figures["loss"] == pytest.approx(float(-torch.nn.functional.logsigmoid(margins).mean()), rel=1e-5)
    assert figures["loss"] == pytest.approx(after, rel=1e-5)
    assert figures["reward_margin"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert "perplexity" not in figures
    together = _evaluated(run.directory, pairs, tmp_path)["figures"]
    assert together["loss"] == pytest.approx(figures["loss"], rel=1e-5)


def test_it_begins_with_an_adapter_of_a_language_model_merged(
    train_here: Train, pairs: dict[str, Any], tmp_path: Path
) -> None:
    language = train_here(adapter={"rank": 4, "alpha": 8})
    adapter = {"rank": 4, "alpha": 8, "merge": [str(language.directory)]}
    merged = train_here(**pairs, adapter=adapter)
    plain = train_here(**pairs)
    assert merged.result["eval"]["loss_before"] != plain.result["eval"]["loss_before"]
    found = _evaluated(merged.directory, pairs, tmp_path)["figures"]["loss"]  # on the unchanged base
    assert found == pytest.approx(merged.result["eval"]["loss"], rel=1e-4)


@pytest.mark.parametrize("merge", [True, False])
def test_an_export_gives_the_same_scores(
    train_here: Train, pairs: dict[str, Any], tmp_path: Path, *, merge: bool
) -> None:
    run = train_here(**pairs)
    out = tmp_path / "out"
    result = export.run(
        ExportRequest(model=RequestedModel(str(run.directory), 4), out=str(out), merge=merge), Listening()
    )
    assert result["reward"]
    assert not (out / "generation_config.json").exists()
    auto = (
        transformers.AutoModelForSequenceClassification
        if merge
        else peft.AutoPeftModelForSequenceClassification
    )
    model = auto.from_pretrained(out, **{} if merge else {"num_labels": 1, "pad_token_id": 0})
    found = _scores(model, out, pairs)
    measured = _evaluated(run.directory, pairs, tmp_path, each=True)["rows"]
    wanted = torch.tensor([[row["rewards_chosen"], row["rewards_rejected"]] for row in measured])
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def _unisono(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return front_server.run(command, input="hello\n", timeout=240, env=environment)


@pytest.mark.slow  # five processes, four of which import torch
def test_the_commands_know_a_reward_model(pair_files: tuple[Path, Path], tmp_path: Path) -> None:
    train, unseen = pair_files
    out, config = tmp_path / "rm", tmp_path / "train.yaml"
    config.write_text(
        f"objective: reward\nmodel: {{path: 'builtin:tiny', dtype: float32}}\nadapter: {{rank: 4, alpha: 8}}\n"
        f"data: {{train: {train}, eval: {unseen}, max_length: 128}}\noptim: {{lr: 0.003}}\nduration: 4 steps\n"
        f"device: cpu\noutput_dir: {out}\n"
    )
    dry = _unisono("train", config, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "memory    about" in dry.stdout
    trained = _unisono("train", config)
    assert trained.returncode == 0, trained.stderr
    assert "unisono eval" in trained.stdout
    assert "unisono chat" not in trained.stdout
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])

    measured = _unisono("eval", out, "--data", unseen, "--json")
    assert measured.returncode == 0, measured.stderr
    figures = json.loads(measured.stdout)
    assert figures["pairs"] == 12
    assert figures["reward_accuracy"] == last["eval_reward_accuracy"]
    assert figures["loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    shown = _unisono("eval", out / "adapter", "--data", unseen)
    assert f"reward accuracy   {100 * figures['reward_accuracy']:.1f} %" in shown.stdout

    for words in (("chat", out), ("generate", out, "hello"), ("chat", out / "adapter")):
        refused = _unisono(*words)
        assert refused.returncode == 2
        assert "is a reward model: it rates answers and writes none" in refused.stderr
        assert "--data FILE" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_without_a_padding_token_the_end_token_pads(
    train_here: Train, pairs: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(model_dir)
    run = train_here(**pairs, adapter=None)
    directory = run.directory / "model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    assert model.config.pad_token_id == tokenizer.eos_token_id
    found = _scores(model, directory, pairs)  # with the saved tokenizer, which pads
    rows = _evaluated(run.directory, pairs, tmp_path, each=True)["rows"]
    wanted = torch.tensor([[row["rewards_chosen"], row["rewards_rejected"]] for row in rows])
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_new_tokens_are_trained_with_the_head(
    train_here: Train, pairs: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(model_dir)
    model = {"path": str(model_dir), "dtype": "float32", "resize_vocabulary": True}
    for adapter in ({"rank": 4, "alpha": 8}, None):
        run = train_here(**pairs, adapter=adapter, model=model)
        found = _evaluated(run.directory, pairs, tmp_path)["figures"]["loss"]
        assert found == pytest.approx(run.result["eval"]["loss"], rel=1e-5)


def test_weights_may_be_random(
    train_here: Train, pairs: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    model = {"path": str(model_dir), "dtype": "float32", "weights": "random"}
    run = train_here(**pairs, adapter=None, model=model)
    found = _evaluated(run.directory, pairs, tmp_path, step=4)["figures"]["loss"]
    assert found == pytest.approx(run.result["eval"]["loss"], rel=1e-5)
