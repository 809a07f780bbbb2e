"""Whatever stands in a file or on the command line: a config, or a ConfigError; never another
exception.

Run: pytest tests/trainer/config/test_fuzz.py
"""

import unicodedata
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.base.errors import ConfigError
from unisono.trainer.config import build_config
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import all_keys, parse_yaml

GOOD: dict[str, Any] = {"model": "m", "data": {"train": "d"}, "output_dir": "o"}
KEYS = all_keys(RunConfig)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["auto", "lora", "3 epochs", "1e-4", "1e999", "a{99999999999}", "((", "s3://a:b@c", "2M tokens", "\ud800", ".5.", "5%"]),
)  # fmt: skip
words = st.one_of(
    st.sampled_from(sorted({part for key in KEYS for part in key.split(".")})), st.text(max_size=8)
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(words, inner, max_size=4),
        st.dictionaries(st.one_of(words, st.integers(0, 3), st.none()), inner, max_size=3),
    ),
    max_leaves=12,
)


def check(raw: dict[str, Any], lines: dict[Any, int], overrides: tuple[str, ...] = ()) -> None:
    """Builds a config: a good one can be written and read again, a refusal can be shown on any
    terminal.
    """
    try:
        config = build_config(raw, lines=lines, name="t.yaml", overrides=overrides).config
    except ConfigError as error:
        check_refusal(error)
        return
    assert RunConfig.model_validate(config.model_dump(mode="json", by_alias=True)) == config


def check_refusal(error: ConfigError) -> None:
    assert error.problems
    assert all(problem.what and problem.where for problem in error.problems)
    for line in error.lines():
        assert not {"Cc", "Cs"} & {unicodedata.category(character) for character in line}
        line.encode("utf-8")


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(words, trees, max_size=5))
def test_any_tree_of_values(raw: dict[str, Any]) -> None:
    check({**GOOD, **raw}, {})
    check(raw, {})


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(KEYS), trees)
def test_any_value_at_any_key(key: str, value: Any) -> None:
    raw: Any = value
    for part in reversed(key.split(".")):
        raw = {part: raw}
    merged = {**GOOD, **raw}
    if key.startswith("data.") and isinstance(raw["data"], dict):
        merged["data"] = {"train": "d", **raw["data"]}
    check(merged, {})


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=200))
def test_any_text_as_a_file(text: str) -> None:
    try:
        raw, lines = parse_yaml(text, name="t.yaml")
    except ConfigError:
        return
    check(raw, lines)


@settings(deadline=None, max_examples=150)
@given(trees, st.data())
def test_any_damage_to_a_good_file(tree: Any, data: st.DataObject) -> None:
    text = yaml.safe_dump({**GOOD, "optim": {"lr": 1e-4}, "freeze": [], "x": tree}, allow_unicode=True)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.text(alphabet=":{}[]&*!|>'\"#%@`,?- \n\tab1~", max_size=6)) + text[at:]
    try:
        raw, lines = parse_yaml(text, name="t.yaml")
    except ConfigError:
        return
    check(raw, lines)


overrides = st.one_of(
    st.text(max_size=30),
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(KEYS), st.text(max_size=12)),
    st.builds(
        lambda key, value: f"{key}={yaml.safe_dump(value, default_flow_style=True)}",
        st.sampled_from(KEYS),
        trees,
    ),
    st.builds(lambda key, part: f"{key}.{part}=1", st.sampled_from(KEYS), words),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(overrides, max_size=4))
def test_any_overrides(given_overrides: list[str]) -> None:
    check(GOOD, {}, tuple(given_overrides))
