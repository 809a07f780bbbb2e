"""From files to a token table: every row is accounted for, and refusals name the place and the
remedy.

Run: .venv/bin/python -m pytest tests/trainer/data/test_prepare.py
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.base.errors import DataError, ModelError
from unisono.base.events import Reporter
from unisono.base.messages import RefusedMessage, message_of
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data import RowError, Text, encode
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.prepare import prepare_data
from unisono.trainer.data.token_table import Encoded, TokenTable, collate
from unisono.trainer.data.tokenizer import load_tokenizer
from unisono.trainer.plan import DataSummary, steps_for_tokens

TokenizerDir = Callable[..., Path]


def make_config(data: dict[str, Any], **more: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "m", "data": data, "output_dir": "o", **more})


def prepare(
    config: RunConfig, tokenizer: Path, folder: Path, *, vocab_size: int | None = 10_000
) -> tuple[DataSummary, dict[str, Any]]:
    ledger = folder / "data.json"
    summary = prepare_data(
        config,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        cache_dir=folder / "cache",
        report=Reporter(None),
        ledger=ledger,
    )
    return summary, json.loads(ledger.read_text(encoding="utf-8"))


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def refused(config: RunConfig, tokenizer: Path, folder: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        prepare(config, tokenizer, folder)
    assert caught.value.exit_code == 2
    assert all(problem.fix or problem.what.endswith("refused") for problem in caught.value.problems)
    return caught.value


# The ledger.

_row = st.one_of(
    st.builds(lambda n: pair("q" * n, "a"), st.integers(0, 80)),
    st.builds(lambda n: pair("q", "a" * n), st.integers(0, 120)),
    st.just({"prompt": "x"}),
    st.just("{"),
)
_source = st.tuples(st.lists(_row, min_size=1, max_size=12), st.sampled_from([0.5, 1.0, 1.5, 2.0]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sources=st.lists(_source, min_size=1, max_size=3),
    too_long=st.sampled_from(["cut", "drop", "split"]),
    share=st.sampled_from([None, 0.2, 0.5]),
    packing=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_ledger_adds_up_for_every_source_and_agrees_with_the_table(
    tokenizer_dir: TokenizerDir,
    sources: list[tuple[list[Any], float]],
    too_long: str,
    share: float | None,
    *,
    packing: bool,
    seed: int,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = [
            {"path": write_rows(folder / f"{i}.jsonl", rows), "weight": weight, "format": "prompt-completion"}
            for i, (rows, weight) in enumerate(sources)
        ]  # fmt: skip
        data = {
            "train": train,
            "eval": share,
            "max_length": 48,
            "too_long": too_long,
            "on_bad_row": "skip",
            "packing": packing,
        }
        try:
            summary, ledger = prepare(make_config(data, seed=seed), tokenizer_dir(), folder)
        except DataError as error:
            assert "no rows are left" in str(error)  # noqa: PT017 - either outcome is right
            return
        for entry, (rows, _) in zip(ledger["sources"], sources, strict=True):
            assert entry["rows"] == len(rows) == entry["used"] + sum(entry["dropped"].values()) + entry["bad"]
            assert entry["cut"] + entry["split"] <= entry["used"]
            assert entry["eval"] <= entry["used"]
        total = ledger["total"]
        for key in ("rows", "used", "cut", "split", "bad", "eval", "tokens", "tokens_cut", "loss_tokens"):
            assert total[key] == sum(entry[key] for entry in ledger["sources"])
        splits = [summary.train, *([summary.eval] if summary.eval else [])]
        assert total["tokens"] == sum(split.tokens for split in splits)
        assert total["loss_tokens"] == sum(split.loss_tokens for split in splits)
        noted = [row["what"] for row in ledger["rows"]]
        assert noted.count("bad") == total["bad"]
        assert noted.count("dropped") == sum(total["dropped"].values())
        assert (noted.count("cut"), noted.count("split")) == (total["cut"], total["split"])
        check_table(summary, max_length=48)


def check_table(summary: DataSummary, *, max_length: int) -> None:
    """The summary's figures are those of the table, and no row or sequence breaks its promises."""
    for split, figures in (("train", summary.train), ("eval", summary.eval)):
        if figures is None:
            continue
        table = TokenTable.open(Path(summary.cache_dir), split)  # type: ignore[arg-type]
        assert table.sequences == figures.sequences
        assert int(table.sequence_tokens().sum()) == figures.tokens
        assert int(table.sequence_loss_tokens().sum()) == figures.loss_tokens
        assert sum(len(table.rows_of(s)) for s in range(table.sequences)) == figures.rows
        for s in range(table.sequences):
            rows = [table.row(int(row)) for row in table.rows_of(s)]
            assert sum(len(ids) for ids, _ in rows) == table.sequence_tokens()[s] <= max_length
            assert sum(int(targets.sum()) for _, targets in rows) == table.sequence_loss_tokens()[s]
            assert all(targets.any() and not targets[0] for _, targets in rows)


_shaped = st.tuples(
    st.lists(_row, min_size=1, max_size=12), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sources=st.lists(_shaped, min_size=1, max_size=3),
    strategy=st.sampled_from(["concat", "interleave_under", "interleave_over", "interleave_once"]),
    by_chance=st.booleans(),
    count=st.none() | st.integers(1, 6),
)
def test_the_ledger_adds_up_with_rows_samples_and_mixes(
    tokenizer_dir: TokenizerDir,
    sources: list[tuple[list[Any], int | None, int | None]],
    strategy: str,
    *,
    by_chance: bool,
    count: int | None,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = [
            {"path": write_rows(folder / f"{i}.jsonl", rows), "format": "prompt-completion", "rows": first, "samples": samples}
            for i, (rows, first, samples) in enumerate(sources)
        ]  # fmt: skip
        shares = [1 / len(train)] * len(train) if by_chance and strategy != "concat" else None
        mix = {"strategy": strategy, "probabilities": shares}
        data = {
            "train": train,
            "eval": count,
            "mix": mix,
            "max_length": 48,
            "too_long": "drop",
            "on_bad_row": "skip",
        }
        try:
            summary, ledger = prepare(make_config(data), tokenizer_dir(), folder)
        except DataError as error:
            assert "no rows are left" in str(error)  # noqa: PT017 - either outcome is right
            return
        for entry, (rows, first, samples) in zip(ledger["sources"], sources, strict=True):
            read = len(rows) if first is None or samples is not None else min(first, len(rows))
            assert entry["rows"] == read == entry["used"] + sum(entry["dropped"].values()) + entry["bad"]
            if samples is not None:
                assert entry["used"] <= min(samples, first or samples)
        assert ledger["total"]["eval"] == (count or 0)
        noted = Counter(row["what"] for row in ledger["rows"])
        assert noted["dropped"] == sum(ledger["total"]["dropped"].values())
        assert noted["bad"] == ledger["total"]["bad"]
        assert summary.train.rows >= ledger["total"]["used"] - (count or 0)
        check_table(summary, max_length=48)


def test_rows_that_something_was_done_to_are_in_the_ledger_with_their_line(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    rows = [pair("q", "a"), "{bad", pair("q", "a" * 200), pair("q", ""), pair("x", "y")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    config = make_config({"train": path, "max_length": 64, "too_long": "cut", "on_bad_row": "skip"})
    _, ledger = prepare(config, tokenizer_dir(), tmp_path)
    assert sorted((row["line"], row["what"], row["file"]) for row in ledger["rows"]) == [
        (2, "bad", path),
        (3, "cut", path),
        (4, "bad", path),
    ]
    assert ledger["total"] | {"tokens": 0, "loss_tokens": 0, "tokens_cut": 0} == {
        "rows": 5, "used": 3, "cut": 1, "split": 0, "not_rendered": 0, "bad": 2, "eval": 0, "dropped": {}, "tokens": 0, "loss_tokens": 0, "tokens_cut": 0,
    }  # fmt: skip
    assert ledger["schema"] == 1


def test_a_path_for_evaluation_is_a_source_of_its_own(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [pair("q", "a")] * 3)
    test = write_rows(tmp_path / "test.jsonl", [pair("x", "y")] * 2)
    summary, ledger = prepare(make_config({"train": train, "eval": test}), tokenizer_dir(), tmp_path)
    assert [(entry["path"], entry["used"], entry["eval"]) for entry in ledger["sources"]] == [
        (train, 3, 0),
        (test, 2, 2),
    ]
    assert summary.train.rows == 3
    table = TokenTable.open(Path(summary.cache_dir), "eval")
    assert [table.row_id(i) for i in range(table.rows)] == [f"{test}:1", f"{test}:2"]


def test_training_and_evaluation_share_no_row(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [pair(f"q{i}", f"a{i}") for i in range(50)])
    summary, _ = prepare(make_config({"train": train, "eval": 0.3}), tokenizer_dir(), tmp_path)
    tables = [
        TokenTable.open(Path(summary.cache_dir), "train"),
        TokenTable.open(Path(summary.cache_dir), "eval"),
    ]
    names = [{table.row_id(i) for i in range(table.rows)} for table in tables]
    assert not names[0] & names[1]
    assert (len(names[0]), len(names[1])) == (35, 15)


def test_weight_2_shows_every_row_twice_an_epoch(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a"), pair("x", "y")])
    once, _ = prepare(make_config({"train": path}), tokenizer_dir(), tmp_path)
    twice, ledger = prepare(make_config({"train": [{"path": path, "weight": 2}]}), tokenizer_dir(), tmp_path)
    assert (twice.train.rows, twice.train.tokens) == (2 * once.train.rows, 2 * once.train.tokens)
    assert (ledger["total"]["rows"], ledger["total"]["used"]) == (2, 2)


# What the model sees.


def test_a_batch_lays_rows_side_by_side(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair(f"q{i}", "a" * i) for i in range(1, 9)])
    summary, _ = prepare(make_config({"train": path, "max_length": 128}), tokenizer_dir(), tmp_path)
    table = TokenTable.open(Path(summary.cache_dir), "train")
    batch = collate(table, range(table.sequences))
    rows = [table.row(int(row)) for s in range(table.sequences) for row in table.rows_of(s)]
    assert batch.lengths == [len(ids) for ids, _ in rows]
    assert batch.input_ids.tolist() == [token for ids, _ in rows for token in ids.tolist()]
    assert batch.position_ids.tolist() == [place for ids, _ in rows for place in range(len(ids))]
    assert batch.labels.tolist() == [token for ids, targets in rows for token in ids[targets].tolist()]
    assert (batch.input_ids[batch.label_index + 1] == batch.labels).all()
    assert (batch.tokens, batch.loss_tokens) == (summary.train.tokens, summary.train.loss_tokens)
    assert {batch.input_ids.dtype, batch.position_ids.dtype, batch.label_index.dtype, batch.labels.dtype} == {
        np.dtype(np.int64)
    }
    assert len(batch.row_ids) == 8


def test_without_packing_a_sequence_is_a_row_in_the_order_of_the_file(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a" * i) for i in (9, 1, 5)])
    summary, _ = prepare(make_config({"train": path, "packing": False}), tokenizer_dir(), tmp_path)
    table = TokenTable.open(Path(summary.cache_dir), "train")
    assert [table.rows_of(s).tolist() for s in range(table.sequences)] == [[0], [1], [2]]


def test_pretraining_counts_every_token_and_ends_each_text(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("there you are\n\nhow are you\n", encoding="utf-8")
    config = make_config({"train": str(path)}, objective="pretrain", adapter=None)
    summary, _ = prepare(config, tokenizer_dir(), tmp_path)
    table = TokenTable.open(Path(summary.cache_dir), "train")
    tokenizer = load_tokenizer(tokenizer_dir(), trust_remote_code=False)
    assert [tokenizer.decode(table.row(i)[0]) for i in range(table.rows)] == [
        "there you are<|im_end|>",
        "how are you<|im_end|>",
    ]
    assert all(table.row(i)[1][1:].all() for i in range(table.rows))


def test_plain_completions_use_the_chat_template_where_there_is_one(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q: ", "a")])
    shown = []
    for directory in (tokenizer_dir("headers", eos="<|eot_id|>"), tokenizer_dir(None)):
        summary, _ = prepare(make_config({"train": path}), directory, tmp_path)
        ids, targets = TokenTable.open(Path(summary.cache_dir), "train").row(0)
        tokenizer = load_tokenizer(directory, trust_remote_code=False)
        shown.append((tokenizer.decode(ids), tokenizer.decode(ids[targets])))
        assert not summary.warnings
    assert shown == [
        ("<s><|start_header_id|>user<|end_header_id|>\n\nq:<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>", "a<|eot_id|>"),
        # a token that holds the answer's first letter counts, with the blank before it
        ("q: a<|im_end|>", " a<|im_end|>"),
    ]  # fmt: skip


@pytest.mark.parametrize(("duration", "steps"), [("3 epochs", 8), ("1.5 epochs", 4), ("7 steps", 7)])
def test_the_steps_of_a_duration(
    tokenizer_dir: TokenizerDir, tmp_path: Path, duration: str, steps: int
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a")] * 10)
    config = make_config({"train": path, "packing": False}, duration=duration, batch={"global": 4})
    assert prepare(config, tokenizer_dir(), tmp_path)[0].total_steps == steps


def test_steps_of_a_duration_in_tokens_are_counted_in_stream_order(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a" * i) for i in range(1, 20)])
    config = make_config(
        {"train": path, "packing": False}, duration="1000 tokens", batch={"global": 4}, seed=3
    )
    summary, _ = prepare(config, tokenizer_dir(), tmp_path)
    lengths = TokenTable.open(Path(summary.cache_dir), "train").sequence_tokens().tolist()
    assert summary.total_steps == steps_for_tokens(lengths, target=1000, global_batch=4, seed=3)


# Refusals.


def test_all_bad_rows_are_reported_together_and_the_rest_is_counted(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a"), '{"prompt": 1,}', *[pair("q", "")] * 30])
    error = refused(make_config({"train": path}), tokenizer_dir(), tmp_path)
    assert [problem.where for problem in error.problems[:2]] == [f"{path}:2:14", f"{path}:3"]
    assert error.problems[-1].what == "11 more rows are refused"
    assert "on_bad_row: skip" in error.problems[0].fix
    assert not list((tmp_path / "cache" / "tables").iterdir())


def test_rows_that_are_too_long_are_refused_with_what_would_take_them(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a"), pair("q", "ab" * 100)])
    error = refused(make_config({"train": path, "max_length": 64}), tokenizer_dir(), tmp_path)
    assert error.problems[0].where == f"{path}:2"
    length = int(error.problems[0].why.split()[0])
    assert f"data.max_length={length}" in error.problems[-1].fix
    prepare(make_config({"train": path, "max_length": length}), tokenizer_dir(), tmp_path)


@pytest.mark.parametrize(
    ("content", "data", "what"),
    [
        ("", {}, "has no rows"),
        ("\n\n", {}, "has no rows"),
        ('{"prompt": "q", "completion": ""}\n', {"on_bad_row": "skip"}, "no rows are left to train on"),
        ('{"prompt": "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", "completion": "a"}\n', {"max_length": 8, "too_long": "drop"}, "no rows are left to train on"),
        ('{"prompt": "q", "completion": "a"}\n', {"eval": 0.5}, "no rows are left to train on"),
        ('{"frage": "q", "antwort": "a"}\n', {}, "cannot infer the format"),
        ('{"messages": [{"role": "user", "content": "q"}]}\n', {}, "a row cannot be used"),
        ('{"prompt": "q", "completion": "a"}\n', {"template": "/nowhere.jinja"}, "there is no file"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_are_refused(
    tokenizer_dir: TokenizerDir, tmp_path: Path, content: str, data: dict[str, Any], what: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    assert what in str(refused(make_config({"train": str(path), **data}), tokenizer_dir(), tmp_path))


def test_what_is_wrong_with_every_row_is_reported_once(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for i in range(10**9) %}{% endfor %}", encoding="utf-8")
    path = write_rows(tmp_path / "rows.jsonl", [pair("q", "a")] * 1000)
    data = {"train": path, "template": str(template)}
    error = refused(make_config(data), tokenizer_dir(), tmp_path)
    (problem,) = error.problems
    assert error.exit_code == 2
    assert "none of the 1000 rows" in problem.what
    assert f"{template}:1): Range too big" in problem.why
    (problem,) = refused(make_config(data | {"on_bad_row": "skip"}), tokenizer_dir(), tmp_path).problems
    assert f"the first is {path}:1: the chat template refuses it ({template}:1)" in problem.why


@pytest.mark.parametrize(
    "row", ['{"\\ud800": "a"}', '{"prompt": "a", "completion": "b", "\\udc00": "c"}', json.dumps({"x" * 100_000: "\x1b[31m"})]
)  # fmt: skip
def test_names_of_columns_that_nobody_can_read_do_no_harm(
    tokenizer_dir: TokenizerDir, tmp_path: Path, row: str
) -> None:
    config = make_config({"train": write_rows(tmp_path / "rows.jsonl", [row])})
    pipe, reported = os.pipe()
    try:
        summary, _ = prepare(config, tokenizer_dir(), tmp_path)
        message: dict[str, Any] = {"formats": summary.formats}
    except DataError as error:  # what is no format is refused; the words are short, and can be sent
        message = error.to_json()
    fields = {"row": str(json.loads(row))[:100], **message}
    Reporter(reported).send(message_of(RefusedMessage, fields))
    os.close(reported)
    with os.fdopen(pipe, "rb") as stream:
        sent = json.loads(stream.read())
    assert len(json.dumps(sent.get("problems", ""))) < 2000


def test_a_row_of_enormous_length_is_refused_before_the_tokenizer_sees_it(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "word " * 3_400_000}, {"text": "short"}])
    data = {"train": path, "max_length": 64}
    (problem,) = refused(make_config(data), tokenizer_dir(), tmp_path).problems
    assert (problem.where, "17,000,000 characters" in problem.why) == (f"{path}:1", True)
    summary, _ = prepare(make_config(data | {"on_bad_row": "skip"}), tokenizer_dir(), tmp_path)
    assert summary.train.rows == 1


def test_long_rows_are_tokenized_in_small_groups_with_the_same_outcome(
    tokenizer_dir: TokenizerDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [Text("word " * i) for i in range(30)]
    encoder = Encoder(load_tokenizer(tokenizer_dir(), trust_remote_code=False), directory=tokenizer_dir())
    together = encoder.encode(texts)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 100)
    for one, other in zip(together, encoder.encode(texts), strict=True):
        assert isinstance(one, RowError) is isinstance(other, RowError)
        if isinstance(one, Encoded) and isinstance(other, Encoded):
            assert one.ids.tolist() == other.ids.tolist()


def test_template_that_is_no_regular_file_is_refused_before_opening(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "t.jinja")
    data = {
        "train": write_rows(tmp_path / "rows.jsonl", [pair("q", "a")]),
        "template": str(tmp_path / "t.jinja"),
    }
    assert "named pipe" in str(refused(make_config(data), tokenizer_dir(), tmp_path))


def test_a_tokenizer_that_makes_tokens_the_model_does_not_know_is_refused(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    config = make_config({"train": write_rows(tmp_path / "rows.jsonl", [pair("q", "a")])})
    for _ in range(2):  # also where the table is in the cache already
        with pytest.raises(ModelError, match=r"does not match the model: .* \(0 to 19\)"):
            prepare(config, tokenizer_dir(), tmp_path, vocab_size=20)


def test_a_tokenizer_that_cannot_be_read_is_refused(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tokenizer_dir(), broken)
    (broken / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        prepare(
            make_config({"train": write_rows(tmp_path / "rows.jsonl", [pair("q", "a")])}), broken, tmp_path
        )


def test_keep_answer_cuts_prompts_from_the_left_and_counts_them(
    tokenizer_dir: TokenizerDir, tmp_path: Path
) -> None:
    """The beginning of sequence stays, the answer is whole, and a row whose answer alone is too
    long is bad.
    """
    rows = [
        {"question": "hello " * 40 + "why?", "answer": "because"},
        {"question": "why?", "answer": "because " * 60},
        {"question": "why?", "answer": "so"},
    ]
    train = write_rows(tmp_path / "rows.jsonl", [json.dumps(row) for row in rows])
    data = {
        "train": train,
        "too_long": "keep-answer",
        "max_length": 32,
        "on_bad_row": "skip",
        "packing": False,
    }
    summary, ledger = prepare(make_config(data), tokenizer_dir("inst", eos="</s>"), tmp_path)
    tokenizer = load_tokenizer(tokenizer_dir("inst", eos="</s>"), trust_remote_code=False)
    table = TokenTable.open(Path(summary.cache_dir), "train")
    ids, targets = table.row(0)
    assert len(ids) == 32
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[~targets]).endswith("why? [/INST]")
    assert tokenizer.decode(ids[targets]).strip() == "because</s>"
    total = ledger["total"]
    assert (total["used"], total["cut"], total["bad"]) == (2, 1, 1)
    cut = next(note for note in ledger["rows"] if note["what"] == "cut")
    assert (
        cut["why"]
        == f"{32 + total['tokens_cut']} tokens, max_length is 32: {total['tokens_cut']} cut off before the"
        " answer"
    )
    bad = next(note for note in ledger["rows"] if note["what"] == "bad")
    assert bad["why"].startswith("its answer alone is too long: ")
