"""Files of sd-scripts as LoRA-Scripts writes them: each key has a fate, and the config is what it
means.

Run: pytest tests/trainer/readers/sd_scripts/test_sd_scripts.py
"""

import os
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.readers.key_table import Key
from unisono.trainer.readers.sd_scripts.keys import KEYS
from unisono.trainer.readers.sd_scripts.reader import read_sd_scripts

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
    text = FILE + "color_aug = true\nnetwork_dimm = 4\n"
    text = text.replace('optimizer_type = "AdamW8bit"', 'optimizer_type = "Prodigy"')
    with pytest.raises(ConfigError) as error:
        load_config(_write(tmp_path, text))
    found = {problem.what: problem for problem in error.value.problems}
    assert any("color_aug" in what for what in found)
    assert any("Prodigy" in what for what in found)
    unknown = next(problem for what, problem in found.items() if "network_dimm" in what)
    assert unknown.fix == "did you mean `network_dim`?"
    assert unknown.where.endswith(f":{len(text.splitlines())}")


def test_every_key_has_one_fate_and_those_of_the_schema_exist() -> None:
    from unisono.trainer.config.schema import RunConfig

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


# ---- values that mean off


BASE = {
    "pretrained_model_name_or_path": '"m"',
    "train_data_dir": '"d"',
    "reg_data_dir": '"r"',
    "output_dir": '"o"',
    "logging_dir": '"l"',
    "enable_bucket": "true",
    "lr_scheduler": '"cosine_with_restarts"',
    "sample_prompts": '"a portrait"',
    "sample_every_n_epochs": "2",
}
"""A file in which keys that depend on others have an effect."""


def _off_values(key: Key) -> list[str]:
    """What means "not given" for a key, as the table says it, in TOML."""
    is_number = key.type in ("int", "float", "numbers", "number")
    zero_is_off = key.zero == "off" or (
        not key.zero and (not is_number or key.default == 0 or key.fate == "ignored")
    )
    zeros = ["0", "0.0", *(['"0"'] if is_number or key.type == "bool" else [])]
    return ['""', "[]", "false", *(zeros if zero_is_off else [])]


def _translated(folder: Path, lines: dict[str, str], dataset: str = "") -> tuple[dict[str, Any], list[str]]:
    """Our config of a file before it is checked, and what is wrong with the file."""
    (folder / "dataset.toml").write_text(dataset)
    found = read_sd_scripts(_write(folder, "".join(f"{name} = {value}\n" for name, value in lines.items())))
    return found.config, [problem.what for problem in found.problems]


def _outcome(folder: Path, lines: dict[str, str]) -> Any:
    """The config of a file, or what is wrong with it."""
    path = _write(folder, "".join(f"{name} = {value}\n" for name, value in lines.items()))
    try:
        return load_config(path).config.model_dump()
    except ConfigError as error:
        return [problem.what for problem in error.problems]


@pytest.mark.parametrize("name", KEYS)
def test_a_value_that_means_off_is_as_none(tmp_path: Path, name: str) -> None:
    key = KEYS[KEYS[name].same_as or name]
    without = {known: value for known, value in BASE.items() if known != key.name}
    wanted = _translated(tmp_path, without)
    assert not wanted[1] or key.name in ("pretrained_model_name_or_path", "train_data_dir")
    for value in _off_values(key):
        assert _translated(tmp_path, {**without, name: value}) == wanted, f"{name} = {value}"


_DATASET = {
    "[general]": {"caption_extension": '".txt"'},
    "[[datasets]]": {"resolution": "64"},
    "[[datasets.subsets]]": {"image_dir": '"a"', "num_repeats": "2"},
}
_LEVELS = {
    "dataset": ("[general]", "[[datasets]]"),
    "subset": tuple(_DATASET),
    "own": ("[[datasets.subsets]]",),
}


@pytest.mark.parametrize("name", [key.name for key in KEYS.values() if key.level])
def test_a_value_that_means_off_is_as_none_in_a_dataset_file(tmp_path: Path, name: str) -> None:
    key = KEYS[name]
    main = {"pretrained_model_name_or_path": '"m"', "dataset_config": '"dataset.toml"', "output_dir": '"o"'}

    def file(part: str | None, value: str) -> str:
        lines = []
        for own, settings in _DATASET.items():
            lines.append(own)
            lines += [f"{known} = {text}" for known, text in settings.items() if known != name]
            lines += [f"{name} = {value}"] if own == part else []
        return "\n".join(lines)

    wanted = _translated(tmp_path, main, file(None, ""))
    for part in _LEVELS[key.level]:
        for value in _off_values(key):
            assert _translated(tmp_path, main, file(part, value)) == wanted, f"{part} {name} = {value}"


def test_the_table_says_what_0_means_for_every_number_that_has_an_effect() -> None:
    for key in KEYS.values():
        if key.type in ("int", "float", "number", "numbers") and key.fate != "ignored":
            assert key.zero in ("off", "value", "wrong") or key.default == 0, key.name


@pytest.mark.parametrize("name", [key.name for key in KEYS.values() if key.zero == "wrong"])
def test_a_0_that_fails_there_fails_here_with_its_name(tmp_path: Path, name: str) -> None:
    found = _outcome(tmp_path, {**BASE, name: "0"})
    if name not in (
        "sample_steps",
        "dataset_repeats",
    ):  # without the prompts' effect, and of dataset files only
        assert isinstance(found, list), name
        assert any(name in what for what in found), found


def test_0_is_the_number_where_the_table_says_value(tmp_path: Path) -> None:
    base = _outcome(tmp_path, BASE)
    assert _outcome(tmp_path, {**BASE, "max_grad_norm": "0"})["optim"]["max_grad_norm"] is None
    assert _outcome(tmp_path, {**BASE, "prior_loss_weight": "0"})["diffusion"]["prior_weight"] == 0
    assert _outcome(tmp_path, {**BASE, "sample_cfg": "0"})["diffusion"]["guidance"] == 0
    assert _outcome(tmp_path, {**BASE, "text_encoder_lr": "0"})["adapter"]["targets"] == "unet"
    assert base["adapter"]["targets"] == "unet+text"
    assert any("unet_lr" in what for what in _outcome(tmp_path, {**BASE, "unet_lr": "0"}))


# ---- files in the form of LoRA-Scripts' own


def test_its_default_file_is_read_as_it_is(tmp_path: Path) -> None:
    text = """
[model]
v2 = false
pretrained_model_name_or_path = "./sd-models/model.safetensors"
[dataset]
train_data_dir = "./train/input"
reg_data_dir = ""
prior_loss_weight = 1
shuffle_caption = true
enable_bucket = true
[additional_network]
network_dim = 32
network_alpha = 16
network_train_unet_only = false
network_module = "networks.lora"
network_args = []
[optimizer]
unet_lr = 1e-4
text_encoder_lr = 1e-5
optimizer_type = "AdamW8bit"
lr_scheduler = "cosine_with_restarts"
lr_warmup_steps = 0
lr_restart_cycles = 3
[training]
resolution = "512,512"
train_batch_size = 1
max_train_epochs = 10
noise_offset = 0.0
keep_tokens = 0
clip_skip = 2
mixed_precision = "fp16"
[saving]
output_name = "x"
save_every_n_epochs = 1
save_n_epoch_ratio = 0
save_last_n_epochs = 499
save_state = false
output_dir = "./output"
[sample_prompt]
sample_sampler = "euler_a"
sample_every_n_epochs = 1
[others]
caption_extension = ".txt"
max_token_length = 225
resolution = "768,768"
"""
    loaded = load_config(_write(tmp_path, text))
    config = loaded.config
    assert config.adapter is not None
    assert (config.adapter.rank, config.optim.cycles, config.checkpoint.keep) == (32, 3, 499)
    assert (config.diffusion.prior, config.data.resolution) == (None, 768)  # of two sections the later
    assert loaded.origins["data.resolution"].endswith(":45")


def test_a_preset_lacks_a_model_and_pictures_and_says_so(tmp_path: Path) -> None:
    text = (
        '[metadata]\nname = "n"\nversion = "1"\ntrain_type = ""\n[data]\nresolution ='
        ' "768,768"\nenable_bucket = true\n'
    )
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert [problem.why for problem in error.value.problems] == [
        "it is a preset, which has only a part of the settings"
    ] * 2
    config = load_config(path, ("pretrained_model_name_or_path=m", "train_data_dir=d", "output_dir=o")).config
    assert (config.data.resolution, config.data.train) == (768, "d")
    with pytest.raises(ConfigError, match="is for Chroma"):
        load_config(_write(tmp_path, '[metadata]\ntrain_type = "flux-lora"\n[data]\nmodel_type = "chroma"\n'))


def test_a_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = _write(tmp_path, FILE + 'wandb_api_key = "0123abcd"\n')
    translation = read_sd_scripts(path)
    assert [problem.fix for problem in translation.problems] == [
        "remove it; set WANDB_API_KEY in the environment"
    ]
    assert "0123abcd" not in str(translation.to_json())
