"""Files with the usual names of columns are read; where a name could be two things, the file is
refused with the mappings to choose from.

Run: .venv/bin/python -m pytest tests/trainer/data/test_source_format.py
"""

from typing import Any

import pytest
import yaml

from unisono.base.errors import DataError, Problem
from unisono.trainer.config.data_sections import COLUMN_NAMES, SourceSection
from unisono.trainer.data import Completion, Conversation, Message, Place, Preference, RawRow
from unisono.trainer.data.formats import to_example
from unisono.trainer.data.preference_rows import read_preference
from unisono.trainer.data.source_format import USUAL_NAMES, propose, settle_format

Q: Message = {"role": "user", "content": "q"}
A: Message = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
EARLIER = [{"role": "user", "content": "q0"}, {"role": "assistant", "content": "a0"}]


def section(**settings: Any) -> SourceSection:
    return SourceSection(path="rows.jsonl", **settings)


def first(row: dict[str, Any]) -> RawRow:
    return RawRow(Place("rows.jsonl", 1), row)


def refusal(row: dict[str, Any], objective: str = "sft", key: str = "data.train", **settings: Any) -> Problem:
    with pytest.raises(DataError) as caught:
        settle_format(section(**settings), first(row), objective=objective, key=key)
    return caught.value.problems[0]


def conversation(row: dict[str, Any], **settings: Any) -> list[Message]:
    """The messages of a row that is read without a format."""
    found = settle_format(section(**settings), first(row), objective="sft", key="data.train")
    example = to_example(found.name, row, found.section.columns)
    assert isinstance(example, Conversation)
    return example.messages


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "answer": "a"}, [Q, A]),
        ({"id": "7", "Question": "q", " Answer": "a"}, [Q, A]),
        ({"query": "q", "response": "a"}, [Q, A]),
        ({"input": "q", "output": "a"}, [Q, A]),
        ({"input": "q", "target": "a"}, [Q, A]),
        ({"prompt": "q", "response": "a"}, [Q, A]),
        ({"问题": "q", "回答": "a"}, [Q, A]),
        ({"输入": "q", "输出": "a"}, [Q, A]),
        ({"instruction": "q", "input": "", "response": "a"}, [Q, A]),
        (
            {"instruction": "q", "context": "c", "response": "a", "category": "x"},  # Dolly
            [{"role": "user", "content": "q\nc"}, A],
        ),
        # ms-swift
        ({"query": "q", "response": "a", "history": [["q0", "a0"]], "system": "s"}, [SYSTEM, *EARLIER, Q, A]),
        ({"id": "1", "system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, Q, A]),  # OpenOrca
        ({"input": "q", "context": "c", "output": "a"}, [{"role": "user", "content": "q\nc"}, A]),
        ({"question": "q", "answers": {"text": ["b"]}, "answer": "a"}, [Q, A]),
        ({"conversation": [Q, A], "model": "m"}, [Q, A]),  # LMSYS
        ({"Messages": [Q, A]}, [Q, A]),
    ],
)  # fmt: skip
def test_usual_names_are_read_without_a_mapping(row: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert conversation(row) == expected


def test_the_line_of_the_source_says_what_was_read_as_what() -> None:
    row = {"question": "q", "answer": "a", "topic": "t"}
    line = settle_format(section(), first(row), objective="sft", key="data.train").line
    assert (
        line
        == "rows.jsonl: alpaca (auto: the first row has question and answer; not read: topic; question is"
        " read as instruction, answer is read as output)"
    )


def test_names_of_ours_count_before_usual_ones() -> None:
    assert conversation({"instruction": "q", "output": "a", "response": "b", "question": "p"}) == [Q, A]
    assert conversation({"messages": [Q, A], "question": "p", "answer": "b"}) == [Q, A]
    row = {"prompt": "q", "completion": "a", "answer": "b"}
    found = settle_format(section(), first(row), objective="sft", key="data.train")
    assert to_example(found.name, row, found.section.columns) == Completion("q", "a")


@pytest.mark.parametrize(
    ("row", "why", "choices"),
    [
        (
            {"problem": "q", "solution": "a", "answer": "b"},
            "solution or answer could be the answer",
            [{"output": "solution"}, {"output": "answer"}],
        ),
        (
            {"question": "q", "query": "p", "answer": "a"},
            "question or query could be the question",
            [{"instruction": "question"}, {"instruction": "query"}],
        ),
        (
            {"question": "q", "input": "p", "context": "c", "answer": "a"},
            "input or context could be the text after the question",
            [{"input": "input"}, {"input": "context"}],
        ),
        (
            {"text": "t", "question": "q", "answer": "a"},
            "it has a question with an answer and a text",
            [{"instruction": "question", "output": "answer"}, {"text": "text"}],
        ),
    ],
)
def test_ambiguous_row_is_refused_and_each_mapping_ends_the_doubt(
    row: dict[str, Any], why: str, choices: list[dict[str, str]]
) -> None:
    problem = refusal(row)
    assert problem.what == "the columns of rows.jsonl can be read in several ways"
    assert problem.why == why
    assert problem.where == "rows.jsonl:1"
    for columns in choices:
        written = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
        assert f"columns: {{{written}}}" in problem.fix
        found = settle_format(section(columns=columns), first(row), objective="sft", key="data.train")
        assert columns.items() <= found.section.columns.items()
        to_example(found.name, row, found.section.columns)


def test_what_the_config_says_counts() -> None:
    row = {"question": "q", "answer": "a", "reply": "b"}
    assert conversation(row, columns={"output": "answer"}) == [Q, A]
    assert (
        conversation(row | {"hint": "h"}, columns={"output": "reply", "input": "hint"})[0]["content"]
        == "q\nh"
    )
    assert conversation({"question": "q", "answer": "a", "context": "c"}, columns={"input": None}) == [Q, A]
    found = settle_format(
        section(columns={"prompt": "question"}),
        first({"question": "q", "answer": "a"}),
        objective="sft",
        key="data.train",
    )
    assert (found.name, found.section.columns) == (
        "prompt-completion",
        {"prompt": "question", "completion": "answer"},
    )


def test_plain_text_stays_the_format_of_pretraining() -> None:
    row = {"text": "t", "question": "q", "answer": "a"}
    assert settle_format(section(), first(row), objective="pretrain", key="data.train").name == "text"


def mapping_in(text: str) -> dict[str, str]:
    """The columns of a fix, read as the config is."""
    entry = yaml.safe_load(text[text.index("data.") :].partition("; ")[0].partition(": ")[2])
    return entry[0]["columns"]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"frage": "q", "antwort": "a"}, {"instruction": "frage", "output": "antwort"}),
        ({"id": "1", "questions": "q", "answer_text": "a"}, {"instruction": "questions", "output": "answer_text"}),
        ({"id": 1, "body: raw": "x"}, {"text": "body: raw"}),
        ({"no": "q", "7": "a"}, {"instruction": "no", "output": "7"}),
        ({"talk": [{"who": "me", "what": "q"}]}, {"messages": "talk"}),
    ],
)  # fmt: skip
def test_fix_of_an_unknown_format_is_a_mapping_of_the_files_own_columns(
    row: dict[str, Any], columns: dict[str, str]
) -> None:
    problem = refusal(row)
    assert "cannot infer the format of rows.jsonl" in problem.what
    assert mapping_in(problem.fix) == columns
    assert all(name in COLUMN_NAMES for name in columns)
    settle_format(section(columns=mapping_in(problem.fix)), first(row), objective="sft", key="data.train")


def test_the_fix_of_a_source_for_evaluation_names_its_key() -> None:
    assert (
        "set data.eval: [{path: rows.jsonl, columns:" in refusal({"a": "q", "b": "r"}, key="data.eval.1").fix
    )


def test_rows_without_a_text_have_no_mapping() -> None:
    assert propose({"x": 1}) == {}
    assert "columns" not in refusal({"x": 1}).fix


PAIR = Preference([Conversation([Q, A]), Conversation([Q, {"role": "assistant", "content": "b"}])])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "chosen": "a", "rejected": "b"}, PAIR),
        ({"query": "q", "response": "a", "rejected_response": "b"}, PAIR),  # ms-swift
        ({"prompt": "q", "chosen": "a", "rejected": "b", "question": "p"}, Preference([Completion("q", "a"), Completion("q", "b")])),
        ({"question": "p", "chosen": [Q, A], "rejected": [Q, PAIR.answers[1].messages[1]]}, PAIR),  # type: ignore[union-attr]
    ],
)  # fmt: skip
def test_pairs_have_usual_names_too(row: dict[str, Any], expected: Preference) -> None:
    found = settle_format(section(), first(row), objective="dpo", key="data.train")
    assert read_preference(row, found.section.columns) == expected


def test_the_system_message_of_a_pair_has_a_usual_name() -> None:
    row = {"system_prompt": "s", "question": "q", "chosen": "a", "rejected": "b"}
    found = settle_format(section(), first(row), objective="dpo", key="data.train")
    example = read_preference(row, found.section.columns)
    assert all(isinstance(one, Conversation) and one.messages[0] == SYSTEM for one in example.answers)


@pytest.mark.parametrize(
    "row", [{"query": "q", "response": "a", "label": True}, {"question": "q", "output": "a", "label": True}]
)
def test_rated_answers_have_usual_names_too(row: dict[str, Any]) -> None:
    found = settle_format(section(), first(row), objective="kto", key="data.train")
    assert read_preference(row, found.section.columns) == Preference([Conversation([Q, A])], desirable=True)


def test_the_fix_of_preferences_has_the_files_own_columns() -> None:
    fix = refusal({"question": "q", "better": "a", "worse": "b"}, "dpo").fix
    assert mapping_in(fix) == {"instruction": "question", "chosen": "better", "rejected": "worse"}
    fix = refusal({"question": "q", "answer": "a", "is_good": True}, "kto").fix
    assert mapping_in(fix) == {"instruction": "question", "output": "answer", "label": "is_good"}


def test_every_usual_name_belongs_to_one_part_and_is_written_folded() -> None:
    names = [name for ours, theirs in USUAL_NAMES.items() for name in (ours, *theirs)]
    assert len(names) == len(set(names))
    assert all(name == name.strip().casefold() for name in names)
    assert set(USUAL_NAMES) <= set(COLUMN_NAMES)
