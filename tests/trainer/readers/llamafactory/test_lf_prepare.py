"""Templates of LLaMA-Factory between config and token table: cache key, labels, refusals; and what
a run saves of them.

Run: .venv/bin/python -m pytest tests/trainer/readers/llamafactory/test_lf_prepare.py
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from unisono.base.errors import DataError, ModelError
from unisono.base.events import Reporter
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.data.token_table import TokenTable, collate
from unisono.trainer.plan import DataSummary

TOKENIZER = Path(__file__).parent / "golden" / "tokenizer"
TALK = [
    {"from": "human", "value": "a"},
    {"from": "gpt", "value": "b"},
    {"from": "human", "value": "c"},
    {"from": "gpt", "value": "d"},
]


def prepare(
    folder: Path, rows: list[Any], data: dict[str, Any], objective: str = "sft", **more: Any
) -> DataSummary:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    config = RunConfig.model_validate(
        {
            "model": "m",
            "objective": objective,
            "data": {"train": str(file), **data},
            "output_dir": "o",
            "adapter": None,
        }
    )
    return prepare_data(
        config,
        tokenizer=TOKENIZER,
        vocab_size=2000,
        cache_dir=folder / "cache",
        report=Reporter(None),
        **more,
    )


def test_end_of_sequence_is_predicted_if_a_question_closes_an_answer(tmp_path: Path) -> None:
    summary = prepare(tmp_path, [{"conversations": TALK}], {"template": "lf:falcon", "packing": False})
    table = TokenTable.open(Path(summary.cache_dir), "train")
    ids, targets = table.row(0)
    batch = collate(table, [0])
    predicted = dict(zip(batch.label_index.tolist(), batch.labels.tolist(), strict=True))
    closing = [place for place in range(1, len(ids)) if targets[place] and predicted[place - 1] != ids[place]]
    assert len(closing) == 1  # the first token of the second question
    assert predicted[closing[0] - 1] == table.eos == 2
    assert ids[closing[0] : closing[0] + 3].tolist() == ids[:3].tolist()
    assert predicted[len(ids) - 2] == 2


def test_each_setting_of_the_template_makes_another_table(tmp_path: Path) -> None:
    rows = [{"conversations": TALK}]
    settings: list[dict[str, Any]] = [
        {"template": "lf:qwen3"},
        {"template": "lf:qwen3", "thinking": False},
        {"template": "lf:qwen3", "thinking": None},
        {"template": "lf:qwen3", "date": "2026-01-02"},
        {"template": "lf:qwen3", "too_long": "balanced"},
        {"template": "lf:qwen3_nothink"},
    ]
    found = [prepare(tmp_path, rows, one) for one in settings]
    assert [one.cache_hit for one in found] == [False] * len(settings)
    assert len({one.cache_dir for one in found}) == len(settings)
    assert all(prepare(tmp_path, rows, one).cache_hit for one in settings)
    thinking, off, unset, *_, without = (one.rows_digest for one in found)
    assert len({thinking, unset, without}) == 3
    assert off == unset  # there is no thought that could be removed


def test_training_refuses_a_template_whose_tokens_are_not_there(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "output": "a"}]
    with pytest.raises(ModelError, match=r"no token \[gMASK\]"):
        prepare(tmp_path, rows, {"template": "lf:chatglm3"})
    with pytest.raises(ModelError, match="gives token 2000"):
        prepare(tmp_path, rows, {"template": "lf:phi"})
    shown = prepare(tmp_path, rows, {"template": "lf:phi"}, is_preview=True)
    assert any("gives token 2000" in warning for warning in shown.warnings)


def test_preference_rows_are_refused_by_name(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "chosen": "a", "rejected": "b"}]
    with pytest.raises(DataError, match="preference rows") as error:
        prepare(tmp_path, rows, {"template": "lf:qwen", "format": "preference"})
    assert error.value.exit_code == 2


def test_mismatched_answers_are_those_of_groups_of_1000_readable_rows(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "output": f"a{i}", "label": i % 2 == 0} for i in range(1002)]
    rows.insert(3, {"instruction": "q", "output": "a", "label": "bad"})
    data = {"template": "lf:qwen", "on_bad_row": "skip", "packing": False}
    table = TokenTable.open(Path(prepare(tmp_path, rows, data, objective="kto").cache_dir), "train")
    assert table.rows == 1002
    before = [999, *range(999), 1001, 1000]
    for i, other in enumerate(before):
        assert table.labels(i, 1).tolist() == table.labels(other, 0).tolist()
    assert table.columns["label"].tolist() == [int(i % 2 == 0) for i in range(1002)]


_LONG_PAIR = {"instruction": "q " * 40, "chosen": "a " * 40, "rejected": "b " * 60}


@pytest.mark.parametrize("too_long", ["cut", "balanced"])
def test_both_sides_of_a_cut_pair_have_the_same_prompt(too_long: str, tmp_path: Path) -> None:
    rows = [_LONG_PAIR, {"instruction": "q", "chosen": "a", "rejected": "b"}]
    limit = 150 if too_long == "cut" else 64
    data = {"template": "lf:qwen", "too_long": too_long, "max_length": limit, "packing": False}
    table = TokenTable.open(Path(prepare(tmp_path, rows, data, objective="dpo").cache_dir), "train")
    assert (table.sides, table.rows) == (2, 2)
    (chosen, counts), (rejected, others) = table.row(0, 0), table.row(0, 1)
    first = int(counts.argmax())
    assert int(others.argmax()) == first
    assert chosen[:first].tolist() == rejected[:first].tolist()
    assert max(len(chosen), len(rejected)) == limit
    batch = collate(table, [0, 1], sides=(0, 1))
    assert batch.lengths == [len(table.row(i, side)[0]) for i in (0, 1) for side in (0, 1)]
    assert batch.units == [0, 1]


def test_a_pair_that_is_equal_up_to_the_cut_is_bad(tmp_path: Path) -> None:
    rows = [{"instruction": "q", "chosen": "a " * 60 + "b", "rejected": "a " * 60 + "c"}]
    for too_long in ("cut", "balanced"):
        data = {"template": "lf:qwen", "too_long": too_long, "max_length": 48}
        with pytest.raises(DataError) as error:
            prepare(tmp_path, rows, data, objective="dpo")
        assert "equal up to the cut" in error.value.problems[0].why


@pytest.mark.parametrize(
    ("objective", "row", "words"),
    [
        ("dpo", {"instruction": "q", "chosen": "a"}, "no rejected answer"),
        ("dpo", {"instruction": "q", "chosen": "a", "rejected": "a"}, "are equal"),
        ("dpo", {"instruction": "q", "output": "a", "label": True}, "needs a chosen and a rejected answer"),
        ("kto", {"instruction": "q", "output": "a", "label": "no"}, "label is 'no', not a boolean"),
        ("kto", {"instruction": "q", "chosen": "a", "rejected": "b"}, "needs one answer with a label"),
    ],
)
def test_bad_preference_rows_have_their_place(
    objective: str, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    good = {"instruction": "q", "output": "a", "label": True} if objective == "kto" else {"instruction": "q", "chosen": "a", "rejected": "b"}  # fmt: skip
    with pytest.raises(DataError) as error:
        prepare(tmp_path, [good, row], {"template": "lf:qwen"}, objective=objective)
    (problem,) = error.value.problems
    assert problem.where == f"{tmp_path / 'rows.json'}#2"
    assert words in problem.why


@pytest.mark.slow
def test_a_result_stops_and_asks_as_its_template_says(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    model = tmp_path / "model"
    shutil.copytree(TOKENIZER, model)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    settings = Qwen3Config(
        vocab_size=2000, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True, **sizes
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(model)
    (tmp_path / "rows.json").write_text(
        json.dumps([{"instruction": "q", "output": "a"}] * 4), encoding="utf-8"
    )
    config = {
        "model": {"path": str(model), "resize_vocabulary": True}, "adapter": None, "output_dir": "out", "duration": "1 steps", "batch": {"global": 2},
        "data": {"train": "rows.json", "template": "lf:llama4", "max_length": 64},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")

    def run(*words: str) -> str:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = front_server.run([sys.executable, "-m", "unisono", *words], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("train", "config.yaml")
    run("generate", "out", "q", "--max-tokens", "4", "--out", "answers.jsonl")
    assert json.loads((tmp_path / "answers.jsonl").read_text())["tokens"] <= 4
    run("export", "out", "exported")
    for place in (tmp_path / "out" / "model", tmp_path / "exported"):
        tokenizer = AutoTokenizer.from_pretrained(place)
        assert (tokenizer.eos_token, len(tokenizer)) == ("<|eot|>", 2002)
        stops = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
        assert {2000, 2001} <= set(stops)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)
        assert (
            text
            == "<s><|header_start|>user<|header_end|>\n\nq<|eot|><|header_start|>assistant<|header_end|>\n\n"
        )
