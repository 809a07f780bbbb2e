"""Metrics of generated answers in evaluations: the best checkpoint and early stopping by them, and
functions that fail.

Run: pytest tests/trainer/training/test_answer_metrics.py
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

METRICS = """
import pathlib

CALLS = pathlib.Path(__file__).with_name("calls")


def rises_and_falls(completions, answer, **columns):
    with CALLS.open("a") as file:
        file.write(f"{answer[0]}\\n")
    evaluation = (len(CALLS.read_text().splitlines()) - 1) // 4
    return [[0.0, 0.5, 1.0, 0.25, 0.25, 0.25][evaluation]]


def refuses(completions, answer, **columns):
    raise ValueError("there is nothing to measure")


def hangs(completions, **columns):
    while True:
        pass
"""


def train(
    folder: Path, *metrics: Any, best: str | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A run on eight rows, four of them for evaluation."""
    rows = [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics.py").write_text(METRICS)
    config: dict[str, Any] = {
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "data": {"train": "rows.jsonl", "eval": 4},
        "batch": {"global": 4},
        "duration": "8 steps",
        "eval": {"every": "2 steps", "metrics": list(metrics), **more},
        "checkpoint": {"every": "8 steps", "best": best},
        "device": "cpu",
        "output_dir": "run",
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "unisono", "train", "sft.yaml", "--trust-code"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval_loss" in line]


def test_the_best_step_by_a_metric_of_ones_own_becomes_the_result(tmp_path: Path) -> None:
    ended = train(tmp_path, "metrics.py:rises_and_falls", "json_valid", best="rises_and_falls", stop_after=2)
    assert ended.returncode == 0, ended.stderr
    lines = evaluations(tmp_path)
    assert [(line["step"], line["eval_rises_and_falls"]) for line in lines] == [
        (2, 0.5),
        (4, 1.0),
        (6, 0.25),
        (8, 0.25),
    ]
    assert all(line["eval_json_valid"] in (0, 0.25, 0.5, 0.75, 1) for line in lines)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["eval"]["rises_and_falls"] == 1.0
    assert result["eval"]["rises_and_falls_before"] == 0.0
    assert (
        "eval_rises_and_falls has not improved in 2 evaluations; the best, 1.0000, was at step 4"
        in ended.stderr
    )
    result_weights = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    best = load_file(tmp_path / "run/checkpoints/step-00000004/trainable.safetensors")
    assert all(
        torch.equal(value, best[name.replace(".weight", ".default.weight")])
        for name, value in result_weights.items()
    )
    references = (tmp_path / "calls").read_text().splitlines()
    assert len(references) == 20
    assert set(references) <= {f"it is {n}" for n in range(8)}


def test_a_metric_that_raises_ends_the_run_with_its_line(tmp_path: Path) -> None:
    ended = train(tmp_path, "metrics.py:refuses")
    assert ended.returncode == 4, ended.stderr
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    assert verdict["cause"] == "reward_error"
    assert "the metric refuses failed on" in verdict["summary"]
    line = METRICS.splitlines().index('    raise ValueError("there is nothing to measure")') + 1
    assert verdict["evidence"][0]["where"].endswith(f"metrics.py:{line}")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("on_error", "value"), [("skip", None), (0.25, 0.25)])
def test_a_metric_that_never_returns_costs_its_deadline(
    tmp_path: Path, on_error: object, value: float | None
) -> None:
    metric = {"use": "metrics.py:hangs", "deadline": "0.2 seconds", "on_error": on_error}
    ended = train(tmp_path, metric, "exact", every=None)
    assert ended.returncode == 0, ended.stderr
    (line,) = evaluations(tmp_path)
    assert line.get("eval_hangs") == value
    assert "eval_exact" in line
    failures = [json.loads(text) for text in (tmp_path / "run/rewards.jsonl").read_text().splitlines()]
    assert {failure["kind"] for failure in failures} == {"timeout"}


def test_eval_measures_the_metrics_of_the_run_and_of_the_command_line(tmp_path: Path) -> None:
    ended = train(
        tmp_path, "json_valid", {"use": "metrics.py:hangs", "deadline": "0.2 seconds", "on_error": 0.5}
    )
    assert ended.returncode == 0, ended.stderr

    def evaluated(*words: str) -> subprocess.CompletedProcess[str]:
        words = ("eval", "run", "--data", "rows.jsonl", "--json", *words)
        return subprocess.run(
            [sys.executable, "-m", "unisono", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    cautious = evaluated()
    assert cautious.returncode == 0, cautious.stderr
    figures = json.loads(cautious.stdout)
    assert "metric_json_valid" in figures
    assert "metric_hangs" not in figures
    assert "is not measured: it is code that has not been trusted" in cautious.stderr
    trusting = evaluated("--trust-code", "--out", "answers.jsonl")
    assert json.loads(trusting.stdout)["metric_hangs"] == 0.5
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {frozenset(row["metrics"]) for row in rows} == {frozenset({"json_valid", "hangs"})}
    chosen = evaluated("--metric", "exact", "--metric", "{use: length, max: 1000}")
    figures = json.loads(chosen.stdout)
    assert figures["metric_exact"] == figures["exact_match"]
    assert figures["metric_length"] == 1
    assert "metric_json_valid" not in figures
    refused = evaluated("--metric", "metrics.py:refuses")
    assert refused.returncode == 2
    assert "is code that has not been trusted" in refused.stderr
    failed = evaluated("--metric", "metrics.py:refuses", "--trust-code")
    assert failed.returncode == 4
    assert "the metric refuses failed on" in failed.stderr
    assert "Traceback" not in failed.stderr
