"""A config survives being written and read again; its digest is of what is learnt; every key is described.

Run: pytest tests/config
"""

import json
from typing import Any

import pytest
import yaml

from unisono.cli.init import template_names, template_text
from unisono.config import RunConfig, config_digest
from unisono.config.yaml_file import all_keys, describe_field, section_in

GOOD: dict[str, Any] = {"model": "m", "data": {"train": "d"}, "output_dir": "o"}


def make(**keys: Any) -> RunConfig:
    return RunConfig.model_validate({**GOOD, **keys})


@pytest.mark.parametrize("name", template_names())
def test_a_config_written_out_in_full_means_the_same(name: str) -> None:
    config = RunConfig.model_validate(yaml.safe_load(template_text(name)))
    body = config.model_dump(mode="json", by_alias=True)
    again = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(body)))))
    assert again == config
    assert config_digest(again) == config_digest(config)


@pytest.mark.parametrize(
    "change",
    [
        {"output_dir": "p"},
        {"duration": "9 epochs"},
        {"restarts": 0},
        {"grace": "1 minute"},
        {"track": ["tensorboard"]},
    ],
)
def test_moving_prolonging_and_watching_leave_it_the_same_run(change: dict[str, Any]) -> None:
    assert config_digest(make(**change)) == config_digest(make())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1}, {"optim": {"lr": 1e-3}}, {"adapter": None}, {"adapter": {"rank": 8}}, {"data": {"train": "e"}},
        {"batch": {"global": 8}}, {"batch": {"micro": 1}}, {"objective": "pretrain"}, {"model": "n"},
    ],
)  # fmt: skip
def test_whatever_changes_what_is_learned_makes_a_different_run(change: dict[str, Any]) -> None:
    assert config_digest(make(**change)) != config_digest(make())


def test_a_default_that_is_written_out_is_the_same_run() -> None:
    assert config_digest(make(seed=0, optim={"lr": 2e-4}, adapter={"rank": 16})) == config_digest(make())


def test_the_short_form_of_a_model_is_the_long_one() -> None:
    assert make(model={"path": "m"}) == make()


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().seed = 1  # type: ignore[misc]


def test_every_key_reports_in_words_what_it_takes() -> None:
    assert {"model.path", "batch.global", "data.train.weight", "optim.lr"} <= set(all_keys(RunConfig))
    for name in all_keys(RunConfig):
        section: Any = RunConfig
        field = None
        for part in name.split("."):
            field = {f.alias or n: f for n, f in section.model_fields.items()}[part]
            section = section_in(field.annotation)
        assert field is not None
        words = describe_field(field)
        assert words
        assert "a value" not in words, name
