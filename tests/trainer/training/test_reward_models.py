"""Runs with `objective: reward`: what they begin with, what they write, and what they refuse.

Run: pytest tests/trainer/training/test_reward_models.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from unisono.base.errors import ModelError

Train = Callable[..., Any]


@pytest.fixture
def pairs(pair_files: tuple[Path, Path]) -> dict[str, Any]:
    """The config of a run on pairs."""
    train, unseen = pair_files
    return {
        "objective": "reward",
        "data": {"train": str(train), "eval": str(unseen), "max_length": 64},
        "checkpoint": {"every": "3 steps"},
    }


def _steps(run: Any) -> list[dict[str, Any]]:
    return [line for line in run.metrics if "loss" in line]


def test_neither_packing_nor_the_micro_batch_changes_the_losses(
    train_here: Train, pairs: dict[str, Any]
) -> None:
    whole = train_here(**pairs, batch={"global": 40}, duration="3 steps")
    # Without packing a sequence is a pair: all 40 are in a step, as when they are packed into fewer
    # sequences.
    alone = train_here(
        **{**pairs, "data": {**pairs["data"], "packing": False}},
        batch={"global": 40, "micro": 4},
        duration="3 steps",
    )
    packed = whole.plan.data.train.sequences
    assert packed < 40
    again = train_here(**pairs, batch={"global": packed}, duration="3 steps")
    small = train_here(**pairs, batch={"global": packed, "micro": 1}, duration="3 steps")
    names = ("loss", "rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
    for mine, other, theirs in zip(*(_steps(run) for run in (again, small, alone)), strict=True):
        for name in names:
            # A reward is a small difference of larger numbers.
            least = 1e-6 if name == "loss" else 1e-5
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=least)
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=least)
        assert "logps_chosen" not in mine


@pytest.mark.parametrize("adapter", [{"rank": 4, "alpha": 8, "dropout": 0.1}, None], ids=["lora", "full"])
def test_a_resumed_run_is_the_straight_one(
    train_here: Train, pairs: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    straight = train_here(**pairs, adapter=adapter)
    resumed = train_here(
        **pairs, adapter=adapter, resume=(3, straight.directory / "checkpoints" / "step-00000003")
    )
    assert resumed.losses == straight.losses[3:]
    wanted = straight.weights()
    assert all(torch.equal(value, wanted[name]) for name, value in resumed.weights().items())


def test_the_new_head_depends_on_the_seed_alone(train_here: Train, pairs: dict[str, Any]) -> None:
    one, again, other = (train_here(**pairs, duration="1 steps", seed=seed) for seed in (1, 1, 2))
    before = [run.result["eval"]["loss_before"] for run in (one, again, other)]
    assert before[0] == before[1] != before[2]


def test_a_reward_model_is_trained_further_with_its_head(train_here: Train, pairs: dict[str, Any]) -> None:
    first = train_here(**pairs, adapter=None)
    model = {"path": str(first.directory / "model"), "dtype": "float32"}
    second = train_here(**pairs, adapter=None, model=model)
    assert second.result["eval"]["loss_before"] == pytest.approx(first.result["eval"]["loss"], rel=1e-5)
    third = train_here(**pairs, model=model)
    assert third.result["eval"]["loss_before"] == pytest.approx(first.result["eval"]["loss"], rel=1e-5)
    fourth = train_here(**pairs, model=model, adapter={"rank": 4, "alpha": 8, "from": str(third.directory)})
    assert fourth.result["eval"]["loss_before"] == pytest.approx(third.result["eval"]["loss"], rel=1e-5)


def test_train_only_trains_the_head_too(train_here: Train, pairs: dict[str, Any]) -> None:
    run = train_here(**pairs, adapter=None, train_only={"layers": 1})
    begin = transformers.LlamaForCausalLM.from_pretrained(run.plan.model.directory).state_dict()
    trained = run.weights()
    changed = {
        name for name, value in trained.items() if name in begin and not torch.equal(value, begin[name])
    }
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)
    straight = train_here(
        **pairs, adapter=None, train_only={"layers": 1}, duration="1 steps", optim={"lr": 1e-9}
    )
    assert not torch.allclose(straight.weights()["score.weight"], trained["score.weight"], atol=1e-4)


def test_an_adapter_of_the_other_kind_is_refused(train_here: Train, pairs: dict[str, Any]) -> None:
    language, reward = train_here(), train_here(**pairs)
    with pytest.raises(
        ModelError, match=r"an adapter of a language model, and a reward model or classifier is trained"
    ) as error:
        train_here(**pairs, adapter={"rank": 4, "alpha": 8, "from": str(language.directory)})
    assert "adapter.merge" in str(error.value.problems[0].fix)
    with pytest.raises(
        ModelError, match="an adapter of a reward model or classifier, and a language model is trained"
    ):
        train_here(adapter={"rank": 4, "alpha": 8, "from": str(reward.directory)})


def test_models_without_a_value_for_a_row_are_refused(
    train_here: Train, pairs: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    size = len(tokenizer)

    def refused(model: Any, *, sections: dict[str, Any], why: str) -> None:
        directory = tmp_path / type(model).__name__
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        with pytest.raises(ModelError, match=why):
            train_here(**sections, model={"path": str(directory), "dtype": "float32"})

    mamba = transformers.MambaConfig(vocab_size=size, hidden_size=32, num_hidden_layers=2, state_size=4)
    refused(
        transformers.MambaForCausalLM(mamba),
        sections=pairs,
        why="a model of type mamba cannot become a reward model",
    )
    bert = transformers.BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        is_decoder=True,
    )  # fmt: skip
    refused(
        transformers.BertLMHeadModel(bert),
        sections=pairs,
        why="a model of type bert cannot become a reward model",
    )
    llama = transformers.LlamaConfig.from_pretrained(model_dir, num_labels=2)
    two = transformers.LlamaForSequenceClassification(llama)
    refused(two, sections=pairs, why="has 2 labels")
    refused(two, sections={}, why="is a reward model, or another classifier, not a language model")
