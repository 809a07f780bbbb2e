"""Templates and encodings of LLaMA-Factory: equal to its own outputs, token by token.

Run: .venv/bin/python -m pytest tests/trainer/readers/llamafactory/test_lf_encoder.py
"""

import gzip
import json
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from unisono.base.errors import DataError
from unisono.trainer.config.named_templates import NO_TOKEN, named_template
from unisono.trainer.data import Exchange, RowError
from unisono.trainer.data.ingest import balance, fit
from unisono.trainer.data.preference_rows import read_exchange
from unisono.trainer.data.token_table import Encoded, EncodedUnit
from unisono.trainer.readers.llamafactory.encoder import LfEncoder, LfNamedTemplate
from unisono.trainer.readers.llamafactory.pieces import PieceTokens
from unisono.trainer.readers.llamafactory.template import find_lf_template, template_names

if TYPE_CHECKING:
    from unisono.trainer.data.encode import LossOn

HERE = Path(__file__).parent / "golden"
GOLDEN = json.loads(gzip.decompress((HERE / "golden.json.gz").read_bytes()))
MADE_ON = date(2026, 11, 21)
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
FORMATS: dict[str, tuple[str, dict[str, str | None]]] = {
    "identity": ("alpaca", {}),
    "alpaca_en_demo": ("alpaca", {}),
    "glaive_toolcall_en_demo": ("sharegpt", {}),
    "dpo_en_demo": ("preference", {}),
    "kto_en_demo": ("preference", OPENAI_TAGS),  # type: ignore[dict-item]
    "c4_demo": ("text", {}),
}
TEMPLATES = sorted({case["template"] for case in GOLDEN["cases"]})
Labels = list[int]


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(HERE / "tokenizer")


def make_encoder(template: str, **settings: Any) -> LfEncoder:
    found = find_lf_template(template)
    assert found is not None
    return LfEncoder(tokenizer(), found, today=MADE_ON, **settings)


def encoder_of(case: dict[str, Any], *, cutoff: int) -> LfEncoder:
    options = case["options"]
    loss_on: LossOn = "answers"
    if options.get("train_on_prompt"):
        loss_on = "all"
    elif options.get("mask_history"):
        loss_on = "last-answer"
    return make_encoder(case["template"], loss_on=loss_on, cut_at=cutoff, pretrain=case["stage"] == "pt")


def examples_of(dataset: str) -> list[Exchange]:
    name, tags = FORMATS[dataset]
    return [read_exchange(name, row, {}, tags) for row in GOLDEN["rows"][dataset]]


def assert_same(row: Encoded, ids: list[int | None], labels: Labels) -> None:
    assert [None if i == NO_TOKEN else i for i in row.ids.tolist()] == ids
    assert row.targets.tolist() == [False, *(label != -100 for label in labels[1:])]


def is_packed(case: dict[str, Any]) -> bool:
    return bool(case["options"].get("packing") or case["options"].get("neat_packing"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_golden_case_has_the_same_tokens_and_the_same_loss(template: str) -> None:
    cases = [case for case in GOLDEN["cases"] if case["template"] == template and not is_packed(case)]
    assert cases
    for case in cases:
        encoder = encoder_of(case, cutoff=case["options"].get("cutoff_len", 2048))
        check(case, encoder, examples_of(case["dataset"]))
        assert encoder.tokenizer.eos_token == case["eos"]
        assert (encoder.tokenizer.eos_token_id, encoder.tokenizer.pad_token_id) == (
            case["eos_id"],
            case["pad_id"],
        )
        ends = {case["eos_id"], *encoder.tokenizer.convert_tokens_to_ids(case["stop_words"])}
        assert encoder.stop_ids == ends


def check(case: dict[str, Any], encoder: LfEncoder, examples: list[Exchange]) -> None:
    out = case["out"]
    if case["stage"] == "rm":
        pairs = encoder.encode_pairs(examples)
        for i, pair in enumerate(pairs):
            assert isinstance(pair, EncodedUnit)
            for row, name in zip(pair.sides, ("chosen", "rejected"), strict=True):
                assert_same(row, out[f"{name}_input_ids"][i], out[f"{name}_labels"][i])
        return
    if case["stage"] == "kto":
        for i, rating in enumerate(encoder.encode_ratings(examples)):
            assert isinstance(rating, EncodedUnit)
            assert_same(rating.sides[0], out["input_ids"][i], out["labels"][i])
            assert_same(rating.sides[1], out["kl_input_ids"][i], out["kl_labels"][i])
            assert rating.label == out["kto_tags"][i]
        return
    rows = encoder.encode(examples)
    for found, ids, labels in zip(rows, out["input_ids"], out.get("labels", out["input_ids"]), strict=True):
        assert isinstance(found, Encoded)
        assert_same(found, ids, labels)


PACKED = [case for case in GOLDEN["cases"] if is_packed(case)]


@pytest.mark.parametrize("case", [c for c in PACKED if c["stage"] == "pt"], ids=lambda c: c["template"])
def test_packed_texts_have_the_same_tokens_before_they_are_cut_into_blocks(case: dict[str, Any]) -> None:
    rows = make_encoder(case["template"], pretrain=True).encode(examples_of(case["dataset"]))
    ours = list(chain.from_iterable(row.ids.tolist() for row in rows if isinstance(row, Encoded)))
    theirs = list(chain.from_iterable(case["out"]["input_ids"]))
    assert ours[: len(theirs)] == theirs  # the tail that LLaMA-Factory drops follows


@pytest.mark.parametrize(
    "case", [c for c in PACKED if c["stage"] == "sft_packed"], ids=lambda c: f"{c['template']}-{c['options']}"
)
def test_packed_rows_have_the_same_tokens_each_in_one_bin(case: dict[str, Any]) -> None:
    rows = encoder_of(case, cutoff=case["options"]["cutoff_len"] - 1).encode(examples_of(case["dataset"]))
    bins = [
        (ids, labels) for ids, labels in zip(case["out"]["input_ids"], case["out"]["labels"], strict=True)
    ]
    for row in rows:
        assert isinstance(row, Encoded)
        ids, loss = row.ids.tolist(), row.targets.tolist()
        found = [
            (first, labels)
            for theirs, labels in bins
            for first in range(len(theirs))
            if theirs[first : first + len(ids)] == ids
        ]
        assert len(found) == 1
        first, labels = found[0]
        assert [label != -100 for label in labels[first + 1 : first + len(ids)]] == loss[1:]


def test_the_golden_cases_are_all_there() -> None:
    assert len(GOLDEN["cases"]) == 297
    assert len(TEMPLATES) == 29


# ---- what the cases do not show


def encode_one(encoder: LfEncoder, row: dict[str, Any], name: str = "sharegpt") -> Encoded:
    (found,) = encoder.encode([read_exchange(name, row, {}, {})])
    assert isinstance(found, Encoded)
    return found


def trained_text(encoder: LfEncoder, row: Encoded) -> str:
    return encoder.tokenizer.decode(row.ids[row.targets].tolist())


TALK = {
    "conversations": [
        {"from": "human", "value": "first"},
        {"from": "gpt", "value": "<think>\nwhy\n</think>\n\none"},
        {"from": "human", "value": "second"},
        {"from": "gpt", "value": "two"},
    ]
}


@pytest.mark.parametrize(
    ("thinking", "trained"),
    [
        (True, "<think>\nwhy\n</think>\n\none<|im_end|>\n<think>\n\n</think>\n\ntwo<|im_end|>\n"),
        (None, "<think>\nwhy\n</think>\n\none<|im_end|>\ntwo<|im_end|>\n"),
        (False, "one<|im_end|>\ntwo<|im_end|>\n"),
    ],
)
def test_an_answer_without_a_thought_gets_an_empty_one(*, thinking: bool | None, trained: str) -> None:
    encoder = make_encoder("qwen3", thinking=thinking)
    row = encode_one(encoder, TALK)
    assert trained_text(encoder, row) == trained
    assert encoder.tokenizer.decode(row.ids.tolist()).count("<think>") == 2


def test_history_loses_its_thoughts_if_only_the_last_answer_is_trained() -> None:
    encoder = make_encoder("qwen3", loss_on="last-answer")
    text = encoder.tokenizer.decode(encode_one(encoder, TALK).ids.tolist())
    assert "why" not in text
    assert text.count("<think>") == 1
    assert text.endswith("<think>\n\n</think>\n\ntwo<|im_end|>\n")


def test_the_template_without_thinking_adds_none() -> None:
    encoder = make_encoder("qwen3_nothink")
    assert trained_text(encoder, encode_one(encoder, TALK)).endswith("one<|im_end|>\ntwo<|im_end|>\n")


@pytest.mark.parametrize("template", ["llama4", "gemma3", "qwen3_5", "qwen3_5_nothink"])
def test_text_rows_of_vision_models_need_no_image_processor(template: str) -> None:
    encoder = make_encoder(template)
    assert "two" in trained_text(encoder, encode_one(encoder, TALK))


def test_the_date_in_the_tool_prompt_is_the_given_one() -> None:
    tools = [{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}]
    row = {"conversations": TALK["conversations"], "tools": json.dumps(tools)}
    found = find_lf_template("llama3")
    assert found is not None
    encoder = LfEncoder(tokenizer(), found, today=date(2024, 3, 1))
    assert "Today Date: 01 Mar 2024" in encoder.tokenizer.decode(encode_one(encoder, row).ids.tolist())


def test_a_stop_word_that_is_no_token_is_added_with_a_warning() -> None:
    encoder = make_encoder("phi")
    assert any("<|end|>" in warning and "different families" in warning for warning in encoder.warnings)
    assert encoder.tokenizer.convert_tokens_to_ids("<|end|>") == 2000
    assert make_encoder("qwen").warnings == []


def test_a_misspelt_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match="qwen3_nothnk") as error:
        named_template("lf:qwen3_nothnk")
    assert "lf:qwen3_nothink" in error.value.problems[0].fix
    assert named_template("lf:wholly_other") is None
    assert named_template("template.jinja") is None


@pytest.mark.parametrize("template", ["gemma2", "glm4", "chatglm3", "gpt_oss", "falcon"])
def test_templates_ending_answers_in_next_question_refuse_prompt_training(template: str) -> None:
    with pytest.raises(DataError, match="cannot train on prompts"):
        make_encoder(template, loss_on="all")


def test_an_unknown_call_or_tool_makes_a_row_bad_and_leaves_the_others() -> None:
    encoder = make_encoder("qwen")
    turns = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "not JSON"}]
    bad = read_exchange("sharegpt", {"conversations": turns}, {}, {})
    good = read_exchange("sharegpt", TALK, {}, {})
    found = encoder.encode([bad, good])
    assert isinstance(found[0], RowError)
    assert isinstance(found[1], Encoded)


def test_the_answer_for_the_comparison_is_that_of_the_row_before() -> None:
    encoder = make_encoder("qwen3_nothink")
    rows = [{"instruction": f"q{i}", "output": f"a{i}", "label": i != 1} for i in range(3)]
    found = encoder.encode_ratings([read_exchange("preference", row, {}, {}) for row in rows])
    ratings = [one for one in found if isinstance(one, EncodedUnit)]
    assert [one.label for one in ratings] == [True, False, True]
    answers = [trained_text(encoder, one.sides[1]).removesuffix("<|im_end|>\n") for one in ratings]
    assert answers == ["a2", "a0", "a1"]


def test_an_empty_answer_is_not_desirable() -> None:
    rows = [{"instruction": "q", "output": text, "label": True} for text in ("", "a")]
    examples = [read_exchange("preference", row, {}, {}) for row in rows]
    found = make_encoder("qwen").encode_ratings(examples)
    assert [one.label for one in found if isinstance(one, EncodedUnit)] == [False, True]


def test_a_cut_row_knows_how_many_tokens_it_lost() -> None:
    whole = encode_one(make_encoder("qwen3_nothink"), TALK)
    cut = encode_one(make_encoder("qwen3_nothink", cut_at=16), TALK)
    assert (len(cut.ids), cut.cut) == (16, len(whole.ids) - 16)
    assert whole.cut == 0


@pytest.mark.parametrize(
    ("source", "target", "limit", "kept"),
    [(100, 10, 50, (40, 10)), (10, 100, 50, (10, 40)), (100, 100, 50, (25, 25)), (5, 5, 50, (5, 5)), (60, 30, 45, (30, 15))],
)  # fmt: skip
def test_the_shorter_side_stays_whole_and_else_both_shrink(
    source: int, target: int, limit: int, kept: tuple[int, int]
) -> None:
    assert balance(source, target, limit) == kept


def test_rows_of_other_templates_are_cut_turn_by_turn_too() -> None:
    targets = np.array([False] * 40 + [True] * 4 + [False] * 40 + [True] * 40 + [False])
    row = Encoded(np.arange(len(targets), dtype=np.int32), targets)
    fitted = fit(row, max_length=64, too_long="balanced")
    (piece,) = fitted.pieces
    assert len(piece.ids) == 64
    assert piece.ids[:44].tolist() == list(range(44))  # the first pair is whole
    assert piece.ids[44:54].tolist() == list(range(44, 54))
    assert piece.ids[54:].tolist() == list(range(84, 94))
    assert piece.targets[54:].all()
    assert (fitted.what, fitted.tokens_cut) == ("cut", len(targets) - 64)


# ---- the same prompts as a chat template


@pytest.mark.parametrize("template", [*sorted(set(TEMPLATES) - {"chatglm3"}), "llama4", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("thinking", [True, False])
def test_the_chat_template_renders_the_prompt_of_training(template: str, *, thinking: bool) -> None:
    encoder = make_encoder(template, thinking=thinking)
    chat = encoder.template
    assert chat is not None
    messages = [
        {"role": "system", "content": "Be 'brief'."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\none"},
        {"role": "user", "content": "second"},
    ]
    for some in (messages, messages[1:], messages[:2], messages[1:2]):
        ids = chat.prompt_ids(some)
        assert chat.render(some, prompt=True) == encoder.tokenizer.decode(ids)


TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": 'Today\'s "weather" – in a town',
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "description": "its name", "enum": ["Köln", "Bern"]},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["town"],
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
CALLS = [
    {"type": "function", "function": {"name": "weather", "arguments": {"town": "Köln", "days": [1, 2]}}},
    {"type": "function", "function": {"name": "now", "arguments": {}}},
]
WRITES_TOOLS = [
    name
    for name in sorted({*TEMPLATES, "llama4"} - {"chatglm3"})
    if (found := find_lf_template(name)) and found.tool_format in ("default", "qwen", "llama3")
]  # fmt: skip


@pytest.mark.parametrize("template", WRITES_TOOLS)
def test_the_chat_template_renders_tools_calls_and_results_as_the_slots_do(template: str) -> None:
    chat = make_encoder(template, thinking=None).template
    assert chat is not None
    assert chat.writer is not None
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "rain"},
    ]
    for messages in (conversation, conversation[1:], conversation[:2], conversation[1:2]):
        asked = [*messages, {"role": "assistant", "content": ""}]
        exchange = read_exchange("messages", {"messages": asked, "tools": TOOLS}, {})
        pieces = chat.writer.question(exchange, exchange.answers[0]).source
        ids = PieceTokens(chat.tokenizer).of([pieces])[0]
        assert chat.render(messages, TOOLS, prompt=True) == chat.tokenizer.decode(ids)


@pytest.mark.parametrize("template", ["glm4", "qwen3_5", "mistral"])
def test_a_chat_template_of_other_tool_formats_refuses_tools(template: str) -> None:
    chat = make_encoder(template).template
    assert chat is not None
    with pytest.raises(RowError, match="writes no tools"):
        chat.render([{"role": "user", "content": "q"}], TOOLS, prompt=True)


def test_the_prompt_has_the_tokens_of_the_training_row() -> None:
    for template in sorted(set(TEMPLATES) - {"gpt_oss"}):
        encoder = make_encoder(template, thinking=None)
        row = encode_one(encoder, {"instruction": "What is it?\n\n", "output": "an answer"}, "alpaca")
        chat = encoder.template
        assert chat is not None
        prompt = chat.prompt_ids([{"role": "user", "content": "What is it?\n\n"}])
        assert row.ids[: len(prompt)].tolist() == prompt
        assert not row.targets[: len(prompt)].any()
        assert row.targets[len(prompt)]


@pytest.mark.parametrize("template", ["qwen", "llama2", "gemma", "qwen3_nothink"])
def test_a_default_system_message_is_that_of_rows_without_one(template: str) -> None:
    row = {"instruction": "q", "output": "a"}

    def ids(encoder: LfEncoder, **more: str) -> list[int]:
        return encode_one(encoder, row | more, "alpaca").ids.tolist()

    found = named_template(f"lf:{template}", system="Be brief.")
    assert isinstance(found, LfNamedTemplate)
    encoder, plain = LfEncoder(tokenizer(), found.template), make_encoder(template)
    assert ids(encoder) == ids(plain, system="Be brief.") != ids(plain)
    assert ids(encoder, system="Be long.") == ids(plain, system="Be long.")
    asked = [{"role": "user", "content": "q"}]
    assert encoder.template is not None
    assert plain.template is not None
    assert encoder.template.render(asked, prompt=True) == plain.template.render(
        [{"role": "system", "content": "Be brief."}, *asked], prompt=True
    )


def test_an_empty_default_system_message_takes_away_that_of_the_template() -> None:
    found = named_template("lf:qwen", system="")
    assert isinstance(found, LfNamedTemplate)
    encoder = LfEncoder(tokenizer(), found.template)
    text = encoder.tokenizer.decode(
        encode_one(encoder, {"instruction": "q", "output": "a"}, "alpaca").ids.tolist()
    )
    assert text.startswith("<|im_start|>user\nq")


def test_openai_rows_are_read_with_all_oddities_of_their_formatting() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "not read"},
    ]
    found = read_exchange("openai", {"messages": messages}, {})
    assert found.system == "detailed thinking off"
    assert [turn.role for turn in found.prompt] == ["user", "function", "observation"]
    assert json.loads(found.prompt[1].content) == [{"name": "f", "arguments": {}}]
    assert found.prompt[2].content == "1\n</tool_response>\n<tool_response>\n2"
    assert found.answers[0].content == "a"
    with pytest.raises(RowError, match="ends with a question"):
        read_exchange("messages", {"messages": messages}, {})
    assert read_exchange("messages", {"messages": messages[:-1]}, {}).system == ""


def test_the_how_to_lists_all_templates() -> None:
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "from-llamafactory.md").read_text(
        encoding="utf-8"
    )
    assert ", ".join(f"`{name}`" for name in template_names()) in page
