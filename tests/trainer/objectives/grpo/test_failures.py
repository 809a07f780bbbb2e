"""Rewards that raise or never return: the run ends at once on all ranks with their line and a
checkpoint, or goes on, as `on_error` says.

Run: pytest tests/trainer/objectives/grpo/test_failures.py
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.objectives.grpo import rewards

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
PROMPTS = 16


def train(
    folder: Path, reward: dict[str, Any], *overrides: str, ranks: int = 1
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run on prompts with the numbers 1 to 16, in order of the seed."""
    words, run = command(folder, reward, *overrides, ranks=ranks)
    return subprocess.run(words, capture_output=True, text=True, check=False), run


def command(folder: Path, reward: dict[str, Any], *overrides: str, ranks: int = 1) -> tuple[list[str], Path]:
    """The words of such a run, and its directory."""
    rows = folder / "prompts.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "number": n}) + "\n" for n in range(1, 1 + PROMPTS))
    )
    config = {
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "objective": "grpo",
        "data": {"train": str(rows), "max_length": 64},
        "rewards": [reward],
        "rollout": {"group": 2, "max_new_tokens": 5},
        "grpo": {"truncated": "keep"},
        "batch": {"global": 8, "micro": 4},
        "duration": "4 steps",
        "device": "cpu",
        "output_dir": str(folder / "run"),
    }
    file = folder / "grpo.yaml"
    file.write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "unisono", "train", str(file), "--trust-code", *overrides]
    words += ["--nproc", str(ranks)] if ranks > 1 else []
    return words, folder / "run"


def reward(name: str, **settings: Any) -> dict[str, Any]:
    return {"use": f"{rewards.__file__}:{name}", **settings}


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_ends_the_run_with_its_line_and_a_checkpoint(tmp_path: Path, ranks: int) -> None:
    ended, run = train(tmp_path, reward("fails_on_a_seven"), ranks=ranks)
    assert ended.returncode == 4, ended.stderr
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["cause"] == "reward_error"
    assert "there is no score for a seven" in verdict["summary"]
    assert "prompts.jsonl:7" in verdict["summary"]
    (line,) = {line["where"] for line in failures(run)}
    source = Path(rewards.__file__).read_text().splitlines()
    assert source[int(line.rpartition(":")[2]) - 1].strip().startswith("raise ValueError")
    assert "[reward_error]" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "a restart would not help" in ended.stderr
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == verdict["step"] - 1


def test_the_same_command_goes_on_when_the_reward_is_repaired(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def score(completions, number, **_):\n    return [1 / (7 - number[0])] * len(completions)\n"
    )
    ended, run = train(tmp_path, {"use": f"{file}:score"})
    assert ended.returncode == 4, ended.stderr
    file.write_text("def score(completions, number, **_):\n    return [1.0] * len(completions)\n")
    ended, run = train(tmp_path, {"use": f"{file}:score"})
    assert ended.returncode == 0, ended.stderr
    assert "the file of rewards.0 has changed: answers may get other rewards" in ended.stderr
    assert json.loads((run / "result.json").read_text())["step"] == 4


def test_the_same_command_goes_on_with_what_the_remedy_says(tmp_path: Path) -> None:
    ended, _ = train(tmp_path, reward("fails_on_a_seven"))
    assert ended.returncode == 4, ended.stderr
    ended, _ = train(tmp_path, reward("fails_on_a_seven", on_error="skip"))
    assert ended.returncode == 0, ended.stderr
    assert 'rewards.on_error is "skip", and was "error"' in ended.stderr
    ended, _ = train(tmp_path, reward("fails_on_a_seven", on_error="skip", weight=2.0), "duration=5 steps")
    assert ended.returncode == 2
    assert "--allow rewards.weight" in ended.stderr


def test_words_of_any_length_and_script_reach_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def score(completions, **_):\n    raise ValueError('答' * 5000)\n")
    ended, run = train(tmp_path, {"use": f"{file}:score"}, ranks=2)
    assert ended.returncode == 4, ended.stderr
    assert "ValueError: 答答答" in json.loads((run / "verdict.json").read_text())["summary"]


def test_a_reward_that_fails_in_an_evaluation_ends_the_run_alike(tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"prompt": "say 27", "number": 27}) + "\n")
    ended, run = train(tmp_path, reward("fails_on_a_seven"), f"data.eval={held_out}")
    assert ended.returncode == 4, ended.stderr
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["cause"] == "reward_error"
    assert "held-out.jsonl:1" in verdict["summary"]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("on_error", ["skip", 0.5])
def test_the_run_goes_on_if_on_error_says_so(tmp_path: Path, on_error: str | float) -> None:
    ended, run = train(tmp_path, reward("fails_on_a_seven", on_error=on_error))
    assert ended.returncode == 0, ended.stderr
    assert {line["row"].rpartition(":")[2] for line in failures(run)} == {"7"}
    assert {line["answer"] for line in failures(run)} == {0, 1}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("no_reward" in line for line in lines) == (on_error == "skip")


def test_a_reward_that_never_returns_ends_the_run_soon(tmp_path: Path) -> None:
    ended, run = train(tmp_path, reward("hangs_on_a_seven", deadline="3 seconds"))
    assert ended.returncode == 4, ended.stderr
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["cause"] == "reward_timeout"
    assert "no reward within 3 seconds" in verdict["summary"]
    events = (run / "events" / "rank-00000.jsonl").read_text().splitlines()
    waits = [m for m in map(json.loads, events) if m["kind"] == "phase" and m["phase"] == "reward"]
    assert any("hangs_on_a_seven on " in m["text"] and "prompts.jsonl:7 for " in m["text"] for m in waits)
    assert 3 <= failures(run)[0]["seconds"] < 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_request_ends_the_wait_for_a_reward_and_nothing_is_lost(tmp_path: Path, ranks: int) -> None:
    file, wait = tmp_path / "own.py", tmp_path / "wait"
    file.write_text(
        "import pathlib, time\n\n"
        "def score(completions, number, **_):\n"
        f"    while number[0] == 7 and pathlib.Path({str(wait)!r}).exists():\n"
        "        time.sleep(0.1)\n"
        "    return [float(len(answer)) for answer in completions]\n"
    )
    of_own = {"use": f"{file}:score", "deadline": "20 minutes"}
    (tmp_path / "straight").mkdir()
    ended, straight = train(tmp_path / "straight", of_own, ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    wait.touch()
    (tmp_path / "stopped").mkdir()
    words, run = command(tmp_path / "stopped", of_own, ranks=ranks)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("waiting for own.py:score on" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            since = time.monotonic()
            text = process.stderr.read()
            assert process.wait() == 75, text
            assert time.monotonic() - since < 30
        finally:
            process.kill()
    wait.unlink()
    assert subprocess.run(words, check=False).returncode == 0
    for name in ("loss", "reward", "entropy", "grad_norm"):
        assert metrics(run, name) == metrics(straight, name)
    assert len(metrics(run, "loss")) == 4


def test_a_stop_request_while_a_reward_is_loaded_changes_nothing(tmp_path: Path) -> None:
    file, wait = tmp_path / "own.py", tmp_path / "wait"
    wait.touch()
    file.write_text(
        "import pathlib, time\n\n"
        f"while pathlib.Path({str(wait)!r}).exists():\n"
        "    time.sleep(0.1)\n\n"
        "def score(completions, **_):\n"
        "    return [float(len(answer)) for answer in completions]\n"
    )
    words, run = command(tmp_path, {"use": f"{file}:score"}, ranks=2)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("waiting for loading own.py:score" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            text = process.stderr.read()
            assert process.wait() == 75, text
        finally:
            process.kill()
    assert "SIGTERM before the first step of this start: ending; nothing has changed" in text
    assert "Traceback" not in text
    wait.unlink()
    assert subprocess.run(words, check=False).returncode == 0
    assert len(metrics(run, "loss")) == 4


def metrics(run: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def failures(run: Path) -> list[dict[str, Any]]:
    """The lines of rewards.jsonl."""
    return [json.loads(line) for line in (run / "rewards.jsonl").read_text().splitlines()]


def test_rewards_that_say_nothing_are_named_once_and_the_run_goes_on(tmp_path: Path) -> None:
    ended, run = train(tmp_path, {"use": "length", "max": 1000}, "duration=14 steps")
    assert ended.returncode == 0, ended.stderr
    text = (
        "all answers to a prompt get the same reward (mean 1), so none becomes likelier, in 10 steps in a row"
    )
    assert ended.stderr.count(text) == 1
    events = [json.loads(line) for line in (run / "events" / "rank-00000.jsonl").read_text().splitlines()]
    (warning,) = [event for event in events if event.get("code") == "no_reward_signal"]
    assert warning["fix"].startswith("Look at answers with their rewards")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_policy_that_explodes_ends_the_run_and_keeps_its_checkpoints(tmp_path: Path, ranks: int) -> None:
    settings = [
        "rollout.steps=8",
        "optim.lr=3.0",
        "optim.max_grad_norm=null",
        "optim.warmup=0%",
        "duration=16 steps",
    ]
    ended, run = train(tmp_path, reward("longer"), *settings, "checkpoint.every=1 steps", ranks=ranks)
    assert ended.returncode == 4, ended.stderr
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["cause"] == "kl_exploded"
    assert "the divergence from the model that sampled is" in verdict["summary"]
    assert "Restart with a lower learning rate" in ended.stderr
    assert list((run / "checkpoints").glob("step-*"))
