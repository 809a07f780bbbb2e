"""Runs in which the model acts in an environment: it learns to use the tool, what it reads is not
trained, and failures end as `on_error` says.

Run: pytest tests/trainer/objectives/environments/test_runs.py
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import get_json_schema

from tests.trainer.objectives.environments import shop
from tests.trainer.objectives.environments.test_turns import PLAIN, WITHOUT_TOOLS
from tests.trainer.objectives.grpo.test_vllm import Server

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 6


def price(item: str) -> int:
    """The price of something.

    Args:
        item: what to buy
    """
    return len(item)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts and a model that looks a price up in some of its answers, and guesses
    in others.
    """
    folder, draw = tmp_path_factory.mktemp("shop"), random.Random(0)
    (folder / "t.jinja").write_text(PLAIN)
    (folder / "bare.jinja").write_text(WITHOUT_TOOLS)
    write(folder / "sft.jsonl", [conversation(draw) for _ in range(160)])
    items = [draw.choice(list(shop.PRICES)) for _ in range(32)]
    write(
        folder / "prompts.jsonl",
        [{"prompt": f"what is the price of {item}?", "item": item} for item in items],
    )
    config = {
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "adapter": None,
        "data": {"train": str(folder / "sft.jsonl"), "template": str(folder / "t.jinja"), "max_length": 384},
        "optim": {"lr": 3e-3, "warmup": "0%"},
        "duration": "60 steps",
        "batch": {"global": 8},
        "device": "cpu",
        "output_dir": str(folder / "sft"),
    }
    ended = command(folder, config, "train")
    assert ended.returncode == 0, ended.stderr
    return folder


def conversation(draw: random.Random) -> dict[str, Any]:
    item = draw.choice(list(shop.PRICES))
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"what is the price of {item}?"}]
    if draw.random() < 0.3:
        call = {"type": "function", "function": {"name": "price", "arguments": {"item": item}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(shop.PRICES[item])},
            {"role": "assistant", "content": f"It costs {shop.PRICES[item]}."},
        ]
    else:
        messages.append({"role": "assistant", "content": f"It costs {draw.randint(1, 9)}."})
    return {"messages": messages, "tools": [get_json_schema(price)]}


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(folder: Path, config: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    file = folder / f"{Path(config['output_dir']).name}.yaml"
    file.write_text(yaml.safe_dump(config))
    line = [sys.executable, "-m", "unisono", words[0], str(file), *words[1:]]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def run_config(started: Path, name: str, **sections: Any) -> dict[str, Any]:
    rollout = {"group": 4, "max_new_tokens": 64, "turns": 3, "environment": f"{shop.__file__}:Shop"}
    return {
        "model": {"path": str(started / "sft" / "model"), "dtype": "float32"},
        "objective": "grpo",
        "data": {
            "train": str(started / "prompts.jsonl"),
            "template": str(started / "t.jinja"),
            "eval": 8,
            "max_length": 256,
        },
        "rollout": rollout | sections.pop("rollout", {}),
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "batch": {"global": 32},
        "duration": f"{STEPS} steps",
        "device": "cpu",
        "output_dir": str(started / name),
        **sections,
    }


def train(
    started: Path, name: str, *words: str, **sections: Any
) -> tuple[subprocess.CompletedProcess[str], Path]:
    config = run_config(started, name, **sections)
    return command(started, config, "train", "--trust-code", *words), started / name


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def answers(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


@pytest.fixture(scope="module")
def learned(started: Path) -> Path:
    """A run on one device, of six steps."""
    ended, run = train(started, "one")
    assert ended.returncode == 0, ended.stderr
    return run


def test_the_model_learns_to_use_the_tool(learned: Path) -> None:
    rising = [line["reward"] for line in metrics(learned) if "reward" in line]
    assert rising[0] < 0.7
    assert rising[-1] > rising[0] + 0.2
    assert json.loads((learned / "result.json").read_text())["eval"]["reward"] > 0.9


def test_what_tools_give_is_read_and_not_trained(learned: Path, started: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(started / "sft" / "model")
    with_results = [row for row in answers(learned) if row["turns"] > 1]
    assert with_results
    for row in with_results:
        messages = json.loads(row["messages"])
        read = [token for token, mine in zip(row["ids"], row["is_sampled"], strict=True) if not mine]
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert tokenizer.decode(read) == "".join(f"\n= {one}\n" for one in results)
        assert sum(row["is_sampled"]) == len(row["log_probs"]) < len(row["ids"])
        prompt = tokenizer.decode(row["prompt_ids"])
        assert prompt.startswith('{"type": "function"')
        assert prompt.endswith("?\n")


def test_the_sampler_is_the_training_forward_between_turns_too(learned: Path) -> None:
    differences = [line["sampler_difference"] for line in metrics(learned) if "sampler_difference" in line]
    assert len(differences) == STEPS
    assert max(differences) < 1e-5


def test_figures_tell_turns_and_rewards(learned: Path) -> None:
    rows = answers(learned)
    for line in (line for line in metrics(learned) if "turns" in line):
        of_step = [row for row in rows if row["step"] == line["step"]]
        assert line["turns"] == pytest.approx(sum(row["turns"] for row in of_step) / len(of_step))
        assert line["reward"] == pytest.approx(sum(row["reward"] for row in of_step) / len(of_step))
        assert 1 <= line["turns"] <= 3


@pytest.mark.parametrize(
    "words", [["--nproc", "2"], ["batch.micro=4"]], ids=["two ranks", "small micro batches"]
)
def test_losses_are_those_of_one_device(started: Path, learned: Path, words: list[str]) -> None:
    ended, run = train(started, words[-1].replace("=", ""), *words)
    assert ended.returncode == 0, ended.stderr
    losses, expected = ([line["loss"] for line in metrics(one) if "loss" in line] for one in (run, learned))
    assert losses[:5] == pytest.approx(expected[:5], abs=1e-6)


def test_a_run_that_was_killed_within_a_rollout_repeats_no_episode(started: Path) -> None:
    sections: Any = {"rollout": {"steps": 2}, "checkpoint": {"every": "1 steps"}, "duration": "4 steps"}
    ended, straight = train(started, "straight", **sections)
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(straight, run := started / "resumed")
    for later in ("checkpoints/step-00000004", "result.json", "adapter"):
        path = run / later
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ended, run = train(started, "resumed", **sections)
    assert ended.returncode == 0, ended.stderr
    assert "from step 3" in ended.stderr
    keys = ("loss", "reward", "turns", "refused_calls", "grad_norm")
    mine, expected = (
        {line["step"]: [line[key] for key in keys] for line in metrics(one) if "loss" in line}
        for one in (run, straight)
    )
    assert mine == expected
    assert answers(run) == answers(straight)


def test_a_server_samples_the_turns(started: Path) -> None:
    server = Server(started / "sft" / "model")
    try:
        rollout = {"engine": "vllm", "url": server.url, "patience": "1 minute"}
        ended, run = train(started, "served", rollout=rollout, duration="2 steps")
    finally:
        server.end()
    assert ended.returncode == 0, ended.stderr
    assert any(row["turns"] > 1 for row in answers(run))
    assert max(line["sampler_difference"] for line in metrics(run) if "loss" in line) < 1e-4


def test_rewards_of_the_config_are_added_and_get_all_messages(started: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def turns(prompts, completions, item, **_):\n"
        "    assert all(prompt.endswith('?') for prompt in prompts)\n"
        "    return [float(sum(m['role'] == 'assistant' for m in messages)) for messages in completions]\n"
    )
    environment = {"use": f"{shop.__file__}:Shop", "weight": 0.5}
    ended, run = train(
        started, "both", rewards=[f"{file}:turns"], rollout={"environment": environment}, duration="1 steps"
    )
    assert ended.returncode == 0, ended.stderr
    for row in answers(run):
        given = json.loads(row["rewards"])
        assert given["turns"] == row["turns"]
        assert row["reward"] == pytest.approx(given["turns"] + 0.5 * given["Shop"])


def test_an_environment_that_fails_ends_the_run_with_its_line(started: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        Path(shop.__file__).read_text().replace('self.item: str = row["item"]', 'self.item = row["itm"]')
    )
    ended, run = train(started, "failed", rollout={"environment": f"{file}:Shop"})
    assert ended.returncode == 4, ended.stderr
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["cause"] == "reward_error"
    assert "the environment Shop.reset failed on " in verdict["summary"]
    assert "prompts.jsonl:" in verdict["summary"]
    assert "KeyError: 'itm'" in verdict["summary"]
    line = int(verdict["evidence"][0]["where"].rpartition(":")[2])
    assert 'row["itm"]' in file.read_text().splitlines()[line - 1]
    assert "Traceback" not in ended.stderr
    file.write_text(Path(shop.__file__).read_text())
    ended, _ = train(started, "failed", rollout={"environment": f"{file}:Shop"}, duration="1 steps")
    assert ended.returncode == 0, ended.stderr
    assert "the file of rollout.environment.use has changed" in ended.stderr


@pytest.mark.parametrize(("on_error", "reward"), [("skip", None), (-1.0, -1.0)])
def test_an_answer_whose_environment_fails_leaves_its_group_or_gets_a_number(
    started: Path, tmp_path: Path, on_error: Any, reward: float | None
) -> None:
    source = (
        Path(shop.__file__)
        .read_text()
        .replace("        self.seen: list", "        assert row['item'] != 'tea'\n        self.seen: list")
    )
    (tmp_path / "own.py").write_text(source)
    environment = {"use": f"{tmp_path / 'own.py'}:Shop", "on_error": on_error}
    ended, run = train(started, f"on-{on_error}", rollout={"environment": environment}, duration="2 steps")
    assert ended.returncode == 0, ended.stderr
    failed = [row for row in answers(run) if "tea" in row["prompt"]]
    assert failed
    assert {row["reward"] for row in failed} == {reward}
    assert all(row["reward"] is not None for row in answers(run) if "tea" not in row["prompt"])
    lines = [json.loads(line) for line in (run / "rewards.jsonl").read_text().splitlines()]
    assert {line["function"] for line in lines} == {"Shop.reset"}


@pytest.mark.parametrize(
    ("sections", "texts"),
    [
        (
            {"data": {"template": "bare.jinja"}},
            ["does not write conversations with the tools of shop.py:Shop", "set data.template"],
        ),
        (
            {"rollout": {"environment": f"{shop.__file__}:Shp"}},
            ["has no class Shp", "did you mean `shop.py:Shop`?"],
        ),
        ({"rollout": {"environment": "Shop"}}, ["Shop is not a class in a file", "write FILE.py:CLASS"]),
    ],
    ids=["template", "class", "no file"],
)
def test_refused_before_the_first_step(started: Path, sections: dict[str, Any], texts: list[str]) -> None:
    config = run_config(started, "refused")
    data = sections.get("data", {})
    config["data"] |= {key: str(started / value) for key, value in data.items()}
    config["rollout"] |= sections.get("rollout", {})
    ended = command(started, config, "train", "--trust-code", "--fresh")
    assert ended.returncode == 2, ended.stderr
    for text in texts:
        assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_run_is_evaluated_in_its_environment(learned: Path) -> None:
    words = [sys.executable, "-m", "unisono", "eval", str(learned), "--rewards", "--samples", "2", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "shop.py:Shop is code that has not been trusted" in ended.stderr
    ended = subprocess.run([*words, "--trust-code"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["reward"] > 0.8
