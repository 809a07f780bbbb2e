"""A server as the sampler, in a process of its own, that is killed, hangs, or answers with something
else: what a run does and says then.

Run: pytest tests/trainer/objectives/grpo/test_vllm.py

The server computes with our own engine; a real vLLM: bench/vllm_sampler.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.trainer.objectives.grpo import rewards, vllm_like
from unisono.base.causes import Verdict
from unisono.base.errors import ConfigError

Train = Callable[..., Any]
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]
_KEY = "a-key-of-the-test-0123456789"
_STEP_2 = 7  # answers of the server before version 2: two probes and two groups, a probe and two groups


class Server:
    """A server in a process; `port` stays the same when it is started again."""

    def __init__(self, model: Path, **state: Any) -> None:
        self._model, self.port = model, 0
        self.start(**state)

    def start(self, **state: Any) -> None:
        """Starts it, also again after it was killed."""
        if self.port:
            self.end()
        words = [sys.executable, "-m", vllm_like.__name__, "--model", str(self._model)]
        words += ["--port", str(self.port), "--state", json.dumps(state)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def change(self, **state: Any) -> None:
        body = json.dumps(state).encode()
        request = urllib.request.Request(self.url + "/fault", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def lasting_server(model_dir: Path) -> Iterator[Server]:
    with Server(model_dir) as server:
        yield server


@pytest.fixture
def server(lasting_server: Server) -> Server:
    lasting_server.change()
    return lasting_server


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """A config of GRPO on twelve prompts; `rollout.url` is missing."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}", "number": n}) + "\n" for n in range(12)))
    return {
        "adapter": {"rank": 4, "alpha": 8},
        "objective": "grpo",
        "data": {"train": str(prompts), "max_length": 40},
        "rewards": [{"use": f"{rewards.__file__}:thirds"}],
        "rollout": {"group": 4, "max_new_tokens": 6, "engine": "vllm"},
        "grpo": {"truncated": "keep"},
        "optim": {"lr": 0.05, "schedule": "constant", "warmup": "0%"},
        "batch": {"global": 8},
        "duration": "4 steps",
    }


def served_by(server: Server, sections: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    return sections | {"rollout": sections["rollout"] | {"url": server.url} | rollout}


def figures(run: Any, name: str) -> list[float]:
    return [line[name] for line in run.metrics if name in line]


def verdict_of(run: Any) -> tuple[Verdict, str]:
    """The verdict of a run that it has ended with, and what the user reads of it."""
    assert run.result["exit_code"] == 4
    verdict = Verdict.from_json(run.result["verdict"])
    saved = [int(path.name.removeprefix("step-")) for path in (run.directory / "checkpoints").glob("step-*")]
    assert max(saved) == run.result["step"]
    return verdict, "\n".join(verdict.lines())


def test_answers_are_those_of_the_trained_weights(
    train_here: Train, sections: dict[str, Any], server: Server
) -> None:
    run = train_here(**served_by(server, sections))
    assert len(set(figures(run, "reward"))) > 2
    assert max(figures(run, "sampler_difference")) < 1e-5
    assert max(figures(run, "sync_difference")) < 1e-5
    assert not (run.directory / "sampler").exists()
    models = json.load(urllib.request.urlopen(server.url + "/v1/models", timeout=60))
    assert [card["id"] for card in models["data"]] == [vllm_like.BASE]


def test_evaluations_have_the_weights_of_their_step(
    train_here: Train, sections: dict[str, Any], server: Server
) -> None:
    sections |= {"eval": {"every": "2 steps"}, "data": sections["data"] | {"eval": 3}}
    run = train_here(**served_by(server, sections))
    own = sections | {"rollout": {"group": 4, "max_new_tokens": 6}, "duration": "1 steps"}
    assert run.result["eval"]["reward_before"] == train_here(**own).result["eval"]["reward_before"]
    assert len(figures(run, "eval_reward")) == 2
    assert max(figures(run, "sampler_difference")) < 1e-5


def test_the_temperature_is_in_the_log_probabilities(
    train_here: Train, sections: dict[str, Any], server: Server
) -> None:
    server.change(log_probs="processed")
    run = train_here(**served_by(server, sections, temperature=0.7))
    assert max(figures(run, "sampler_difference")) < 1e-5


@pytest.mark.parametrize(
    ("kind", "after", "cause", "words"),
    [
        ("older-version", _STEP_2, "sampler_stale", "answers as version 1, not as version 2"),
        ("binds-nothing", 0, "sampler_stale", "changes nothing on the server"),
        ("wrong-log-probs", _STEP_2, "sampler_mismatch", "different log-probabilities for version 2 than the weights here"),
        ("unknown-token", _STEP_2, "sampler_mismatch", "a token is not in the vocabulary"),
        ("other-prompt", _STEP_2 + 1, "sampler_mismatch", "it answers a different prompt"),
        ("nan", _STEP_2 + 1, "sampler_mismatch", "a log-probability is above 0, NaN or missing"),
        ("no-log-probs", _STEP_2 + 1, "sampler_mismatch", "returns what is not an answer"),
        ("fewer-answers", _STEP_2 + 1, "sampler_mismatch", "3 answers instead of 4"),
        ("too-long", _STEP_2 + 1, "sampler_mismatch", "has more than"),
        ("html", _STEP_2 + 1, "sampler_mismatch", "welcome to the gateway"),
    ],
)  # fmt: skip
def test_other_answers_than_those_of_the_weights_end_the_run(
    train_here: Train, sections: dict[str, Any], server: Server, kind: str, after: int, cause: str, words: str
) -> None:
    server.change(kind=kind, after=after)
    verdict, text = verdict_of(train_here(**served_by(server, sections)))
    assert verdict.cause == cause
    assert words in text
    assert server.url in verdict.summary
    assert "FIX" in text


def test_a_server_that_never_answers_is_waited_for_as_long_as_patience_says(
    train_here: Train, sections: dict[str, Any], server: Server
) -> None:
    server.change(kind="hangs", after=_STEP_2)
    began = time.monotonic()
    verdict, text = verdict_of(train_here(**served_by(server, sections, patience="4 seconds")))
    assert verdict.cause == "sampler_unreachable"
    assert f"the server {server.url}, which samples version 2, has not answered for" in text
    assert "(rollout.patience is 4 seconds): no answer within" in text
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("state", "rollout", "words"),
    [
        ({"lora": False}, {}, ["cannot load adapters", "--enable-lora"]),
        ({"max_length": 39}, {}, ["takes 39 tokens of prompt and answer", "--max-model-len 40"]),
        ({"key": _KEY}, {}, ["does not list its models", "401", "UNISONO_SAMPLER_KEY"]),
        ({"kind": "html"}, {}, ["cannot sample for this run", "welcome to the gateway"]),
        ({"kind": "hangs"}, {}, ["does not answer", "no answer within 10 s"]),
        ({}, {"temperature": 0.7}, ["different log-probabilities", "--logprobs-mode processed_logprobs"]),
    ],
    ids=["no LoRA", "short prompts", "key", "no vLLM", "hangs", "log-probabilities before the temperature"],
)
def test_a_server_that_cannot_sample_is_refused_before_the_first_step(
    train_here: Train,
    sections: dict[str, Any],
    server: Server,
    state: dict[str, Any],
    rollout: dict[str, Any],
    words: list[str],
) -> None:
    server.change(**state)
    with pytest.raises(ConfigError) as refusal:
        train_here(**served_by(server, sections, **rollout))
    text = "\n".join(refusal.value.lines())
    assert all(word in text for word in [server.url, "where: rollout.url", "why:", "fix:", *words]), text
    assert _KEY not in text


def test_a_server_of_another_model_is_refused(
    train_here: Train, sections: dict[str, Any], tmp_path: Path, model_dir: Path
) -> None:
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(other)
    with Server(other) as server, pytest.raises(ConfigError) as refusal:
        train_here(**served_by(server, sections))
    text = "\n".join(refusal.value.lines())
    assert f"gives different log-probabilities than {model_dir} without an adapter" in text
    assert "serve the model of this run with `--dtype float32`" in text


# ---- runs as users start them


class Folder:
    """A config on the folder of a test, and the run that it makes."""

    def __init__(self, path: Path, model: Path, sections: dict[str, Any]) -> None:
        path.mkdir(exist_ok=True)
        self.run, self._file = path / "run", path / "grpo.yaml"
        config = {
            **sections,
            "model": {"path": str(model), "dtype": "float32"},
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

    def figures(self, name: str) -> list[float]:
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_server_that_is_killed_and_restarted_costs_no_answer(
    train_here: Train, sections: dict[str, Any], server: Server, tmp_path: Path, model_dir: Path, ranks: str
) -> None:
    straight = train_here(**served_by(server, sections))
    with Server(model_dir, kind="killed", after=_STEP_2 + 2) as mortal, ExitStack() as stack:
        folder = Folder(tmp_path / "killed", model_dir, served_by(mortal, sections))
        run = folder.start("--nproc", ranks)
        stack.callback(run.kill)
        mortal.process.wait()
        died = time.monotonic()
        assert run.stdout is not None
        line = next((line for line in run.stdout if "waiting for the server" in line), "")
        assert mortal.url in line
        assert time.monotonic() - died < 10
        mortal.start()
        text, _ = run.communicate()
    assert run.returncode == 0, text
    assert folder.figures("reward") == pytest.approx(figures(straight, "reward"), abs=1e-9)
    assert folder.figures("loss") == pytest.approx(figures(straight, "loss"), abs=1e-6)


def test_sharded_weights_reach_the_server(
    train_here: Train, sections: dict[str, Any], server: Server, tmp_path: Path, model_dir: Path
) -> None:
    straight = train_here(**served_by(server, sections))
    folder = Folder(tmp_path / "sharded", model_dir, served_by(server, sections))
    code, text = folder.train("--nproc", "2", "parallel.strategy=fsdp")
    assert code == 0, text
    assert max(folder.figures("sync_difference")) < 1e-5
    assert folder.figures("reward") == pytest.approx(figures(straight, "reward"), abs=1e-9)


def test_a_server_that_stays_away_ends_all_ranks_with_a_checkpoint(
    sections: dict[str, Any], tmp_path: Path, model_dir: Path
) -> None:
    with Server(model_dir, kind="killed", after=_STEP_2) as mortal:
        folder = Folder(tmp_path / "away", model_dir, served_by(mortal, sections, patience="3 seconds"))
        code, text = folder.train("--nproc", "2")
        assert code == 4, text
        verdict = json.loads((folder.run / "verdict.json").read_text())
        assert verdict["cause"] == "sampler_unreachable"
        assert f"the server {mortal.url}, which samples version 2, has not answered for" in text
        assert "[sampler_unreachable]" in text
        assert "Traceback" not in text
        assert (folder.run / "checkpoints" / "step-00000002").exists()
        mortal.start()
        code, text = folder.train("--nproc", "2")
    assert code == 0, text
    assert len(folder.figures("reward")) == 4


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("after", [_STEP_2, _STEP_2 + 2], ids=["in a transfer", "while it samples"])
def test_a_stop_request_ends_the_wait_for_a_server(
    train_here: Train, sections: dict[str, Any], server: Server, tmp_path: Path, model_dir: Path, ranks: str, after: int
) -> None:  # fmt: skip
    straight = train_here(**served_by(server, sections))
    with Server(model_dir, kind="killed", after=after) as mortal, ExitStack() as stack:
        folder = Folder(tmp_path / "stopped", model_dir, served_by(mortal, sections))
        run = folder.start("--nproc", ranks)
        stack.callback(run.kill)
        assert run.stdout is not None
        assert any("waiting for the server" in line for line in run.stdout)
        run.send_signal(signal.SIGTERM)
        since = time.monotonic()
        text, _ = run.communicate()
        assert run.returncode == 75, text
        assert time.monotonic() - since < 30
        assert (folder.run / "checkpoints" / "step-00000002").exists()
        mortal.start()
        code, text = folder.train("--nproc", ranks)
    assert code == 0, text
    assert folder.figures("reward") == pytest.approx(figures(straight, "reward"), abs=1e-9)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_server_that_is_not_there_is_refused(
    sections: dict[str, Any], tmp_path: Path, model_dir: Path, ranks: str
) -> None:
    sections["rollout"] |= {"url": "http://127.0.0.1:9"}
    code, text = Folder(tmp_path / "none", model_dir, sections).train("--nproc", ranks)
    assert code == 2, text
    assert "the server http://127.0.0.1:9 does not answer" in text
    assert "Connection refused" in text
    assert "Traceback" not in text


def test_the_key_of_a_server_goes_to_the_server_alone(
    sections: dict[str, Any], server: Server, tmp_path: Path, model_dir: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import os\n\ndef score(completions, **_):\n"
        "    assert not any('SAMPLER_KEY' in name for name in os.environ)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    server.change(key=_KEY)
    folder = Folder(tmp_path / "key", model_dir, served_by(server, sections | {"rewards": [f"{own}:score"]}))
    code, text = folder.train(key=_KEY)
    assert code == 0, text
    assert _KEY not in text
    files = [path for path in folder.run.rglob("*") if path.is_file()]
    assert files
    assert not any(_KEY.encode() in path.read_bytes() for path in files)
