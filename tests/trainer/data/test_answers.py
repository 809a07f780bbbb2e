"""Which tokens count in the loss: exactly the answers, over templates that behave in different
ways.

Run: .venv/bin/python -m pytest tests/trainer/data/test_answers.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import DataError
from unisono.trainer.data import Conversation, Message, RowError, ToolCall
from unisono.trainer.data.answer_spans import _by_marks, _by_prefixes
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.token_table import Encoded
from unisono.trainer.data.tokenizer import load_tokenizer

TokenizerDir = Callable[..., Path]
# Template, its end of a turn, whether it strips contents.
TEMPLATES = [
    ("chatml_tools", "<|im_end|>"), ("headers", "<|eot_id|>"), ("inst", "</s>"), ("turns", "<end_of_turn>"),
    ("thinking", "<|im_end|>"), ("forced_thinking", "</s>"), ("marked", "<|im_end|>"),
]  # fmt: skip


def turns(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def make_encoder(directory: Path, **settings: Any) -> Encoder:
    return Encoder(load_tokenizer(directory, trust_remote_code=False), directory=directory, **settings)


def encode(encoder: Encoder, messages: list[Message], tools: list[Any] | None = None) -> Encoded:
    (encoded,) = encoder.encode([Conversation(messages, tools)])
    assert isinstance(encoded, Encoded), encoded
    return encoded


def refusal(encoder: Encoder, messages: list[Message], tools: list[Any] | None = None) -> str:
    (encoded,) = encoder.encode([Conversation(messages, tools)])
    assert isinstance(encoded, RowError)
    return str(encoded)


def trained(encoder: Encoder, encoded: Encoded) -> list[str]:
    """The text of each stretch of loss tokens."""
    parts: list[list[int]] = []
    for place, (token, target) in enumerate(zip(encoded.ids.tolist(), encoded.targets.tolist(), strict=True)):
        if target:
            if not place or not encoded.targets[place - 1]:
                parts.append([])
            parts[-1].append(token)
    return [encoder.tokenizer.decode(part, skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
def test_the_tokens_are_those_of_apply_chat_template(
    tokenizer_dir: TokenizerDir, template: str, end: str
) -> None:
    encoder = make_encoder(tokenizer_dir(template, eos=end))
    messages = turns("hello  ", "\nthere,\n how are you ", "日本語? 🙂", "fine\n\n")
    expected = encoder.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert encode(encoder, messages).ids.tolist() == expected


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
@pytest.mark.parametrize("trim", [False, True])
def test_every_answer_is_trained_with_its_stop_token_and_nothing_else(
    tokenizer_dir: TokenizerDir, template: str, end: str, *, trim: bool
) -> None:
    encoder = make_encoder(tokenizer_dir(template, eos=end, trim=trim))
    encoded = encode(encoder, turns("hello", "there there", "日本語?", "fine 🙂", "and you?", "I am fine"))
    expected = ["there there", "fine 🙂", "I am fine"]
    if (
        template == "thinking"
    ):  # it writes an empty thought into the last turn, which the model is to write, too
        expected[-1] = "<think>\n\n</think>\n\nI am fine"
    assert [text.removeprefix(" ") for text in trained(encoder, encoded)] == [text + end for text in expected]


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
def test_with_last_answer_only_the_last_is_trained(
    tokenizer_dir: TokenizerDir, template: str, end: str
) -> None:
    encoder = make_encoder(tokenizer_dir(template, eos=end), loss_on="last-answer")
    (text,) = trained(encoder, encode(encoder, turns("hello", "there there", "and you?", "I am fine")))
    assert text.endswith("I am fine" + end)
    assert "there there" not in text


@pytest.mark.parametrize(("template", "end"), TEMPLATES)
def test_with_all_everything_but_the_first_token_is_trained(
    tokenizer_dir: TokenizerDir, template: str, end: str
) -> None:
    encoded = encode(make_encoder(tokenizer_dir(template, eos=end), loss_on="all"), turns("hello", "there"))
    assert not encoded.targets[0]
    assert encoded.targets[1:].all()


@pytest.mark.parametrize("answer", ["\n\nthere", "  there", "there\n\n", "\tthere \n", "🙂", "e\u0301"])
@pytest.mark.parametrize("trim", [False, True])
def test_blanks_at_the_ends_of_an_answer_belong_to_it(
    tokenizer_dir: TokenizerDir, answer: str, *, trim: bool
) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools", trim=trim))
    (text,) = trained(encoder, encode(encoder, turns("hello", answer)))
    assert text.lstrip("\n") == (answer + "<|im_end|>").lstrip("\n")


def test_answers_are_found_though_earlier_thoughts_are_not_in_the_text(
    tokenizer_dir: TokenizerDir,
) -> None:
    """The template drops the thoughts of earlier turns."""
    encoder = make_encoder(tokenizer_dir("thinking"), thoughts="ignore")
    messages = turns("hello", "<think>\nwell\n</think>\n\nthere", "and?", "<think>\nhm\n</think>\n\nfine")
    encoded = encode(encoder, messages)
    assert encoded.ids.tolist() == encoder.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert trained(encoder, encoded) == ["there<|im_end|>", "<think>\nhm\n</think>\n\nfine<|im_end|>"]


def test_turn_markers_in_a_question_do_not_mislead_if_earlier_turns_change(
    tokenizer_dir: TokenizerDir,
) -> None:
    encoder = make_encoder(tokenizer_dir("thinking"), thoughts="ignore")
    messages = turns(
        "say <|im_start|>assistant\nno<|im_end|>", "<think>\nwell\n</think>\n\nthere", "and?", "fine"
    )
    assert trained(encoder, encode(encoder, messages)) == [
        "there<|im_end|>",
        "<think>\n\n</think>\n\nfine<|im_end|>",
    ]


def test_where_earlier_answers_end_otherwise_they_count_without_their_end(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{{ '<start_of_turn>' + m['role'] + m['content'] }}{{ '</s>' if loop.last else"
        " '<end_of_turn>' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>assistant' }}{%"
        " endif %}",
        encoding="utf-8",
    )
    messages = turns("hello", "there", "and?", "fine")
    directory = tokenizer_dir("turns", eos="</s>")
    encoder = make_encoder(directory, template_file=str(file))
    assert trained(encoder, encode(encoder, messages)) == ["there", "fine</s>"]
    assert encoder.warnings == [
        "the chat template ends an earlier answer with <end_of_turn>, and only the last one with </s>:"
        " earlier answers count without their end"
    ]
    last_only = make_encoder(directory, template_file=str(file), loss_on="last-answer")
    assert trained(last_only, encode(last_only, messages)) == ["fine</s>"]
    assert not last_only.warnings


@pytest.mark.parametrize("kept", ["", "<think>\nwell\n</think>\n\n"])
def test_a_prompt_that_asks_for_thoughts_is_not_trained(tokenizer_dir: TokenizerDir, kept: str) -> None:
    encoder = make_encoder(tokenizer_dir("forced_thinking", eos="</s>"), thoughts="ignore")
    messages = turns("hello", kept + "there <|Assistant|> here", "and?", kept + "<b>fine")
    first, last = trained(encoder, encode(encoder, messages))
    assert first.lstrip("\n") == "there <|Assistant|> here</s>"
    assert last.lstrip("\n") == "<b>fine</s>"


@pytest.mark.parametrize(("template", "end"), [("thinking", "<|im_end|>"), ("forced_thinking", "</s>")])
def test_marks_find_what_prefixes_find(tokenizer_dir: TokenizerDir, template: str, end: str) -> None:
    encoder = make_encoder(tokenizer_dir(template, eos=end))
    assert encoder.template is not None
    conversation = Conversation(turns("hello", "there there", "日本語?", "fine 🙂"))
    text = encoder.template.render(conversation.messages)
    last = _by_prefixes(encoder.template, conversation, text, [3])
    assert _by_marks(encoder.template, conversation, text, [1, 3]) is not None
    assert last in (None, _by_marks(encoder.template, conversation, text, [3]))


def test_a_stop_token_inside_a_message_does_not_end_its_answer(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools"))
    assert trained(encoder, encode(encoder, turns("hello", "a <|im_end|> b", "x <|im_end|>", "c"))) == [
        "a <|im_end|> b<|im_end|>",
        "c<|im_end|>",
    ]


def test_tool_calls_are_answers_and_tool_results_are_not(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools"))
    tools = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ]
    call: ToolCall = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
    messages: list[Message] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "12 °C"},
        {"role": "tool", "content": "13 °C"},
        {"role": "assistant", "content": "It is 12 °C."},
    ]  # fmt: skip
    encoded = encode(encoder, messages, tools)
    assert (
        encoded.ids.tolist()
        == encoder.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True)["input_ids"]
    )
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
    assert trained(encoder, encoded) == [f"{written}\n{written}<|im_end|>", "It is 12 °C.<|im_end|>"]


def test_what_a_template_would_leave_out_is_refused(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("turns", eos="<end_of_turn>"))
    call: ToolCall = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert "does not render tool calls" in refusal(encoder, messages)
    assert "does not render tools" in refusal(
        encoder, turns("a", "b"), [{"type": "function", "function": {"name": "f"}}]
    )


def test_a_message_of_weight_0_is_not_trained(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir("chatml_tools"))
    messages = turns("hello", "there", "and?", "fine")
    messages[1]["weight"] = 0
    assert trained(encoder, encode(encoder, messages)) == ["fine<|im_end|>"]


@pytest.mark.parametrize("messages", [turns("hello"), turns("hello", ""), turns("hello", " \n")])
def test_a_conversation_without_an_answer_is_refused(
    tokenizer_dir: TokenizerDir, messages: list[Message]
) -> None:
    assert "answer" in refusal(make_encoder(tokenizer_dir("chatml_tools")), messages)


def test_what_the_template_itself_refuses_is_reported_in_its_words(tokenizer_dir: TokenizerDir) -> None:
    printed = refusal(
        make_encoder(tokenizer_dir("turns", eos="<end_of_turn>")),
        [{"role": "system", "content": "x"}, *turns("a", "b")],
    )
    assert "System role not supported" in printed


# The user's own template.

NO_STOP = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
UNTRAINED_STOP = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{%"
    " generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{"
    " '<|im_end|>\n' }}{% endfor %}"
)


@pytest.mark.parametrize("template", [NO_STOP, UNTRAINED_STOP])
def test_a_template_that_leaves_the_stop_token_out_of_the_loss_is_refused(
    tokenizer_dir: TokenizerDir, tmp_path: Path, template: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template, encoding="utf-8")
    encoder = make_encoder(tokenizer_dir(), template_file=str(file))
    with pytest.raises(DataError, match="leaves the stop token") as caught:
        encoder.encode([Conversation(turns("hello", "there"))])
    assert "data.check_template" in caught.value.problems[0].fix
    assert "<|im_end|>" in caught.value.problems[0].why


@pytest.mark.parametrize(("template", "answer"), [(NO_STOP, "there\n"), (UNTRAINED_STOP, "there")])
def test_the_check_can_be_turned_off(
    tokenizer_dir: TokenizerDir, tmp_path: Path, template: str, answer: str
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template, encoding="utf-8")
    encoder = make_encoder(tokenizer_dir(), template_file=str(file), check_template=False)
    encoded = encode(encoder, turns("hello", "there"))
    assert [text.lstrip(" ") for text in trained(encoder, encoded)] == [answer]


def test_a_template_file_is_rendered_in_place_of_the_tokenizers_own(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(
        (Path(__file__).parent / "templates" / "marked.jinja").read_text(encoding="utf-8"), encoding="utf-8"
    )
    encoder = make_encoder(tokenizer_dir("headers"), template_file=str(file))
    messages = turns("hello", "there")
    expected = encoder.tokenizer.apply_chat_template(
        messages, chat_template=file.read_text(encoding="utf-8"), tokenize=True
    )
    assert encode(encoder, messages).ids.tolist() == expected["input_ids"]


def test_a_template_that_is_not_a_jinja_is_refused_with_its_line(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        make_encoder(tokenizer_dir(), template_file=str(file))
    assert caught.value.problems[0].where == f"{file}:2"


def test_without_a_template_conversations_become_chatml_with_a_warning(tokenizer_dir: TokenizerDir) -> None:
    encoder = make_encoder(tokenizer_dir(None))
    assert trained(encoder, encode(encoder, turns("hello", "there"))) == ["there<|im_end|>"]
    assert "ChatML" in encoder.warnings[0]


def template_file(folder: Path, text: str) -> str:
    (folder / "template.jinja").write_text(text, encoding="utf-8")
    return str(folder / "template.jinja")


def test_all_answers_are_found_if_only_the_whole_ends_with_end_of_sequence(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    phi = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%"
        " endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '</s>' }}"
    )
    encoder = make_encoder(tokenizer_dir("inst", eos="</s>"), template_file=template_file(tmp_path, phi))
    encoded = encode(encoder, turns("hello", "there", "and?", "fine"))
    assert trained(encoder, encoded) == ["there<|im_end|>", "fine<|im_end|>"]
    assert encoder.tokenizer.convert_tokens_to_ids("<|im_end|>") in encoder.stop_ids


def test_next_role_as_the_stop_ends_each_answer_including_the_last(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    glm = (
        "{% for m in messages %}{{ ('<|im_start|>' if m['role'] == 'user' else '<|im_end|>') + m['content']"
        " }}{% endfor %}{{ '<|im_end|>' if add_generation_prompt }}"
    )
    directory = tokenizer_dir("chatml_tools", eos="<|im_start|>")
    encoder = make_encoder(directory, template_file=template_file(tmp_path, glm))
    messages = turns("hello", "there", "and?", "fine")
    encoded = encode(encoder, messages)
    assert trained(encoder, encoded) == ["there<|im_start|>", "fine<|im_start|>"]
    last = make_encoder(directory, template_file=template_file(tmp_path, glm), loss_on="last-answer")
    assert trained(last, encode(last, messages)) == ["fine<|im_start|>"]


@pytest.mark.parametrize(
    ("template", "opening"),
    [("chatml_tools", []), ("headers", ["<s>"]), ("inst", ["<s>"]), ("turns", ["<s>"]), (None, ["<s>"])],
)
def test_row_opens_with_beginning_of_sequence_if_the_template_writes_it(
    tokenizer_dir: TokenizerDir, template: str | None, opening: list[str]
) -> None:
    encoder = make_encoder(tokenizer_dir(template))
    assert encoder.tokenizer.convert_ids_to_tokens(list(encoder.opening)) == opening
