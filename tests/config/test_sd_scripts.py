"""Files of sd-scripts as LoRA-Scripts writes them: each key has a fate, and the config is what it means.

Run: pytest tests/config/test_sd_scripts.py
"""

import os
from pathlib import Path

import pytest

from unisono.config import load_config
from unisono.config.sd_scripts import KEYS, read_sd_scripts
from unisono.errors import ConfigError

FILE = """
model_train_type = "sd-lora"
pretrained_model_name_or_path = "./sd-models/model"
v2 = false
train_data_dir = "./train/aki"
reg_data_dir = "./train/reg"
prior_loss_weight = 0.5
resolution = "512,768"
enable_bucket = true
min_bucket_reso = 256
max_bucket_reso = 1024
bucket_reso_steps = 64
bucket_no_upscale = true
output_name = "aki"
output_dir = "./output"
save_model_as = "safetensors"
save_precision = "fp16"
save_every_n_epochs = 2
max_train_epochs = 10
train_batch_size = 2
gradient_checkpointing = true
network_train_unet_only = false
network_train_text_encoder_only = false
learning_rate = 1e-4
unet_lr = "2e-4"
text_encoder_lr = 1e-5
lr_scheduler = "cosine_with_restarts"
lr_warmup_steps = 0
lr_scheduler_num_cycles = 3
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=.9,.99"]
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
network_dropout = 0
log_with = "tensorboard"
logging_dir = "./logs"
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1
caption_dropout_rate = 0.1
max_token_length = 255
seed = 1337
clip_skip = 2
min_snr_gamma = 5
noise_offset = 0.05
mixed_precision = "bf16"
xformers = true
cache_latents = true
cache_latents_to_disk = true
gradient_accumulation_steps = 2
sample_prompts = "a portrait --w 512 --n ugly"
sample_every_n_epochs = 2
v_parameterization = false
"""


def _write(folder: Path, text: str = FILE) -> Path:
    file = folder / "20261124.toml"
    file.write_text(text)
    return file


def test_a_file_of_lora_scripts_is_translated(tmp_path: Path) -> None:
    loaded = load_config(_write(tmp_path))
    config, section = loaded.config, loaded.config.diffusion
    assert config.objective == "diffusion"
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (32, 16.0, "unet+text")
    assert (config.optim.lr, section.text_lr, config.optim.weight_decay, config.optim.betas) == (
        2e-4,
        1e-5,
        0.1,
        (0.9, 0.99),
    )
    assert (config.optim.schedule, config.optim.cycles, config.optim.warmup) == (
        "cosine_with_restarts",
        3,
        "0 steps",
    )
    assert config.batch.of_ranks == (2, 2)
    assert (config.duration, config.checkpoint.every) == ("10 epochs", "2 epochs")
    assert config.data.resolution == [512, 768]
    assert (section.buckets, section.upscale, section.max_side) == (True, False, 1024)
    assert (section.shuffle_captions, section.keep_tokens, section.caption_dropout) == (True, 1, 0.1)
    assert (section.clip_skip, section.max_tokens, section.min_snr_gamma, section.noise_offset) == (
        2,
        225,
        5.0,
        0.05,
    )
    assert (section.prior, section.prior_weight) == ("./train/reg", 0.5)
    assert (section.prompts, config.eval.every) == (["a portrait"], "2 epochs")
    assert config.model.dtype == "bfloat16"
    assert config.output_dir == "output/aki"
    assert loaded.origins["optim.lr"].endswith("20261124.toml:25")
    assert loaded.translation is not None
    fates = {key.key: key.fate for key in loaded.translation.keys}
    assert fates["xformers"] == "ignored"
    assert fates["network_dim"] == "carried"
    assert fates["unet_lr"] == "translated"
    assert any("xformers" in note for note in loaded.translation.notes())
    assert any("accelerate" in note for note in loaded.translation.notes(("ACCELERATE_MIXED_PRECISION",)))


def test_overrides_use_the_names_of_both(tmp_path: Path) -> None:
    config = load_config(_write(tmp_path), ("network_dim=8", "diffusion.cache=false")).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.diffusion.cache) == (8, False)


def test_defaults_are_those_of_sd_scripts(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "d"\noutput_dir = "o"\n'
    config = load_config(_write(tmp_path, text)).config
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.duration, config.optim.lr) == (
        4,
        1.0,
        "1600 steps",
        2e-6,
    )
    assert (config.optim.schedule, config.diffusion.buckets, config.model.dtype) == (
        "constant",
        False,
        "float32",
    )


def test_a_dataset_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "dataset.toml").write_text(
        '[general]\nshuffle_caption = true\n[[datasets]]\nresolution = 640\nbatch_size = 3\n[[datasets.subsets]]\nimage_dir = "a"\nnum_repeats = 4\n'
        '[[datasets.subsets]]\nimage_dir = "b"\n[[datasets.subsets]]\nimage_dir = "r"\nis_reg = true\n'
    )
    text = 'pretrained_model_name_or_path = "m"\ndataset_config = "dataset.toml"\noutput_dir = "o"\n'
    config = load_config(_write(tmp_path, text)).config
    assert isinstance(config.data.train, list)
    assert [(entry.path, entry.weight) for entry in config.data.train if not isinstance(entry, str)] == [
        ("a", 4.0),
        ("b", 1.0),
    ]
    assert (
        config.data.resolution,
        config.batch.per_rank,
        config.diffusion.shuffle_captions,
        config.diffusion.prior,
    ) == (640, 3, True, "r")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('network_module = "lycoris.kohya"', "LyCORIS"),
        ('model_train_type = "flux-lora"', "FLUX"),
        ('network_module = "networks.lora_sd3"', "Stable Diffusion 3"),
        ('t5xxl = "t5.safetensors"', "FLUX or Stable Diffusion 3"),
    ],
)
def test_other_models_are_refused_in_one_sentence(tmp_path: Path, line: str, words: str) -> None:
    text = 'pretrained_model_name_or_path = "m"\nunknown_key = 1\n' + line + "\n"
    with pytest.raises(ConfigError) as error:
        load_config(_write(tmp_path, text))
    assert len(error.value.problems) == 1
    assert words in error.value.problems[0].what
    assert error.value.exit_code == 2


def test_refused_and_unknown_keys_are_named_with_their_line(tmp_path: Path) -> None:
    text = FILE + "flip_aug = true\nnetwork_dimm = 4\n"
    text = text.replace('optimizer_type = "AdamW8bit"', 'optimizer_type = "Prodigy"')
    with pytest.raises(ConfigError) as error:
        load_config(_write(tmp_path, text))
    found = {problem.what: problem for problem in error.value.problems}
    assert any("flip_aug" in what for what in found)
    assert any("Prodigy" in what for what in found)
    unknown = next(problem for what, problem in found.items() if "network_dimm" in what)
    assert unknown.fix == "did you mean `network_dim`?"
    assert unknown.where.endswith(f":{len(text.splitlines())}")


def test_every_key_has_one_fate_and_those_of_the_schema_exist() -> None:
    from unisono.config.schema import RunConfig

    schema = RunConfig.model_json_schema()
    assert {key.fate for key in KEYS.values()} == {"carried", "translated", "ignored", "refused"}
    for key in KEYS.values():
        if key.same_as:
            assert key.same_as in KEYS
            continue
        assert key.note or key.ours, key.name
        if key.ours:
            assert key.ours.split(".")[0] in schema["properties"], key.name


def test_every_key_can_be_given_at_its_default(tmp_path: Path) -> None:
    lines = ['pretrained_model_name_or_path = "m"', 'train_data_dir = "d"', 'output_dir = "o"']
    for key in KEYS.values():
        if key.default is not None and key.name not in ("learning_rate",):
            value = str(key.default).lower() if isinstance(key.default, bool) else repr(key.default)
            lines.append(f"{key.name} = {value}")
    translation = read_sd_scripts(_write(tmp_path, "\n".join(lines)))
    assert [problem.what for problem in translation.problems] == []


def test_a_config_that_is_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a named pipe"):
        read_sd_scripts(path)
