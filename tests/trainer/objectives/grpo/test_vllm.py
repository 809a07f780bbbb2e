"""A server as the sampler, in a process of its own, that is killed, hangs, or answers with something
else: what a run does and says then.

Run: pytest tests/trainer/objectives/grpo/test_vllm.py

The server computes with our own engine; with a real vLLM: test_real_vllm.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.trainer.objectives.grpo import rewards, vllm_like

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
_KEY = "a-key-of-the-test-0123456789"
_STEP_2 = 7  # answers of the server before version 2: two probes and two groups, then a probe and two groups


class Server:
    """A server; `port` stays the same when it is started again."""

    def __init__(self, model: Path, *options: str) -> None:
        self._model, self.port = model, 0
        self.start(*options)

    def start(self, *options: str) -> None:
        words = [sys.executable, "-m", vllm_like.__name__, "--model", str(self._model)]
        words += ["--port", str(self.port), *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Folder:
    """A config on the folder of a test, and the run that it makes."""

    def __init__(self, path: Path, model: Path, url: str, **rollout: Any) -> None:
        self.run, self._file = path / "run", path / "grpo.yaml"
        rows = path / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": f"say {n}", "number": n}) + "\n" for n in range(12)))
        config = {
            "model": {"path": str(model), "dtype": "float32"},
            "adapter": {"rank": 4, "alpha": 8},
            "objective": "grpo",
            "data": {"train": str(rows), "max_length": 40},
            "rewards": [f"{rewards.__file__}:thirds"],
            "rollout": {"group": 4, "max_new_tokens": 6, "engine": "vllm", "url": url, **rollout},
            "grpo": {"truncated": "keep"},
            "optim": {"lr": 0.05, "schedule": "constant", "warmup": "0%"},
            "batch": {"global": 8},
            "duration": "4 steps",
            "device": "cpu",
            "restarts": 0,
            "output_dir": str(self.run),
        }
        self._file.write_text(yaml.safe_dump(config))

    def start(self, *options: str, key: str = "") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "unisono", "train", str(self._file), "--trust-code", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "UNISONO_SAMPLER_KEY": key},
        )

    def train(self, *options: str, key: str = "") -> tuple[int, str]:
        """The exit code, and what the user reads."""
        process = self.start(*options, key=key)
        text, _ = process.communicate()
        return process.returncode, text

    def verdict(self) -> dict[str, Any]:
        verdict: dict[str, Any] = json.loads((self.run / "verdict.json").read_text())
        return verdict

    def figures(self, name: str) -> list[float]:
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [line[name] for line in lines if name in line]

    def checkpoints(self) -> list[int]:
        return [
            int(path.name.removeprefix("step-")) for path in sorted((self.run / "checkpoints").glob("step-*"))
        ]


@pytest.fixture
def server(model_dir: Path) -> Iterator[Server]:
    with Server(model_dir) as one:
        yield one


def test_answers_are_those_of_the_trained_weights_on_any_number_of_ranks(
    tmp_path: Path, model_dir: Path, server: Server
) -> None:
    folders = []
    for ranks in (1, 2):
        path = tmp_path / str(ranks)
        path.mkdir()
        folder = Folder(path, model_dir, server.url)
        code, text = folder.train("--nproc", str(ranks))
        assert code == 0, text
        assert max(folder.figures("sampler_difference")) < 1e-5
        assert max(folder.figures("sync_difference")) < 1e-5
        assert not (folder.run / "sampler").exists()
        folders.append(folder)
    one, two = folders
    assert two.figures("reward") == pytest.approx(one.figures("reward"), abs=1e-9)
    assert two.figures("loss") == pytest.approx(one.figures("loss"), abs=1e-6)
    assert len(set(one.figures("reward"))) > 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_killed_and_restarted_costs_no_answer(
    tmp_path: Path, model_dir: Path, server: Server, ranks: int
) -> None:
    straight = Folder(make(tmp_path / "straight"), model_dir, server.url)
    assert straight.train()[0] == 0
    with Server(model_dir, "--fault", "killed", "--after", str(_STEP_2 + 2)) as mortal:
        folder = Folder(make(tmp_path / "killed"), model_dir, mortal.url)
        run = folder.start("--nproc", str(ranks))
        mortal.process.wait()
        died = time.monotonic()
        assert run.stdout is not None
        line = next(line for line in run.stdout if "waiting for the server" in line)
        assert time.monotonic() - died < 10
        assert mortal.url in line
        mortal.start()
        text, _ = run.communicate()
    assert run.returncode == 0, text
    assert folder.figures("reward") == pytest.approx(straight.figures("reward"), abs=1e-9)
    assert folder.figures("loss") == pytest.approx(straight.figures("loss"), abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_stays_away_ends_the_run_with_a_checkpoint(
    tmp_path: Path, model_dir: Path, ranks: int
) -> None:
    with Server(model_dir, "--fault", "killed", "--after", str(_STEP_2)) as mortal:
        folder = Folder(tmp_path, model_dir, mortal.url, patience="3 seconds")
        code, text = folder.train("--nproc", str(ranks))
        assert code == 4, text
        verdict = folder.verdict()
        assert verdict["cause"] == "sampler_unreachable"
        assert f"the server {mortal.url}, which samples version 2, has not answered for" in verdict["summary"]
        assert "rollout.patience is 3 seconds" in verdict["summary"]
        assert "[sampler_unreachable]" in text
        assert "Traceback" not in text
        assert folder.checkpoints()[-1] == verdict["step"] - 1 == 2
        mortal.start()
        code, text = folder.train("--nproc", str(ranks))
    assert code == 0, text
    assert len(folder.figures("reward")) == 4


def test_a_server_that_never_answers_is_waited_for_as_long_as_patience_says(
    tmp_path: Path, model_dir: Path
) -> None:
    with Server(model_dir, "--fault", "hangs", "--after", str(_STEP_2)) as silent:
        folder = Folder(tmp_path, model_dir, silent.url, patience="4 seconds")
        code, text = folder.train()
    assert code == 4, text
    assert folder.verdict()["cause"] == "sampler_unreachable"
    assert "no answer within" in folder.verdict()["summary"]


@pytest.mark.parametrize(
    ("fault", "after", "cause", "words"),
    [
        ("older-version", _STEP_2, "sampler_stale", "answers as version 1, not as version 2"),
        ("binds-nothing", 0, "sampler_stale", "changes nothing on the server"),
        ("wrong-log-probs", _STEP_2, "sampler_mismatch", "other log-probabilities to version 2 than the weights here"),
        ("unknown-token", _STEP_2, "sampler_mismatch", "a token is not in the vocabulary"),
        ("other-prompt", _STEP_2 + 1, "sampler_mismatch", "it answers another prompt"),
        ("nan", _STEP_2 + 1, "sampler_mismatch", "a log-probability is not a number up to 0"),
        ("too-long", _STEP_2 + 1, "sampler_mismatch", "has more than"),
        ("html", _STEP_2 + 1, "sampler_mismatch", "welcome to the gateway"),
    ],
)  # fmt: skip
def test_other_answers_than_those_of_the_weights_end_the_run(
    tmp_path: Path, model_dir: Path, fault: str, after: int, cause: str, words: str
) -> None:
    with Server(model_dir, "--fault", fault, "--after", str(after)) as server:
        folder = Folder(tmp_path, model_dir, server.url)
        code, text = folder.train()
    assert code == 4, text
    verdict = folder.verdict()
    assert verdict["cause"] == cause
    assert words in verdict["summary"]
    assert server.url in verdict["summary"]
    assert f"[{cause}]" in text
    assert "Traceback" not in text
    assert folder.checkpoints()[-1] == verdict["step"] - 1


@pytest.mark.parametrize(
    ("options", "rollout", "words"),
    [
        (["--no-lora"], {}, ["cannot load adapters", "--enable-lora"]),
        (["--max-model-len", "39"], {}, ["takes 39 tokens of prompt and answer", "--max-model-len 40"]),
        (["--api-key", _KEY], {}, ["does not list its models", "401", "UNISONO_SAMPLER_KEY"]),
        (["--fault", "html"], {}, ["cannot sample for this run", "welcome to the gateway"]),
        (["--fault", "hangs"], {}, ["does not answer", "no answer within 10 s"]),
        ([], {"temperature": 0.7}, ["other log-probabilities", "--logprobs-mode processed_logprobs"]),
    ],
    ids=lambda value: "-".join(map(str, value))[:30] if isinstance(value, Sequence) else None,
)
def test_a_server_that_cannot_sample_is_refused_before_the_first_step(
    tmp_path: Path, model_dir: Path, options: list[str], rollout: dict[str, Any], words: list[str]
) -> None:
    with Server(model_dir, *options) as server:
        folder = Folder(tmp_path, model_dir, server.url, **rollout)
        code, text = folder.train()
    assert code == 2, text
    assert all(word in text for word in [server.url, "where: rollout.url", "why:", "fix:", *words]), text
    assert "Traceback" not in text
    assert _KEY not in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_not_there_is_refused(
    tmp_path: Path, model_dir: Path, server: Server, ranks: int
) -> None:
    server.process.kill()
    server.process.wait()
    code, text = Folder(tmp_path, model_dir, server.url).train("--nproc", str(ranks))
    assert code in (2, 3), text
    assert f"the server {server.url} does not answer" in text
    assert "Connection refused" in text
    assert "Traceback" not in text


def test_a_server_of_another_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(other)
    with Server(other) as server:
        code, text = Folder(tmp_path, model_dir, server.url).train()
    assert code == 2, text
    assert f"gives other log-probabilities than {model_dir} without an adapter" in text
    assert "serve the model of this run with `--dtype float32`" in text


def test_log_probabilities_are_those_at_the_temperature(tmp_path: Path, model_dir: Path) -> None:
    with Server(model_dir, "--logprobs-mode", "processed") as server:
        folder = Folder(tmp_path, model_dir, server.url, temperature=0.7)
        code, text = folder.train()
    assert code == 0, text
    assert max(folder.figures("sampler_difference")) < 1e-5


def test_the_key_of_a_server_goes_to_the_server_alone(tmp_path: Path, model_dir: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import os\n\ndef score(completions, **_):\n"
        "    assert not any('SAMPLER_KEY' in name for name in os.environ)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    with Server(model_dir, "--api-key", _KEY) as server:
        folder = Folder(tmp_path, model_dir, server.url)
        code, text = folder.train(f"rewards=[{own}:score]", key=_KEY)
    assert code == 0, text
    assert _KEY not in text
    files = [path for path in folder.run.rglob("*") if path.is_file()]
    assert files
    assert not any(_KEY.encode() in path.read_bytes() for path in files)


def make(path: Path) -> Path:
    path.mkdir()
    return path
