"""`unisono data preview` and the task prepare, as processes: what is shown, and how refusals end.

Run: .venv/bin/python -m pytest tests/data/test_preview.py
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

from unisono.task.data_tasks import histogram, runs

TokenizerDir = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tokenizer_dir: TokenizerDir, tmp_path: Path) -> Run:
    """Runs `unisono data preview` on some rows with a model that has a tokenizer and a config.json."""
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), model)
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 10000}', encoding="utf-8")

    def preview(rows: list[Any], *more: str) -> "subprocess.CompletedProcess[str]":
        file = tmp_path / "rows.jsonl"
        file.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
            encoding="utf-8",
        )
        config = tmp_path / "config.yaml"
        config.write_text(
            f"model: {model}\ndata: {{train: {file}}}\noutput_dir: {tmp_path / 'out'}\n", encoding="utf-8"
        )
        return subprocess.run(
            [sys.executable, "-m", "unisono", "data", "preview", str(config), *more],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}, capture_output=True, text=True, check=False, cwd=tmp_path,
        )  # fmt: skip

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
