"""A pipeline's files are refused before memory is taken for them, or a library waits.

Run: pytest tests/trainer/diffusion/test_pipeline_files.py
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from tests import needs
from unisono.base.errors import ModelError
from unisono.trainer.config import RunConfig
from unisono.trainer.families.pictures.pipeline import load_tokenizers
from unisono.trainer.families.pictures.pipeline_files import inspect_pipeline, read_pipeline
from unisono.trainer.families.pictures.prepare import text_digest

needs.package("diffusers")


@pytest.fixture
def copy(pipeline_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pipeline_dir, tmp_path / "pipeline")


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("unet", "block_out_channels", [10**9, 10**9]),
        ("unet", "layers_per_block", 10**6),
        ("vae", "block_out_channels", [-1]),
        ("text_encoder", "num_hidden_layers", 10**6),
        ("text_encoder", "vocab_size", 10**12),
        ("scheduler", "num_train_timesteps", 10**12),
    ],
)
def test_a_config_for_more_than_the_weights_hold_is_refused(
    copy: Path, part: str, key: str, value: Any
) -> None:
    file = copy / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ModelError, match=f"{key} in the config of the pipeline's {part}") as caught:
        read_pipeline(copy)
    assert caught.value.problems[0].where == str(file)


def test_embeddings_are_kept_for_the_tokenizers_as_transformers_loads_them(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of transformers may load a class that lowers no letters; the files are equal."""
    pipeline = read_pipeline(copy)
    _, digests = inspect_pipeline(pipeline)
    config = RunConfig.model_validate({"objective": "diffusion", "model": str(copy), "data": {"train": "x"}, "output_dir": "y"})  # fmt: skip
    before = text_digest(config, pipeline, digests)
    assert text_digest(config, pipeline, digests) == before
    tokenizers = load_tokenizers(pipeline)
    tokenizers[0].backend_tokenizer.normalizer = normalizers.NFC()
    monkeypatch.setattr("unisono.trainer.families.pictures.prepare.load_tokenizers", lambda _: tokenizers)
    assert text_digest(config, pipeline, digests) != before


@pytest.mark.parametrize(
    "name", ["unet/config.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer.json"]
)
def test_a_pipe_in_a_pipeline_is_refused_by_its_name(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(ModelError, match=Path(name).name):
        load_tokenizers(read_pipeline(copy))
