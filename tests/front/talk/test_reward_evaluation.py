"""`unisono eval --rewards` measures answers as a run does, and a failing reward is told in words.

Run: pytest tests/front/talk/test_reward_evaluation.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.front.talk.conftest import Listening
from tests.trainer.objectives.grpo import rewards
from unisono.base.errors import EndedByVerdict, UsageError
from unisono.front.cli.reward_evaluation import read_functions, reward_lines
from unisono.trainer.config.rollout_sections import RewardSection
from unisono.trainer.plan.task_requests import EvaluateRewardsRequest, RequestedModel
from unisono.trainer.task import reward_evaluation

Train = Callable[..., Any]
THIRDS = f"{rewards.__file__}:thirds"


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """A config of GRPO whose evaluation is on 3 of 12 prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "number": n, "answer": "x"}) + "\n" for n in range(12))
    )
    return {
        "objective": "grpo",
        "data": {"train": str(prompts), "max_length": 40, "eval": 3},
        "rewards": [{"use": THIRDS}],
        "rollout": {"group": 4, "max_new_tokens": 6},
        "grpo": {"truncated": "keep"},
        "eval": {"every": "4 steps"},
    }


def evaluated(target: object, folder: Path, *, said: Listening | None = None, **more: Any) -> dict[str, Any]:
    settings = {"data": None, "trust_code": True, "cache_dir": folder / "cache", **more}
    settings["rewards"] = read_functions(RewardSection, settings.get("rewards", ()), "--reward")
    request = EvaluateRewardsRequest(model=RequestedModel(str(target)), **settings)
    return dict(reward_evaluation.run(request, said or Listening()))


def test_a_single_answer_has_the_reward_of_the_run_s_own_evaluation(
    train_here: Train, sections: dict[str, Any], tmp_path: Path
) -> None:
    run = train_here(**sections)
    result = evaluated(run.directory, tmp_path)
    figures = result["figures"]
    assert figures["prompts"] == figures["answers"] == 3
    assert figures["reward"] == pytest.approx(run.result["eval"]["reward"])
    assert figures["answer_tokens"] == pytest.approx(run.result["eval"]["answer_tokens"])
    assert result["temperature"] == 0


def test_a_file_of_prompts_is_evaluated_as_rows_that_were_held_out(
    train_here: Train, sections: dict[str, Any], tmp_path: Path
) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"tell {n}", "number": n}) + "\n" for n in range(5)))
    run = train_here(**sections | {"data": {**sections["data"], "eval": str(held_out)}})
    of_run = evaluated(run.directory, tmp_path, samples=2)
    of_file = evaluated(run.directory, tmp_path, samples=2, data=str(held_out))
    assert of_run["figures"]["reward"] == of_file["figures"]["reward"]
    assert of_run["figures"]["prompts"] == 5


def test_answers_and_their_rewards_give_the_figures(
    train_here: Train, sections: dict[str, Any], tmp_path: Path
) -> None:
    run = train_here(**sections)
    said = Listening()
    result = evaluated(run.directory, tmp_path, samples=4, threshold=0.3, said=said)
    rows, figures = result["rows"], result["figures"]
    assert [row["number"] for row in rows] == [0, 1, 2, 3] * 3
    assert len({row["answer"] for row in rows}) > 3, "they are sampled"
    assert figures["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 12)
    assert figures["pass@1"] == pytest.approx(sum(row["reward"] >= 0.3 for row in rows) / 12)
    groups = [rows[first : first + 4] for first in (0, 4, 8)]
    assert figures["pass@4"] == pytest.approx(
        sum(any(row["reward"] >= 0.3 for row in group) for group in groups) / 3
    )
    assert figures["truncated"] == pytest.approx(sum(row["stop"] == "length" for row in rows) / 12)
    progress = [m for m in said.of_kind("phase") if m["phase"] == "rollout"]
    assert (progress[-1]["done"], progress[-1]["total"]) == (12, 12)
    assert evaluated(run.directory, tmp_path, samples=4, threshold=0.3)["rows"] == rows, (
        "the seed is the run's"
    )
    shown: Any = result
    prompts, answers = reward_lines(shown)[2:4]
    assert prompts.split() == ["prompts", "3"]
    assert "4 to each prompt, temperature 1" in answers


@pytest.mark.processes
def test_a_model_is_evaluated_by_rewards_that_are_named(
    model_dir: Path, sections: dict[str, Any], tmp_path: Path
) -> None:
    result = evaluated(
        model_dir,
        tmp_path,
        data=sections["data"]["train"],
        rewards=["exact", "{use: length, max: 5, weight: 0.5}"],
        max_tokens=8,
        samples=2,
        limit=4,
    )
    figures = result["figures"]
    assert (figures["prompts"], figures["answers"]) == (4, 8)
    assert figures["reward"] == pytest.approx(figures["reward_exact"] + 0.5 * figures["reward_length"])
    assert max(row["tokens"] for row in result["rows"]) <= 8


def test_a_failed_reward_ends_it_with_a_verdict(
    train_here: Train, sections: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def score(completions, number, **_):\n    return [1.0] * len(completions)\n")
    run = train_here(**sections | {"rewards": [{"use": f"{file}:score"}]})
    file.write_text("def score(completions, number, **_):\n    raise ValueError('there is no score')\n")
    said = Listening()
    with pytest.raises(EndedByVerdict, match="there is no score") as ended:
        evaluated(run.directory, tmp_path, said=said)
    assert ended.value.verdict is not None
    assert (ended.value.exit_code, ended.value.verdict.cause) == (4, "reward_error")
    assert ended.value.problems[0].where == f"{file}:2"
    assert not any("checkpoint" in line for line in ended.value.verdict.fix), "an evaluation has none"
    assert [m["text"] for m in said.of_kind("warning")] == [
        "the file of rewards.0 has changed since the training"
    ]


def test_a_failed_reward_is_skipped_if_on_error_says_so(
    train_here: Train, sections: dict[str, Any], tmp_path: Path
) -> None:
    run, said = train_here(**sections), Listening()
    own = f"{{use: '{rewards.__file__}:fails_on_a_seven', on_error: skip}}"
    data = sections["data"]["train"]
    result = evaluated(run.directory, tmp_path, said=said, data=data, rewards=[own], samples=2)
    assert result["figures"]["no_reward"] == pytest.approx(1 / 12)
    assert [row["row"] for row in result["rows"] if row["reward"] is None] == [f"{data}:8"] * 2
    assert "there is no score for a seven" in said.of_kind("warning")[0]["text"]


def test_a_reward_that_never_returns_ends_at_its_deadline(
    train_here: Train, sections: dict[str, Any], tmp_path: Path
) -> None:
    run = train_here(**sections)
    own = f"{{use: '{rewards.__file__}:hangs_on_a_seven', deadline: 2 seconds}}"
    with pytest.raises(EndedByVerdict, match="no reward within 2 seconds") as ended:
        evaluated(run.directory, tmp_path, data=sections["data"]["train"], rewards=[own])
    assert ended.value.verdict is not None
    assert ended.value.verdict.cause == "reward_timeout"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "was not trained with rewards"),
        ({"rewards": ["exact"]}, "there are no prompts to evaluate"),
        ({"rewards": [THIRDS], "trust_code": False}, "is code that has not been trusted"),
        ({"rewards": ["exact"], "data": "missing.jsonl"}, "missing.jsonl"),
    ],
    ids=["no rewards", "no prompts", "code", "no file"],
)
def test_what_cannot_be_evaluated_is_refused_before_the_model_is_loaded(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    said = Listening()
    with pytest.raises(UsageError, match=problem):
        evaluated(model_dir, tmp_path, said=said, **settings)
    assert not [m for m in said.of_kind("phase") if m["phase"] == "load_model"]


def test_answers_longer_than_the_model_are_refused(
    model_dir: Path, sections: dict[str, Any], tmp_path: Path
) -> None:
    data = sections["data"]["train"]
    with pytest.raises(UsageError, match="leave no room for a prompt"):
        evaluated(model_dir, tmp_path, rewards=["exact"], data=data, max_tokens=256)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exac", "there is no reward exac"),
        ("{use: regex}", "regex needs it"),
        ("{use: length, mox: 3}", "unknown key"),
        ("{use: [", "is not YAML"),
        ("{use: exact, min: 3}", "exact does not use it"),
    ],
)
def test_a_wrong_reward_of_the_command_line_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refused:
        read_functions(RewardSection, [text], "--reward")
    assert refused.value.problems[0].where == "--reward"


@pytest.mark.slow
def test_the_command_has_a_table_json_and_a_file(
    model_dir: Path, sections: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    words = ["eval", model_dir, "--reward", "exact", "--data", sections["data"]["train"], "--max-tokens", 4]
    done = front_server.run(
        [sys.executable, "-m", "unisono", *map(str, words), "--samples", "2", "--json", "--out", str(out)]
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert (body["schema"], body["prompts"], body["pass@2"], body["samples"]) == (1, 12, 0.0, 2)
    assert len(out.read_text().splitlines()) == 24
    refused = front_server.run(
        [sys.executable, "-m", "unisono", *map(str, words[:2]), "--samples", "2", "--data", str(words[5])]
    )
    assert refused.returncode == 2
    assert "--samples has no effect here" in refused.stderr
