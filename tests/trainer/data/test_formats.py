"""Formats: what each row becomes, and which format `auto` takes and why.

Run: .venv/bin/python -m pytest tests/trainer/data/test_formats.py
"""

from typing import Any

import pytest

from unisono.trainer.config.data_sections import TagsSection
from unisono.trainer.data import Completion, Conversation, Message, RowError, Text, ToolCall
from unisono.trainer.data.formats import FormatName, detect, to_example

CALL: ToolCall = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
USER: Message = {"role": "user", "content": "q"}
ASSISTANT: Message = {"role": "assistant", "content": "a"}


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


def test_a_turn_keeps_the_key_of_its_thought() -> None:
    rows = [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a", "reasoning": "hm", "thinking": None},
    ]
    example = to_example("sharegpt", {"conversations": rows}, {})
    assert example == Conversation([USER, ASSISTANT | {"reasoning": "hm"}])


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"who": who, "said": said} for who, said in pairs]


def test_tags_are_the_words_of_a_source_and_there_are_no_others() -> None:
    tags = TagsSection(
        role_tag="who", content_tag="said", user_tag="me", assistant_tag="it", observation_tag=None, function_tag="call",
    )  # fmt: skip
    rows = turns(("system", "s"), ("me", "q"), ("call", '{"name": "f", "arguments": {"a": 1}}'))
    assert to_example("sharegpt", {"conversations": rows, "system": "s"}, {}, tags) == Conversation(
        [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    )
    for word in ("human", "observation", "gpt"):
        with pytest.raises(RowError, match=f"turn 1 is from '{word}'") as caught:
            to_example("sharegpt", {"conversations": turns((word, "q"))}, {}, tags)
        assert caught.value.fix == "who is one of me, it, call, system"
    with pytest.raises(RowError, match="no text under `said`"):
        to_example("sharegpt", {"conversations": [{"from": "human", "value": "q"}]}, {}, tags)


def test_a_column_that_is_not_read_is_as_if_it_were_not_there() -> None:
    row = {"instruction": "q", "input": "more", "output": "a", "history": [["q", "a"]], "system": "s"}
    off = {"input": None, "history": None, "system": None}
    assert to_example("alpaca", row, off) == Conversation([USER, ASSISTANT])
    assert to_example("alpaca", row, {**off, "instruction": None, "input": "instruction"}) == Conversation(
        [USER, ASSISTANT]
    )
    with pytest.raises(RowError, match=r"the column output is not read \(columns: \{output: null\}\)"):
        to_example("alpaca", row, {"output": None})
    assert detect(row, {"output": None}) is None


def test_text_may_have_a_second_column_if_it_is_named() -> None:
    row = {"text": "a", "input": "b"}
    assert to_example("text", row, {}) == Text("a")
    assert to_example("text", row, {"input": "input"}) == Text("a\nb")
    assert to_example("text", {"text": "a", "input": ""}, {"input": "input"}) == Text("a")


def test_openai_rows_are_what_llamafactory_makes_of_them() -> None:
    """Recorded from the converter of LLaMA-Factory 0.9.5."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            USER, {"role": "assistant", "content": "lost", "tool_calls": [call]}, {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"}, ASSISTANT, {"role": "tool", "content": "dropped"},
        ],
    }  # fmt: skip
    kept: ToolCall = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert to_example("openai", row, {}) == Conversation(
        [
            {"role": "system", "content": "detailed thinking off"}, USER, {"role": "assistant", "content": "", "tool_calls": [kept]},
            {"role": "tool", "content": "1\n</tool_response>\n<tool_response>\n2"}, ASSISTANT,
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("system", "tools", "expected"),
    [
        ("", None, "detailed thinking off"), ("s", None, "s\ndetailed thinking off"), ("detailed thinking on", None, "detailed thinking on"),
        ("", "[]", None), ("s", '[{"name": "f"}]', "s\n"),
    ],
)  # fmt: skip
def test_the_system_message_of_openai_rows(system: str, tools: str | None, expected: str | None) -> None:
    row = {"messages": [USER, ASSISTANT], "system": system, "tools": tools}
    example = to_example("openai", row, {})
    assert isinstance(example, Conversation)
    leading = example.messages[0]
    assert (leading["content"] if leading["role"] == "system" else None) == expected


@pytest.mark.parametrize("order", ["", "u", "a", "uu", "uau", "ua s", "us", "t", "uaa"])
def test_openai_rows_out_of_order_are_bad(order: str) -> None:
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system", " ": "user"}
    messages = [{"role": roles[letter], "content": "x"} for letter in order]
    with pytest.raises(RowError, match=r"out of turn|no answer at the end"):
        to_example("openai", {"messages": messages}, {})


def test_openai_messages_lose_nulls_and_get_text_and_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]
    row = {
        "messages": [
            {"role": "user", "content": parts, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    }
    numbered: Any = {"id": "1", **CALL}
    assert to_example("messages", row, {}) == Conversation([
        {"role": "user", "content": "qr"},
        {"role": "assistant", "content": "", "tool_calls": [numbered]},
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [USER]}, "messages"), ({"conversations": [{"from": "human", "value": "x"}]}, "sharegpt"),
        ({"conversations": [USER]}, "messages"), ({"messages": [{"from": "human", "value": "x"}]}, "sharegpt"),
        ({"prompt": "", "completion": ""}, "prompt-completion"), ({"instruction": "", "output": "", "text": ""}, "alpaca"), ({"text": ""}, "text"),
    ],
)  # fmt: skip
def test_auto_takes_the_format_whose_columns_exist_and_reads_what_it_took(
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


def test_a_column_that_stands_for_another_part_is_that_part_alone() -> None:
    row = {"input": "q", "output": "a"}
    assert to_example("alpaca", row, {"instruction": "input"}) == Conversation([USER, ASSISTANT])


def test_an_error_names_the_column_of_the_file() -> None:
    with pytest.raises(RowError, match=r"answer \(read as output\) is a number, not text"):
        to_example("alpaca", {"question": "q", "answer": 3}, {"instruction": "question", "output": "answer"})
    with pytest.raises(RowError, match="message 1 has no role; its keys are speaker, content"):
        to_example("messages", {"messages": [{"speaker": "user", "content": "q"}]}, {})
    with pytest.raises(RowError, match="turn 1 has no text under `value`; its keys are from, text"):
        to_example("sharegpt", {"conversations": [{"from": "human", "text": "q"}]}, {})
