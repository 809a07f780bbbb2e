"""TRL's files and commands: each key has a fate, and what is carried means the same.

Run: pytest tests/trainer/readers/test_trl.py
"""

import re
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
        ({}, "data.plain_texts", True),
        ({"num_generations": 4, "reward_funcs": ["think_format_reward"]}, "objective", "grpo"),
        ({"simpo_gamma": 0.7, "loss_type": "simpo"}, "preference.gamma", 0.7),
        ({"truncation_mode": "keep_end"}, "data.too_long", "keep-answer"),
        ({"completion_only_loss": False}, "data.loss_on", "all"),
        ({"assistant_only_loss": True}, "data.loss_on", "answers"),
        ({"load_in_4bit": True, "use_bnb_nested_quant": True}, "model.quantize_double", True),
        ({"dtype": "bfloat16"}, "model.dtype", "bfloat16"),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"gradient_checkpointing": False}, "memory.gradient_checkpointing", False),
        ({}, "memory.gradient_checkpointing", True),
        ({"activation_checkpointing": False}, "memory.gradient_checkpointing", False),
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


@pytest.mark.parametrize(
    ("trainer", "rate"), [("sft", 2e-5), ("dpo", 1e-6), ("kto", 1e-6), ("reward", 1e-4), ("orpo", 1e-6)]
)
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
        ({"num_generation": 8}, "unknown key `num_generation`"),
        ({"num_generations": 8}, "`num_generations: 8`"),
        ({"simpo_gamma": 0.7}, "`simpo_gamma: 0.7`"),
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
    "text",
    [
        "trl gkd --beta 1",
        "python gold.py --beta 1",
        "python train.py --x 1",
        "ls -l --all",
        "trl sft x",
        "trl sft --a 'b",
    ],
)
def test_another_command_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not translated|not a command of TRL"):
        read_trl(text)


SAMPLED: dict[str, Any] = BASE | {"reward_funcs": ["lib.rewards.score"], "per_device_train_batch_size": 8}


@pytest.fixture
def reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file `lib/rewards.py` in the working directory."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "rewards.py").write_text("def score(completions, **columns):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("reward_file")
@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ({}, "rewards", [{"use": "lib/rewards.py:score"}]),
        ({"reward_funcs": ["lib/rewards.py:score"]}, "rewards", [{"use": "lib/rewards.py:score"}]),
        ({"reward_funcs": ["accuracy_reward"]}, "rewards", [{"use": "math", "column": "solution", "on_error": "skip"}]),
        ({"reward_weights": [0.5]}, "rewards", [{"use": "lib/rewards.py:score", "weight": 0.5}]),
        ({}, "rollout", {"group": 8, "max_new_tokens": 512, "steps": 1}),
        ({"max_completion_length": 64, "max_prompt_length": 32}, "data.max_length", 96),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 6}, "rollout.steps", 3),
        ({"gradient_accumulation_steps": 2}, "batch", {"global": 16}),
        ({}, "adapter.dropout", 0.0),
        ({}, "grpo", {"loss": "dapo", "clip": [0.2, 0.2], "scale": "group", "beta": 0.0, "truncated": "keep"}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "grpo.loss", "gspo"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "grpo.clip", [1.0, 4.0]),
        ({"scale_rewards": False}, "grpo.scale", "none"),
        ({"mask_truncated_completions": True}, "grpo.truncated", "mask"),
        ({"use_vllm": True, "vllm_mode": "server"}, "rollout.url", "http://127.0.0.1:8000"),
        ({"use_vllm": True, "vllm_mode": "server"}, "grpo.correction", "sequence_mask"),
    ],
)  # fmt: skip
def test_a_key_of_grpo_is_carried_or_translated(keys: dict[str, Any], key: str, value: Any) -> None:
    file = read(SAMPLED | keys, "grpo")
    assert file.problems == []
    assert ours(file, key) == value
    assert config_of(file).config.objective == "grpo"


@pytest.mark.usefixtures("reward_file")
@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"reward_funcs": ["lib.other.score"]}, "reward_funcs: lib.other.score", "reward_funcs: [rewards.py:score]"),
        ({"reward_funcs": ["get_soft_overlong_punishment"]}, "reward_funcs: get_soft", "import it into a file"),
        ({"reward_funcs": None}, "the key `reward_funcs` is missing", "add it"),
        ({"reward_weights": [1, 2]}, "reward_weights", "one weight for each"),
        ({"reward_model_name_or_path": "some/model"}, "reward_model_name_or_path: some/model", "name its directory"),
        ({"loss_type": "sapo"}, "loss_type: sapo", "use one of these"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level: sequence", "loss_type: grpo"),
        ({"loss_type": "cispo"}, "epsilon_high: None", "1 or more"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "steps_per_generation: 3", "make it one"),
        ({"num_iterations": 2}, "num_iterations: 2", "steps_per_generation"),
        ({"min_p": 0.1}, "min_p: 0.1", "top_p or top_k"),
        ({"entropy_coef": 0.1}, "entropy_coef: 0.1", "remove it"),
    ],
)  # fmt: skip
def test_what_grpo_has_not_is_refused_with_what_to_use(keys: dict[str, Any], what: str, fix: str) -> None:
    (problem,) = read(SAMPLED | keys, "grpo").problems
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.usefixtures("reward_file")
def test_rloo_has_its_own_defaults() -> None:
    file = read_trl(
        "python -m trl.scripts.rloo --model_name_or_path m --dataset_name d --reward_funcs lib.rewards.score"
    )
    assert ours(file, "grpo") == {"loss": "rloo", "clip": [0.2, 0.2], "beta": 0.05, "truncated": "keep"}
    assert ours(file, "rollout.group") == 2
    assert any("beta: " in line for line in file.warnings)


def test_the_pattern_of_a_thought_is_that_of_trl() -> None:
    (reward,) = ours(read(BASE | {"reward_funcs": ["think_format_reward"]}), "rewards")
    pattern = re.compile(reward["pattern"])
    # as `re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, re.DOTALL | re.MULTILINE)` of TRL
    good = ["<think>\na\n</think>\nb", "<think></think>"]
    bad = [
        "<think>a",
        " <think>a</think>",
        "a\n<think>b</think>",
        "<think>a<think>b</think>",
        "<think>a</think><think>",
    ]
    assert [text for text in good + bad if pattern.search(text)] == good


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
