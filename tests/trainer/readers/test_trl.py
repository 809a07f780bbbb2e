"""TRL's files and commands: each key has a fate, and what is carried means the same.

Run: pytest tests/trainer/readers/test_trl.py
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import front_server
from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import config_of
from unisono.trainer.readers.trl.command import read_command
from unisono.trainer.readers.trl.trl_file import TrlFile, read_trl, translate
from unisono.trainer.readers.trl.trl_keys import KEYS, OWN

BASE: dict[str, Any] = {
    "model_name_or_path": "some/model", "dataset_name": "some/rows", "learning_rate": 2e-4,
    "num_train_epochs": 1, "per_device_train_batch_size": 2, "use_peft": True, "output_dir": "o", "report_to": "none",
}  # fmt: skip


def read(raw: dict[str, Any], trainer: str | None = None) -> TrlFile:
    lines: dict[tuple[str | int, ...], int] = {(key,): number for number, key in enumerate(raw, 1)}
    return translate(raw, lines, "x.yaml", trainer=trainer)


def ours(file: TrlFile, key: str) -> Any:
    value: Any = file.config
    for name in key.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ({}, "objective", "sft"),
        ({}, "data.train", [{"path": "some/rows", "split": "train"}]),
        ({}, "adapter.targets", [r"(^|\.)q_proj$", r"(^|\.)v_proj$"]),
        ({"dataset_text_field": "body"}, "data.train", [{"path": "some/rows", "split": "train", "columns": {"text": "body"}}]),
        ({"eval_strategy": "steps", "eval_steps": 5}, "data.eval", [{"path": "some/rows", "split": "test"}]),
        ({"use_peft": False}, "adapter", None),
        ({"lora_target_modules": ["up_proj"]}, "adapter.targets", [r"(^|\.)up_proj$"]),
        ({"lora_target_modules": "all-linear"}, "adapter.targets", "all-linear"),
        ({"use_rslora": True}, "adapter.kind", "rslora"),
        ({"max_length": 256}, "data.max_length", 256),
        ({}, "data.max_length", 1024),
        ({}, "data.too_long", "cut"),
        ({"truncation_mode": "keep_end"}, "data.too_long", "keep-answer"),
        ({"completion_only_loss": False}, "data.loss_on", "all"),
        ({"assistant_only_loss": True}, "data.loss_on", "answers"),
        ({"load_in_4bit": True, "use_bnb_nested_quant": True}, "model.quantize_double", True),
        ({"dtype": "bfloat16"}, "model.dtype", "bfloat16"),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"gradient_checkpointing": False}, "memory.gradient_checkpointing", False),
        ({}, "memory.gradient_checkpointing", True),
        ({"loss_type": "dft"}, "optim.loss_weight", "dft"),
        ({"beta": 0.2}, "objective", "dpo"),
        ({"beta": 0.2, "loss_type": "ipo"}, "preference.loss", "ipo"),
        ({"desirable_weight": 2.0}, "preference.desirable_weight", 2.0),
        ({"datasets": [{"path": "a", "name": "b"}], "dataset_name": None}, "data.train", [{"path": "a", "split": "train", "subset": "b"}]),
        ({"optim": "paged_adamw_8bit"}, "optim.kind", "adamw_8bit_paged"),
    ],
)  # fmt: skip
def test_a_key_is_carried_or_translated(keys: dict[str, Any], key: str, value: Any) -> None:
    file = read(BASE | keys)
    assert file.problems == []
    assert ours(file, key) == value


@pytest.mark.parametrize(("trainer", "rate"), [("sft", 2e-5), ("dpo", 1e-6), ("kto", 1e-6), ("reward", 1e-4)])
def test_each_trainer_has_its_own_learning_rate(trainer: str, rate: float) -> None:
    file = read({key: value for key, value in BASE.items() if key != "learning_rate"}, trainer)
    assert ours(file, "optim.lr") == rate
    assert config_of(file).config.objective == trainer


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"loss_type": "sppo_hard"}, "`loss_type: sppo_hard`"),
        ({"model_init_kwargs": {"a": 1}}, "`model_init_kwargs: "),
        ({"f_divergence_type": "js_divergence"}, "`f_divergence_type: js_divergence`"),
        ({"max_length": None}, "`max_length: None`"),
        ({"num_generations": 8}, "unknown key `num_generations`"),
        ({"dataset_name": None}, "the key `dataset_name` is missing"),
    ],
)
def test_what_is_not_available_is_refused_with_what_to_use(keys: dict[str, Any], words: str) -> None:
    problems = read(BASE | keys, "sft").problems
    assert [problem.what for problem in problems if words in problem.what]
    assert all(problem.fix for problem in problems)


def test_a_command_is_read_as_its_keys() -> None:
    command = read_command(
        "accelerate launch --config_file x/deepspeed_zero3.yaml trl/scripts/dpo.py \\\n --model_name_or_path m"
        " --dataset-name=d --learning_rate 5e-7 --lora_target_modules q_proj k_proj --no_remove_unused_columns"
        " --use_peft # a comment"
    )
    assert command.trainer == "dpo"
    assert command.raw == {
        "deepspeed": {"zero_optimization": {"stage": 3}}, "model_name_or_path": "m", "dataset_name": "d",
        "learning_rate": "5e-7", "lora_target_modules": ["q_proj", "k_proj"], "remove_unused_columns": False, "use_peft": True,
    }  # fmt: skip


def test_a_command_may_name_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("learning_rate: 1e-4\nmodel_name_or_path: m\n")
    file = read_trl(f"trl sft --config {tmp_path / 'x.yaml'} --dataset_name d --learning_rate 2e-4")
    assert ours(file, "optim.lr") == 2e-4
    assert ours(file, "model.path") == "m"


@pytest.mark.parametrize(
    "text", ["trl grpo --beta 1", "python train.py --x 1", "ls -l --all", "trl sft x", "trl sft --a 'b"]
)
def test_another_command_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not translated|not a command of TRL"):
        read_trl(text)


def test_every_key_of_the_table_has_a_fate() -> None:
    assert len(OWN) > 70
    assert len(KEYS) > 150
    for key in OWN.values():
        assert key.note or key.ours or key.same_as, key.name


def test_a_file_trains_as_its_objective_says(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert load_config(path).config.objective == "sft"
    assert load_config(path, ("objective=dpo",)).config.objective == "dpo"
    assert load_config(path, ("learning_rate=1e-3",)).config.optim.lr == 1e-3


def test_init_writes_our_config() -> None:
    command = "trl sft --model_name_or_path m --dataset_name d --output_dir o --push_to_hub"
    done = front_server.run([sys.executable, "-m", "unisono", "init", "--from-trl", command])
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"]["path"] == "m"
    assert "nothing is uploaded" in done.stderr
