"""Names in rows: keys of messages, columns, pictures; what is read of each, and what is refused by
its name.

Run: .venv/bin/python -m pytest tests/trainer/data/test_row_names.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from unisono.base.errors import DataError, Problem
from unisono.base.events import Reporter
from unisono.trainer.config.data_sections import COLUMN_NAMES
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.formats import COLUMNS, FormatName
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.data.row_names import MEDIA, READABLE
from unisono.trainer.data.token_table import TokenTable, collate
from unisono.trainer.plan import DataSummary

TokenizerDir = Callable[..., Path]
LF_TOKENIZER = Path(__file__).parents[2] / "trainer" / "readers" / "llamafactory" / "golden" / "tokenizer"
TEMPLATES = ["own", "lf:qwen3_nothink"]


class Sources:
    """Prepares rows, and decodes what was made of them."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.data: dict[str, Any] = {}

    def prepare(
        self, rows: list[Any], *, objective: str = "sft", data: dict[str, Any] | None = None, **source: Any
    ) -> DataSummary:
        file = self.folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        section = {"train": [{"path": str(file), **source}], "packing": False, **self.data, **(data or {})}
        config = RunConfig.model_validate(
            {"model": "m", "objective": objective, "data": section, "output_dir": "o"}
        )
        return prepare_data(
            config,
            tokenizer=self.tokenizer,
            vocab_size=10_000,
            cache_dir=self.folder / "cache",
            report=Reporter(None),
        )

    def texts(self, *given: Any, **more: Any) -> list[tuple[str, str]]:
        """Of each row all its text, and the part that counts in the loss."""
        from transformers import AutoTokenizer

        table = TokenTable.open(Path(self.prepare(*given, **more).cache_dir), "train")
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        rows = [table.row(i) for i in range(table.rows)]
        return [
            (tokenizer.decode(ids.tolist()), tokenizer.decode(ids[targets].tolist())) for ids, targets in rows
        ]

    def refused(self, *given: Any, **more: Any) -> list[Problem]:
        with pytest.raises(DataError) as caught:
            self.prepare(*given, **more)
        assert caught.value.exit_code == 2
        return list(caught.value.problems)


@pytest.fixture(params=TEMPLATES)
def both(request: pytest.FixtureRequest, tokenizer_dir: TokenizerDir, tmp_path: Path) -> Sources:
    """With a template of the tokenizer's own, and with one of LLaMA-Factory."""
    if request.param == "own":
        return Sources(tmp_path, tokenizer_dir())
    found = Sources(tmp_path, LF_TOKENIZER)
    found.data = {"template": request.param}
    return found


@pytest.fixture
def own(tokenizer_dir: TokenizerDir, tmp_path: Path) -> Sources:
    return Sources(tmp_path, tokenizer_dir())


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def talk(**flags: Any) -> dict[str, Any]:
    return {"messages": [user("a"), answer("bad", **flags), user("b"), answer("good")]}


# Flags of messages.

OFF: list[dict[str, Any]] = [
    {"weight": 0},
    {"weight": 0.0},
    {"train": False},
    {"loss": False},
    {"trainable": False},
    {"training": False},
    {"loss": 0},
]
ON: list[dict[str, Any]] = [
    {"weight": 1},
    {"weight": 1.0},
    {"train": True},
    {"loss": True},
    {"weight": None},
    {"weight": 1, "train": True},
]


def test_an_answer_that_a_flag_leaves_out_is_not_in_the_loss(both: Sources) -> None:
    for text, loss in both.texts([talk(**flag) for flag in OFF]):
        assert "bad" in text
        assert "bad" not in loss
        assert "good" in loss
    for _, loss in both.texts([talk(**flag) for flag in ON]):
        assert "bad" in loss


def test_an_answer_may_count_in_part(both: Sources) -> None:
    tables = [
        TokenTable.open(Path(both.prepare(rows).cache_dir), "train")
        for rows in ([talk(weight=0.25), talk(loss=0.001), talk()], [talk(), talk(weight=1)])
    ]
    quarter, least, full = (tables[0].weights(i) for i in range(3))
    half = len(full) // 2  # both answers have as many tokens, or nearly so
    assert set(quarter[: half - 1]) == {np.float32(0.25)}
    assert set(least[: half - 1]) == {np.float32(0.005)}  # weights are multiples of 1/200
    assert set(quarter[half + 1 :]) == set(full) == {np.float32(1)}
    assert collate(tables[0], [0, 2]).weights.tolist() == [*quarter, *full]  # type: ignore[union-attr]
    assert collate(tables[1], [0, 1]).weights is None


def test_flags_of_sharegpt_turns_count_too(both: Sources) -> None:
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "a", "weight": 0}, {"from": "gpt", "value": "bad", **flag},
                {"from": "human", "value": "b", "train": False}, {"from": "gpt", "value": "good"},
            ]
        }
        for flag in OFF
    ]  # fmt: skip
    for text, loss in both.texts(rows):
        assert "bad" in text
        assert "bad" not in loss
        assert "good" in loss


def test_flags_are_those_of_the_own_row_where_a_question_closes_an_answer(tmp_path: Path) -> None:
    sources = Sources(tmp_path, LF_TOKENIZER)
    sources.data = {"template": "lf:falcon"}
    table = TokenTable.open(Path(sources.prepare([talk(weight=0), talk()]).cache_dir), "train")
    without, whole = (table.row(i)[1] for i in (0, 1))
    assert np.count_nonzero(without) < np.count_nonzero(whole)
    assert not without[: len(without) // 2].any()


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_preferences_have_no_weights(both: Sources, objective: str) -> None:
    row = {"messages": [user("a")], "chosen": answer("b", weight=0.5), "rejected": answer("c")}
    assert "weight" in str(both.refused([row], objective=objective)[0])


def test_answer_ending_in_the_next_question_cannot_have_half_a_weight(tmp_path: Path) -> None:
    """It counts or it does not."""
    sources = Sources(tmp_path, LF_TOKENIZER)
    (problem,) = sources.refused([talk(weight=0.5)], data={"template": "lf:falcon"})
    assert "in lf:falcon the next question contains the end of an answer" in problem.why


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [user("a"), answer("b", weight=1.5)],
            "weight of message 2 is 1.5, neither false or true, nor a number",
        ),
        ([user("a"), answer("b", train="no")], "train of message 2 is 'no'"),
        (
            [user("a"), answer("b", train=True, weight=0)],
            "message 2 contradicts itself: weight: 0, train: True",
        ),
        ([user("a", train=True), answer("b")], "message 1 has train: true, and is not an answer"),
        ([user("a"), answer("b", loss=False)], "all its answers have weight 0"),
    ],
)
def test_a_flag_that_cannot_be_followed_makes_a_bad_row(both: Sources, messages: list[Any], why: str) -> None:
    (problem,) = both.refused([{"messages": messages}])
    assert why in problem.why


def test_where_every_token_counts_flags_have_no_effect_and_a_warning(own: Sources) -> None:
    (warning,) = own.prepare([talk(train=False)], data={"loss_on": "all"}).warnings
    assert "weight, train, loss, trainable, training in messages have no effect" in warning


# Other keys of messages.


def test_keys_that_nothing_reads_are_one_error_with_the_nearest_name(both: Sources) -> None:
    rows = [talk(), talk(wieght=0), talk(wieght=0, turn_identifier=3)] * 100
    for data in ({}, {"on_bad_row": "skip"}):
        (problem,) = both.refused(rows, data=data)
        assert problem.where.endswith("rows.jsonl:2")
        assert problem.why == "`wieght` × 200, `turn_identifier` × 100"
        assert "did you mean `weight` instead of `wieght`?" in problem.fix
        assert "data.ignore: [wieght, turn_identifier]" in problem.fix
    both.prepare(rows, data={"ignore": ["wieght", "turn_identifier"]})


def test_a_key_of_sharegpt_turns_that_nothing_reads_is_an_error_too(both: Sources) -> None:
    row = {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "tool_calls": [1]}]
    }
    (problem,) = both.refused([row])
    assert problem.why == "`tool_calls` × 1"


def test_an_ignored_key_is_not_read_even_if_it_could_be(both: Sources) -> None:
    ((_, loss),) = both.texts([talk(weight=0)], data={"ignore": ["weight"]})
    assert "bad" in loss


def test_null_and_empty_values_and_what_exports_carry_pass(both: Sources) -> None:
    exported: dict[str, Any] = {
        "refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": [], "citations": "", "extra": {},
        "name": "Ann", "id": "m1", "tool_call_id": "c1", "thought_signature": None,
    }  # fmt: skip
    own = [talk(**exported), talk(refusal="no", name=None)]
    assert len(both.texts(own)) == 2


def test_a_key_that_the_template_reads_is_known(own: Sources, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['mood'] or '' }}{{ m.content }}<|im_end|>\n{%"
        " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    row = {"messages": [user("a", mood="sad: "), answer("b")]}
    ((text, _),) = own.texts([row], data={"template": str(template)})
    assert "sad: a" in text
    assert "`mood`" in own.refused([row])[0].why


# Columns.


def test_the_known_names_are_those_that_the_formats_read() -> None:
    read = {name for needed, optional in COLUMNS.values() for name in (*needed, *optional)}
    of_heads = {"label", "labels", "anchor", "positive", "negative"}
    assert read | {"chosen", "rejected", "objects"} | of_heads | set(MEDIA) == set(COLUMN_NAMES)
    assert set(READABLE) == set(get_args(FormatName))


def test_a_column_that_no_row_has_is_refused_with_the_nearest(both: Sources) -> None:
    rows = [{"instruction": "Hi", "context": "ctx text", "response": "Yo"}] * 3
    (problem,) = both.refused(rows, columns={"output": "response", "input": "contxt"}, format="alpaca")
    assert "no row of" in problem.what
    assert "the column 'contxt', named in columns: {input: contxt}" in problem.what
    assert problem.where == "data.train.0.columns"
    assert problem.fix == "did you mean `context`?"
    (text, _), *_ = both.texts(rows, columns={"output": "response", "input": "context"})
    assert "Hi\nctx text" in text


def test_a_column_that_only_some_rows_have_passes(own: Sources) -> None:
    rows: list[Any] = [{"prompt": "a", "completion": "b"}] * 600 + [
        {"prompt": "a", "completion": "b", "sys": "Be kind."}
    ]
    *_, (text, _) = own.texts(rows, columns={"system": "sys"})
    assert "Be kind." in text


def test_a_column_that_the_format_does_not_read_is_refused(own: Sources) -> None:
    (problem,) = own.refused([talk() | {"reply": "x"}], columns={"output": "reply"})
    assert "rows of the format messages have no output" in problem.what


# The system column, and OpenAI's old form.


@pytest.mark.parametrize("columns", [{}, {"system": "system"}])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Hi"), answer("Salut")]},
        {"prompt": "Hi", "completion": "Salut"},
        {"prompt": [user("Hi")], "completion": [answer("Salut")]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Salut"}]},
    ],
)
def test_the_system_column_is_the_system_message(
    both: Sources, row: dict[str, Any], columns: dict[str, str]
) -> None:
    ((text, loss),) = both.texts([{"system": "Always answer in French.", **row}], columns=columns)
    assert "Always answer in French." in text
    assert loss.startswith("Salut")


def test_system_column_of_preferences_is_used_with_whole_conversations(
    own: Sources,
) -> None:
    row = {
        "system": "Always answer in French.",
        "chosen": [user("Hi"), answer("Salut")],
        "rejected": [user("Hi"), answer("Hello")],
    }
    ((text, _),) = own.texts([row], objective="dpo")
    assert "Always answer in French." in text


def test_two_different_system_messages_make_a_bad_row(own: Sources) -> None:
    leading = {"role": "system", "content": "Be brief."}
    row = {"system": "Be kind.", "messages": [leading, user("Hi"), answer("Yo")]}
    assert "two system messages" in own.refused([row])[0].why
    ((text, _),) = own.texts([row], columns={"system": None})
    assert "Be brief." in text
    own.prepare([row | {"system": "Be brief."}])


def test_the_tools_of_plain_prompts_are_rendered(own: Sources) -> None:
    row = {"prompt": "time?", "completion": "12", "tools": [{"name": "get_time"}]}
    assert "get_time" in own.texts([row])[0][0]


def test_openais_old_calls_are_tool_calls_and_functions_are_tools(both: Sources) -> None:
    call = {"name": "get_time", "arguments": '{"tz": "UTC"}'}
    function = {
        "name": "get_time", "description": "time",
        "parameters": {"type": "object", "properties": {"tz": {"type": "string"}}},
    }  # fmt: skip
    old = {
        "messages": [
            user("time?"), answer("", function_call=call), {"role": "function", "name": "get_time", "content": "12"},
            answer("Noon.", function_call=None),
        ],
        "functions": [function],
    }  # fmt: skip
    new = {
        "messages": [
            user("time?"), answer("", tool_calls=[{"type": "function", "function": call}]),
            {"role": "tool", "name": "get_time", "content": "12"}, answer("Noon."),
        ],
        "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    of_old, of_new = both.texts([old, new])
    assert of_old == of_new
    assert '"get_time"' in of_old[1]
    assert "12" in of_old[0]
    assert "description" in of_old[0]


def test_text_beside_an_old_call_is_kept(own: Sources) -> None:
    call = {"name": "get_time", "arguments": "{}"}
    row = {"messages": [user("time?"), answer("Let me look.", function_call=call)]}
    ((_, loss),) = own.texts([row])
    assert "Let me look." in loss
    assert "get_time" in loss


# Pictures.


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("<image>What?"), answer("cat")], "images": ["x.png"]},
        {"prompt": "What?", "completion": "cat", "image": {"bytes": None, "path": "x.png"}},
        {"instruction": "<video>What?", "output": "cat", "videos": ["x.mp4"]},
        {"messages": [user("<audio>What?"), answer("cat")], "audios": ["x.wav"]},
    ],
)
def test_a_row_with_a_picture_is_bad(both: Sources, row: dict[str, Any]) -> None:
    (problem,) = both.refused([row])
    column = next(name for name in MEDIA if name in row)
    assert re.search(f"it has .* in the column {column}, and this model reads text only", problem.why)
    text = {name: value for name, value in row.items() if name != column}
    assert both.prepare([row, text], data={"on_bad_row": "skip"}).ledger["bad"] == 1
    assert both.prepare([row], columns={column: None}).ledger["used"] == 1


def test_a_caption_is_no_text_to_train_on_alone(own: Sources) -> None:
    assert "it has a picture" in own.refused([{"text": "a cat", "image": "x.png"}])[0].why


@pytest.mark.parametrize("more", [{}, {"images": []}, {"images": None, "audio": ""}, {"images": [None]}])
def test_a_text_that_only_mentions_a_placeholder_passes(both: Sources, more: dict[str, Any]) -> None:
    ((text, _),) = both.texts(
        [{"messages": [user("What is <image> in a prompt?"), answer("A <video> too.")], **more}]
    )
    assert "What is <image> in a prompt?" in text
    assert "<video>" in text


# An answer that is somewhere else.


def test_an_answer_under_a_key_that_is_not_read_is_named(own: Sources) -> None:
    misnamed, problem = own.refused([{"messages": [user("q"), {"role": "assistant", "text": "a"}]}])
    assert misnamed.fix.startswith("did you mean `content` instead of `text`?")
    assert problem.why == "the answer in message 2 is empty, and its key text is not read"
    assert "write its text under `content`" in problem.fix
    (problem,) = own.refused([{"messages": [user("q"), answer("")]}])
    assert problem.why == "the answer in message 2 is empty"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"instruction": "q", "output": " ", "response": "a"}, "columns: {output: response}"),
        ({"prompt": "q", "completion": "", "answer": "a"}, "columns: {completion: answer}"),
    ],
)
def test_an_answer_in_a_column_that_is_not_read_is_named(
    own: Sources, row: dict[str, Any], column: str
) -> None:
    (problem,) = own.refused([row])
    name = list(row)[-1]
    assert f"is empty; the answer may be in {name}, which is not read" in problem.why
    assert f"set the source's {column}" in problem.fix
    assert "may be in" not in own.refused([{key: row[key] for key in list(row)[:2]}])[0].why


def test_an_answer_that_is_no_text_is_named(own: Sources) -> None:
    (problem,) = own.refused([{"question": "q", "answer": 5}])
    assert problem.fix == "answer is a number, not text: write it as text"


# Preferences.


def test_empty_first_answer_is_named_and_question_is_not_proposed_as_text(
    own: Sources,
) -> None:
    """Training on the questions is what nobody wants."""
    (problem,) = own.refused([{"question": "why?", "answer": None}, {"question": "who?", "answer": "we"}])
    assert problem.fix.startswith("answer is empty in this row: ")
    assert "columns: {instruction: question, output: answer}}] and data.on_bad_row: skip" in problem.fix


def test_answers_without_a_prompt_are_told_from_transcripts(own: Sources) -> None:
    row = {"chosen": "### User: hi\n### Bot: hello", "rejected": "### User: hi\n### Bot: go away"}
    (problem,) = own.refused([row], objective="dpo")
    assert problem.why == "its answers are text, and no column has the prompt"
    assert r"'### User: hi\n### Bot: '" in problem.fix


def test_transcripts_of_human_and_assistant_are_read_as_turns(both: Sources) -> None:
    before = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: so?\n\nAssistant: "
    row = {"chosen": before + "hello", "rejected": before + "go away"}
    ((text, loss),) = both.texts([row], objective="dpo")
    assert "yes?" in text
    assert "Human:" not in text
    assert "yes?" not in loss
    assert "hello" in loss


@pytest.mark.parametrize(("label", "other"), [(True, "undesirable"), (False, "desirable")])
def test_rated_answers_of_one_kind_have_a_warning(both: Sources, label: bool, other: str) -> None:  # noqa: FBT001
    rows = [{"prompt": f"a{i}", "completion": "good", "label": label} for i in range(4)]
    (warning,) = both.prepare(rows, objective="kto").warnings
    assert warning.startswith(f"all 4 rows for training have label: {str(label).lower()}")
    assert f"there is no {other} one (preference.{other}_weight has no effect)" in warning
    rows[0]["label"] = not label
    assert not both.prepare(rows, objective="kto").warnings


def test_it_is_the_rows_for_training_that_need_both_kinds(own: Sources) -> None:
    rows = [{"prompt": f"a{i}", "completion": "good", "label": True} for i in range(6)]
    bad = {"prompt": "a", "completion": "bad", "label": False}
    held_out = own.folder / "eval.jsonl"
    held_out.write_text(json.dumps(bad) + "\n", encoding="utf-8")
    warnings = own.prepare(rows, objective="kto", data={"eval": str(held_out)}).warnings
    assert any(warning.startswith("all 6 rows for training have label: true") for warning in warnings)
