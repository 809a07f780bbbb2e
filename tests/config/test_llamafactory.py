"""A LLaMA-Factory file is recognised by its keys, and nothing else is.

Run: pytest tests/config/test_llamafactory.py
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.cli.app import main
from unisono.config.load import llamafactory_version, refuse_if_llamafactory
from unisono.errors import ConfigError

V0 = {
    "model_name_or_path": "Qwen/Qwen3-4B", "trust_remote_code": True, "stage": "sft", "do_train": True,
    "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "dataset": "identity,alpaca_en_demo",
    "template": "qwen3_nothink", "cutoff_len": 2048, "learning_rate": 1.0e-4, "num_train_epochs": 3.0,
    "output_dir": "saves/x",
}  # fmt: skip
V1 = {
    "model": "Qwen/Qwen3-4B",
    "train_dataset": "data/v1.yaml",
    "micro_batch_size": 1,
    "peft_config": {"name": "lora"},
}
CHAT = {"model_name_or_path": "Qwen/Qwen3-4B", "template": "qwen3_nothink", "infer_backend": "huggingface"}


@pytest.mark.parametrize(("raw", "version"), [(V0, "v0"), (CHAT, "v0"), (V1, "v1")])
def test_both_generations_are_recognised(raw: dict[str, Any], version: str) -> None:
    assert llamafactory_version(raw) == version


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"model": "m", "data": {"train": "d"}, "output_dir": "o"},
        {
            "model": "m",
            "data": {"train": "d"},
            "stage": "sft",
            "template": "x",
        },  # ours, with two foreign keys
        {"model_name_or_path": "m", "dataset_name": "d", "learning_rate": 1e-4},  # TRL's
        {"template": "x"},
    ],
)
def test_other_files_pass(raw: dict[str, Any]) -> None:
    refuse_if_llamafactory(raw, "x.yaml")


def test_the_refusal_is_one_sentence_with_our_names_for_the_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_if_llamafactory(V0, "qwen3_lora_sft.yaml")
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.what.startswith("qwen3_lora_sft.yaml is a LLaMA-Factory file (v0)")
    assert "unisono init" in problem.fix
    for pair in ("cutoff_len → data.max_length", "learning_rate → optim.lr", "dataset → data.train"):
        assert pair in problem.fix
    assert "save_steps" not in problem.fix  # only what the file has


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["data", "preview"]])
def test_every_command_that_reads_a_config_refuses_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(yaml.safe_dump(V0))
    with pytest.raises(SystemExit) as ended:
        main([*command, str(file)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("error:") == 1
    assert "is a LLaMA-Factory file (v0)" in printed
    assert list(tmp_path.iterdir()) == [file]
