"""Dataset files of sd-scripts: every documented layout, the order of precedence, and what is
refused by its name.

Run: pytest tests/trainer/readers/sd_scripts/test_sd_datasets.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.jobs.runs.train_request import with_absolute_paths
from unisono.trainer.config import LoadedConfig
from unisono.trainer.config.data_sections import SourceSection

MAIN = """
pretrained_model_name_or_path = "pipe"
dataset_config = "dataset.toml"
output_dir = "out"
output_name = "my_lora"
network_module = "networks.lora"
network_dim = 16
network_alpha = 1
learning_rate = 1e-4
optimizer_type = "AdamW8bit"
lr_scheduler = "constant"
max_train_epochs = 10
mixed_precision = "fp16"
"""


def _load(folder: Path, dataset: str, *, more: str = "", overrides: tuple[str, ...] = ()) -> LoadedConfig:
    (folder / "dataset.toml").write_text(dataset)
    (folder / "main.toml").write_text(MAIN + more)
    return load_config(folder / "main.toml", overrides)


def _sources(loaded: LoadedConfig) -> list[SourceSection]:
    assert isinstance(loaded.config.data.train, list)
    return [source for source in loaded.config.data.train if isinstance(source, SourceSection)]


def _pictures(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """What each source has of its own, without what all subsets have."""
    found = [source.pictures.model_dump() for source in _sources(loaded) if source.pictures is not None]
    assert all(pictures.pop("flat") is True for pictures in found)
    return found


REGULARIZED = """
[general]
enable_bucket = true

[[datasets]]
resolution = 64
batch_size = 4
min_bucket_reso = 64

  [[datasets.subsets]]
  image_dir = 'train/aki/3_aki'
  class_tokens = 'hoge girl'
  num_repeats = 10

  [[datasets.subsets]]
  is_reg = true
  image_dir = 'reg/1_girl'
  class_tokens = 'girl'
  num_repeats = 1
"""
TWO_RESOLUTIONS = """
[[datasets]]
resolution = 64

  [[datasets.subsets]]
  image_dir = 'train/aki/3_aki'

[[datasets]]
resolution = 128

  [[datasets.subsets]]
  image_dir = 'train/aki/3_aki'
"""
VALIDATED = """
[general]
shuffle_caption = true
keep_tokens = 1

[[datasets]]
resolution = "64,64"
batch_size = 2

  [[datasets.subsets]]
  image_dir = 'train/aki/3_aki'
  caption_extension = '.txt'
  num_repeats = 10

  [[datasets.subsets]]
  image_dir = 'b'
  caption_extension = '.txt'
  validation_split = 1.0 # the whole folder
"""


def test_regularization_pictures_and_repeats(tmp_path: Path) -> None:
    loaded = _load(tmp_path, REGULARIZED)
    assert [(source.path, source.weight) for source in _sources(loaded)] == [
        ("train/aki/3_aki", 10.0),
        ("reg/1_girl", 1.0),
    ]
    assert _pictures(loaded) == [{"caption": "hoge girl"}, {"caption": "girl", "prior": True}]
    config = loaded.config
    assert (config.data.resolution, config.batch.per_rank, config.diffusion.min_side) == (64, 4, 64)
    assert config.diffusion.caption_extensions == [".caption"]  # the default there
    assert loaded.origins["diffusion.min_side"].endswith("dataset.toml:8")
    assert loaded.origins["diffusion.buckets"].endswith("dataset.toml:3")


def test_two_resolutions_of_one_folder(tmp_path: Path) -> None:
    loaded = _load(tmp_path, TWO_RESOLUTIONS)
    assert [source.path for source in _sources(loaded)] == ["train/aki/3_aki"] * 2
    assert loaded.config.data.resolution == 64
    assert _pictures(loaded) == [{"caption": ""}, {"caption": "", "resolution": 128}]


def test_a_whole_folder_for_validation(tmp_path: Path) -> None:
    loaded = _load(tmp_path, VALIDATED)
    assert _pictures(loaded) == [{"caption": ""}, {"caption": "", "eval": 1.0}]
    config = loaded.config
    assert (config.eval.every, config.data.eval) == ("1 epochs", None)
    assert (config.diffusion.shuffle_captions, config.diffusion.keep_tokens) == (True, 1)
    assert config.diffusion.caption_extensions == [".txt"]


@pytest.mark.parametrize("dataset", [REGULARIZED, TWO_RESOLUTIONS, VALIDATED])
def test_the_config_can_be_written_and_read_again(tmp_path: Path, dataset: str) -> None:
    config = _load(tmp_path, dataset).config
    again = with_absolute_paths(config, tmp_path)
    assert again.data.resolution == 64
    assert with_absolute_paths(again, tmp_path) == again


@pytest.mark.parametrize(
    "subsets",
    [
        (
            "image_dir = 'a'\nnum_repeats = 10\n[[datasets.subsets]]\nis_reg = true\nimage_dir ="
            " 'r'\nnum_repeats = 1"
        ),
        "image_dir = 'a'\nclass_tokens = 'hoge girl'\nnum_repeats = 10",
        "image_dir = 'a'\nnum_repeats = 10",
        "image_dir = 'a'",
    ],
    ids=["v1", "v2", "v3", "v4"],
)
def test_less_and_less_of_a_dataset_file(tmp_path: Path, subsets: str) -> None:
    head = (
        "[general]\nenable_bucket = true\n[[datasets]]\nresolution = 64\nbatch_size = 4\nmin_bucket_reso ="
        " 64\n"
    )
    loaded = _load(tmp_path, f"{head}[[datasets.subsets]]\n{subsets}\n")
    first = _sources(loaded)[0]
    assert (first.path, first.weight) == ("a", 10.0 if "num_repeats = 10" in subsets else 1.0)
    assert (loaded.config.data.resolution, loaded.config.batch.per_rank) == (64, 4)


def test_a_dataset_file_is_not_the_main_file(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(VALIDATED)
    with pytest.raises(ConfigError, match="is a dataset file of sd-scripts"):
        load_config(tmp_path / "d.toml")


def test_the_lower_place_comes_first(tmp_path: Path) -> None:
    """The example of sd-scripts' own page: subset before dataset before general before the main
    file.
    """
    loaded = _load(
        tmp_path,
        """
[general]
shuffle_caption = true
caption_extension = '.txt'
keep_tokens = 1
[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 2
  [[datasets.subsets]]
  image_dir = 'hoge'
  [[datasets.subsets]]
  image_dir = 'fuga'
  keep_tokens = 3
  [[datasets.subsets]]
  image_dir = 'off'
  keep_tokens = 0
  shuffle_caption = false
[[datasets]]
resolution = [768, 512]
batch_size = 4
  [[datasets.subsets]]
  image_dir = 'piyo'
""",
        more=(
            'keep_tokens = 9\nresolution = "32,32"\ncaption_extension = ".cap"\ntrain_batch_size ='
            " 7\ncaption_dropout_rate = 0.1\n"
        ),
    )
    config = loaded.config
    assert (config.data.resolution, config.batch.per_rank) == (512, 4)
    assert (config.diffusion.keep_tokens, config.diffusion.caption_extensions) == (2, [".txt"])
    assert config.diffusion.caption_dropout == 0.1
    assert loaded.origins["data.resolution"].endswith("dataset.toml:7")
    assert loaded.origins["diffusion.caption_dropout"].endswith("main.toml:18")
    assert [{k: v for k, v in own.items() if k != "caption"} for own in _pictures(loaded)] == [
        {},
        {"keep_tokens": 3},
        {"keep_tokens": 0, "shuffle_captions": False},
        {"keep_tokens": 1, "resolution": [768, 512]},
    ]


def test_texts_around_captions_and_tags_that_are_dropped(tmp_path: Path) -> None:
    text = VALIDATED + 'caption_suffix = ", from side"\n'
    loaded = _load(tmp_path, text, more='caption_prefix = "best,"\ncaption_tag_dropout_rate = 0.1\n')
    section = loaded.config.diffusion
    assert (section.caption_prefix, section.caption_suffix, section.tag_dropout) == ("best,", "", 0.1)
    assert [own.get("caption_suffix") for own in _pictures(loaded)] == [None, ", from side"]


EXAMPLE = """
[general]
flip_aug = true
color_aug = false
resolution = [1024, 1024]

[[datasets]]
batch_size = 6
enable_bucket = true
bucket_no_upscale = true
caption_extension = ".txt"
keep_tokens_separator= "|||"
shuffle_caption = true
caption_tag_dropout_rate = 0.1
secondary_separator = ";;;"
enable_wildcard = true

  [[datasets.subsets]]
  image_dir = "/path/to/image_dir"
  num_repeats = 1
  caption_prefix = "1girl, hatsune miku, vocaloid |||"
  caption_suffix = ", anime screencap ||| masterpiece, rating: general"
"""
"""The last one of sd-scripts' config_README."""


def test_the_example_with_separators_wildcards_and_mirrored_pictures(tmp_path: Path) -> None:
    section = _load(tmp_path, EXAMPLE).config.diffusion
    assert (section.flip, section.wildcards, section.shuffle_captions, section.upscale) == (True, True, True, False)  # fmt: skip
    assert (section.keep_tokens_separator, section.secondary_separator) == ("|||", ";;;")
    assert (section.caption_separator, section.tag_dropout) == (",", 0.1)
    assert section.caption_prefix == "1girl, hatsune miku, vocaloid |||"
    assert section.caption_suffix == ", anime screencap ||| masterpiece, rating: general"


def test_each_subset_can_have_own_captions_and_undo_those_of_others(tmp_path: Path) -> None:
    more = (
        "[[datasets.subsets]]\nimage_dir = 'b'\nflip_aug = false\nenable_wildcard = false\ncaption_separator"
        " = ';'\ntoken_warmup_step = 0.25\ntoken_warmup_min = 0\n[[datasets.subsets]]\nimage_dir ="
        " 'c'\ncaption_prefix = 'c'\ncaption_suffix = 'd'\n"
    )
    loaded = _load(tmp_path, EXAMPLE + more, more='token_warmup_step = 100\ncaption_separator = "/"\n')
    section = loaded.config.diffusion
    assert (section.tag_warmup, section.tag_warmup_min, section.caption_separator) == ("100 steps", 1, "/")
    assert [{k: v for k, v in own.items() if k != "caption"} for own in _pictures(loaded)] == [
        {},
        {"flip": False, "wildcards": False, "caption_separator": ";", "tag_warmup": "25%", "tag_warmup_min": 0, "caption_prefix": "", "caption_suffix": ""},
        {"caption_prefix": "c", "caption_suffix": "d"},
    ]  # fmt: skip


def test_datasets_with_their_own_batch_sizes(tmp_path: Path) -> None:
    text = TWO_RESOLUTIONS.replace("= 64\n", "= 64\nbatch_size = 6\n").replace(
        "= 128\n", "= 128\nbatch_size = 4\n"
    )
    loaded = _load(tmp_path, text, more="gradient_accumulation_steps = 2\n")
    assert loaded.config.batch.of_ranks == (2, 6)
    assert loaded.translation is not None
    assert any("batch_size: the datasets have 6, 4" in note for note in loaded.translation.notes())


def test_a_share_of_each_dataset_is_one_of_each_source(tmp_path: Path) -> None:
    text = TWO_RESOLUTIONS.replace("[[datasets]]\n", "[[datasets]]\nvalidation_split = 0.2\n")
    loaded = _load(tmp_path, text, more="validation_seed = 7\nvalidate_every_n_steps = 50\n")
    assert [own["eval"] for own in _pictures(loaded)] == [0.2, 0.2]
    config = loaded.config
    assert (config.data.eval, config.diffusion.eval_seed, config.eval.every) == (None, 7, "50 steps")


def test_the_share_of_the_main_file_holds_where_a_subset_has_none(tmp_path: Path) -> None:
    loaded = _load(tmp_path, VALIDATED, more="validation_split = 0.25\n")
    assert [own.get("eval") for own in _pictures(loaded)] == [0.25, 1.0]


def test_a_share_of_plain_folders(tmp_path: Path) -> None:
    text = MAIN.replace('dataset_config = "dataset.toml"', 'train_data_dir = "d"\nvalidation_split = 0.1')
    (tmp_path / "main.toml").write_text(text)
    config = load_config(tmp_path / "main.toml").config
    assert (config.data.train, config.data.eval, config.eval.every) == ("d", 0.1, "1 epochs")
    (tmp_path / "main.toml").write_text(text.replace("0.1", "1.5"))
    with pytest.raises(ConfigError, match=r"validation_split: 1\.5 is not a share"):
        load_config(tmp_path / "main.toml")


def test_json_says_the_same(tmp_path: Path) -> None:
    import tomllib

    (tmp_path / "dataset.json").write_text(json.dumps(tomllib.loads(REGULARIZED)))
    loaded = _load(tmp_path, REGULARIZED)
    other = load_config(tmp_path / "main.toml", (f"dataset_config={tmp_path}/dataset.json",))
    assert other.config == loaded.config


def test_what_is_not_used_there_is_not_used_here(tmp_path: Path) -> None:
    """The same folder twice in one dataset, and a subset with 0 repeats."""
    text = (
        VALIDATED
        + "[[datasets.subsets]]\nimage_dir = 'b'\n[[datasets.subsets]]\nimage_dir = 'c'\nnum_repeats = 0\n"
    )
    loaded = _load(tmp_path, text)
    assert [source.path for source in _sources(loaded)] == ["train/aki/3_aki", "b"]
    assert loaded.translation is not None
    notes = "\n".join(loaded.translation.notes())
    assert "dataset.toml:19: b is in this dataset already" in notes
    assert "dataset.toml:21: c is not used: num_repeats is below 1" in notes


_SUBSET = "[[datasets.subsets]]\nimage_dir = 'a'\n"


@pytest.mark.parametrize(
    ("dataset", "words", "place"),
    [
        ("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\nmetadata_file = 'a.json'", "`metadata_file: a.json` is not available", ":4"),
        ("[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\nconditioning_data_dir = 'c'", "`conditioning_data_dir: c` is not available", ":4"),
        ("[[datasets]]\nrandom_crop = true\n" + _SUBSET, "`random_crop: true` is not available", ":2"),
        ("[[datasets]]\nface_crop_aug_range = [1.0, 3.0]\n" + _SUBSET, "`face_crop_aug_range", ":2"),
        ("[general]\ncolor_aug = true\n[[datasets]]\n" + _SUBSET, "`color_aug: true` is not available", ":2"),
        ("[[datasets]]\n" + _SUBSET + "resolution = 64", "`resolution` is not a setting of [[datasets.subsets]]", ":4"),
        ("[[datasets]]\nimage_dir = 'a'\n" + _SUBSET, "`image_dir` is not a setting of [[datasets]]", ":2"),
        ("[general]\nnetwork_dim = 4\n[[datasets]]\n" + _SUBSET, "`network_dim` is not a setting of a dataset", ":2"),
        ("[[datasets]]\n" + _SUBSET + "num_repeat = 3", "unknown key `num_repeat`", ":4"),
        ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 3", "a subset has no `image_dir`", ":2"),
        ("[[dataset]]\n" + _SUBSET.replace("datasets.", "dataset."), "unknown section `dataset`", ":1"),
        ("resolution = 64\n[[datasets]]\n" + _SUBSET, "`resolution` is in no section", ":1"),
        ("[datasets]\nresolution = 64", "`datasets` is not a list of tables", ":1"),
        ("general = 3\n[[datasets]]\n" + _SUBSET, "`general` is not a table", ":1"),
        ("[[datasets]]\nresolution = 64", "has no pictures to train on", "dataset.toml"),
        ("[[datasets]]\nresolution = 'large'\n" + _SUBSET, "resolution: 'large' is not a size", ":2"),
        ("[[datasets]]\n" + _SUBSET + "validation_split = 3.0", "validation_split: 3 is not a share", ":4"),
        ("[[datasets]]\nbatch_size = 'many'\n" + _SUBSET, "batch_size: must be a whole number", ":2"),
        ("[[datasets]\n", "cannot be read", "dataset.toml"),
    ],
)  # fmt: skip
def test_one_key_is_named_with_its_line(tmp_path: Path, dataset: str, words: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        _load(tmp_path, dataset)
    assert [problem.what for problem in error.value.problems if words in problem.what], error.value
    assert len(error.value.problems) == 1, [problem.what for problem in error.value.problems]
    assert error.value.problems[0].where.endswith(place)
    assert error.value.exit_code == 2


def test_a_missing_dataset_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "main.toml").write_text(MAIN)
    with pytest.raises(ConfigError, match=r"dataset\.toml"):
        load_config(tmp_path / "main.toml")
