"""Preference rows: what is read, that a unit keeps its sides and their prompt, and refusals.

Run: .venv/bin/python -m pytest tests/trainer/data/test_preference_rows.py
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data import ingest
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.preference_rows import read_preference, turns_of_transcript
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.data.token_table import EncodedUnit, TokenTable, collate
from unisono.trainer.data.tokenizer import load_tokenizer
from unisono.trainer.plan import DataSummary

TokenizerDir = Callable[..., Path]

USER = {"role": "user", "content": "why?"}
GOOD, POOR = {"role": "assistant", "content": "because"}, {"role": "assistant", "content": "no idea"}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [POOR]}
RATED = {"prompt": [USER], "completion": [GOOD], "label": True}


def write(path: Path, rows: list[Any]) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def make_config(folder: Path, rows: list[Any], objective: str = "dpo", **data: Any) -> RunConfig:
    train = write(folder / "rows.jsonl", rows)
    settings_of_data = {"train": train, "max_length": 512, "packing": False, **data}
    return RunConfig.model_validate(
        {"model": "m", "objective": objective, "data": settings_of_data, "output_dir": "o"}
    )


def prepare(config: RunConfig, tokenizer: Path, folder: Path) -> tuple[DataSummary, dict[str, Any]]:
    summary = prepare_data(
        config, tokenizer=tokenizer, vocab_size=None, cache_dir=folder / "cache", report=Reporter(None), ledger=folder / "data.json",
    )  # fmt: skip
    return summary, json.loads((folder / "data.json").read_text(encoding="utf-8"))


def table_of(summary: DataSummary) -> TokenTable:
    return TokenTable.open(Path(summary.cache_dir), "train")


def refusal(config: RunConfig, tokenizer: Path, folder: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        prepare(config, tokenizer, folder)
    assert caught.value.exit_code == 2
    return caught.value


Side = tuple[str, str]
"""The text of a prompt, and of the answer in the loss."""


def sides_of(table: TokenTable, i: int, tokenizer: Any) -> list[Side]:
    found = []
    for side in range(table.sides):
        ids, targets = table.row(i, side)
        found.append((tokenizer.decode(ids[~targets]), tokenizer.decode(ids[targets])))
    return found


# What is read.

_SYSTEM = {"role": "system", "content": "be kind"}
_PROMPT = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
_OWN_SYSTEM = "<|im_start|>system\nYou are a careful assistant.<|im_end|>\n"  # of the template
_SAME = [
    {"prompt": "why?", "chosen": "because", "rejected": "no idea"},
    {"prompt": "why?", "chosen": GOOD, "rejected": [POOR]},
    {"prompt": [USER], "chosen": "because", "rejected": POOR},
    {"prompt": "why?", "chosen": [USER, GOOD], "rejected": [USER, POOR]},
    {"chosen": [USER, GOOD], "rejected": [USER, POOR]},
    {"instruction": "why?", "chosen": "because", "rejected": "no idea"},
    {"messages": [USER], "chosen": "because", "rejected": "no idea"},
    {"conversations": [{"from": "human", "value": "why?"}], "chosen": {"from": "gpt", "value": "because"},
     "rejected": {"from": "gpt", "value": "no idea"}},
    {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([POOR])},
    {"chosen": "\n\nHuman: why?\n\nAssistant: because", "rejected": "\n\nHuman: why?\n\nAssistant: no idea"},
    {"question": "why?", "chosen": "because", "rejected": "no idea"},
]  # fmt: skip


@pytest.mark.parametrize("row", _SAME, ids=range(len(_SAME)))
def test_all_ways_to_write_a_pair_give_the_same_tokens(
    row: dict[str, Any], tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    summary, _ = prepare(make_config(tmp_path, [row]), tokenizer_dir(), tmp_path)
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    chosen, rejected = sides_of(table_of(summary), 0, tokenizer)
    assert chosen == (_OWN_SYSTEM + _PROMPT, "because<|im_end|>")
    assert rejected == (_OWN_SYSTEM + _PROMPT, "no idea<|im_end|>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: a\n\nb: c\n\nAssistant: d",
            [("user", "hi"), ("assistant", "yes?"), ("user", "a\n\nb: c"), ("assistant", "d")],
        ),
        ("\r\n\r\nHuman: hi\r\n\r\nAssistant: a\r\nb", [("user", "hi"), ("assistant", "a\r\nb")]),
        ("Human: hi\n\nAssistant:", [("user", "hi"), ("assistant", "")]),
        ("\n\nHuman: a Human: b\n\nAssistant: c", [("user", "a Human: b"), ("assistant", "c")]),
        ("\n\nHuman: hi", None),
        ("Say:\n\nHuman: hi\n\nAssistant: d", None),
        ("\n\nAssistant: hi\n\nHuman: d", None),
        ("### Human: hi\n### Assistant: d", None),
        (5, None),
    ],
)
def test_a_transcript_is_turns_of_human_and_assistant_from_its_first_word(
    text: object, expected: list[tuple[str, str]] | None
) -> None:
    turns = turns_of_transcript(text)
    assert (None if turns is None else [(turn["role"], turn["content"]) for turn in turns]) == expected


def test_transcripts_share_all_turns_but_the_last(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    before = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: why?\n\nAssistant: "
    row = {"chosen": before + "because", "rejected": before + "no idea"}
    summary, _ = prepare(make_config(tmp_path, [row]), tokenizer_dir(), tmp_path)
    assert "transcripts of Human: and Assistant: turns" in summary.formats[0]
    chosen, rejected = sides_of(
        table_of(summary), 0, load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    )
    assert chosen[0] == rejected[0]
    assert chosen[0].endswith("assistant\nyes?<|im_end|>\n" + _PROMPT)
    assert (chosen[1], rejected[1]) == ("because<|im_end|>", "no idea<|im_end|>")
    other = row | {"rejected": row["rejected"].replace("yes?", "no?")}
    assert (
        "different prompts"
        in refusal(make_config(tmp_path, [row, other]), tokenizer_dir(), tmp_path).problems[0].why
    )


def test_a_transcript_after_a_prompt_is_an_answer(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    row = {"prompt": "why?", "chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"}
    summary, _ = prepare(make_config(tmp_path, [row]), tokenizer_dir(), tmp_path)
    chosen, _ = sides_of(table_of(summary), 0, load_tokenizer(tokenizer_dir(), trust_remote_code=False))
    assert chosen[1] == row["chosen"] + "<|im_end|>"


def test_only_a_reward_model_sees_template_text_after_the_stop_token(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    """Its users score whole rendered rows; the model of the other objectives never writes it."""
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    rendered = tokenizer.apply_chat_template([USER, GOOD], tokenize=False)
    assert rendered.endswith("<|im_end|>\n")
    for objective, whole in (("reward", True), ("dpo", False), ("orpo", False), ("simpo", False)):
        summary, _ = prepare(make_config(tmp_path, [PAIR], objective), tokenizer_dir(), tmp_path)
        text = tokenizer.decode(table_of(summary).row(0, 0)[0])
        assert text == (rendered if whole else rendered.removesuffix("\n")), objective


_RATINGS = [
    {"prompt": "why?", "completion": "because"},
    {"prompt": [USER], "completion": [GOOD]},
    {"messages": [USER, GOOD]},
    {"instruction": "why?", "output": "because"},
    {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}]},
]


@pytest.mark.parametrize("row", _RATINGS, ids=range(len(_RATINGS)))
def test_all_ways_to_write_a_rated_answer_give_the_same_tokens(
    row: dict[str, Any], tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    rows = [row | {"label": False}, {"prompt": "q", "completion": "other", "label": True}]
    summary, _ = prepare(make_config(tmp_path, rows, "kto"), tokenizer_dir(), tmp_path)
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    table = table_of(summary)
    assert sides_of(table, 0, tokenizer) == [
        (_OWN_SYSTEM + _PROMPT, "because<|im_end|>"),
        (_OWN_SYSTEM + _PROMPT, "other<|im_end|>"),
    ]
    assert table.columns["label"].tolist() == [0, 1]


def test_history_system_and_tools_are_in_the_prompt_of_both_sides(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    turns = [USER, GOOD, USER]
    rows = [
        {"prompt": turns, "system": "be kind", "chosen": "a", "rejected": "b", "tools": tools},
        {"instruction": "why?", "history": [["why?", "because"]], "system": "be kind", "chosen": "a", "rejected": "b",
         "tools": tools},
        {"prompt": [_SYSTEM, *turns], "chosen": "a", "rejected": "b", "tools": tools},
    ]  # fmt: skip
    summary, _ = prepare(make_config(tmp_path, rows), tokenizer_dir(), tmp_path)
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    table = table_of(summary)
    found = [sides_of(table, i, tokenizer) for i in range(3)]
    assert found[0] == found[1] == found[2]
    (chosen_prompt, chosen), (rejected_prompt, rejected) = found[0]
    assert chosen_prompt == rejected_prompt
    assert "be kind" in chosen_prompt
    assert "look_up" in chosen_prompt
    assert chosen_prompt.count("because") == 1
    assert (chosen, rejected) == ("a<|im_end|>", "b<|im_end|>")


def test_strings_without_a_template_are_joined(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    folder = tokenizer_dir(None)
    rows = [{"prompt": "Question: ", "chosen": "yes", "rejected": "no"}]
    summary, _ = prepare(make_config(tmp_path, rows), folder, tmp_path)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    texts = [
        tokenizer.decode(table_of(summary).row(0, side)[0], skip_special_tokens=False) for side in (0, 1)
    ]
    assert texts == ["Question: yes<|im_end|>", "Question: no<|im_end|>"]


# Units.

_texts = st.text(alphabet="ab \n?", min_size=1, max_size=30).filter(lambda text: bool(text.strip()))
_pairs = st.builds(
    lambda prompt, chosen, rejected: {"prompt": prompt, "chosen": chosen, "rejected": rejected}, _texts, _texts, _texts
)  # fmt: skip
_pair_rows = st.lists(
    st.one_of(_pairs, st.just({"prompt": "p", "chosen": "a"}), st.just({"prompt": "p", "chosen": "a", "rejected": "a"})),
    max_size=12,
)  # fmt: skip


_AROUND = 26  # tokens that the template puts around a prompt and an answer


def prompt_of(table: TokenTable, i: int, side: int) -> list[int]:
    ids, targets = table.row(i, side)
    return ids[: int(targets.argmax())].tolist()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    rows=[{"prompt": "?", "chosen": "???", "rejected": "???"}],
    too_long="drop",
    template="chatml_tools",
    share=None,
    room=8,
    packing=False,
    weight=0.5,
)
@given(
    rows=_pair_rows,
    too_long=st.sampled_from(["cut", "balanced", "drop", "keep-answer"]),
    template=st.sampled_from(["chatml_tools", None]),
    share=st.sampled_from([None, 0.3]),
    room=st.integers(8, 40),
    packing=st.booleans(),
    weight=st.sampled_from([0.5, 1.0, 2.0, 2.5]),
)
def test_pairs_stay_whole_with_one_prompt_and_the_ledger_adds_up(
    tokenizer_dir: TokenizerDir,
    rows: list[Any],
    too_long: str,
    template: str | None,
    share: float | None,
    room: int,
    weight: float,
    *,
    packing: bool,
) -> None:
    rows = [*({"prompt": "p", "chosen": "a", "rejected": other} for other in "bcde"), *rows]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = {"path": write(folder / "weighted.jsonl", rows), "weight": weight}
        limit = room + (_AROUND if template else 0)
        config = make_config(
            folder, [], train=[source], too_long=too_long, max_length=limit, packing=packing, on_bad_row="skip", eval=share
        )  # fmt: skip
        summary, ledger = prepare(config, tokenizer_dir(template), folder)
        total = ledger["total"]
        assert total["rows"] == len(rows) == total["used"] + sum(total["dropped"].values()) + total["bad"]
        too_long_rows = sum(total["dropped"].values()) if too_long == "drop" else 0
        equal_sides = sum(row["chosen"] == row.get("rejected", row["chosen"]) for row in rows)
        assert total["bad"] + too_long_rows >= equal_sides
        tokens = used = 0
        for split in ("train", "eval") if share else ("train",):
            table = TokenTable.open(Path(summary.cache_dir), split)
            assert table.sides == 2
            places = [int(row) for s in range(table.sequences) for row in table.rows_of(s)]
            often = [places.count(i) for i in range(table.rows)]
            assert set(often) <= ({math.floor(weight), math.ceil(weight)} - {0} if split == "train" else {1})
            tokens += int(table.columns["length"] @ np.array(often))
            used += table.rows
            for i in range(table.rows):
                lengths = [len(table.row(i, side)[0]) for side in (0, 1)]
                assert max(lengths) <= limit
                assert table.columns["length"][i] == sum(lengths)
                assert table.columns["loss"][i] == sum(len(table.labels(i, side)) for side in (0, 1))
                assert prompt_of(table, i, 0) == prompt_of(table, i, 1)
                assert table.row(i, 0)[0].tolist() != table.row(i, 1)[0].tolist()
            for s in range(table.sequences):
                batch = collate(table, [s], sides=(0, 1))
                assert len(batch.lengths) == 2 * len(batch.units) == len(batch.loss_counts)
                assert batch.tokens == sum(batch.lengths) == int(table.sequence_tokens()[s])
                assert batch.tokens <= 2 * limit
                assert sum(batch.loss_counts) == len(batch.labels) == int(table.sequence_loss_tokens()[s])
        assert (used, tokens) == (total["used"], total["tokens"])


def test_a_token_across_prompt_and_answer_belongs_to_the_answers(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    folder = tokenizer_dir(None)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    assert tokenizer.tokenize("is there") == ["is", "Ġthere"]
    rows = [{"prompt": "is the", "chosen": "re", "rejected": "m"}]
    summary, _ = prepare(make_config(tmp_path, rows), folder, tmp_path)
    table = table_of(summary)
    assert prompt_of(table, 0, 0) == prompt_of(table, 0, 1)
    assert [tokenizer.decode(table.row(0, side)[0]) for side in (0, 1)] == [
        "is there<|im_end|>",
        "is them<|im_end|>",
    ]
    assert [tokenizer.decode(prompt_of(table, 0, side)) for side in (0, 1)] == ["is", "is"]


def _said(text: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("template", "end"),
    [("chatml_tools", "<|im_end|>"), ("forced_thinking", "<|im_end|>"), ("headers", "<|eot_id|>"), ("inst", "</s>"),
     ("marked", "<|im_end|>"), ("thinking", "<|im_end|>"), ("turns", "<end_of_turn>")],
)  # fmt: skip
def test_every_template_gives_both_sides_one_prompt(
    template: str, end: str, tokenizer_dir: TokenizerDir
) -> None:
    folder = tokenizer_dir(template, eos=end)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    encoder = Encoder(tokenizer, directory=folder, loss_on="last-answer", thoughts="ignore")
    prompts = [[USER], [USER, _said("<think>\nwell\n</think>\n\nok"), USER]]
    answers = [
        _said("yes"),
        _said("\nno"),
        _said("<think>\nhm\n</think>\n\nyes"),
        _said("  lead"),
        _said("x", reasoning_content="deep"),
    ]
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in prompts
        for chosen in answers
        for rejected in answers
        if chosen is not rejected
    ]
    units = encoder.encode_pairs([read_preference(row, {}) for row in rows])
    for unit in units:
        assert isinstance(unit, EncodedUnit)
        begins = [int(side.targets.argmax()) for side in unit.sides]
        assert begins[0] == begins[1] > 0
        assert unit.sides[0].ids[: begins[0]].tolist() == unit.sides[1].ids[: begins[1]].tolist()
        for side in unit.sides:
            trained = side.ids[side.targets]
            assert trained.tolist() == side.ids[begins[0] : begins[0] + len(trained)].tolist()
            assert trained[-1] == tokenizer.convert_tokens_to_ids(end)


# Mismatched answers.


def mismatches(table: TokenTable, tokenizer: Any) -> Iterator[tuple[str, str]]:
    for i in range(table.rows):
        (_, own), (_, other) = sides_of(table, i, tokenizer)
        yield own.removesuffix("<|im_end|>"), other.removesuffix("<|im_end|>")


_rated_rows = st.one_of(
    st.builds(
        lambda answer, label: {"prompt": "p", "completion": answer, "label": label},
        st.text(alphabet="abc", min_size=1, max_size=4),
        st.booleans(),
    ),
    st.sampled_from(
        [
            {"prompt": "p", "completion": "a", "label": "x"},
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            "{",
        ]
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(_rated_rows, max_size=12), group=st.integers(1, 5), packing=st.booleans())
def test_mismatched_answers_are_a_function_of_the_rows(
    tokenizer_dir: TokenizerDir, rows: list[Any], group: int, *, packing: bool
) -> None:
    rows = [{"prompt": "p", "completion": "first", "label": True}, *rows]
    good = [row for row in rows if isinstance(row, dict) and isinstance(row.get("label"), bool)]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest, "_RATED_BATCH", group)
        config = make_config(Path(name), rows, "kto", packing=packing, on_bad_row="skip")
        summary, ledger = prepare(config, tokenizer_dir(), Path(name))
        table = table_of(summary)
        found = list(mismatches(table, load_tokenizer(tokenizer_dir(), trust_remote_code=False)))
    expected = []
    for first in range(0, len(good), group):
        answers = [row["completion"] for row in good[first : first + group]]
        expected += list(zip(answers, [answers[-1], *answers[:-1]], strict=True))
    assert found == expected
    assert table.columns["label"].tolist() == [int(row["label"]) for row in good]
    assert (ledger["total"]["used"], ledger["total"]["bad"]) == (len(good), len(rows) - len(good))


def test_mismatched_answer_is_of_the_readable_row_before_in_its_group(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    rows: list[Any] = [{"prompt": "q", "completion": f"a{i}", "label": i % 2 == 0} for i in range(1003)]
    rows.insert(1, {"prompt": "q", "completion": " ", "label": True})
    rows.insert(500, {"prompt": "q", "completion": "x", "label": "yes"})
    config = make_config(tmp_path, rows, "kto", on_bad_row="skip")
    summary, ledger = prepare(config, tokenizer_dir(), tmp_path)
    assert (ledger["total"]["used"], ledger["total"]["bad"]) == (1003, 2)
    table = table_of(summary)
    found = list(mismatches(table, load_tokenizer(tokenizer_dir(), trust_remote_code=False)))
    before = [999, *range(999), 1002, 1000, 1001]
    assert found == [(f"a{i}", f"a{before[i]}") for i in range(1003)]
    assert table.columns["label"].tolist() == [int(i % 2 == 0) for i in range(1003)]


def test_mismatched_answers_are_of_one_source_with_any_packing_or_split(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    """Packing and a split for evaluation do not change which answer a row is paired with."""
    first = write(
        tmp_path / "1.jsonl", [{"prompt": "q", "completion": f"a{i}", "label": True} for i in range(3)]
    )
    second = write(tmp_path / "2.jsonl", [{"prompt": "q", "completion": "b", "label": False}])
    found = []
    for data in ({}, {"packing": True}, {"eval": 1}):
        config = make_config(tmp_path, [], "kto", train=[first, second], **data)
        summary, _ = prepare(config, tokenizer_dir(), tmp_path)
        found.append(
            set(mismatches(table_of(summary), load_tokenizer(tokenizer_dir(), trust_remote_code=False)))
        )
        assert any("own mismatched answer" in warning for warning in summary.warnings)
    assert found[0] == found[1] == {("a0", "a2"), ("a1", "a0"), ("a2", "a1"), ("b", "b")}
    assert found[2] < found[0]


def test_a_long_mismatched_answer_is_cut_and_costs_no_row(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": "q", "completion": "b " * 99, "label": True},
    ]
    config = make_config(tmp_path, rows, "kto", max_length=40, too_long="drop")
    summary, ledger = prepare(config, tokenizer_dir(), tmp_path)
    assert ledger["total"]["dropped"] == {"too_long": 1}
    table = table_of(summary)
    assert table.rows == 1
    assert len(table.row(0, 1)[0]) == 40
    assert summary.train.longest_row == 40


# Digests.


def test_the_digest_covers_labels_and_sides(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    digests = set()
    for label in (True, False):
        config = make_config(tmp_path, [RATED | {"label": label}], "kto")
        digests.add(prepare(config, tokenizer_dir(), tmp_path)[0].rows_digest)
    for row in (PAIR, PAIR | {"chosen": [POOR], "rejected": [GOOD]}):
        digests.add(prepare(make_config(tmp_path, [row]), tokenizer_dir(), tmp_path)[0].rows_digest)
    both = [{"prompt": [USER], "completion": [answer]} for answer in (GOOD, POOR)]
    digests.add(prepare(make_config(tmp_path, both, "sft"), tokenizer_dir(), tmp_path)[0].rows_digest)
    assert len(digests) == 5


# Refusals.

_LONG = "x " * 60


@pytest.mark.parametrize(
    ("objective", "row", "words"),
    [
        ("dpo", {"prompt": "p", "chosen": "a"}, "it has a chosen answer, but no rejected one"),
        ("dpo", {"prompt": "p", "rejected": "a", "chosen": None}, "it has a rejected answer, but no chosen one"),
        ("dpo", {"prompt": "p", "chosen": "a", "rejected": " "}, "rejected is empty"),
        ("dpo", {"prompt": "p", "chosen": [GOOD], "rejected": [{"role": "assistant", "content": ""}]}, "rejected is empty"),
        ("dpo", {"prompt": "p", "chosen": "a", "rejected": "a"}, "are equal"),
        ("dpo", {"prompt": "p", "chosen": _LONG + "a", "rejected": _LONG + "b"}, "equal up to the cut"),
        ("dpo", {"prompt": _LONG, "chosen": "a", "rejected": "b"}, "none of its tokens counts in the loss"),
        ("dpo", {"chosen": "a", "rejected": "b"}, "it has no prompt"),
        ("dpo", {"chosen": "\n\nHuman: hi\n\nAssistant:", "rejected": "\n\nHuman: hi\n\nAssistant: b"}, "the answer in chosen is empty"),
        ("dpo", {"chosen": [USER, GOOD], "rejected": [GOOD, USER]}, "ends with a message of user"),
        ("dpo", {"chosen": [USER, GOOD], "rejected": [_SYSTEM, USER, POOR]}, "different prompts"),
        ("dpo", {"prompt": "p", "chosen": 5, "rejected": "b"}, "chosen is a number"),
        ("reward", RATED, "objective reward needs a chosen and a rejected answer"),
        ("kto", PAIR, "two rows, one for each answer"),
        ("kto", RATED | {"label": "true"}, "label is 'true', not a boolean"),
        ("kto", RATED | {"label": 1}, "label is 1, not a boolean"),
        ("kto", {"messages": [USER], "label": True}, "ends with a message of user"),
        ("dpo", PAIR | {"rejected": [POOR | {"weight": 0}]}, "rejected: all its answers have weight 0"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_unit_is_bad_with_its_line(
    objective: str, row: dict[str, Any], words: str, tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    good = PAIR if objective in ("dpo", "reward") else RATED
    config = make_config(
        tmp_path, [good, good | {"prompt": "other"}, row], objective, max_length=48, too_long="cut"
    )
    error = refusal(config, tokenizer_dir(), tmp_path)
    (problem,) = error.problems
    assert problem.where.endswith("rows.jsonl:3")
    assert words in f"{problem.why} {problem.fix}"
    assert problem.fix
    skipping = config.model_copy(update={"data": config.data.model_copy(update={"on_bad_row": "skip"})})
    total = prepare(skipping, tokenizer_dir(), tmp_path)[1]["total"]
    assert (total["rows"], total["used"], total["bad"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("objective", "row", "data", "words"),
    [
        ("sft", {"prompt": "p", "chosen": "a", "rejected": "b"}, {}, "set objective: reward, dpo"),
        ("pretrain", {"text": "t", "chosen": "a", "rejected": "b"}, {}, "set objective: reward, dpo"),
        ("sft", PAIR, {"format": "preference"}, "set objective: reward, dpo"),
        ("dpo", {"prompt": "p", "completion": "a"}, {}, "columns: {chosen: NAME, rejected: NAME}}]"),
        ("kto", {"prompt": "p", "completion": "a"}, {}, "columns: {label: NAME}}]"),
        ("orpo", {"prompt": "p", "completion": "a"}, {"format": "prompt-completion"}, "set objective: sft"),
        ("orpo", RATED, {}, "set objective: kto"),
        ("kto", PAIR, {}, "set objective: dpo, or write two rows"),
    ],
)
def test_rows_for_another_objective_are_refused_with_what_to_set(
    objective: str, row: Any, data: dict[str, Any], words: str, tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    error = refusal(make_config(tmp_path, [row], objective, **data), tokenizer_dir(), tmp_path)
    (problem,) = error.problems
    assert problem.where.endswith("rows.jsonl:1")
    assert words in problem.fix


def test_a_long_pair_is_an_error_or_dropped_by_its_longer_side(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    rows = [PAIR, {"prompt": "p", "chosen": "a", "rejected": _LONG}]
    error = refusal(make_config(tmp_path, rows, max_length=48), tokenizer_dir(), tmp_path)
    assert error.problems[0].where.endswith("rows.jsonl:2")
    assert "chosen 32, rejected 151 tokens, max_length is 48" in error.problems[0].why
    assert "split" not in error.problems[0].fix
    _, ledger = prepare(
        make_config(tmp_path, rows, max_length=48, too_long="drop"), tokenizer_dir(), tmp_path
    )
    assert ledger["total"]["dropped"] == {"too_long": 1}


def test_a_template_that_changes_the_prompt_with_the_answer_is_refused(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{{ messages[-1]['content'] | length }} {% for m in messages %}{{ m['role'] + ': ' + m['content'] +"
        " '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
        encoding="utf-8",
    )
    config = make_config(tmp_path, [PAIR], template=str(file), check_template=False)
    assert refusal(config, tokenizer_dir(), tmp_path).problems[0].where.endswith("rows.jsonl:1")
