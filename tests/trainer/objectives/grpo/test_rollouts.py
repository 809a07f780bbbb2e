"""Sampled answers as a source of batches: what is trained does not depend on micro batches, is on
disk, and a stopped run resumes bit by bit.

Run: pytest tests/trainer/objectives/grpo/test_rollouts.py

On two ranks: kind `grpo` of tests/trainer/ranks.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pyarrow import parquet

from tests.trainer.objectives.grpo import rewards
from unisono.base.errors import IntegrityError

Train = Callable[..., Any]
_GROUP, _TOKENS = 4, 6


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """A config of GRPO on twelve prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}", "number": n}) + "\n" for n in range(12)))
    return {
        "objective": "grpo",
        "data": {"train": str(prompts), "max_length": 40, "eval": 3},
        "rewards": [{"use": f"{rewards.__file__}:thirds"}],
        "rollout": {"group": _GROUP, "max_new_tokens": _TOKENS},
        "grpo": {"truncated": "keep"},
        "batch": {"global": 8},
        "duration": "6 steps",
        "eval": {"every": "3 steps"},
        "checkpoint": {"every": "2 steps"},
    }


def answers(directory: Path) -> list[dict[str, Any]]:
    """All answers of a run, in order."""
    files = sorted((directory / "rollouts").glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def figures(run: Any, name: str) -> list[float]:
    return [line[name] for line in run.metrics if name in line]


def test_losses_do_not_depend_on_the_micro_batch(train_here: Train, sections: dict[str, Any]) -> None:
    whole, single = (train_here(**sections | {"batch": {"global": 8, "micro": n}}) for n in (8, 1))
    assert len(set(whole.losses)) > 3
    assert single.losses[:5] == pytest.approx(whole.losses[:5], abs=1e-6)
    assert figures(single, "reward") == figures(whole, "reward")


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "rloo"])
def test_every_loss_trains(train_here: Train, sections: dict[str, Any], loss: str) -> None:
    run = train_here(**sections | {"grpo": {"loss": loss, "truncated": "keep"}, "duration": "2 steps"})
    assert all(norm > 0 for norm in figures(run, "grad_norm"))


def test_log_probabilities_of_the_sampler_are_those_of_training(
    train_here: Train, sections: dict[str, Any]
) -> None:
    sections["rollout"] |= {"temperature": 0.7}
    run = train_here(**sections)
    differences = figures(run, "sampler_difference")
    assert len(differences) == 6
    assert max(differences) < 1e-5


def test_the_dropout_of_a_model_is_not_taken_for_a_sampler_that_differs(
    train_here: Train, sections: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    """It is off while answers are sampled, and a config cannot remove it as that of an adapter."""
    model = shutil.copytree(model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.9}))
    run = train_here(**sections | {"model": {"path": str(model), "dtype": "float32"}})
    assert run.result["exit_code"] == 0
    assert len(figures(run, "loss")) == 6
    assert figures(run, "sampler_difference") == []


def test_answers_on_disk_are_those_of_the_metrics(train_here: Train, sections: dict[str, Any]) -> None:
    run = train_here(**sections | {"grpo": {"truncated": "mask"}})
    rows = answers(run.directory)
    assert [row["answer"] for row in rows] == [*range(_GROUP)] * 12
    for step, reward in enumerate(figures(run, "reward"), 1):
        of_step = [row for row in rows if row["step"] == step]
        assert sum(row["reward"] for row in of_step) / 8 == pytest.approx(reward, abs=1e-9)
    for row in rows:
        (reward,) = rewards.thirds([row["ids"]])
        assert json.loads(row["rewards"]) == {"thirds": pytest.approx(reward)}
        assert len(row["ids"]) == len(row["log_probs"]) <= _TOKENS
        assert row["has_loss"] == (row["stop"] == "stop")  # truncated ones are masked
    for first in range(0, len(rows), _GROUP):
        assert sum(row["advantage"] for row in rows[first : first + _GROUP]) == pytest.approx(0, abs=1e-9)


def test_the_reward_that_is_asked_for_rises(train_here: Train, sections: dict[str, Any]) -> None:
    sections |= {"duration": "40 steps", "batch": {"global": 32}, "adapter": None, "optim": {"lr": 0.01}}
    run = train_here(**sections)
    rising = figures(run, "reward")
    assert sum(rising[-5:]) / 5 > sum(rising[:5]) / 5 + 0.2
    assert run.result["eval"]["reward"] > run.result["eval"]["reward_before"]


@pytest.mark.parametrize(
    "rollout",
    [{"steps": 1}, {"steps": 3}, {"steps": 3, "resample": 2}],
    ids=["one step of a rollout", "within a rollout", "with other prompts"],
)
def test_a_stopped_run_resumes_bit_exactly(
    train_here: Train, sections: dict[str, Any], rollout: dict[str, int]
) -> None:
    sections["rollout"] |= rollout
    sections["rewards"] = [{"use": f"{rewards.__file__}:of_even_numbers"}]
    straight = train_here(**sections)

    def at_step_4(message: dict[str, Any], stop: Any) -> None:
        if message["kind"] == "step" and message["step"] == 4:
            stop.outcome = "preempted"

    stopped = train_here(on_message=at_step_4, **sections)
    path = stopped.directory / "checkpoints" / "step-00000004"
    resumed = train_here(directory=stopped.directory, resume=(4, path), **sections)
    assert resumed.losses == straight.losses
    assert figures(resumed, "reward") == figures(straight, "reward")
    assert resumed.result["eval"] == straight.result["eval"]
    mine, expected = resumed.weights(), straight.weights()
    assert all(torch.equal(mine[name], expected[name]) for name in expected)
    assert answers(resumed.directory) == answers(straight.directory)


def test_a_run_that_ended_within_a_rollout_can_be_extended(
    train_here: Train, sections: dict[str, Any]
) -> None:
    """The answers to the steps that it did not have were never sampled."""
    sections["rollout"] |= {"steps": 4}
    ended = train_here(**sections | {"duration": "2 steps"})
    path = ended.directory / "checkpoints" / "step-00000002"
    extended = train_here(directory=ended.directory, resume=(2, path), **sections)
    assert [line["step"] for line in extended.metrics if "loss" in line][-4:] == [3, 4, 5, 6]
    policies = {row["step"]: row["policy"] for row in answers(extended.directory)}
    assert policies == {1: 0, 2: 0, 3: 2, 4: 2, 5: 4, 6: 4}
    resumed = train_here(directory=ended.directory, resume=(4, path.with_name("step-00000004")), **sections)
    assert resumed.losses[-2:] == extended.losses[-2:]


def test_later_steps_of_a_rollout_have_clipped_ratios(train_here: Train, sections: dict[str, Any]) -> None:
    sections["rollout"] |= {"steps": 3}
    run = train_here(**sections | {"grpo": {"truncated": "keep", "clip": [0.01, 0.01]}, "optim": {"lr": 0.1}})
    ratios, clipped = figures(run, "ratio"), figures(run, "clip_high")
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert ratios[3] == pytest.approx(1, abs=1e-5)
    assert max(abs(ratio - 1) for ratio in ratios[1:3]) > 1e-3
    assert max(clipped[1:3]) > 0
    assert {row["policy"] for row in answers(run.directory)} == {0, 3}


@pytest.mark.parametrize(
    "adapter",
    [
        {"rank": 4, "alpha": 8},
        {"rank": 4, "alpha": 8, "init": "pissa"},
        {"rank": 4, "alpha": 8, "modules_to_save": ["norm"]},
        None,
    ],
    ids=["lora", "pissa", "with a whole module", "full"],
)
def test_divergence_is_that_from_the_model_as_it_starts(
    train_here: Train, sections: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    more = {
        "adapter": adapter,
        "grpo": {"beta": 0.1, "truncated": "keep"},
        "batch": {"global": 8, "micro": 4},
    }
    run = train_here(**sections | more)
    start = transformers.AutoModelForCausalLM.from_pretrained(run.plan.model.directory)
    rows, divergence = answers(run.directory), figures(run, "kl")
    assert divergence[0] == pytest.approx(0, abs=1e-6)
    assert divergence[-1] > 1e-4
    for step, value in enumerate(divergence, 1):
        of_step = [row for row in rows if row["step"] == step]
        # The weights of a step are those that sampled. As in TRL: exp(ref - new) - (ref - new) - 1.
        new = torch.tensor([p for row in of_step for p in row["log_probs"]])
        delta = torch.cat([log_probs(start, row["prompt_ids"], row["ids"]) for row in of_step]) - new
        assert value == pytest.approx(float((delta.exp() - delta - 1).mean()), rel=1e-3, abs=1e-6)
    assert (run.plan.memory.other_models > 0) == (adapter != {"rank": 4, "alpha": 8})


def log_probs(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Those of the tokens of an answer."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    values: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return values


def test_a_copy_of_the_start_costs_nothing_in_the_first_step(
    train_here: Train, sections: dict[str, Any]
) -> None:
    """All weights, and an adapter that is switched off: the same reference, model and answers."""
    more = {"grpo": {"beta": 0.5, "truncated": "keep"}, "duration": "1 steps"}
    full, lora = (train_here(**sections | more | {"adapter": one}) for one in (None, {"rank": 4, "alpha": 8}))
    assert [row["ids"] for row in answers(full.directory)] == [row["ids"] for row in answers(lora.directory)]
    assert full.losses == pytest.approx(lora.losses, abs=1e-6)


def test_a_run_with_a_copy_of_the_start_resumes_bit_by_bit(
    train_here: Train, sections: dict[str, Any]
) -> None:
    sections |= {"adapter": None, "grpo": {"beta": 0.1, "truncated": "keep"}}
    straight = train_here(**sections)
    resumed = train_here(**sections, resume=(4, straight.directory / "checkpoints" / "step-00000004"))
    assert resumed.losses == straight.losses[4:]
    assert figures(resumed, "kl") == figures(straight, "kl")[4:]


def test_groups_with_equal_rewards_change_nothing(train_here: Train, sections: dict[str, Any]) -> None:
    sections["rewards"] = [{"use": "length", "max": 1000}]
    run = train_here(**sections | {"optim": {"weight_decay": 0.0}})
    assert figures(run, "equal_groups") == [1.0] * 6
    assert figures(run, "grad_norm") == [0.0] * 6


def test_groups_with_equal_rewards_get_another_prompt(train_here: Train, sections: dict[str, Any]) -> None:
    sections["rollout"] |= {"resample": 3}
    sections["rewards"] = [{"use": f"{rewards.__file__}:of_even_numbers"}]
    run = train_here(**sections)
    rows = answers(run.directory)
    groups = [rows[first : first + _GROUP] for first in range(0, len(rows), _GROUP)]
    for group in groups:
        is_odd = int(json.loads(group[0]["prompt"]).split()[-1]) % 2 == 1
        assert {row["is_equal"] for row in group} == {is_odd}
        assert group[0]["is_replaced"] == (is_odd and group[0]["draw"] < 3)
        assert not any(row["has_loss"] for row in group if row["is_replaced"])
    last = {group[0]["place"]: group for group in groups}
    assert len(last) == 12
    assert not any(group[0]["is_replaced"] for group in last.values())
    assert sum(group[0]["is_replaced"] for group in groups) == len(groups) - 12 > 0
    shares = [sum(last[place][0]["draw"] > 0 for place in (2 * step, 2 * step + 1)) / 2 for step in range(6)]
    assert [line.get("resampled", 0.0) for line in run.metrics if "loss" in line] == shares


def test_draws_are_bounded(train_here: Train, sections: dict[str, Any]) -> None:
    sections["rewards"] = [{"use": "length", "max": 1000}]
    sections["rollout"] |= {"resample": 2}
    run = train_here(**sections)
    assert figures(run, "equal_groups") == [1.0] * 6
    assert [row["draw"] for row in answers(run.directory)[::_GROUP]] == [0, 1, 2] * 12


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_changes_nothing_where_sampler_and_training_agree(
    train_here: Train, sections: dict[str, Any], kind: str
) -> None:
    sections["duration"] = "2 steps"
    plain = train_here(**sections)
    run = train_here(**sections | {"grpo": {"truncated": "keep", "correction": kind}})
    assert run.losses == pytest.approx(plain.losses, abs=1e-5)
    assert figures(run, "effective_samples") == pytest.approx([1.0] * 2, abs=1e-5)
    assert figures(run, "correction") == pytest.approx([1.0] * 2, abs=1e-4)


def test_entropy_is_that_of_the_sampled_tokens(train_here: Train, sections: dict[str, Any]) -> None:
    run = train_here(**sections)
    for step, entropy in enumerate(figures(run, "entropy"), 1):
        values = [p for row in answers(run.directory) if row["step"] == step for p in row["log_probs"]]
        assert entropy == pytest.approx(-sum(values) / len(values), rel=1e-6)


def test_answers_of_an_earlier_start_with_more_ranks_are_not_trained_on(
    train_here: Train, sections: dict[str, Any]
) -> None:
    sections["rollout"] |= {"steps": 3}
    straight = train_here(**sections)
    path = straight.directory / "checkpoints" / "step-00000004"
    resumed = train_here(directory=straight.directory, resume=(4, path), **sections)
    stale = straight.directory / "rollouts" / "step-00000004.1.parquet"
    shutil.copy(straight.directory / "rollouts" / "step-00000004.0.parquet", stale)
    path = straight.directory / "checkpoints" / "step-00000002"
    again = train_here(directory=straight.directory, resume=(2, path), **sections)
    assert not stale.exists()
    assert again.losses == resumed.losses == straight.losses


def test_damaged_answers_of_a_rollout_refuse_the_resume(train_here: Train, sections: dict[str, Any]) -> None:
    sections["rollout"] |= {"steps": 3}
    run = train_here(**sections)
    (run.directory / "rollouts" / "step-00000004.0.parquet").write_bytes(b"PAR1 nothing")
    path = run.directory / "checkpoints" / "step-00000004"
    with pytest.raises(IntegrityError, match="the answers that step 5 trains on are damaged"):
        train_here(directory=run.directory, resume=(4, path), **sections)


def test_missing_answers_of_a_rollout_refuse_the_resume(train_here: Train, sections: dict[str, Any]) -> None:
    sections["rollout"] |= {"steps": 3}
    run = train_here(**sections)
    for file in (run.directory / "rollouts").iterdir():
        file.unlink()
    path = run.directory / "checkpoints" / "step-00000004"
    with pytest.raises(
        IntegrityError, match=r"answers to .*prompts.jsonl:\d+ that step 5 trains on are not there"
    ):
        train_here(directory=run.directory, resume=(4, path), **sections)
