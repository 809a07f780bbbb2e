"""Rows of prompts: what the model continues, and what rewards get.

Run: pytest tests/trainer/data/test_prompt_rows.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data import RowError
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.data.prompt_rows import read_question
from unisono.trainer.data.token_table import TokenTable

_TURNS = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "2 + 2"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3 + 3"},
]
_ANSWER = {"role": "assistant", "content": "6"}


@pytest.mark.parametrize(
    ("row", "prompt", "columns"),
    [
        ({"prompt": "hi", "level": 3}, "hi", {"level": 3}),
        ({"prompt": "hi", "completion": "ho"}, "hi", {"completion": "ho", "answer": "ho"}),
        ({"prompt": "hi", "completion": "ho", "answer": "x"}, "hi", {"completion": "ho", "answer": "x"}),
        ({"question": "hi", "answer": "ho"}, "hi", {"answer": "ho"}),
        ({"prompt": _TURNS, "answer": 6}, _TURNS, {"answer": 6}),
        ({"messages": _TURNS}, _TURNS, {}),
        ({"messages": [*_TURNS, _ANSWER]}, _TURNS, {"answer": "6"}),
        (
            {"instruction": "add", "input": "3 3", "output": "6", "id": 1},
            [{"role": "user", "content": "add\n3 3"}],
            {"output": "6", "id": 1, "answer": "6"},
        ),
        (
            {
                "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
                "n": [1, {"a": 2}],
            },
            [{"role": "user", "content": "hi"}],
            {"n": [1, {"a": 2}], "answer": "ho"},
        ),
        ({"prompt": "hi", "system": "be short"}, [_TURNS[0], {"role": "user", "content": "hi"}], {}),
    ],
)
def test_a_row_gives_its_prompt_and_its_other_columns(
    row: dict[str, Any], prompt: object, columns: dict[str, Any]
) -> None:
    question = read_question(row, {}, None)
    assert question.prompt == prompt
    assert json.loads(question.columns) == columns
    assert json.loads(question.record) == {"prompt": prompt, "columns": columns}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hi"}, "there is no prompt; the columns are text"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"prompt": 3}, "prompt is a number"),
        ({"prompt": [_ANSWER]}, "no message is a question"),
        ({"prompt": "hi", "picture": b"\x00"}, "a column cannot be given to a reward"),
        ({"prompt": "hi", "value": float("nan")}, "a column cannot be given to a reward"),
    ],
)
def test_rows_that_cannot_be_used_say_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(RowError) as refused:
        read_question(row, {}, None)
    assert refused.value.why.startswith(why)
    assert refused.value.fix


def test_columns_name_the_prompt() -> None:
    question = read_question({"ask": "hi", "prompt": "not this"}, {"prompt": "ask"}, None)
    assert question.prompt == "hi"
    assert json.loads(question.columns) == {"prompt": "not this"}


@pytest.fixture
def prepare(model_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """A function that prepares rows, and gives summary and table."""

    def run(rows: list[dict[str, Any]], **data: Any) -> tuple[Any, TokenTable]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RunConfig.model_validate(
            {
                "model": {"path": str(model_dir)},
                "objective": "grpo",
                "data": {"train": str(file), "max_length": 60, **data},
                "rewards": ["exact"],
                "rollout": {"group": 2, "max_new_tokens": 20},
                "output_dir": "out",
            }
        )
        summary = prepare_data(
            config, tokenizer=model_dir, vocab_size=None, cache_dir=tmp_path / "cache", report=Reporter(None)
        )
        return summary, TokenTable.open(Path(summary.cache_dir), "train")

    return run


def test_the_table_has_what_the_model_continues(prepare: Callable[..., Any], model_dir: Path) -> None:
    rows = [{"prompt": f"number {n}", "answer": n} for n in range(2000)]
    summary, table = prepare(rows)
    assert (summary.train.rows, summary.train.sequences) == (2000, 2000)  # prompts are not packed
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    turns = [{"role": "user", "content": "number 1500"}]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert table.row(1500)[0].tolist() == expected
    assert not table.row(1500)[1].any()
    assert table.record(1500) == {"prompt": "number 1500", "columns": {"answer": 1500}}
    assert tokenizer.eos_token_id in table.stop_ids
    assert summary.train.longest_row == max(map(len, (table.row(n)[0] for n in range(2000)))) + 20


def test_other_columns_make_another_table(prepare: Callable[..., Any]) -> None:
    one, other = (prepare([{"prompt": "hi", "answer": answer}] * 3)[0] for answer in ("a", "b"))
    assert one.rows_digest != other.rows_digest


def test_a_prompt_leaves_room_for_its_answer(prepare: Callable[..., Any]) -> None:
    long = {"prompt": " ".join(["word"] * 45)}
    with pytest.raises(DataError, match="too long") as refused:
        prepare([{"prompt": "hi"}, long])
    assert "set data.too_long to drop" in str(refused.value.problems[0].fix)
    summary, _ = prepare([{"prompt": "hi"}, long], too_long="drop")
    assert summary.train.rows == 1


def test_a_format_is_refused(prepare: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="reads prompts from any row"):
        prepare([{"text": "hi"}], format="text")
    with pytest.raises(DataError, match="no column with a prompt"):
        prepare([{"text": "hi"}])
