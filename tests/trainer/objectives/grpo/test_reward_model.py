"""A reward model as a reward: its values are those of the toolkit for the same pairs, it has a
process of its own, and a run that is none is refused.

Run: pytest tests/trainer/objectives/grpo/test_reward_model.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import Listening
from unisono.base.errors import ConfigError
from unisono.trainer.config.reward_models import reward_model
from unisono.trainer.config.rollout_sections import RewardSection
from unisono.trainer.objectives.rewards.builtin import UnusableValueError
from unisono.trainer.objectives.rewards.calls import RewardCall, RewardError, Text
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.plan.task_requests import EvaluateRequest, RequestedModel
from unisono.trainer.task import evaluate
from unisono.trainer.task.generation import encode_prompts
from unisono.trainer.task.inference import open_requested
from unisono.trainer.task.prompt_files import Prompt
from unisono.trainer.task.reward_model import ModelReward

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def unisono(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", *words], capture_output=True, text=True, check=False
    )


def written(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def reward_config(model_dir: Path, pairs: Path, folder: Path, **sections: Any) -> str:
    """The file with the config of a reward model, whose tokenizer and template are not those of the
    policy.
    """
    config = {
        "model": {"path": str(model_dir), "dtype": "float32"},
        "objective": "reward",
        "adapter": {"rank": 4, "alpha": 8},
        "data": {"train": str(pairs), "max_length": 64},
        "optim": {"lr": 0.01},
        "duration": "4 steps",
        "device": "cpu",
        "output_dir": str(folder / "judge"),
        **sections,
    }
    (folder / "reward.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "reward.yaml")


@pytest.fixture(scope="session")
def reward_run(
    model_dir: Path, pair_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished reward model."""
    folder = tmp_path_factory.mktemp("reward-model")
    ended = unisono("train", reward_config(model_dir, pair_files[0], folder))
    assert ended.returncode == 0, ended.stderr
    return folder / "judge"


def policy(folder: Path, rewards: list[dict[str, Any]], **sections: Any) -> str:
    """The file with the config of a run with rewards."""
    prompts: list[dict[str, Any]] = [{"prompt": f"say {n}"} for n in range(5)]
    prompts += [
        {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"tell {n}"}]}
        for n in range(5)
    ]
    config = {
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "objective": "grpo",
        "data": {"train": written(folder / "prompts.jsonl", prompts), "max_length": 64},
        "rewards": rewards,
        "rollout": {"group": 4, "max_new_tokens": 6},
        "grpo": {"truncated": "keep"},
        "batch": {"global": 8},
        "duration": "3 steps",
        "device": "cpu",
        "output_dir": str(folder / "run"),
        **sections,
    }
    (folder / "grpo.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "grpo.yaml")


def evaluated(run: Path, folder: Path, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `unisono eval` gives for each pair."""
    data = written(folder / "pairs.jsonl", pairs)
    request = EvaluateRequest(
        model=RequestedModel(str(run)), data=data, cache_dir=folder / "cache", each=True
    )
    return [dict(row) for row in evaluate.run(request, Listening())["rows"]]


def test_answers_get_the_values_that_the_toolkit_gives_for_the_same_pairs(
    reward_run: Path, tmp_path: Path
) -> None:
    from pyarrow import parquet

    model = {"use": "model", "path": str(reward_run), "weight": 0.5}
    ended = unisono("train", policy(tmp_path, [model, {"use": "length", "max": 3}]))
    assert ended.returncode == 0, ended.stderr
    answers = parquet.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert len(answers) == 24
    values = [json.loads(answer["rewards"]) for answer in answers]
    for answer, parts in zip(answers, values, strict=True):
        assert answer["reward"] == pytest.approx(0.5 * parts["model"] + parts["length"])
    said = [
        (json.loads(answer["prompt"]), answer["text"], parts["model"])
        for answer, parts in zip(answers, values, strict=True)
        if answer["text"].strip()
    ]
    pairs: list[dict[str, Any]] = []
    for prompt, text, _ in said:
        other = "another answer"
        if isinstance(prompt, list):
            texts = [[{"role": "assistant", "content": one}] for one in (text, other)]
            pairs.append({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
        else:
            pairs.append({"prompt": prompt, "chosen": text, "rejected": other})
    assert len(pairs) > 12
    assert len({type(pair["prompt"]) for pair in pairs}) == 2
    rows = evaluated(reward_run, tmp_path, pairs)
    assert [row["rewards_chosen"] for row in rows] == pytest.approx([value for *_, value in said], abs=1e-5)
    assert len({round(value, 6) for *_, value in said}) > 12, "answers have different values"
    events = map(json.loads, (tmp_path / "run" / "events" / "rank-00000.jsonl").read_text().splitlines())
    waits = [m["text"] for m in events if m["kind"] == "phase" and m["phase"] == "reward"]
    assert any("waiting for loading model judge for " in text for text in waits)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["code_digests"] == {
        "rewards.0.path": reward_model(reward_run, "rewards.0.path", device="cpu").digest
    }
    assert plan["memory"]["other_models"] > 0


def test_a_resumed_run_says_that_the_reward_model_is_another_one(
    reward_run: Path, model_dir: Path, pair_files: tuple[Path, Path], tmp_path: Path
) -> None:
    judge = shutil.copytree(reward_run, tmp_path / "judge")
    config = policy(tmp_path, [{"use": "model", "path": str(judge)}])
    ended = unisono("train", config)
    assert ended.returncode == 0, ended.stderr
    # All weights are trained this time, and the result is in another directory.
    again = reward_config(model_dir, pair_files[0], tmp_path, adapter=None, optim={"lr": 1e-3})
    ended = unisono("train", again, "--fresh")
    assert ended.returncode == 0, ended.stderr
    ended = unisono("train", config, "--resume", "duration=4 steps")
    assert ended.returncode == 0, ended.stderr
    assert "the reward model of rewards.0.path has changed: answers may get other rewards" in ended.stderr


def rated(run: Path, prompt: Text, *answers: Text) -> list[Any]:
    """What a loaded reward model gives for answers to a prompt."""
    with torch.random.fork_rng():
        opened = open_requested(RequestedModel(str(run)), Listening(), answers=False)
    return ModelReward(opened)([prompt] * len(answers), list(answers))


def test_an_empty_answer_has_a_value_and_one_that_is_too_long_has_none(reward_run: Path) -> None:
    usual, empty, blank, long, last = rated(
        reward_run, "say 1", "the tree", "", " \n", "the tree " * 300, "dog"
    )
    assert all(isinstance(value, float) for value in (usual, empty, blank, last))
    assert empty == pytest.approx(blank, abs=1e-5)
    assert isinstance(long, UnusableValueError)
    assert "the reward model reads 256" in str(long)


def test_a_prompt_that_looks_like_json_is_a_text(reward_run: Path) -> None:
    prompt = '[{"role": "user"}] is what?'
    as_messages: Text = [{"role": "user", "content": prompt}]
    answer: Text = [{"role": "assistant", "content": "a list"}]
    assert rated(reward_run, prompt, "a list") == rated(reward_run, as_messages, answer)


def test_a_conversation_with_tools_and_several_turns_is_rated_as_a_whole(reward_run: Path) -> None:
    prompt: Text = [{"role": "user", "content": "count"}]
    turns: list[dict[str, object]] = [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "two"},
    ]
    whole, first, last = rated(reward_run, prompt, turns, turns[:1], turns[2:])
    longer: Text = [*prompt, *turns[:2]]
    assert rated(reward_run, longer, turns[2:]) == [pytest.approx(whole, abs=1e-5)]
    assert len({whole, first, last}) == 3


def processes_of_models() -> list[int]:
    """The processes of reward models that this one has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"task.reward_model" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def pool(run: Path, **settings: Any) -> RewardPool:
    entries = [RewardSection.model_validate({"use": "model", "path": str(run), **settings})]
    model = reward_model(run, "rewards.0.path", device="cpu")
    return RewardPool(entries, {model.key: model.digest})


def test_a_killed_process_is_named_with_its_row_and_replaced_for_the_next_call(reward_run: Path) -> None:
    call = RewardCall("prompts.jsonl:3", "say 3", ["the tree"] * 400, [[1]] * 400)
    with pool(reward_run) as rewards:
        (pid,) = processes_of_models()
        os.kill(pid, signal.SIGSTOP)  # it is killed within the call
        rewards._on_wait = lambda _: os.kill(pid, signal.SIGKILL)
        with pytest.raises(RewardError) as error:
            rewards.score([replace(call, completions=["the tree"], completion_ids=[[1]])])
        assert str(error.value) == "model on prompts.jsonl:3, answer 0: its process ended by SIGKILL"
        rewards._on_wait = None
        (scored,) = rewards.score([replace(call, completions=["the tree"], completion_ids=[[1]])])
        assert scored.totals == pytest.approx(rated(reward_run, "say 3", "the tree"), abs=1e-5)
        (other,) = processes_of_models()
        assert other != pid
    assert processes_of_models() == []


def test_a_killed_process_ends_the_run_with_a_verdict_and_a_checkpoint(
    reward_run: Path, tmp_path: Path
) -> None:
    """The reward model is killed while the run waits for it, in the second step."""
    config = policy(tmp_path, [{"use": "model", "path": str(reward_run)}], duration="100000 steps")
    words = [sys.executable, "-m", "unisono", "train", config]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(line.startswith("step ") for line in process.stderr)
            (pid,) = model_processes_below(process.pid)
            os.kill(pid, signal.SIGSTOP)
            assert any("waiting for model judge on" in line for line in process.stderr)
            os.kill(pid, signal.SIGKILL)
            text = process.stderr.read()
            assert process.wait() == 4, text
        finally:
            process.kill()
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["cause"] == "reward_error"
    assert "the reward model failed on" in verdict["summary"]
    assert "its process ended by SIGKILL" in verdict["summary"]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def model_processes_below(pid: int) -> list[int]:
    """The processes of reward models among the descendants of a process."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        for task in Path(f"/proc/{one}/task").iterdir():
            waiting += map(int, (task / "children").read_text().split())
        if b"task.reward_model" in Path(f"/proc/{one}/cmdline").read_bytes():
            found.append(one)
    return found


def test_damaged_weights_are_refused_before_the_first_step(reward_run: Path, tmp_path: Path) -> None:
    judge = shutil.copytree(reward_run, tmp_path / "judge")
    file = judge / "adapter" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"), pool(judge):
        pass
    assert processes_of_models() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("absent", "is not a run"),
        ("sft", "is not a reward model; its objective is sft"),
        ("unfinished", "is not finished; its outcome is preempted"),
        ("without files", "lacks files; there is no adapter/unisono_manifest.json"),
    ],
)
def test_a_path_that_is_not_a_finished_reward_model_is_refused_before_the_start(
    reward_run: Path, tmp_path: Path, change: str, words: str
) -> None:
    judge = shutil.copytree(reward_run, tmp_path / "judge")
    plan, result = (json.loads((judge / name).read_text()) for name in ("plan.json", "result.json"))
    if change == "absent":
        (judge / "plan.json").unlink()
    elif change == "sft":
        plan["config"]["objective"] = "sft"
        (judge / "plan.json").write_text(json.dumps(plan))
    elif change == "unfinished":
        (judge / "result.json").write_text(json.dumps(result | {"outcome": "preempted"}))
    else:
        (judge / "adapter" / "unisono_manifest.json").unlink()
    ended = unisono("train", policy(tmp_path, [{"use": "model", "path": str(judge)}]))
    assert ended.returncode == 2, ended.stderr
    what, _, why = words.partition("; ")
    assert what in ended.stderr
    assert why in ended.stderr
    assert "where: rewards.0.path" in ended.stderr
    assert "fix:" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_unisono_eval_takes_a_reward_model(reward_run: Path, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": f"say {n}"} for n in range(3)])
    out = tmp_path / "answers.jsonl"
    reward = f"{{use: model, path: '{reward_run}'}}"
    ended = unisono(
        "eval", "builtin:tiny", "--rewards", "--data", prompts, "--reward", reward, "--max-tokens", "6",
        "--out", str(out),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert [row["reward"]] == pytest.approx(rated(reward_run, row["prompt"], row["answer"]), abs=1e-5)


def test_a_reward_model_of_texts_reads_texts_as_its_rows(
    model_dir: Path, pair_files: tuple[Path, Path], tmp_path: Path
) -> None:
    data = {"train": str(pair_files[0]), "max_length": 64, "plain_texts": True}
    ended = unisono("train", reward_config(model_dir, pair_files[0], tmp_path, data=data))
    assert ended.returncode == 0, ended.stderr
    assert "rows are plain text" in ended.stderr + ended.stdout
    judge, answers = tmp_path / "judge", ["the tree", "dog", "a small tree"]
    pairs = [{"prompt": "say 1 ", "chosen": answer, "rejected": "no"} for answer in answers]
    values = rated(judge, "say 1 ", *answers)
    assert values == pytest.approx([row["rewards_chosen"] for row in evaluated(judge, tmp_path, pairs)])
    turns: list[Text] = [[{"role": "assistant", "content": answer}] for answer in answers]
    rendered = rated(judge, [{"role": "user", "content": "say 1 "}], *turns)
    assert rendered != pytest.approx(values, abs=1e-5)
    with torch.random.fork_rng():
        opened = open_requested(RequestedModel(str(judge)), Listening(), answers=False)
    ids, template = encode_prompts(
        opened, [Prompt("a file", "say 1 ")], raw=False, system=None, max_new_tokens=4
    )
    assert template is None
    assert ids == [opened.tokenizer("say 1 ").input_ids]
