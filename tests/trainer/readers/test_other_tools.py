"""Files of axolotl and TRL: one error that names the tool and the page that helps; those of
LLaMA-Factory and ours are read.

Run: pytest tests/trainer/readers/test_other_tools.py
"""

from pathlib import Path

import pytest

from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config.yaml_file import read_yaml
from unisono.trainer.readers.llamafactory.reader import read_llamafactory
from unisono.trainer.readers.other_tools import TOOLS, Tool, refuse_other_tools

AXOLOTL = """
base_model: Qwen/Qwen3-0.6B
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/out
adapter: qlora
lora_r: 32
lora_alpha: 16
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
flash_attention: true
"""
AXOLOTL_DPO = "base_model: m\nrl: dpo\ndatasets:\n  - {path: d, split: train}\nlearning_rate: 1e-5\n"
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dtype: bfloat16
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
packing: true
use_peft: true
lora_r: 32
output_dir: out
report_to: none
"""
TRL_MIXTURE = (
    "model_name_or_path: m\ndatasets:\n  - path: d\n    split: train\nlearning_rate: 1e-5\noutput_dir: o\n"
)
LLAMA_FACTORY = """
model_name_or_path: m
stage: sft
do_train: true
finetuning_type: lora
dataset: alpaca_en_demo
template: qwen
output_dir: o
"""


@pytest.mark.parametrize(
    ("text", "tool", "page"),
    [
        (AXOLOTL, "axolotl", "from-axolotl.md"),
        (AXOLOTL_DPO, "axolotl", "from-axolotl.md"),
        (TRL, "TRL", "from-trl.md"),
        (TRL_MIXTURE, "TRL", "from-trl.md"),
    ],
)
@pytest.mark.parametrize("overrides", [(), ("learning_rate=1e-5",), ("optim.lr=1e-5",)])
def test_one_error_names_the_tool_and_the_page(
    tmp_path: Path, text: str, tool: str, page: str, overrides: tuple[str, ...]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    (problem,) = error.value.problems
    assert problem.what == f"{path} is a config of {tool}"
    assert page in problem.fix
    assert error.value.exit_code == 2


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_the_page_exists_and_has_the_keys(tool: Tool) -> None:
    assert "| unisono |" in (Path(__file__).parents[3] / tool.page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "more", ["", "per_device_train_batch_size: 2\n", "lora_rank: 8\n", "flash_attn: fa2\n"]
)
def test_a_file_of_llama_factory_is_its_own(tmp_path: Path, more: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(LLAMA_FACTORY + more)
    raw, lines = read_yaml(path)
    refuse_other_tools(raw, lines, str(path))
    assert read_llamafactory(path).stage == "sft"


def test_a_file_of_llama_factory_with_a_key_of_trl_is_not_trls(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(LLAMA_FACTORY + "dataset_name: d\n")
    assert "unknown key `dataset_name`" in [problem.what for problem in read_llamafactory(path).problems]


def test_ours_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model: m\ndata: {train: d.jsonl}\nadapter: {kind: lora}\noutput_dir: o\n")
    assert load_config(path).config.model.path == "m"
    path.write_text("model: m\nbase_model: m\ndatasets: [d]\noutput_dir: o\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert any("base_model" in problem.what for problem in error.value.problems)
