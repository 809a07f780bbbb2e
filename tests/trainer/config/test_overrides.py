"""`key.sub=value` of the command line lies over what the file says.

Run: pytest tests/config
"""

from pathlib import Path

import pytest

from unisono.base.errors import ConfigError
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import LoadedConfig

TEXT = (
    "model: {path: m, dtype: float32}\ndata:\n  train: [a, {path: b}]\noptim: {lr: 1.0e-3, warmup:"
    " 5%}\noutput_dir: o\n"
)


def load(tmp_path: Path, *overrides: str, text: str = TEXT) -> LoadedConfig:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def test_an_override_replaces_one_value_and_leaves_its_neighbours(tmp_path: Path) -> None:
    loaded = load(tmp_path, "optim.lr=2e-4", "batch.global=8")
    assert (loaded.config.optim.lr, loaded.config.optim.warmup, loaded.config.batch.global_) == (
        2e-4,
        "5%",
        8,
    )
    assert loaded.origins["optim.lr"] == loaded.origins["batch.global"] == "command line"
    assert loaded.origins["optim.warmup"] == f"{tmp_path}/t.yaml:4"
    assert "optim" not in loaded.origins


def test_the_last_override_counts(tmp_path: Path) -> None:
    assert load(tmp_path, "seed=1", "seed=2").config.seed == 2


def test_the_value_is_yaml(tmp_path: Path) -> None:
    loaded = load(tmp_path, "adapter=null", "freeze=[embed, 'lm.head']", "data.eval=0.1", "duration=3 epochs")
    assert loaded.config.adapter is None
    assert loaded.config.freeze == ["embed", "lm.head"]
    assert (loaded.config.data.eval, loaded.config.duration) == (0.1, "3 epochs")


def test_a_value_may_hold_an_equals_sign(tmp_path: Path) -> None:
    assert load(tmp_path, "output_dir=runs/a=b").config.output_dir == "runs/a=b"


def test_a_model_given_by_name_can_still_be_refined(tmp_path: Path) -> None:
    for overrides in (("model=n", "model.dtype=bfloat16"), ("model.dtype=bfloat16", "model.path=n")):
        model = load(tmp_path, *overrides, text=TEXT.replace("{path: m, dtype: float32}", "m")).config.model
        assert (model.path, model.dtype) == ("n", "bfloat16")


def test_an_item_of_a_list_is_named_by_its_number(tmp_path: Path) -> None:
    sources = load(tmp_path, "data.train.1.weight=2").config.data.train
    assert sources[0] == "a"
    assert sources[1].weight == 2.0  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["data.train.2=x", "data.train.x=1", "data.train.-1=x"])
def test_an_item_that_is_not_there_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="list of 2 items"):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["optim.lr", "=1", ".lr=1", "optim..lr=1", "", "lr=", "9" * 5000 + "=1"])
def test_what_is_not_an_override_is_refused_at_the_command_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert {problem.where for problem in caught.value.problems} == {"command line"}


def test_a_typo_of_a_section_is_blamed_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "optm.lr=1")
    (problem,) = caught.value.problems
    assert (problem.where, problem.fix) == ("command line", "did you mean `optim`?")


def test_a_replaced_section_forgets_the_lines_of_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "data.train=[x, {path: y, weight: 0}]")
    assert [problem.where for problem in caught.value.problems] == ["command line"]
