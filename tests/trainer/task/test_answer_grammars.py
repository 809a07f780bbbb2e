"""Grammars of answers: the forms of calls that templates write, beside text and thoughts, and
schemas as the library `jsonschema` reads them.

Run: pytest tests/trainer/task/test_answer_grammars.py
"""

import json
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests import needs
from unisono.trainer.model.token_grammars import GrammarError, TokenGrammars
from unisono.trainer.plan.talk_messages import AnswerForm, Thought
from unisono.trainer.plan.tool_calls import ToolCallReader
from unisono.trainer.task.answer_grammars import (
    ACTION,
    BARE,
    LISTED,
    NAMED,
    NAMED_OBJECT,
    TAGGED,
    CallForm,
    GrammarWriter,
    call_form_of,
    special_marks,
)

needs.package("llguidance")

FORMS = [TAGGED, LISTED, NAMED, NAMED_OBJECT, BARE, ACTION]
END = 0


def tokenizer(*special: str) -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|end|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["what day is it"], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", additional_special_tokens=list(special)
    )


PLAIN = tokenizer()
MARKED = tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")


def function(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"function": {"name": name, "parameters": parameters}}


NUMBER = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = (function("add", NUMBER), function("free", None))


def accepts(
    tok: Any, text: str, form: AnswerForm, thought: Thought = "none", calls: CallForm = TAGGED
) -> bool:
    """Whether an answer may be a text, and then end."""
    grammars = TokenGrammars(tok, stop_ids={END}, vocabulary=len(tok))
    whole = GrammarWriter(special_marks(tok), calls).write(form, thought)
    grammars.check(whole)
    matcher = grammars.compile(whole).matcher
    ids = tok(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def written(calls: CallForm, *arguments: str, name: str = "add") -> str:
    each = [calls.name + name + calls.arguments + one + calls.ends for one in arguments]
    return calls.opens + calls.between.join(each) + calls.closes


@pytest.mark.parametrize("tok", [PLAIN, MARKED], ids=["plain", "marks are special tokens"])
@pytest.mark.parametrize("calls", FORMS)
def test_required_calls_have_the_templates_form_and_the_arguments_of_their_schema(
    tok: Any, calls: CallForm
) -> None:
    must = AnswerForm(tools=TOOLS, must_call=True)
    one = AnswerForm(tools=TOOLS, must_call=True, one_call=True)
    assert accepts(tok, written(calls, '{"a": 1}'), must, calls=calls)
    assert accepts(tok, written(calls, '{"a": 1}', '{"a":2}'), must, calls=calls)
    assert accepts(tok, written(calls, '{"b": [null]}', name="free"), must, calls=calls)
    assert not accepts(tok, written(calls, '{"a": 1}', '{"a":2}'), one, calls=calls)
    assert not accepts(tok, written(calls, '{"a": 3}'), must, calls=calls)
    assert not accepts(tok, written(calls, '{"a": 1}', name="subtract"), must, calls=calls)
    for text in ("", "hello", "hello " + written(calls, '{"a": 1}')):
        assert not accepts(tok, text, must, calls=calls)
    # The reader of calls, which clients depend on, reads what the grammar lets through.
    parts = [
        *(reader := ToolCallReader({"add", "free"})).push(written(calls, '{"a": 1}', '{"a":2}')),
        *reader.close(),
    ]
    assert [part["function"] for part in parts if isinstance(part, dict)] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]


@pytest.mark.parametrize("tok", [PLAIN, MARKED], ids=["plain", "marks are special tokens"])
@pytest.mark.parametrize("calls", FORMS)
def test_texts_are_free_and_calls_in_them_are_strict(tok: Any, calls: CallForm) -> None:
    free = AnswerForm(tools=TOOLS)
    right, wrong = written(calls, '{"a": 1}'), written(calls, '{"a": 3}')
    for text in ("", "hello", "a < b, and {} too", right):
        assert accepts(tok, text, free, calls=calls), text
    assert not accepts(tok, wrong, free, calls=calls)
    for other in FORMS:  # a call in another form would be read, too
        assert not accepts(tok, written(other, '{"a": 3}'), free, calls=calls), other
    if calls.trigger:
        assert accepts(tok, f"I look.\n{right}", free, calls=calls)
        assert not accepts(tok, f"I look.\n{wrong}", free, calls=calls)
    with_schema = AnswerForm(tools=TOOLS, schema={"type": "integer"})
    assert accepts(tok, "17", with_schema, calls=calls)
    assert accepts(tok, right, with_schema, calls=calls)
    assert not accepts(tok, "hello", with_schema, calls=calls)


@pytest.mark.parametrize("tok", [PLAIN, MARKED], ids=["plain", "marks are special tokens"])
def test_the_form_begins_after_a_thought(tok: Any) -> None:
    form = AnswerForm(schema={"type": "integer"})
    assert accepts(tok, "it is {odd} </think>\n\n17", form, "open")
    assert not accepts(tok, "it is odd </think>\n\nodd", form, "open")
    assert not accepts(tok, "17", form, "open")
    assert accepts(tok, "<think>\nodd</think>17", form, "possible")
    assert accepts(tok, "17", form, "possible")
    assert not accepts(tok, "odd</think>17", form, "possible")
    assert not accepts(tok, "<think>odd</think>17", form, "none")


def test_the_form_of_calls_is_seen_in_what_a_template_writes() -> None:
    for text, form in (
        ('<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>', TAGGED),
        ('[TOOL_CALLS] [{"name": "find", "arguments": {}}]', LISTED),
        ('[TOOL_CALLS][{"name": "find", "arguments": {}}]', LISTED),
        ("[TOOL_CALLS]find[ARGS]{}", NAMED),
        ("[TOOL_CALLS]find{}", NAMED_OBJECT),
        ('{"name": "find", "parameters": {}}', BARE),
        ("Action: find\nAction Input: {}", ACTION),
        ("", TAGGED),
    ):
        assert call_form_of(text) is form


SCHEMAS: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, [2, 3, 12, 13, "3", None]),
    ({"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.5}, [0, 0.5, 0.75, 7]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, ["", "a", "äöü", "abcd", 3]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc", "abd", ""]),
    ({"type": "string", "format": "date"}, ["2026-11-30", "yesterday"]),
    ({"enum": ["a", 1, None, [2]]}, ["a", 1, None, [2], "b", [3]]),
    ({"const": {"a": [True]}}, [{"a": [True]}, {"a": [False]}]),
    ({"type": ["string", "null"]}, ["a", None, 1]),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, [1, True, "a"]),
    ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [1, 2, 4, 5]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[], [1], [1, 2], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": False}, [[1, "a"], [2, "a"], [1, "a", 3]]),
    (NUMBER, [{"a": 1}, {"a": 3}, {}, {"a": 1, "b": 2}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1}, {"x": "1"}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, [{"x1": 1}, {"x1": "a"}, {"y": "a"}]),
    (
        {"$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["next"]}}, "$ref": "#/$defs/node"},
        [{"next": None}, {"next": {"next": None}}, {"next": {}}, {}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "values"), SCHEMAS)
def test_schemas_let_through_what_jsonschema_finds_valid(schema: dict[str, Any], values: list[Any]) -> None:
    jsonschema = needs.package("jsonschema")
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    texts = {json.dumps(value, ensure_ascii=False): value for value in values}
    found = {text: accepts(PLAIN, text, AnswerForm(schema=schema)) for text in texts}
    assert found == {text: checker.is_valid(value) for text, value in texts.items()}
    assert set(found.values()) == {True, False}


def test_masks_are_of_their_rows_and_end_with_the_form() -> None:
    grammars = TokenGrammars(PLAIN, stop_ids={END}, vocabulary=len(PLAIN) + 9)
    writer = GrammarWriter({}, TAGGED)
    two = [grammars.compile(writer.write(AnswerForm(schema={"const": value}), "none")) for value in (1, "a")]
    for text in ('1"', None):
        logits = torch.zeros(2, len(PLAIN) + 9)
        grammars.allow(logits, two)
        allowed = [PLAIN.decode(row.isfinite().nonzero()[:, 0]) for row in logits]
        if text is None:
            assert [grammar.is_over for grammar in two] == [True, False]
            assert allowed[1] == "a"
            break
        assert allowed == ["1", '"']
        for grammar, character in zip(two, text, strict=True):
            grammar.take(PLAIN.convert_tokens_to_ids(character))
    with pytest.raises(GrammarError):
        two[1].take(PLAIN.convert_tokens_to_ids("b"))


def test_a_tokenizer_that_cannot_be_read_is_refused() -> None:
    grammars = TokenGrammars(object(), stop_ids={END}, vocabulary=9)
    with pytest.raises(GrammarError, match="tokenizer"):
        grammars.check("start: /a/")
