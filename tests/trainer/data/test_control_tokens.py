"""Control tokens in the texts of rows: read as such, as text, or refused.

Run: .venv/bin/python -m pytest tests/trainer/data/test_control_tokens.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.trainer.config.data_sections import SourceSection
from unisono.trainer.data import Completion, Conversation, Message, Messages, RowError, Text
from unisono.trainer.data.control_tokens import ControlTokens
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.token_table import Encoded
from unisono.trainer.data.tokenizer import load_tokenizer
from unisono.trainer.readers.llamafactory.encoder import LfEncoder
from unisono.trainer.readers.llamafactory.template import find_lf_template

TokenizerDir = Callable[..., Path]
END = "<|im_end|>"
ROW: list[Message] = [
    {"role": "user", "content": f"what is {END} for? 日本"},
    {"role": "assistant", "content": f"it ends {END} a turn"},
]


def make_encoder(directory: Path, **settings: Any) -> Encoder:
    return Encoder(load_tokenizer(directory, trust_remote_code=False), directory=directory, **settings)


def encoded(encoder: Encoder, example: Any) -> Encoded:
    (row,) = encoder.encode([example])
    assert isinstance(row, Encoded), row
    return row


def test_a_control_token_in_a_text_is_kept_and_the_row_is_counted(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools"))
    row = encoded(encoder, Conversation(ROW))
    end = encoder.tokenizer.convert_tokens_to_ids(END)
    assert row.ids.tolist().count(end) == 5  # three messages, one of them the template's own
    assert row.has_control_tokens
    assert not encoded(
        encoder, Conversation([{"role": "user", "content": "a"}, ROW[1] | {"content": "b"}])
    ).has_control_tokens


def test_an_escaped_control_token_is_text_and_the_templates_own_are_not(tokenizer_dir: TokenizerDir) -> None:
    directory = tokenizer_dir("chatml_tools")
    encoder = make_encoder(directory, control_tokens="escape")
    row, tokenizer = encoded(encoder, Conversation(ROW)), encoder.tokenizer
    end = tokenizer.convert_tokens_to_ids(END)
    assert row.ids.tolist().count(end) == 3
    assert not row.has_control_tokens
    assert tokenizer.decode(row.ids) == tokenizer.decode(
        encoded(make_encoder(directory), Conversation(ROW)).ids
    )
    assert tokenizer.decode(row.ids[row.targets]) == f"it ends {END} a turn{END}"


def test_a_row_with_a_control_token_is_bad_if_they_are_refused(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools"), control_tokens="bad")
    (row,) = encoder.encode([Conversation(ROW)])
    assert isinstance(row, RowError)
    assert row.why == f"its text has the control token {END}"
    assert "data.control_tokens: escape" in row.fix


@pytest.mark.parametrize(
    "example", [Completion(f"a {END} b", f"c {END}"), Text(f"a {END} b")], ids=["completion", "text"]
)
def test_texts_without_a_template_are_escaped_too(
    example: Completion | Text, tokenizer_dir: TokenizerDir
) -> None:
    directory = tokenizer_dir(None)
    as_tokens, as_text = (
        encoded(make_encoder(directory, control_tokens=mode), example) for mode in ("keep", "escape")
    )
    tokenizer = load_tokenizer(directory, trust_remote_code=False)
    end = tokenizer.convert_tokens_to_ids(END)
    own = int(tokenizer.eos_token_id == end)  # the end of the whole text
    assert as_text.ids.tolist().count(end) == own
    assert as_tokens.ids.tolist().count(end) > own


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text("ab<|>é ") | st.just(END), min_size=1, max_size=8).map("".join))
def test_rows_without_control_tokens_have_the_same_tokens(texts: str, tokenizer_dir: TokenizerDir) -> None:
    directory = tokenizer_dir("chatml_tools")
    example = Conversation([{"role": "user", "content": texts}, {"role": "assistant", "content": "yes"}])
    kept = encoded(make_encoder(directory), example)
    escaped = encoded(make_encoder(directory, control_tokens="escape"), example)
    tokenizer = load_tokenizer(directory, trust_remote_code=False)
    assert tokenizer.decode(kept.ids) == tokenizer.decode(escaped.ids)
    assert (kept.ids.tolist() == escaped.ids.tolist()) == (END not in texts)


def test_a_place_behind_an_escaped_token_moves_with_it(tokenizer_dir: TokenizerDir) -> None:
    control = ControlTokens(load_tokenizer(tokenizer_dir("chatml_tools"), trust_remote_code=False))
    hidden = control.hidden(Conversation(ROW))
    text = "|".join(message["content"] for message in hidden.conversation.messages)
    first, end = text.index("it ends"), len(text)
    restored = hidden.restored(text, [(first, end)])
    assert restored.text == "|".join(message["content"] for message in ROW)
    ((first, end),) = restored.spans
    assert restored.text[first:end] == ROW[1]["content"]
    assert [restored.text[a:b] for a, b in restored.escaped] == [END, END]


# LLaMA-Factory's templates.


def lf_encoded(directory: Path, messages: Messages, **settings: Any) -> tuple[LfEncoder, Encoded | RowError]:
    template = find_lf_template("qwen3")
    assert template is not None
    encoder = LfEncoder(load_tokenizer(directory, trust_remote_code=False), template, **settings)
    try:
        example = encoder.read_row("messages", {"messages": messages}, SourceSection(path="rows.jsonl"))
    except RowError as error:
        return encoder, error
    return encoder, encoder.encode([example])[0]


def test_the_thought_of_a_row_is_that_of_the_template(tokenizer_dir: TokenizerDir) -> None:
    thinks = {"role": "assistant", "content": "Four.", "reasoning_content": "two and two"}
    encoder, row = lf_encoded(tokenizer_dir("chatml_tools"), [{"role": "user", "content": "2+2"}, thinks])
    assert isinstance(row, Encoded)
    text = encoder.tokenizer.decode(row.ids[row.targets])
    assert text.startswith("<think>\ntwo and two\n</think>\n\nFour.")


def test_control_tokens_are_counted_split_or_refused_there_too(tokenizer_dir: TokenizerDir) -> None:
    directory = tokenizer_dir("chatml_tools")
    _, kept = lf_encoded(directory, ROW)
    assert isinstance(kept, Encoded)
    assert kept.has_control_tokens
    encoder, split = lf_encoded(directory, ROW, control_tokens="escape")
    assert isinstance(split, Encoded)
    assert (
        encoder.tokenizer.convert_tokens_to_ids(END) not in split.ids.tolist()
    )  # the template's neither, as there
    _, bad = lf_encoded(directory, ROW, control_tokens="bad")
    assert isinstance(bad, RowError)


@pytest.mark.parametrize(("thinking", "kept"), [(True, 1), ("preserve", 2)])
def test_earlier_answers_keep_their_thoughts_on_request(
    thinking: Any, kept: int, tokenizer_dir: TokenizerDir
) -> None:
    thinks = {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\nFour."}
    messages = [{"role": "user", "content": "2+2"}, thinks] * 2
    encoder, row = lf_encoded(
        tokenizer_dir("chatml_tools"), messages, loss_on="last-answer", thinking=thinking
    )
    assert isinstance(row, Encoded)
    assert encoder.tokenizer.decode(row.ids).count("two and two") == kept


def test_what_looks_like_a_mark_of_an_escaped_token_stays_text(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools"), control_tokens="escape")
    messages: list[Message] = [
        {"role": "user", "content": f"zqk0qz {END} zqk0xqz"},
        {"role": "assistant", "content": "zqk0qz"},
    ]
    row = encoded(encoder, Conversation(messages))
    assert f"zqk0qz {END} zqk0xqz" in encoder.tokenizer.decode(row.ids)
    assert encoder.tokenizer.decode(row.ids[row.targets]) == f"zqk0qz{END}"
