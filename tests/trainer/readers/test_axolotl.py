"""Axolotl's files: each key has a fate, and what is carried means the same.

Run: pytest tests/trainer/readers/test_axolotl.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import front_server
from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.data import Completion
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.formats import to_example
from unisono.trainer.data.token_table import Encoded
from unisono.trainer.data.tokenizer import load_tokenizer
from unisono.trainer.readers.axolotl.axolotl_file import AxolotlFile, to_config
from unisono.trainer.readers.axolotl.axolotl_keys import KEYS

BASE: dict[str, Any] = {
    "base_model": "some/model", "datasets": [{"path": "rows.jsonl", "type": "alpaca"}], "adapter": "lora",
    "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True, "sequence_len": 512, "micro_batch_size": 2,
    "num_epochs": 1, "learning_rate": 2e-4, "optimizer": "adamw_torch",
}  # fmt: skip


def read(raw: dict[str, Any], *overrides: str) -> AxolotlFile:
    lines: dict[tuple[str | int, ...], int] = {(key,): number for number, key in enumerate(raw, 1)}
    return to_config(raw, lines, Path("x.yml"), overrides)


def ours(file: AxolotlFile, key: str) -> Any:
    value: Any = file.config
    for name in key.split("."):
        value = value[name]
    return value


@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ({}, "data.train", [{"path": "rows.jsonl", "format": "alpaca-prompt"}]),
        ({}, "data.too_long", "drop"),
        ({"excess_length_strategy": "truncate"}, "data.too_long", "cut"),
        ({"train_on_inputs": True}, "data.loss_on", "all"),
        ({"val_set_size": 0.05}, "data.eval", 0.05),
        ({"val_set_size": 0.05, "evals_per_epoch": 4}, "eval.every", "0.25 epochs"),
        ({"saves_per_epoch": 2}, "checkpoint.every", "0.5 epochs"),
        ({"save_steps": 50}, "checkpoint.every", "50 steps"),
        ({"max_steps": 7}, "duration", "7 steps"),
        ({"batch_size": 8}, "batch.accumulate", 4),
        ({"warmup_ratio": 0.1}, "optim.warmup", "10%"),
        ({"warmup_steps": 10}, "optim.warmup", "10 steps"),
        ({"warmup_steps": 0.1}, "optim.warmup", "10%"),
        ({"optimizer": "adamw_bnb_8bit"}, "optim.kind", "adamw_8bit"),
        ({"optimizer": "paged_adamw_32bit"}, "optim.kind", "adamw_paged"),
        ({"optimizer": "muon", "adapter": None}, "optim.muon_scale", "adamw"),
        ({"optimizer": "adamw_bnb_8bit", "deepspeed": "deepspeed_configs/zero3.json"}, "optim.state_dtype", "bfloat16"),
        ({"deepspeed": "deepspeed_configs/zero1.json"}, "parallel.strategy", "ddp"),
        ({"fsdp": ["full_shard", "auto_wrap"]}, "parallel.strategy", "fsdp"),
        ({"cosine_min_lr_ratio": 0.1}, "optim.min_lr", 0.1),
        ({"lr_scheduler": "constant", "warmup_steps": 3}, "optim.warmup", "0 steps"),
        ({"adam_beta2": 0.95}, "optim.betas", [0.9, 0.95]),
        ({"adapter": "qlora"}, "model.quantize", "nf4"),
        ({"load_in_8bit": True}, "model.quantize", "int8"),
        ({"adapter": None}, "adapter", None),
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj"]}, "adapter.targets", [r"(^|\.)q_proj$"]),
        ({"lora_target_linear": None, "lora_target_modules": r"model\.\d+\.up"}, "adapter.targets", [r"^(?:model\.\d+\.up)$"]),
        ({"peft_use_dora": True}, "adapter.kind", "dora"),
        ({"bf16": "auto"}, "model.dtype", "auto"),
        ({"bf16": True}, "model.dtype", "bfloat16"),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"chat_template": "chatml"}, "data.template", "lf:chatml"),
        ({"rl": "dpo", "datasets": [{"path": "p", "type": "chat_template.default"}], "rl_beta": 0.2}, "preference.beta", 0.2),
        ({"rl": "ipo", "datasets": [{"path": "p", "type": "chat_template"}]}, "preference.loss", "ipo"),
        ({"pretraining_dataset": [{"path": "t", "text_column": "body"}]}, "objective", "pretrain"),
        ({"wandb_project": "mine"}, "track", ["wandb"]),
        ({"wandb_project": "mine", "use_wandb": False}, "seed", 42),
    ],
)  # fmt: skip
def test_a_key_is_carried_or_translated(keys: dict[str, Any], key: str, value: Any) -> None:
    file = read(BASE | keys)
    assert file.problems == []
    assert ours(file, key) == value


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ({"type": "chat_template", "field_messages": "talk"}, {"format": "messages", "columns": {"messages": "talk"}}),
        (
            {"type": "chat_template", "field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}},
            {"format": "sharegpt"},
        ),
        (
            {"type": "chat_template", "message_field_role": "who", "message_field_content": "said"},
            {"format": "sharegpt", "columns": {"conversations": "messages"}, "tags": {"role_tag": "who", "content_tag": "said"}},
        ),
        ({"type": "completion", "field": "body"}, {"format": "text", "columns": {"text": "body"}}),
        ({"type": "alpaca", "split": "train[:100]"}, {"split": "train", "rows": 100, "format": "alpaca-prompt"}),
        (
            {"type": "bradley_terry.chat_template"},
            {"format": "preference", "columns": {"prompt": "input"}},
        ),
        ({"type": "alpaca", "name": "en", "split": "test"}, {"subset": "en", "split": "test", "format": "alpaca-prompt"}),
    ],
)  # fmt: skip
def test_a_dataset_is_a_source(entry: dict[str, Any], source: dict[str, Any]) -> None:
    more = {"reward_model": True} if "bradley_terry" in entry["type"] else {}
    file = read(BASE | more | {"datasets": [{"path": "rows", **entry}]})
    assert file.problems == []
    assert ours(file, "data.train") == [{"path": "rows", **source}]


def test_files_of_a_dataset_are_sources_of_their_own() -> None:
    entry = {"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "type": "completion"}
    paths = [source["path"] for source in ours(read(BASE | {"datasets": [entry]}), "data.train")]
    assert paths == ["a.jsonl", "b.jsonl"]
    remote = {"path": "some/rows", "data_files": "c.jsonl", "type": "completion"}
    (source,) = ours(read(BASE | {"datasets": [remote]}), "data.train")
    assert source["path"] == "hf://datasets/some/rows/c.jsonl"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"optimizer": "lomo"}, "`optimizer: lomo`"),
        ({"datasets": [{"path": "p", "type": "alpaca:chat"}]}, "`type: alpaca:chat` of datasets[0]"),
        ({"datasets": [{"path": "p", "type": "alpaca", "shards": 4}]}, "`shards: 4` of datasets[0]"),
        ({"datasets": [{"type": "alpaca"}]}, "datasets[0] has no `path`"),
        ({"rl": "grpo"}, "`rl: grpo`"),
        ({"trl": {"beta": 0.1}}, "`trl: "),
        ({"context_parallel_size": 4}, "`context_parallel_size: 4`"),
        ({"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "`plugins: "),
        ({"fsdp_config": {"offload_params": True}}, "`fsdp_config: "),
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, "`deepspeed: "),
        ({"adapter": None, "load_in_4bit": True}, "`load_in_4bit: True`"),
        ({"sequnce_len": 3}, "unknown key `sequnce_len`"),
        ({"learning_rate": None}, "the key `learning_rate` is missing"),
    ],
)  # fmt: skip
def test_what_is_not_available_is_refused_with_what_to_use(keys: dict[str, Any], words: str) -> None:
    problems = read(BASE | keys).problems
    assert [problem.what for problem in problems if words in problem.what]
    assert all(problem.fix for problem in problems)


def test_every_key_of_the_table_has_a_fate_and_refusals_say_what_to_use() -> None:
    assert len(KEYS) > 400
    for key in KEYS.values():
        if not key.same_as:
            assert key.note or key.ours, key.name
            assert key.fate in ("carried", "translated", "ignored", "refused")
        else:
            assert key.same_as in KEYS


def test_special_tokens_of_a_local_tokenizer_are_compared(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    same = {"base_model": str(tmp_path), "special_tokens": {"eos_token": "</s>", "pad_token": "<pad>"}}
    assert read(BASE | same).problems == []
    (problem,) = read(BASE | same | {"special_tokens": {"eos_token": "<end>"}}).problems
    assert "`special_tokens: " in problem.what


def test_rows_of_alpaca_keep_axolotls_prompt() -> None:
    with_input = to_example("alpaca-prompt", {"instruction": "Add", "input": "1 and 2", "output": "3"}, {})
    assert with_input == Completion(
        "Below is an instruction that describes a task, paired with an input that provides further context."
        " Write a response that appropriately completes the request.\n\n### Instruction:\nAdd\n\n### Input:\n1 and"
        " 2\n\n### Response:\n",
        "3",
        plain=True,
    )
    without = to_example("alpaca-prompt", {"instruction": "Add", "input": "", "output": "3"}, {})
    assert without == Completion(
        "Below is an instruction that describes a task. Write a response that appropriately completes the"
        " request.\n\n### Instruction:\nAdd\n\n### Response:\n",
        "3",
        plain=True,
    )


def test_the_prompt_of_alpaca_does_not_enter_a_chat_template(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir, trust_remote_code=False)
    encoder = Encoder(tokenizer, directory=model_dir)
    assert encoder.template is not None
    example = to_example("alpaca-prompt", {"instruction": "Add", "input": "", "output": "three"}, {})
    assert isinstance(example, Completion)
    (row,) = encoder.encode([example])
    assert isinstance(row, Encoded)
    assert tokenizer.decode(row.ids) == f"{example.prompt}three{tokenizer.eos_token}"


def test_a_file_is_recognized_and_overridden_in_its_names_and_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(yaml.safe_dump(BASE))
    loaded = load_config(path, ("sequence_len=64", "optim.eps=1e-6"))
    assert loaded.config.data.max_length == 64
    assert loaded.config.optim.eps == 1e-6
    assert "is an axolotl file" in loaded.translation.notes()[0] if loaded.translation else False


def test_init_writes_our_config_and_lists_fates(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(yaml.safe_dump(BASE | {"tf32": True}))
    done = front_server.run([sys.executable, "-m", "unisono", "init", "--from-axolotl", str(path)])
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["data"]["train"][0]["format"] == "alpaca-prompt"
    fates = json.loads(
        front_server.run(
            [sys.executable, "-m", "unisono", "init", "--from-axolotl", str(path), "--json"]
        ).stdout
    )["keys"]
    assert {fate["key"]: fate["fate"] for fate in fates}["tf32"] == "ignored"


def test_a_file_of_another_tool_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text("model: m\n")
    done = front_server.run([sys.executable, "-m", "unisono", "init", "--from-axolotl", str(path)])
    assert done.returncode == 2
    assert "is not a file of axolotl" in done.stderr


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text(yaml.safe_dump(BASE | {"optimizer": "lomo", "rl": "grpo"}))
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert len(raised.value.problems) >= 2
