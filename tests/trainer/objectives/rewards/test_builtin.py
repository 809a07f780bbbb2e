"""The built-in rewards, on answers whose reward is known.

Run: pytest tests/trainer/objectives/rewards/test_builtin.py
"""

import json
from typing import Any

import pytest

from tests import needs
from unisono.base.errors import ConfigError
from unisono.trainer.config.answer_functions import FUNCTIONS
from unisono.trainer.config.reward_models import MODEL
from unisono.trainer.objectives.rewards.builtin import BUILT_IN, UnusableValueError

TAGS = {"tags": ["think", "answer"]}
SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


def rewards(name: str, settings: dict[str, Any], answers: list[Any], **columns: Any) -> list[float]:
    if name == "length":
        return list(BUILT_IN[name](settings)(answers))
    return list(BUILT_IN[name](settings)(answers, **columns))


def test_each_name_of_the_config_has_a_function() -> None:
    assert {*BUILT_IN, MODEL} == set(FUNCTIONS)


@pytest.mark.parametrize("as_messages", [False, True])
def test_exact_compares_stripped_texts_with_a_column(*, as_messages: bool) -> None:
    texts = ["4", " 4\n", "44", ""]
    answers = [[{"role": "assistant", "content": text}] for text in texts] if as_messages else texts
    for value in ("4", "4 ", 4):
        assert rewards("exact", {"column": "answer"}, answers, answer=[value] * 4) == [1, 1, 0, 0]
    assert rewards("exact", {"column": "target"}, answers, target=["44"] * 4) == [0, 0, 1, 0]


def test_contains_looks_for_the_column_in_the_answer() -> None:
    answers = ["it is 42.", "42", "4 2", ""]
    assert rewards("contains", {"column": "answer"}, answers, answer=[" 42"] * 4) == [1, 1, 0, 0]
    with pytest.raises(UnusableValueError, match="`answer` is empty"):
        rewards("contains", {"column": "answer"}, answers, answer=[" "] * 4)


@pytest.mark.parametrize("name", ["exact", "contains"])
def test_a_column_that_is_missing_or_of_a_different_type_is_named(name: str) -> None:
    with pytest.raises(UnusableValueError, match="no column `answer`; its other columns: `target`"):
        rewards(name, {"column": "answer"}, ["a"], target=["a"])
    for value in (None, True, ["a"], {"a": 1}):
        with pytest.raises(UnusableValueError, match="neither text nor number"):
            rewards(name, {"column": "answer"}, ["a"], answer=[value])


def test_regex_searches() -> None:
    assert rewards("regex", {"pattern": r"^\d+$"}, ["12", "a12", "12\nb"]) == [1, 0, 0]
    assert rewards("regex", {"pattern": r"(?i)yes"}, ["oh YES", "no"]) == [1, 0]


def test_length_counts_tokens() -> None:
    ids = [[], [1], [1, 2], [1, 2, 3]]
    assert rewards("length", {"min": 1, "max": 2}, ids) == [0, 1, 1, 0]
    assert rewards("length", {"min": 2, "max": None}, ids) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("\n<think>\na\n</think>\n\n<answer>b < c</answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think> </think><answer>b</answer>", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> so", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<answer>c</answer></think><answer>b</answer>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_format_takes_answers_that_consist_of_the_tags(text: str, reward: float) -> None:
    assert rewards("format", TAGS, [text]) == [reward]


def test_json_schema_takes_json_that_is_valid() -> None:
    needs.package("jsonschema")
    answers = ['{"n": 1}', '{"n": "1"}', "{}", "no", '{"n": 1} ', '{"n": NaN}', "[" * 100_000, ""]
    settings = {"schema": SCHEMA, "path": "schema.json"}
    assert rewards("json_schema", settings, answers) == [1, 0, 0, 0, 1, 0, 0, 0]


def test_what_is_not_a_json_schema_is_refused_with_its_part() -> None:
    needs.package("jsonschema")
    with pytest.raises(ConfigError) as refused:
        BUILT_IN["json_schema"]({"schema": {"properties": {"n": {"type": "whole"}}}, "path": "schema.json"})
    assert refused.value.problems[0].where == "schema.json#/properties/n/type"


def test_json_schema_downloads_nothing() -> None:
    needs.package("jsonschema")
    settings = {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}, "path": "schema.json"}
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9") as unresolved:
        rewards("json_schema", settings, [json.dumps({"n": 1})])
    assert "Unresolvable" in repr(unresolved.value)


def test_math_compares_expressions() -> None:
    needs.package("math_verify")
    answers = ["so it is $\\frac{1}{2}$", "0.5", "\\boxed{1/2}", "$\\frac{1}{3}$", "none"]
    for value in ("1/2", "\\frac{1}{2}", "$0.5$", 0.5):
        assert rewards("math", {"column": "answer"}, answers, answer=[value] * 5) == [1, 1, 1, 0, 0]
    with pytest.raises(UnusableValueError, match="no expression"):
        rewards("math", {"column": "answer"}, answers, answer=[" "] * 5)
