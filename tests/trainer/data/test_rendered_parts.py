"""Every part of a conversation is in its rendering, or the row is bad, or a note says which part is
not.

Run: .venv/bin/python -m pytest tests/trainer/data/test_rendered_parts.py
"""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from unisono.trainer.data import (
    Conversation,
    Ledger,
    Message,
    Place,
    Preference,
    RowError,
    ThoughtKey,
    ToolCall,
    unrendered_parts,
)
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.rendered_parts import RenderedParts
from unisono.trainer.data.token_table import Encoded, EncodedUnit
from unisono.trainer.data.tokenizer import load_tokenizer

TokenizerDir = Callable[..., Path]
USER: Message = {"role": "user", "content": "2+2?"}
ANSWER: Message = {"role": "assistant", "content": "Four."}
THOUGHT = "two and two are four"
CALL: ToolCall = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}

# As the templates that people use: they know some roles, trim, drop thoughts, ignore a text beside
# a call, or read a key.
ONLY_KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}\n{{"
    " m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " endif %}"
)
TRIMS = ONLY_KNOWN_ROLES.replace("{{ m.content }}", "{{ m.content | trim }}")
DROPS_THOUGHTS = ONLY_KNOWN_ROLES.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
READS_REASONING = ONLY_KNOWN_ROLES.replace(
    "{{ m.content }}", "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
)
CALL_OR_TEXT = ONLY_KNOWN_ROLES.replace(
    "{{ m.content }}",
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{%"
    " endfor %}{% else %}{{ m.content }}{% endif %}",
).replace("{% for m in messages %}", "{{ tools | tojson if tools }}{% for m in messages %}")
ONLY_QUESTIONS_THAT_ASK = ONLY_KNOWN_ROLES.replace(
    "if m.role in", "if (m.role != 'user' or '?' in m.content) and m.role in"
)


def encoder_of(folder: Path, template: str, tokenizer_dir: TokenizerDir, **settings: Any) -> Encoder:
    file = folder / "template.jinja"
    file.write_text(template, encoding="utf-8")
    directory = tokenizer_dir("chatml_tools")
    tokenizer = load_tokenizer(directory, trust_remote_code=False)
    return Encoder(tokenizer, directory=directory, template_file=str(file), **settings)


def encoded(encoder: Encoder, *messages: Message, tools: list[Any] | None = None) -> Encoded | str:
    """The row, or why it is bad."""
    (row,) = encoder.encode([Conversation(list(messages), tools)])
    return str(row) if isinstance(row, RowError) else row


def text_of(encoder: Encoder, row: Encoded | str, *, trained: bool = False) -> str:
    assert isinstance(row, Encoded), row
    ids = row.ids[row.targets] if trained else row.ids
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("role", ["developer", "User", "human", "observation"])
@pytest.mark.parametrize("repeated", [False, True], ids=["first row", "later row"])
def test_a_message_of_a_role_that_the_template_does_not_know_is_a_bad_row(
    role: str, tmp_path: Path, tokenizer_dir: TokenizerDir, *, repeated: bool
) -> None:
    encoder = encoder_of(tmp_path, ONLY_KNOWN_ROLES, tokenizer_dir)
    if repeated:
        assert isinstance(encoded(encoder, {"role": "system", "content": "a"}, USER, ANSWER), Encoded)
    why = encoded(encoder, {"role": role, "content": "a"}, USER, ANSWER)
    assert why == f"message 1 ({role}) is not rendered by the chat template"


@pytest.mark.parametrize("content", ["2+2", "?", "a", "assistant", "user", "x" * 200])
def test_templates_branch_on_contents_so_that_each_row_is_looked_at(
    content: str, tmp_path: Path, tokenizer_dir: TokenizerDir
) -> None:
    encoder = encoder_of(tmp_path, ONLY_QUESTIONS_THAT_ASK, tokenizer_dir)
    assert isinstance(encoded(encoder, USER, ANSWER), Encoded)
    row = encoded(encoder, {"role": "user", "content": content}, ANSWER)
    expected = "message 1 (user) is not rendered by the chat template"
    assert row == expected if "?" not in content else isinstance(row, Encoded)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
@pytest.mark.parametrize("template", [READS_REASONING, DROPS_THOUGHTS, ONLY_KNOWN_ROLES])
@pytest.mark.parametrize("thoughts", ["loss", "ignore", "strip"])
def test_thought_is_rendered_by_the_template_or_its_answer_does_not_count(
    key: ThoughtKey, template: str, thoughts: str, tmp_path: Path, tokenizer_dir: TokenizerDir
) -> None:
    encoder = encoder_of(tmp_path, template, tokenizer_dir, thoughts=thoughts)
    answer = ANSWER.copy()
    answer[key] = THOUGHT
    row = encoded(encoder, USER, answer)
    if thoughts == "strip":
        assert text_of(encoder, row, trained=True) == "Four.<|im_end|>"
        assert isinstance(row, Encoded)
        assert not row.not_rendered
    elif template == READS_REASONING:
        assert text_of(encoder, row, trained=True) == f"<think>{THOUGHT}</think>Four.<|im_end|>"
    elif thoughts == "ignore":
        assert text_of(encoder, row, trained=True) == "Four.<|im_end|>"
        assert isinstance(row, Encoded)
        assert row.not_rendered == (f"the thought of message 2 (assistant): {THOUGHT}",)
    else:
        assert row == "the thought of message 2 (assistant) is not rendered by the chat template"


def test_earlier_answer_without_its_thought_does_not_count_but_last_does(
    tokenizer_dir: TokenizerDir,
) -> None:
    directory = tokenizer_dir("thinking")
    encoder = Encoder(load_tokenizer(directory, trust_remote_code=False), directory=directory)
    thinks = f"<think>\n{THOUGHT}\n</think>\n\nFour."
    row = encoded(encoder, USER, ANSWER | {"content": thinks}, USER, ANSWER | {"content": thinks})
    assert text_of(encoder, row, trained=True) == thinks + "<|im_end|>"
    assert isinstance(row, Encoded)
    assert row.not_rendered == (
        f"the answer of message 2 does not count, without the thought of message 2 (assistant): {THOUGHT}",
    )


def test_a_text_beside_a_call_is_a_bad_row_where_the_template_drops_it(
    tmp_path: Path, tokenizer_dir: TokenizerDir
) -> None:
    encoder = encoder_of(tmp_path, CALL_OR_TEXT, tokenizer_dir, check_template=False)
    call: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert "weather" in text_of(encoder, encoded(encoder, USER, call, tools=[TOOL]))
    beside = encoded(encoder, USER, call | {"content": "I look it up."}, tools=[TOOL])
    assert beside == "message 2 (assistant) is not rendered by the chat template"


def test_a_tool_that_the_template_does_not_write_is_a_bad_row(
    tmp_path: Path, tokenizer_dir: TokenizerDir
) -> None:
    silent = CALL_OR_TEXT.replace("{{ tools | tojson if tools }}", "{{ 'tools' if tools }}")
    encoder = encoder_of(tmp_path, silent, tokenizer_dir)
    why = encoded(encoder, USER, ANSWER, tools=[TOOL])
    assert why == "a tool ('weather') is not rendered by the chat template"


def test_marks_in_a_row_are_texts(tmp_path: Path, tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tmp_path, ONLY_KNOWN_ROLES, tokenizer_dir)
    lost: Message = {"role": "developer", "content": "zq0qz zq1qz"}
    assert "message 1" in str(encoded(encoder, lost, {"role": "user", "content": "zq0qz zq0xqz"}, ANSWER))
    assert isinstance(encoded(encoder, {"role": "user", "content": "zq0qz zq1qz"}, ANSWER), Encoded)


# Against an oracle: which roles a template writes, and how.

CONTENTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n \t<>{}zq01"),
    max_size=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": CONTENTS}
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(MESSAGES, min_size=1, max_size=4), trims=st.booleans())
@example(rows=[[USER, ANSWER], [USER | {"content": " 2+2? "}, ANSWER]], trims=True)
@example(rows=[[{"role": "developer", "content": "a"}, {"role": "user", "content": "a"}]], trims=False)
def test_exactly_the_messages_that_a_template_does_not_write_are_lost(
    rows: list[list[Message]], *, trims: bool
) -> None:
    def render(messages: list[Message], _: object) -> str:
        return "".join(
            f"<{m['role']}>{m['content'].strip() if trims else m['content']}</{m['role']}>\n"
            for m in messages
            if m["role"] != "developer"
        )

    parts = RenderedParts(render)
    for messages in (*rows, *rows):
        lost = parts.lost(Conversation(messages), render(messages, None))
        unknown = [i for i, m in enumerate(messages) if m["role"] == "developer" and m["content"].strip()]
        assert [part.message for part in lost] == unknown


TEMPLATES = sorted(
    path.name
    for path in files("trl").joinpath("chat_templates").iterdir()
    if path.name.endswith(".jinja") and "_training" not in path.name
)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_part_of_every_form_is_rendered_bad_or_noted(
    name: str, tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    template = files("trl").joinpath("chat_templates", name).read_text(encoding="utf-8")
    encoder = encoder_of(tmp_path, template, tokenizer_dir, check_template=False)
    system = {"role": "system", "content": "uniquesystem"}
    question = {"role": "user", "content": "uniquequestion"}
    answer = {"role": "assistant", "content": "uniqueanswer"}
    thinks = answer | {"reasoning_content": "uniquethought"}
    calls = {"role": "assistant", "content": "uniquebeside", "tool_calls": [
        {"type": "function", "id": "abcdefghi", "function": {"name": "uniquecall", "arguments": {"city": "uniqueargument"}}}
    ]}  # fmt: skip
    result = {"role": "tool", "name": "uniquecall", "tool_call_id": "abcdefghi", "content": "uniqueresult"}
    function = {"name": "uniquetool", "description": "uniquedescription", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    shapes: list[tuple[list[Any], list[Any] | None]] = [
        ([question, answer], None),
        ([system, question, answer], None),
        ([system | {"role": "developer"}, question, answer], None),
        ([question, thinks], None),
        ([question, thinks, question, thinks], None),
        ([question, answer | {"content": "<think>uniquethought</think>uniqueanswer"}], None),
        ([question, calls, result, answer], tools),
        ([system, question, answer], tools),
    ]
    for messages, given_tools in shapes:
        row = encoded(encoder, *messages, tools=given_tools)
        if isinstance(row, str):
            continue
        said = text_of(encoder, row) + " ".join(row.not_rendered)
        whole = repr((messages, given_tools))
        for word in (
            "system",
            "question",
            "thought",
            "answer",
            "beside",
            "call",
            "argument",
            "result",
            "tool",
            "description",
        ):
            assert (f"unique{word}" in said) >= (f"unique{word}" in whole), (word, said)


def test_what_the_prompt_of_a_pair_lacks_is_noted_with_the_pair(tokenizer_dir: TokenizerDir) -> None:
    directory = tokenizer_dir("thinking")
    tokenizer = load_tokenizer(directory, trust_remote_code=False)
    encoder = Encoder(tokenizer, directory=directory, loss_on="last-answer")
    before = [USER, ANSWER | {"content": f"<think>\n{THOUGHT}\n</think>\n\nFour. <|im_end|>"}, USER]
    sides = [Conversation([*before, ANSWER | {"content": text}]) for text in ("yes", "no")]
    (unit,) = encoder.encode_pairs([Preference(list(sides))])
    assert isinstance(unit, EncodedUnit), unit
    for side in unit.sides:
        assert side.not_rendered == (f"the thought of message 2 (assistant): {THOUGHT}",)
        assert side.has_control_tokens


def test_parts_with_semicolons_stay_whole_in_the_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "notes") as ledger:
        ledger.note(Place("a.jsonl", 3), "not rendered", "a; b; c", parts=["a; b", "c"])
        ledger.note(Place("a.jsonl", 4), "cut", "d")
        ledger.write(tmp_path / "data.json")
    assert unrendered_parts(tmp_path / "data.json", ["a.jsonl:3", "a.jsonl:4"]) == {
        "a.jsonl:3": ["a; b", "c"]
    }
