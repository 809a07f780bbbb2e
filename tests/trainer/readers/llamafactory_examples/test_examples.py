"""LLaMA-Factory's example files run unchanged: train, then predict, merge and chat.

Run: pytest tests/trainer/readers/llamafactory_examples
"""

import json
import math
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
import yaml

from tests import front_server
from tests.session_server import cache_with_kernels
from tests.trainer.readers.llamafactory_examples.conftest import QWEN3, Workspace

Trained = Callable[[str], Workspace]
LORA = "train_lora/qwen3_lora_sft"


def test_lora_trains_and_its_config_says_everything_in_our_keys(trained: Trained) -> None:
    place = trained(LORA)
    run = place.root / "saves/qwen3-4b/lora/sft"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["path"].endswith(QWEN3)
    assert config["data"]["template"] == "lf:qwen3_nothink"
    assert config["data"]["max_length"] == 2048
    assert config["data"]["too_long"] == "balanced"
    assert config["adapter"] | {"rank": 8, "alpha": 16} == config["adapter"]
    assert config["batch"] == {"global": 8, "micro": 1}
    assert config["optim"] | {"lr": 1e-4, "schedule": "cosine", "warmup": "10%"} == config["optim"]
    assert config["duration"] == "3 epochs"
    steps = [line for line in place.lines("saves/qwen3-4b/lora/sft/metrics.jsonl") if "loss" in line]
    assert (
        len(steps) == 2
    )  # 15 rows in three epochs, eight a step: epochs follow each other without a smaller batch
    again = place.must("train", str(run / "config.yaml"), "output_dir=runs/again", "--dry-run")
    assert "LLaMA-Factory file" not in again.stderr


def test_plain_text_trains_without_a_chat_template(workspace: Workspace) -> None:
    workspace.must("train", workspace.example("train_lora/qwen3_lora_pretrain"))
    config = yaml.safe_load((workspace.root / "saves/qwen3-4b/lora/pretrain/config.yaml").read_text())
    assert config["objective"] == "pretrain"
    assert config["data"]["template"] == "lf:empty"


def test_the_preprocessing_example_trains(workspace: Workspace) -> None:
    done = workspace.must("train", workspace.example("train_lora/qwen3_preprocess"))
    assert "tokenized_path" in done.stderr
    assert (workspace.root / "saves/qwen3-4b/lora/sft/result.json").is_file()


@pytest.mark.parametrize(
    ("name", "objective", "section"),
    [
        ("dpo", "dpo", {"loss": "sigmoid", "beta": 0.1}),
        ("kto", "kto", {"beta": 0.1}),
        ("reward", "reward", {}),
    ],
)
def test_init_writes_the_config_of_a_preference_file(
    workspace: Workspace, name: str, objective: str, section: dict[str, Any]
) -> None:
    file = workspace.example(f"train_lora/qwen3_lora_{name}")
    text = workspace.must("init", "--from-llamafactory", file).stdout
    config = yaml.safe_load(text)
    assert (config["objective"], config.get("preference", {})) == (objective, section)
    assert config["data"]["train"][0]["format"] == "preference"


@pytest.mark.parametrize(
    ("name", "metric"), [("dpo", "reward_accuracy"), ("kto", "kl"), ("reward", "reward_margin")]
)
def test_preferences_train_and_can_be_previewed(workspace: Workspace, name: str, metric: str) -> None:
    file = workspace.example(f"train_lora/qwen3_lora_{name}")
    workspace.must("train", file)
    (step,) = workspace.lines(f"saves/qwen3-4b/lora/{name}/metrics.jsonl")
    assert metric in step
    if name != "reward":
        assert step["loss"] == pytest.approx(math.log(2) if name == "dpo" else 0.5, abs=1e-6)
    shown = json.loads(workspace.must("--json", "data", "preview", file, "--ids", "--rows", "2").stdout)
    sides = ("kl",) if name == "kto" else ("chosen", "rejected")
    for row in shown["rows"]:
        for side in sides:
            assert len(row[side]["ids"]) == len(row[side]["loss"]) > 0


def test_use_dft_loss_weights_each_token_by_its_probability(workspace: Workspace) -> None:
    workspace.must("train", workspace.example(LORA), "use_dft_loss=true", "max_steps=1")
    run = workspace.root / "saves/qwen3-4b/lora/sft"
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["loss_weight"] == "dft"
    (step,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 0 < step["loss"] < 0.1, "a random model gives each token a small probability"


def test_predict_writes_answers_and_scores(trained: Trained, tmp_path: Path) -> None:
    place = trained("extras/loraplus/llama3_lora_sft")
    file = place.example("extras/nlg_eval/llama3_lora_predict")
    out = tmp_path / "predict"
    done = place.must("eval", file, f"output_dir={out}", "max_new_tokens=6")
    rows = [json.loads(line) for line in (out / "generated_predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 5  # two of identity, three of alpaca_en_demo
    assert all(set(row) == {"prompt", "predict", "label"} for row in rows)
    assert rows[0]["label"].startswith("Hello! I am {{name}}")
    assert rows[0]["prompt"].endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    scores = json.loads((out / "predict_results.json").read_text())
    assert {"predict_bleu-4", "predict_rouge-1", "predict_rouge-2", "predict_rouge-l"} < set(scores)
    assert "generated_predictions.jsonl" in done.stdout
    again = place.must("eval", file, f"output_dir={tmp_path / 'again'}", "max_new_tokens=6")
    assert again.code == 0
    assert (tmp_path / "again" / "generated_predictions.jsonl").read_text() == (
        out / "generated_predictions.jsonl"
    ).read_text()


def test_merge_writes_a_model_that_answers_as_base_plus_adapter(trained: Trained) -> None:
    place = trained(LORA)
    place.must("export", place.example("merge_lora/qwen3_lora_sft"))
    merged = place.root / "saves/qwen3_sft_merged"
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    base = transformers.AutoModelForCausalLM.from_pretrained(place.root / QWEN3)
    both = peft.PeftModel.from_pretrained(base, str(place.root / "saves/qwen3-4b/lora/sft/adapter"))
    ids = torch.tensor([[5, 9, 300, 41]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, both(ids).logits, atol=1e-4, rtol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_full_fine_tuning_with_deepspeed_is_merged_and_asked(workspace: Workspace) -> None:
    done = workspace.must("train", workspace.example("train_full/qwen3_full_sft"))
    assert "fsdp" in done.stderr
    workspace.must("export", workspace.example("merge_lora/qwen3_full_sft"))
    transformers.AutoModelForCausalLM.from_pretrained(workspace.root / "saves/qwen3_sft_merged")
    said = workspace.must(
        "chat", workspace.example("inference/qwen3_full_sft"), "max_new_tokens=4", given="hi\n"
    )
    assert "qwen3-4b/full/sft" in said.stderr


@pytest.mark.parametrize("name", ["inference/qwen3", "inference/qwen3_lora_sft"])
def test_chat_and_generate_take_an_inference_file(trained: Trained, name: str) -> None:
    place = trained(LORA)
    place.must("chat", place.example(name), "max_new_tokens=4", given="hi\n")
    found = json.loads(
        place.must(
            "--json", "generate", place.example(name), "who are you", "max_new_tokens=4", "do_sample=false"
        ).stdout
    )
    assert found["tokens"] <= 4
    assert found["prompt"] == "who are you"


def test_a_file_of_a_different_command_names_that_command(workspace: Workspace) -> None:
    for name, command in (
        ("extras/nlg_eval/llama3_lora_predict", "unisono eval"),
        ("merge_lora/qwen3_lora_sft", "unisono export"),
        ("inference/qwen3", "unisono chat"),
    ):
        file = workspace.example(name)
        done = workspace.run("train", file)
        assert done.code == 2
        assert f"`{command} {file}`" in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "extras/pissa/llama3_lora_sft",
        "extras/llama_pro/llama3_freeze_sft",
        "extras/muon/qwen2_full_sft",
        "train_lora/qwen3_lora_sft_ds3",
    ],
)
def test_near_examples_train(workspace: Workspace, name: str) -> None:
    workspace.must("train", workspace.example(name))


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_that_are_killed_resume_bit_equal(workspace: Workspace, tmp_path: Path) -> None:
    command = [
        "train",
        workspace.example(LORA),
        "--nproc",
        "2",
        "max_steps=10",
        "save_steps=3",
        "gradient_accumulation_steps=2",
    ]
    workspace.must(*command, f"output_dir={tmp_path / 'undisturbed'}")
    killed = tmp_path / "killed"
    front = front_server.start(
        [sys.executable, "-m", "unisono", "--json", *command, f"output_dir={killed}"],
        cwd=workspace.root,
        env=os.environ | {"XDG_CACHE_HOME": str(cache_with_kernels(workspace.root / ".cache"))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert front.stdout is not None
    with front:
        for line in front.stdout:
            event = json.loads(line)
            if event["kind"] == "step" and event["step"] >= 4:
                front.kill()
                break
        else:
            raise AssertionError("it ended before it was killed")
    assert not (killed / "result.json").exists()
    workspace.must(*command, f"output_dir={killed}")
    both = [
        [
            (line["step"], line["loss"])
            for line in workspace.lines(str(run / "metrics.jsonl"))
            if "loss" in line
        ]
        for run in (tmp_path / "undisturbed", killed)
    ]
    assert both[0] == both[1]
    assert [step for step, _ in both[0]] == list(range(1, 11))
    weights = [
        (run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in (tmp_path / "undisturbed", killed)
    ]
    assert weights[0] == weights[1]
