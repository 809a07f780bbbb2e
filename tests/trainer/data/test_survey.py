"""Rows are surveyed without a model; the estimates are safe.

Run: pytest tests/trainer/data/test_survey.py
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.config.data_sections import DataSection
from unisono.trainer.data.sources import find_sources
from unisono.trainer.data.survey import estimated_tokens, fitting_length, survey
from unisono.trainer.plan.extent import FEW_STEPS, propose_extent
from unisono.trainer.plan.task_requests import Survey


def surveyed(path: Path) -> Survey:
    (source,) = find_sources(DataSection(train=str(path)), cache_dir=path.parent)
    return survey(source, packed=True)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=200))
def test_a_length_fits_all_rows_or_the_number_beyond_is_told(lengths: list[int]) -> None:
    limit, beyond = fitting_length(lengths)
    assert beyond == sum(length > limit for length in lengths)
    if max(lengths) * 1.25 <= 4096:
        assert beyond == 0


@given(st.integers(1, 5000), st.sampled_from([16, 32, 64]), st.integers(1, 3))
def test_a_proposal_has_steps_enough_unless_the_rows_are_very_few(
    sequences: int, global_batch: int, epochs: int
) -> None:
    found = propose_extent(sequences, global_batch=global_batch, epochs=epochs, every=200)
    assert found.steps == -(-found.epochs * sequences // found.global_batch)
    assert found.steps >= FEW_STEPS or (found.global_batch == 1 and found.epochs == 20)
    assert found.global_batch <= global_batch
    assert 0 < found.every <= 200
    if found.steps >= FEW_STEPS:
        assert found.every < found.steps


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("The quick brown fox jumps over the lazy dog.", 10, 16),
        ("2 + 40 = 42", 5, 8),
        ("今天天气很好", 4, 6),
        ("", 0, 0),
    ],
)
def test_tokens_are_estimated_rather_too_high(text: str, least: int, most: int) -> None:
    assert least <= estimated_tokens(text) <= most


def test_bad_rows_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    file.write_text("\n".join(["{broken", good, json.dumps({"messages": 3}), good]) + "\n")
    found = surveyed(file)
    assert (found["rows"], found["bad"], found["format"]) == (2, 2, "messages")
    assert found["first_bad"].startswith(f"{file}:1")


@pytest.mark.parametrize("row", [{"chosen": "b", "rejected": "c"}, {"completion": "b", "label": True}])
def test_preference_rows_share_sequences_with_both_sides_of_each(
    row: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text((json.dumps({"prompt": "a " * 30, **row}) + "\n") * 40)
    found = surveyed(file)
    each = found["max_length"] // found["longest"]  # as both sides are as long
    assert found["sequences"] == -(-40 // each)


def test_rated_answers_are_rows_of_kto(tmp_path: Path) -> None:
    file = tmp_path / "rated.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "b", "label": True}) + "\n")
    found = surveyed(file)
    assert (found["format"], found["objective"], found["sequences"]) == ("preference", "kto", 1)


def test_usual_names_of_columns_are_those_that_training_reads(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("question,answer\nWhat?,That.\n")
    found = surveyed(file)
    assert (found["format"], found["columns"]) == ("alpaca", {"instruction": "question", "output": "answer"})
    assert "question is read as instruction" in found["why"]
