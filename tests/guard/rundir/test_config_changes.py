"""What a changed key means, and the words of `--allow`.

Run: pytest tests/guard/rundir/test_config_changes.py
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import UsageError
from unisono.jobs.runs.config_changes import (
    NAMES,
    RULES,
    changes_between,
    judge_key,
    name_of,
    not_allowed,
    read_allowed,
    rule_of,
)
from unisono.trainer.config import RunConfig
from unisono.trainer.config.yaml_file import all_keys

KEYS = all_keys(RunConfig)
LEAVES = [key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)]

CHANGES: dict[str, Any] = {
    "optim.lr": 1e-3, "optim.betas": [0.8, 0.99], "seed": 7, "batch.global": 8, "batch.micro": 2, "adapter": None, "data.packing": False,
    "data.train": "elsewhere.jsonl", "data.eval": 0.2, "model.path": "m2", "eval.every": None, "checkpoint.keep": 5, "grace": "1 minute",
    "model.dtype": "bfloat16", "output_dir": "other", "duration": "9 epochs", "device": "cpu", "freeze": [],
    "restarts": 0, "watch.stall_after": "1 minute",
}  # fmt: skip


def make(changes: dict[str, Any]) -> RunConfig:
    body: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "output_dir": "out"}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (body.setdefault(section, {}) if section else body)[name] = value
    return RunConfig.model_validate(body)


some_changes = st.dictionaries(st.sampled_from(sorted(CHANGES)), st.none(), max_size=6).map(
    lambda chosen: {key: CHANGES[key] for key in chosen}
)


@pytest.mark.parametrize("key", LEAVES)
def test_somebody_has_thought_about_every_key(key: str) -> None:
    rule = rule_of(key)
    assert rule in RULES.values(), f"{key} has no place in the table of rundir/config_changes.py"
    assert rule.says or rule.kind in ("silent", "decided", "contents")
    assert (rule.kind == "contents") == (rule.name in NAMES)


def test_the_table_knows_no_key_that_there_is_not() -> None:
    assert set(RULES) - {"watch"} <= set(KEYS)


def test_output_dir_duration_and_reasons_are_the_only_silent_changes() -> None:
    """docs/decisions/0014 says why; all others are at least a line."""
    assert {key for key, rule in RULES.items() if rule.kind == "silent"} == {
        "output_dir",
        "duration",
        "reasons",
    }


def test_a_key_that_nobody_has_thought_about_means_a_different_run() -> None:
    assert rule_of("optim.brand_new").kind == "meaning"
    assert rule_of("checkpoint.brand_new").kind == "line"


@given(some_changes)
def test_differences_of_two_configs_are_exactly_the_changed_keys(
    changes: dict[str, Any],
) -> None:
    assert changes_between(make(changes), make(changes)) == []
    found = {change.key for change in changes_between(make({}), make(changes))}
    assert found == {key for key in changes if key != "freeze"}


@given(some_changes)
def test_there_and_back_are_the_same_changes_with_their_values_exchanged(changes: dict[str, Any]) -> None:
    there, back = changes_between(make({}), make(changes)), changes_between(make(changes), make({}))
    assert [(c.key, c.before, c.after) for c in there] == [(c.key, c.after, c.before) for c in back]
    assert [c.rule for c in there] == [c.rule for c in back]


@given(some_changes, st.sets(st.sampled_from(sorted(CHANGES))))
def test_to_allow_more_never_refuses_more(changes: dict[str, Any], more: set[str]) -> None:
    found = [finding for change in changes_between(make({}), make(changes)) if (finding := judge_key(change))]
    less, greater = not_allowed(found, frozenset()), not_allowed(found, frozenset(more))
    assert {finding.name for finding in greater} <= {finding.name for finding in less}
    refused = [finding for finding in less if finding.verdict == "refused"]
    left = not_allowed(found, frozenset(finding.name for finding in refused))
    assert all(finding.verdict == "fixed" for finding in left), "what the refusal says to type is enough"


@given(some_changes)
def test_every_line_reports_the_key_both_values_and_what_it_means(changes: dict[str, Any]) -> None:
    for change in changes_between(make({}), make(changes)):
        finding = judge_key(change)
        if finding is not None:
            assert finding.text.startswith(f"{change.key} is ")
            assert ", and was " in finding.text
            assert finding.text.partition(": ")[2]
            assert "\n" not in finding.text


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("optim.lr", "optim.lr"), ("data", "data"), ("data.train", "data"), ("data.format", "data"), ("model.path", "model"),
        ("model.tokenizer", "tokenizer"), ("versions", "versions"), ("adapter", "adapter"), ("data.train.weight", "data"),
    ],
)  # fmt: skip
def test_keys_that_point_at_files_are_allowed_by_what_is_in_them(word: str, name: str) -> None:
    assert read_allowed([word]) == {name}
    assert name_of(word) == name


@pytest.mark.parametrize(
    ("word", "help_"),
    [("optim.lrr", "`optim.lr`"), ("lr", "`optim.lr`"), ("tokeniser", "`tokenizer`"), ("optim", "optim.lr"), ("xyzzy", "one of data")],
)  # fmt: skip
def test_a_word_that_names_nothing_is_refused_with_the_nearest_key(word: str, help_: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_allowed(["seed", word])
    (problem,) = caught.value.problems
    assert word in problem.what
    assert help_ in problem.fix


def test_all_words_that_name_nothing_are_refused_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        read_allowed(["sed", "optim.lrr"])
    assert len(caught.value.problems) == 2
