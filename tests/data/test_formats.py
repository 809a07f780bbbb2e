"""Formats: what each row becomes, and which format `auto` takes and why.

Run: .venv/bin/python -m pytest tests/data/test_formats.py
"""

from typing import Any

import pytest

from unisono.data.formats import FormatName, detect, to_example
from unisono.data.rows import Completion, Conversation, RowError, Text

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("text", {"text": "t"}, Text("t")),
        ("prompt-completion", {"prompt": "p", "completion": "c"}, Completion("p", "c")),
        ("prompt-completion", {"prompt": [USER], "completion": [ASSISTANT]}, Conversation([USER, ASSISTANT])),
        ("messages", {"messages": [USER, ASSISTANT], "tools": None}, Conversation([USER, ASSISTANT])),
        ("alpaca", {"instruction": "q", "output": "a"}, Conversation([USER, ASSISTANT])),
        (
            "alpaca",
            {"instruction": "do", "input": "it", "output": "a", "system": "s", "history": [["q", "a"]]},
            Conversation([{"role": "system", "content": "s"}, USER, ASSISTANT, {"role": "user", "content": "do\nit"}, ASSISTANT]),
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "o"}, {"from": "gpt", "value": "a"},
                ],
                "system": "s", "tools": '[{"name": "f"}]',
            },
            Conversation(
                [
                    {"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "content": "o"}, ASSISTANT,
                ],
                [{"type": "function", "function": {"name": "f"}}],
            ),
        ),
    ],
)  # fmt: skip
def test_a_row_becomes_its_example(name: FormatName, row: dict[str, Any], expected: object) -> None:
    assert to_example(name, row, {}) == expected


def test_openai_messages_lose_nulls_and_get_text_and_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]
    row = {
        "messages": [
            {"role": "user", "content": parts, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    }
    assert to_example("messages", row, {}) == Conversation([
        {"role": "user", "content": "qr"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", **CALL}]},
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [USER]}, "messages"), ({"conversations": [{"from": "human", "value": "x"}]}, "sharegpt"),
        ({"conversations": [USER]}, "messages"), ({"messages": [{"from": "human", "value": "x"}]}, "sharegpt"),
        ({"prompt": "", "completion": ""}, "prompt-completion"), ({"instruction": "", "output": "", "text": ""}, "alpaca"), ({"text": ""}, "text"),
    ],
)  # fmt: skip
def test_auto_takes_the_format_whose_columns_are_there_and_reads_what_it_took(
    row: dict[str, Any], name: str
) -> None:
    found = detect(row, {})
    assert found is not None
    assert found[0] == name
    assert next(iter(row)) in found[1]


def test_auto_reports_which_columns_it_does_not_read() -> None:
    found = detect({"text": "a", "id": 3, "source": "x"}, {})
    assert found is not None
    assert "not read: id, source" in found[1]


def test_columns_have_other_names_if_one_reports_it() -> None:
    renamed = {"instruction": "question", "output": "answer"}
    row = {"question": "q", "answer": "a"}
    assert detect(row, {}) is None
    found = detect(row, renamed)
    assert found is not None
    assert found[0] == "alpaca"
    assert to_example("alpaca", row, renamed) == Conversation([USER, ASSISTANT])


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("alpaca", {"instruction": "q"}, "no column 'output'"),
        ("alpaca", {"instruction": "q", "output": 3}, "output is a number"),
        ("alpaca", {"instruction": "q", "output": "a", "history": ["x"]}, "history"),
        ("messages", {"messages": []}, "empty"),
        ("messages", {"messages": [{"content": "x"}]}, "message 1 has no role"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ("messages", {"messages": [USER], "tools": "{"}, "tools is not valid JSON"),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}, "'alien'"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "f()"}]},
            "function call of turn 1",
        ),
        ("prompt-completion", {"prompt": "x", "completion": [ASSISTANT]}, "completion is a list"),
        ("text", {"text": "\ud83d"}, "surrogate"),
    ],
)
def test_a_row_that_does_not_fit_reports_why(name: FormatName, row: dict[str, Any], why: str) -> None:
    with pytest.raises(RowError, match=why):
        to_example(name, row, {})


def test_a_misspelt_column_is_guessed() -> None:
    with pytest.raises(RowError) as caught:
        to_example("prompt-completion", {"prompt": "p", "completions": "c"}, {})
    assert "completion: completions" in caught.value.fix
