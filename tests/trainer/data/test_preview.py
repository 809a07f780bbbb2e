"""`unisono data preview` and the task prepare, as processes: what is shown, and how refusals end.

Run: .venv/bin/python -m pytest tests/trainer/data/test_preview.py
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import front_server
from unisono.trainer.task.data_tasks import histogram, runs

TokenizerDir = Callable[..., Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tokenizer_dir: TokenizerDir, tmp_path: Path) -> Run:
    """Runs `unisono data preview` on some rows with a model that has a tokenizer and a
    config.json.
    """
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), model)
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 10000}', encoding="utf-8")

    def preview(rows: list[Any], *more: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "rows.jsonl"
        file.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
            encoding="utf-8",
        )
        config = tmp_path / "config.yaml"
        config.write_text(
            f"model: {model}\ndata: {{train: {file}}}\noutput_dir: {tmp_path / 'out'}\n", encoding="utf-8"
        )
        command = [sys.executable, "-m", "unisono", "data", "preview", str(config), *more]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return front_server.run(command, env=environment, cwd=tmp_path)

    return preview


def test_loss_tokens_stand_in_brackets_where_there_is_no_terminal(run: Run) -> None:
    done = run([{"prompt": "hello\x1b[31m", "completion": "there\nthere"}] * 3, "--rows", "1")
    assert done.returncode == 0, done.stderr
    assert "⟦there⟧\n⟦there<|im_end|>⟧" in done.stdout
    assert "hello<|im_end|>" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.count("── ") == 1
    assert "3 rows = 3 used" in done.stdout


def test_with_json_there_is_one_object_whose_runs_give_the_text(run: Run) -> None:
    done = run([{"prompt": "hello", "completion": "there"}], "--json")
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert row["tokens"] == sum(part["tokens"] for part in row["runs"])
    assert row["loss_tokens"] == sum(part["tokens"] for part in row["runs"] if part["loss"])
    assert "".join(part["text"] for part in row["runs"]).endswith("<|im_start|>assistant\nthere<|im_end|>\n")
    assert found["ledger"]["total"]["rows"] == 1
    assert sum(part["rows"] for part in found["lengths"]) == 1


def test_an_answer_that_counts_in_part_is_shown_with_its_weight(run: Run) -> None:
    turns = [
        {"role": role, "content": text, **more}
        for role, text, more in (
            ("user", "a", {}), ("assistant", "b", {"weight": 0.25}), ("user", "c", {}), ("assistant", "d", {}),
        )
    ]  # fmt: skip
    done = run([{"messages": turns}], "--rows", "1")
    assert done.returncode == 0, done.stderr
    head = next(line for line in done.stdout.splitlines() if line.startswith("── "))
    assert head.count("in the loss with weight 0.25") == 1
    assert " 2 in the loss + 1" in head
    shown = json.loads(run([{"messages": turns}], "--json").stdout)["rows"][0]["runs"]
    assert [run["weight"] for run in shown if run["loss"]] == [0.25, 1]


def test_a_prompt_has_the_columns_that_rewards_get(run: Run) -> None:
    rows = [{"prompt": "hello", "answer": "there\x1b[31m", "level": 2, "tags": ["a"]}, {"prompt": "hi"}]
    words = ("objective=grpo", "rewards=[exact]", "rollout.max_new_tokens=8")
    done = run(rows, *words)
    assert done.returncode == 0, done.stderr
    assert 'rewards get: answer = "there' in done.stdout
    assert 'level = 2, tags = ["a"]' in done.stdout
    assert "rewards get: no columns" in done.stdout
    assert "\x1b" not in done.stdout
    assert json.loads(run(rows, *words, "--json").stdout)["rows"][0]["columns"] == {
        "answer": "there\x1b[31m", "level": 2, "tags": ["a"],
    }  # fmt: skip


def test_bad_rows_end_with_2_and_their_places(run: Run) -> None:
    done = run([{"prompt": "q", "completion": "a"}, '{"prompt": }'])
    assert done.returncode == 2
    assert "rows.jsonl:2:12" in done.stderr
    assert "Traceback" not in done.stderr


def test_overrides_count_and_what_was_done_to_rows_is_listed(run: Run) -> None:
    done = run(
        [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "ab" * 99}],
        "data.max_length=64",
        "data.too_long=cut",
    )
    assert done.returncode == 0, done.stderr
    assert "1 cut" in done.stdout
    assert "rows.jsonl:2: " in done.stdout


def test_runs_cover_all_tokens() -> None:
    assert runs(np.array([False, True, True, False])) == [(0, 1), (1, 3), (3, 4)]
    assert runs(np.array([False])) == [(0, 1)]
    assert runs(np.array([], dtype=np.bool_)) == []


@pytest.mark.parametrize("lengths", [[5], [1, 100], [7, 8, 9], list(range(1, 1000))])
def test_the_histogram_counts_every_row_once(lengths: list[int]) -> None:
    classes = histogram(np.array(lengths, dtype=np.int64))
    assert sum(entry["rows"] for entry in classes) == len(lengths)
    assert len(classes) <= 10
    assert (classes[0]["first"], classes[-1]["last"]) == (min(lengths), max(lengths))
    for entry in classes:
        assert entry["rows"] == sum(entry["first"] <= length <= entry["last"] for length in lengths)


@pytest.fixture
def see(tokenizer_dir: TokenizerDir, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `unisono data preview --json` shows of sources in one folder; with a refusal, its
    problems as text under `stderr`.
    """
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), model)
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 10000}', encoding="utf-8")

    def preview(data: dict[str, Any], **more: Any) -> dict[str, Any]:
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"model": str(model), "output_dir": "out", "data": data, **more}))
        command = [
            sys.executable,
            "-m",
            "unisono",
            "data",
            "preview",
            str(config),
            "--json",
            "--rows",
            "1000",
        ]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = front_server.run(command, env=environment, cwd=tmp_path)
        if done.returncode:
            return {"rc": done.returncode, "stderr": done.stderr}
        return json.loads(done.stdout)

    return preview


See = Callable[..., dict[str, Any]]


def write(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def numbers(found: dict[str, Any]) -> list[int]:
    return [int(row["row"].rpartition(":")[2]) for row in found["rows"]]


def pairs(count: int, name: str = "a") -> list[dict[str, str]]:
    return [{"prompt": f"{name} {number}", "completion": "c"} for number in range(count)]


def test_rows_takes_the_first_of_a_source_and_samples_a_seeded_pick(see: See, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", pairs(30))
    first = see({"train": [{"path": "a.jsonl", "rows": 4}]})
    assert numbers(first) == [1, 2, 3, 4]
    assert first["ledger"]["total"]["rows"] == 4
    picked = see({"train": [{"path": "a.jsonl", "samples": 6}]})
    assert len(numbers(picked)) == 6
    assert numbers(picked) != [1, 2, 3, 4, 5, 6]
    total = picked["ledger"]["total"]
    assert (total["rows"], total["used"], total["dropped"]) == (30, 6, {"samples": 24})
    assert len(picked["notes"]) == 20
    assert {(note["what"], note["why"]) for note in picked["notes"]} == {
        ("dropped", "not among the 6 rows picked by samples")
    }
    assert numbers(see({"train": [{"path": "a.jsonl", "samples": 6}]}, seed=1)) != numbers(picked)
    both = see({"train": [{"path": "a.jsonl", "samples": 6, "rows": 2}]})
    assert set(numbers(both)) < set(numbers(picked))
    assert both["ledger"]["total"]["dropped"] == {"samples": 28}
    more = see({"train": [{"path": "a.jsonl", "samples": 40}]})
    assert (more["ledger"]["total"]["used"], more["data"]["train"]["rows"]) == (30, 40)


def test_each_of_these_keys_is_a_table_of_its_own_in_the_cache(see: See, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", pairs(30))
    sections: list[dict[str, Any]] = [
        {}, {"rows": 4}, {"samples": 4}, {"columns": {"tools": None}}, {"format": "prompt-completion"},
    ]  # fmt: skip
    tables: list[dict[str, Any]] = [
        *({"train": [{"path": "a.jsonl", **section}]} for section in sections),
        {"train": "a.jsonl", "eval": 3},
        {"train": ["a.jsonl", "a.jsonl"], "mix": {"strategy": "interleave_under"}},
    ]
    for data in tables:
        assert [see(data)["data"]["cache_hit"] for _ in range(2)] == [False, True]


def test_eval_is_a_number_of_rows_or_a_list_of_sources(see: See, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", pairs(30))
    write(tmp_path / "b.jsonl", pairs(9, "b"))
    found = see({"train": "a.jsonl", "eval": 7})
    assert (found["data"]["eval"]["rows"], found["data"]["train"]["rows"]) == (7, 23)
    found = see(
        {
            "train": "a.jsonl",
            "eval": ["b.jsonl", {"path": "b.jsonl", "rows": 2}, {"path": "a.jsonl", "samples": 5}],
        }
    )
    assert (found["data"]["eval"]["rows"], found["data"]["train"]["rows"]) == (16, 30)
    refused = see({"train": "a.jsonl", "eval": 30})
    assert refused["rc"] == 2
    assert "no rows are left to train on" in refused["stderr"]
    assert "a number of rows" in see({"train": "a.jsonl", "eval": 0})["stderr"]


def test_a_mix_takes_rows_from_the_sources_in_turn(see: See, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", pairs(10))
    write(tmp_path / "b.jsonl", pairs(4, "b"))

    def mixed(**mix: Any) -> tuple[int, list[tuple[int, dict[str, int]]]]:
        found = see({"train": ["a.jsonl", "b.jsonl"], "mix": mix})
        sources = found["ledger"]["sources"]
        return found["data"]["train"]["rows"], [(entry["used"], entry["dropped"]) for entry in sources]

    assert mixed() == (14, [(10, {}), (4, {})])
    assert mixed(strategy="interleave_once") == (14, [(10, {}), (4, {})])
    assert mixed(strategy="interleave_under") == (8, [(4, {"mix": 6}), (4, {})])
    assert mixed(strategy="interleave_over") == (20, [(10, {}), (4, {})])
    rows, ((used, dropped), (others, _)) = mixed(strategy="interleave_under", probabilities=[0.1, 0.9])
    assert (rows, others) == (used + 4, 4)
    assert dropped == {"mix": 10 - used}


def test_tags_and_columns_that_are_not_read_change_the_text(see: See, tmp_path: Path) -> None:
    turns = [{"who": "system", "said": "S"}, {"who": "me", "said": "Q"}, {"who": "it", "said": "A"}]
    write(tmp_path / "a.jsonl", [{"conversations": turns}] * 2)
    tags = {"role_tag": "who", "content_tag": "said", "user_tag": "me", "assistant_tag": "it"}
    found = see({"train": [{"path": "a.jsonl", "format": "sharegpt", "tags": tags}]})
    assert "".join(run["text"] for run in found["rows"][0]["runs"]).count("<|im_start|>") == 3
    refused = see(
        {"train": [{"path": "a.jsonl", "format": "sharegpt", "tags": {**tags, "system_tag": None}}]}
    )
    assert refused["rc"] == 2
    assert "turn 1 is from 'system'" in refused["stderr"]
    write(tmp_path / "b.jsonl", [{"instruction": "Q", "input": "MORE", "output": "A", "system": "S"}])
    texts = [
        "".join(
            run["text"]
            for run in see({"train": [{"path": "b.jsonl", "columns": columns}]})["rows"][0]["runs"]
        )
        for columns in ({}, {"input": None}, {"system": None})
    ]
    assert [("MORE" in text, "S<|im_end|>" in text) for text in texts] == [
        (True, True),
        (False, True),
        (True, False),
    ]


def test_a_directory_is_a_source_with_the_names_of_its_files(see: See, tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / "rows" / f"{name}.jsonl", pairs(2, name))
    found = see({"train": "rows"})
    assert [row["row"] for row in found["rows"]] == [
        "rows/a.jsonl:1", "rows/a.jsonl:2", "rows/b.jsonl:1", "rows/b.jsonl:2",
    ]  # fmt: skip
    assert found["ledger"]["sources"][0]["path"] == "rows"


@pytest.mark.parametrize("objective", ["dpo", "reward", "kto", "sft"])
def test_preference_rows_show_both_sides(
    objective: str, see: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    answers = [{"chosen": "yes", "rejected": "no"}] if objective != "kto" else []
    rated = (
        [{"completion": "yes", "label": True}, {"completion": "no", "label": False}] if not answers else []
    )
    rows = [{"prompt": "why?", **answer} for answer in answers + rated]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"train": "rows.jsonl", **({"format": "preference"} if objective == "sft" else {})}
    found = see(data, objective=objective)
    first = found["rows"][0]
    one, other = (first, first["kl"]) if rated else (first["chosen"], first["rejected"])
    # Only a reward model sees the newline after the answer.
    assert [part["runs"][-1]["loss"] for part in (one, other)] == [objective != "reward"] * 2
    assert [part["runs"][1]["text"] for part in (one, other)] == ["yes<|im_end|>", "no<|im_end|>"]
    assert one["runs"][0] == other["runs"][0]
    assert first.get("desirable") is (True if rated else None)
    assert sum(entry["rows"] for entry in found["lengths"]) == found["ledger"]["total"]["used"] == len(rows)
    assert found["lengths"][0]["first"] <= one["tokens"] + other["tokens"] <= found["lengths"][-1]["last"]


def test_the_sides_of_a_pair_are_named(run: Run) -> None:
    done = run([{"prompt": "why?", "chosen": "yes", "rejected": "no"}], "objective=dpo")
    assert done.returncode == 0, done.stderr
    assert "rows.jsonl:1 chosen: " in done.stdout
    assert "rows.jsonl:1 rejected: " in done.stdout
    assert "⟦yes<|im_end|>⟧" in done.stdout
    assert "⟦no<|im_end|>⟧" in done.stdout
    assert "tokens per row, both sides together" in done.stdout
    assert "1 rows = 1 used" in done.stdout


def test_a_label_that_is_not_a_boolean_ends_with_2_and_its_line(run: Run) -> None:
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (True, False, "true")]
    done = run(rows, "objective=kto")
    assert done.returncode == 2
    assert "rows.jsonl:3" in done.stderr
    assert "label is 'true', not a boolean" in done.stderr
    assert "Traceback" not in done.stderr
