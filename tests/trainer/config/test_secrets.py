"""Secrets are refused, and never repeated in what is said.

Run: pytest tests/config
"""

from pathlib import Path

import pytest

from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config

GOOD = "model: m\ndata: {train: d}\noutput_dir: o\n"


@pytest.mark.parametrize(
    "override",
    [
        "data.train=s3://key:hunter2@bucket/rows.jsonl",
        "data.train=[a, 'https://user:hunter2@host/x']",
        "data.eval=https://hunter2@host/x",
        "data.train=https://host/x?sig=hunter2",
        "data.train=https://host/x?a=1&X-Amz-Signature=hunter2",
        "model.path=hf_hunter2hunter2hunter2hunter2",
        "device=https://user:hunter2@host",
        "hf_token=hunter2",
        "data.api_key=hunter2",
        "checkpoint={password: hunter2}",
    ],
)
def test_a_secret_is_refused_and_not_repeated(tmp_path: Path, override: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(GOOD)
    with pytest.raises(ConfigError) as caught:
        load_config(file, (override,))
    printed = "\n".join(caught.value.lines()) + str(caught.value.to_json())
    assert "hunter2" not in printed
    assert len(caught.value.problems) == 1
    assert "in the environment" in caught.value.problems[0].fix
    assert caught.value.__cause__ is None  # pydantic's text would repeat it under --debug


@pytest.mark.parametrize(
    "override",
    [
        "data.train=s3://bucket/rows.jsonl", "data.train=https://host/x?page=2", "data.train=sftp://user@host/x",
        "model.tokenizer=builtin:tiny", "data.train=[{path: a, columns: {text: tokens}}]", "output_dir=runs/a:b@c",
    ],
)  # fmt: skip
def test_what_only_resembles_a_secret_passes(tmp_path: Path, override: str) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(GOOD)
    load_config(file, (override,))
