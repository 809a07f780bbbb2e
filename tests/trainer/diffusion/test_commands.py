"""The commands of docs/how-to/from-lora-scripts.md, as a reader types them, and a run that is
killed and resumed.

Run: pytest tests/trainer/diffusion/test_commands.py, and with `-m long` the kill
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests import front_server, needs
from tests.trainer.diffusion.conftest import SIZES
from tests.trainer.diffusion.making import write_pictures
from unisono.front.drill.drills import DRILLS, choose
from unisono.front.drill.execution import run_drills

needs.package("diffusers")

CONFIG = """
model_train_type = "sd-lora"
pretrained_model_name_or_path = "{model}"
train_data_dir = "train/aki"
resolution = "32,32"
enable_bucket = true
min_bucket_reso = 16
max_bucket_reso = 64
bucket_reso_steps = 8
output_dir = "runs"
output_name = "aki"
max_train_steps = {steps}
train_batch_size = 2
network_train_unet_only = true
network_dim = 4
unet_lr = 1e-3
caption_extension = ".txt"
save_every_n_steps = 3
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "keys"),
        "OMP_NUM_THREADS": "1",
    }


def _prepare(folder: Path, model: Path, *, steps: int) -> None:
    folder.mkdir(exist_ok=True)
    write_pictures(folder / "train" / "aki" / "6_aki", ["red", "blue"], SIZES)
    (folder / "20261124-100000.toml").write_text(CONFIG.format(model=model, steps=steps))


def _unisono(*words: str, cwd: Path, env: Mapping[str, str]) -> str:
    done = front_server.run([sys.executable, "-m", "unisono", *words], cwd=cwd, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.ranks
def test_the_commands_of_the_page(pipeline_dir: Path, tmp_path: Path, env: dict[str, str]) -> None:
    _prepare(tmp_path, pipeline_dir, steps=4)
    shown = _unisono("train", "20261124-100000.toml", cwd=tmp_path, env=env)
    assert "is a file of sd-scripts" in shown
    assert 'unisono generate runs/aki "a prompt" --out pictures' in shown
    drawn = _unisono("generate", "runs/aki", "aki, in the rain", "--out", "pictures", "--number", "2", "--seed", "0", "--steps", "2", cwd=tmp_path, env=env)  # fmt: skip
    assert "pictures/00001.png" in drawn
    _unisono("export", "runs/aki", "aki", "--format", "kohya", cwd=tmp_path, env=env)
    assert (tmp_path / "aki" / "aki.safetensors").is_file()
    _unisono("export", "aki/aki.safetensors", "back", "--format", "diffusers", cwd=tmp_path, env=env)
    assert (tmp_path / "back" / "pytorch_lora_weights.safetensors").is_file()


def _losses(run: Path) -> list[float]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


@pytest.mark.long
@pytest.mark.ranks
def test_a_killed_run_resumes_with_the_same_losses(
    pipeline_dir: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    for name in ("straight", "killed"):
        _prepare(tmp_path / name, pipeline_dir, steps=40)
    _unisono("train", "20261124-100000.toml", cwd=tmp_path / "straight", env=env)
    run = tmp_path / "killed" / "runs" / "aki"
    front = front_server.start(
        [sys.executable, "-m", "unisono", "train", "20261124-100000.toml"], cwd=tmp_path / "killed", env=env
    )
    limit = time.monotonic() + 300
    while len(_losses(run)) < 7:
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(front.pid, signal.SIGKILL)
    front.wait(timeout=60)
    assert len(_losses(run)) < 40
    _unisono("train", "20261124-100000.toml", cwd=tmp_path / "killed", env=env)
    assert _losses(run) == _losses(tmp_path / "straight" / "runs" / "aki")
    weights = [
        place / "runs" / "aki" / "adapter" / "pytorch_lora_weights.safetensors"
        for place in (tmp_path / "straight", tmp_path / "killed")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
@pytest.mark.ranks
def test_a_killed_rank_of_two_is_named_and_no_step_is_lost(
    pipeline_dir: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    """The run continues by itself from the steps that its front keeps in memory, with the losses of
    a run that was not killed.
    """
    for name in ("straight", "killed"):
        _prepare(tmp_path / name, pipeline_dir, steps=40)
    words = ["train", "20261124-100000.toml", "--nproc", "2", "checkpoint.every=20 steps"]
    _unisono(*words, cwd=tmp_path / "straight", env=env)
    run = tmp_path / "killed" / "runs" / "aki"
    front = front_server.start([sys.executable, "-m", "unisono", *words], cwd=tmp_path / "killed", env=env)
    limit = time.monotonic() + 300
    while len(_losses(run)) < 7:
        assert time.monotonic() < limit
        time.sleep(0.02)
    (victim,) = [
        process
        for process in psutil.process_iter()
        if str(run / "plan.json") in " ".join(_words_of(process)) and _rank_of(process) == "1"
    ]
    victim.kill()
    assert front.wait(timeout=300) == 0
    (restart,) = json.loads((run / "result.json").read_text())["restarts"]
    assert (restart["verdict"]["cause"], restart["verdict"]["ranks"]) == ("rank_killed", [1])
    assert restart["from_step"] >= 6
    assert _losses(run) == _losses(tmp_path / "straight" / "runs" / "aki")


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("fault", [drill.fault for drill in DRILLS])
def test_a_fault_in_an_image_run_is_named(pipeline_dir: Path, pictures_dir: Path, fault: str) -> None:
    (drill,) = choose((fault,))
    config = {
        "objective": "diffusion", "model": {"path": str(pipeline_dir), "dtype": "float32"},
        "adapter": {"rank": 4, "alpha": 2, "targets": "unet"}, "data": {"train": str(pictures_dir), "resolution": 32},
        "diffusion": {"bucket_step": 8, "min_side": 16, "max_side": 64},
    }  # fmt: skip
    changed = replace(drill, config={**drill.config, **config}, limit_s=5 * drill.limit_s)
    (row,) = run_drills([changed], lambda drill, text: None)
    assert row.is_good, row


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _rank_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RANK", "")
    except psutil.Error:
        return ""


DATASET = """
[general]
shuffle_caption = true
[[datasets]]
resolution = "32,32"
batch_size = 2
  [[datasets.subsets]]
  image_dir = 'train/aki/6_aki'
  caption_extension = '.txt'
  num_repeats = 2
  [[datasets.subsets]]
  is_reg = true
  image_dir = 'reg'
  class_tokens = 'tile'
[[datasets]]
resolution = 64
batch_size = 2
  [[datasets.subsets]]
  image_dir = 'train/aki/6_aki'
  caption_extension = '.txt'
  validation_split = 0.5
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_dataset_file_trains_and_its_mistakes_are_no_traceback(
    pipeline_dir: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    _prepare(tmp_path, pipeline_dir, steps=3)
    write_pictures(tmp_path / "reg", ["grey"], SIZES)
    (tmp_path / "dataset.toml").write_text(DATASET)
    words = ("train", "20261124-100000.toml", "dataset_config=dataset.toml")
    shown = _unisono(*words, cwd=tmp_path, env=env)
    assert "completed: step 3" in shown
    assert "evaluation: loss" in shown
    assert "20 used, 4 for evaluation" in shown
    (tmp_path / "dataset.toml").write_text(DATASET.replace("is_reg = true", "metadata_file = 'm.json'"))
    refused = front_server.run([sys.executable, "-m", "unisono", *words], cwd=tmp_path, env=env, timeout=300)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "dataset.toml:12" in refused.stderr


EXAMPLE = """
[general]
flip_aug = true
color_aug = false
resolution = [32, 32]

[[datasets]]
batch_size = 6
enable_bucket = true
bucket_no_upscale = true
bucket_reso_steps = 8
caption_extension = ".txt"
keep_tokens_separator= "|||"
shuffle_caption = true
caption_tag_dropout_rate = 0.1
secondary_separator = ";;;"
enable_wildcard = true

  [[datasets.subsets]]
  image_dir = "train/aki/6_aki"
  num_repeats = 1
  caption_prefix = "1girl |||"
  caption_suffix = ", anime ||| best"
"""
"""The last one of sd-scripts' config_README, with the paths and sizes of these pictures."""


@pytest.mark.slow
@pytest.mark.ranks
def test_example_with_separators_wildcards_and_mirrored_pictures_trains(
    pipeline_dir: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    _prepare(tmp_path, pipeline_dir, steps=3)
    (tmp_path / "dataset.toml").write_text(EXAMPLE)
    for file in (tmp_path / "train").rglob("*.txt"):
        file.write_text("a {red|blue} tile, sky;;;day\n")
    shown = _unisono("train", "20261124-100000.toml", "dataset_config=dataset.toml", cwd=tmp_path, env=env)
    assert "completed: step 3" in shown
    assert "16 latents and embeddings were computed" in shown  # of 8 pictures, and of them mirrored


TRAIN_SH = """#!/bin/bash
pretrained_model="{model}" # base model path
model_type="sd1.5"
train_data_dir="./train/aki"
reg_data_dir=""
network_module="networks.lora"
network_dim=4
network_alpha=2
resolution="32,32"
batch_size=2
max_train_epoches=1
save_every_n_epochs=2
train_unet_only=1
noise_offset="0"
unet_lr="1e-3"
lr_scheduler="cosine_with_restarts"
lr_warmup_steps=0
lr_restart_cycles=1
optimizer_type="AdamW8bit"
output_name="aki"
min_bucket_reso=16
max_bucket_reso=64
clip_skip=1
dropout="0"
# ============= DO NOT MODIFY CONTENTS BELOW =====================
touch ran
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_train_sh_and_a_preset_train(pipeline_dir: Path, tmp_path: Path, env: dict[str, str]) -> None:
    """The script is not run; what it and the other files of LoRA-Scripts say is trained."""
    _prepare(tmp_path, pipeline_dir, steps=3)
    (tmp_path / "train.sh").write_text(TRAIN_SH.format(model=pipeline_dir))
    shown = _unisono("train", "train.sh", "bucket_reso_steps=8", "track=[]", cwd=tmp_path, env=env)
    assert "completed: step 24" in shown  # 8 pictures 6 times, 2 in a step
    assert (tmp_path / "output" / "aki" / "adapter").is_dir()
    assert not (tmp_path / "ran").exists()
    preset = (
        '[metadata]\nname = "n"\nversion = "1"\n[data]\nresolution = "32,32"\nenable_bucket ='
        " true\nmin_bucket_reso = 16\n"
    )
    (tmp_path / "preset.toml").write_text(preset + "bucket_reso_steps = 8\nbucket_no_upscale = true\n")
    words = (
        f"pretrained_model_name_or_path={pipeline_dir}",
        "train_data_dir=train/aki",
        "caption_extension=.txt",
    )
    shown = _unisono(
        "train", "preset.toml", *words, "max_train_steps=2", "output_dir=o", cwd=tmp_path, env=env
    )
    assert "completed: step 2" in shown
