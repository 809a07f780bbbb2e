"""Scripts of LoRA-Scripts and of sd-scripts: their variables and their command are read, and
nothing of them runs.

Run: pytest tests/trainer/readers/sd_scripts/test_sd_command.py
"""

from pathlib import Path

import pytest

from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import RunConfig
from unisono.trainer.readers.sd_scripts.command import read_script

TRAIN_SH = """#!/bin/bash
# Train data path
pretrained_model="./sd-models/model" # base model path
model_type="sd1.5"                   # option: sd1.5 sd2.0 sdxl flux
parameterization=0
train_data_dir="./train/my folder" # with a blank
reg_data_dir=""
network_module="networks.lora"
network_weights=""
network_dim=32
network_alpha=16
resolution="512,768"
batch_size=2
max_train_epoches=12
save_every_n_epochs=3
train_unet_only=0
train_text_encoder_only=0
stop_text_encoder_training=0
noise_offset="0"
keep_tokens=1
min_snr_gamma=5
lr="1e-4"
unet_lr="2e-4"
text_encoder_lr="1e-5"
lr_scheduler="cosine_with_restarts"
lr_warmup_steps=0
lr_restart_cycles=2
optimizer_type="AdamW8bit"
output_name='aki'
save_state=0
resume=""
clip_skip=2
multi_gpu=0
lowram=0
algo="lora"
conv_dim=4
dropout="0"
use_wandb=0
wandb_api_key=""

# ============= DO NOT MODIFY CONTENTS BELOW =====================
export HF_HOME="huggingface"
extArgs=()
if [[ $lowram ]]; then extArgs+=("--lowram"); fi
touch ran
python -m accelerate.commands.launch ${launchArgs[@]} ./scripts/stable/train_network.py \\
  --enable_bucket --resolution=$resolution ${extArgs[@]}
"""


def _script(folder: Path, text: str, name: str = "train.sh") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _check(config: RunConfig) -> None:
    assert config.adapter is not None
    assert (config.model.path, config.data.train) == ("./sd-models/model", "./train/my folder")
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (32, 16.0, "unet+text")
    assert (config.optim.lr, config.diffusion.text_lr, config.optim.cycles) == (2e-4, 1e-5, 2)
    assert (config.batch.per_rank, config.duration, config.checkpoint.every) == (2, "12 epochs", "3 epochs")
    assert (config.data.resolution, config.output_dir, config.seed) == ([512, 768], "output/aki", 1337)
    section = config.diffusion
    assert (section.min_snr_gamma, section.noise_offset, section.keep_tokens) == (5.0, 0.0, 1)
    # what the script always passes
    assert (section.buckets, section.shuffle_captions, section.caption_extensions) == (True, True, [".txt"])
    assert (section.max_tokens, section.clip_skip, section.prior) == (225, 2, None)


def test_the_variables_of_train_sh(tmp_path: Path) -> None:
    loaded = load_config(_script(tmp_path, TRAIN_SH))
    _check(loaded.config)
    assert loaded.origins["adapter.rank"].endswith("train.sh:10")
    assert list(tmp_path.iterdir()) == [tmp_path / "train.sh"]


def test_the_variables_of_train_ps1(tmp_path: Path) -> None:
    head, rest = TRAIN_SH.split("# ====", 1)
    lines = [
        f"${line}".replace("=", " = ", 1) if "=" in line and line[0] != "#" else line
        for line in head.splitlines()
    ]
    text = (
        "\n".join(lines).replace("$multi_gpu = 0", "$multi_gpu = $false") + "\n# ====" + rest.split("\n")[0]
    )
    text += '\n.\\venv\\Scripts\\activate\n$Env:HF_HOME = "huggingface"\n'
    _check(load_config(_script(tmp_path, text, "train.ps1")).config)


def test_overrides_use_its_names_and_those_of_sd_scripts(tmp_path: Path) -> None:
    path = _script(tmp_path, TRAIN_SH)
    config = load_config(path, ("network_dim=8", "diffusion.cache=false", "keep_tokens=0")).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.diffusion.cache, config.diffusion.keep_tokens) == (8, False, 0)
    for names in (("max_train_epoches", "batch_size"), ("max_train_epochs", "train_batch_size")):
        config = load_config(path, (f"{names[0]}=5", f"{names[1]}=3")).config
        assert (config.duration, config.batch.per_rank) == ("5 epochs", 3)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            'pretrained_model="./sd-models/model"',
            'pretrained_model="$HOME/model"',
            "is not a plain assignment",
        ),
        ("network_dim=32", "network_dim=$DIM", "`network_dim=$DIM` is not a plain assignment"),
        ("network_dim=32", "network_dim=$(cat dim)", "`network_dim=$(cat dim)` is not a plain assignment"),
        ("network_dim=32", "network_dim=`cat dim`", "`network_dim=`cat dim`` is not a plain assignment"),
        ("network_dim=32", 'train_args=("--a" "b")', "is not a plain assignment"),
        ("network_dim=32", "network_dim=32 rm x", "`network_dim=32 rm x` is not a plain assignment"),
        ("network_dim=32", "source more.sh", "`source more.sh` is not a plain assignment"),
        ("network_dim=32", 'network_dim="32', "is not a plain assignment"),
        ("network_dim=32", "network_dimm=32", "unknown key `network_dimm`"),
        (
            'network_weights=""',
            'network_weights="a.safetensors"',
            "`network_weights: a.safetensors` is not available",
        ),
        (
            "stop_text_encoder_training=0",
            "stop_text_encoder_training=9",
            "`stop_text_encoder_training: 9` is not",
        ),
        ('network_module="networks.lora"', 'network_module="lycoris.kohya"', "a module of LyCORIS"),
        ('model_type="sd1.5" ', 'model_type="flux" ', "is for FLUX"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, old: str, new: str, what: str) -> None:
    assert old in TRAIN_SH
    with pytest.raises(ConfigError) as error:
        load_config(_script(tmp_path, TRAIN_SH.replace(old, new)))
    assert [what in problem.what for problem in error.value.problems] == [True]
    assert error.value.exit_code == 2


def test_a_value_in_single_quotes_is_its_text(tmp_path: Path) -> None:
    script = read_script(_script(tmp_path, TRAIN_SH.replace("'aki'", "'$aki # 1'")))
    assert script.raw["output_name"] == "$aki # 1"


def test_clip_skip_is_not_passed_with_other_models(tmp_path: Path) -> None:
    config = load_config(_script(tmp_path, TRAIN_SH.replace('"sd1.5"', '"sdxl"'))).config
    assert config.diffusion.clip_skip is None


def test_train_by_toml_reads_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "default.toml").write_text(
        '[model]\npretrained_model_name_or_path = "m"\n[data]\ntrain_data_dir = "d"\nsample_every_n_epochs ='
        ' 2\noutput_dir = "o"\n'
    )
    (tmp_path / "prompts.txt").write_text("a portrait, --w 64 --n ugly\n")
    text = f"""#!/bin/bash
config_file="./config/default.toml"  # config file
sample_prompts="{tmp_path}/prompts.txt"
sdxl=0
multi_gpu=0
# ============= DO NOT MODIFY CONTENTS BELOW =====================
export HF_HOME="huggingface"
python -m accelerate.commands.launch "./scripts/$script_name" --config_file="$config_file"
"""
    config = load_config(_script(tmp_path, text, "train_by_toml.sh")).config
    assert (config.data.train, config.diffusion.prompts, config.eval.every) == (
        "d",
        ["a portrait,"],
        "2 epochs",
    )
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load_config(_script(tmp_path, text.replace("config/default", "nothing")))


COMMAND = """#!/bin/bash
MODEL=models/sd15
cd /somewhere
# train_network.py is started by accelerate
accelerate launch --num_cpu_threads_per_process 1 sdxl_train_network.py \\
  --pretrained_model_name_or_path="$MODEL" \\
  --train_data_dir "d 1" \\
  --output_dir=${MODEL}/out --output_name="my_lora" \\
  --network_module=networks.lora --network_dim=16 --network_train_unet_only \\
  --optimizer_args "weight_decay=0.1" "betas=0.9,0.99" \\
  --learning_rate=1e-4 --sdpa --max_train_epochs=10
"""


def test_the_command_of_a_script(tmp_path: Path) -> None:
    loaded = load_config(_script(tmp_path, COMMAND, "run.sh"))
    config = loaded.config
    assert config.adapter is not None
    assert (config.model.path, config.data.train, config.output_dir) == (
        "models/sd15",
        "d 1",
        "models/sd15/out/my_lora",
    )
    assert (config.adapter.rank, config.adapter.targets) == (16, "unet")
    assert (config.optim.weight_decay, config.optim.betas, config.duration) == (0.1, (0.9, 0.99), "10 epochs")
    assert config.diffusion.shuffle_captions is False  # LoRA-Scripts' own script passes it, this one does not


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (COMMAND.replace("MODEL=models/sd15", "MODEL=$1"), "$MODEL is not assigned in the script"),
        (COMMAND.replace("--sdpa", "--sdpaa"), "unknown key `sdpaa`"),
        (COMMAND.replace("sdxl_train", "flux_train"), "is for FLUX"),
        ("#!/bin/bash\necho hello\n", "calls no train_network.py"),
        ("", "calls no train_network.py"),
        (COMMAND.replace('"d 1"', '"d 1'), "a command cannot be read"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(_script(tmp_path, text, "run.sh"))
    assert what in error.value.problems[0].what
