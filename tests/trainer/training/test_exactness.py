"""The same training, done in different ways, is the same.

Run: pytest tests/trainer/training/test_exactness.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.trainer.model.kernels import load_kernels

Train = Callable[..., Any]


def _same_bits(a: Any, b: Any) -> None:
    assert a.losses == b.losses
    mine, theirs = a.weights(), b.weights()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("adapter", [{"rank": 4, "alpha": 8}, None])
def test_micro_batches_of_one_and_eight_give_equal_losses_for_twenty_steps(
    train_here: Train, *, packing: bool, adapter: dict[str, Any] | None
) -> None:
    lr = {"lr": 1e-2 if adapter else 1e-3}
    common = {"duration": "20 steps", "adapter": adapter, "data": {"packing": packing}, "optim": lr}
    one, eight = (train_here(batch={"micro": micro}, **common) for micro in (1, 8))
    assert one.plan.micro_batch == 1
    assert eight.plan.micro_batch == 8
    assert one.losses == pytest.approx(eight.losses, abs=1e-5)
    assert len(one.losses) == 20
    assert one.losses[-1] < one.losses[0]


def test_a_run_repeated_from_its_own_config_is_bit_equal(train_here: Train) -> None:
    dropout = {"dropout": 0.2}
    _same_bits(train_here(adapter=dropout), train_here(adapter=dropout))


def test_dropout_and_order_depend_on_the_seed(train_here: Train) -> None:
    assert train_here(seed=1).losses != train_here(seed=2).losses


@pytest.mark.parametrize("optim", [{"kind": "adamw"}, {"kind": "muon", "lr": 1e-3}])
def test_resumed_run_is_bit_equal_to_one_that_was_not_stopped(
    train_here: Train, optim: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {
        "adapter": None if optim["kind"] == "muon" else {"dropout": 0.1}, "optim": optim, "duration": "12 steps",
        "checkpoint": {"every": "5 steps"}, "data": {"eval": 0.2},
    }  # fmt: skip
    straight = train_here(**sections)
    stopped = train_here(on_message=_stop_at(7), **sections)
    assert stopped.result["outcome"] == "preempted"
    assert stopped.result["exit_code"] == 75
    path = stopped.directory / "checkpoints" / "step-00000007"
    resumed = train_here(directory=stopped.directory, resume=(7, path), **sections)
    _same_bits(straight, resumed)
    assert [line["step"] for line in resumed.metrics if "loss" in line] == list(range(1, 13))


def test_evaluation_interrupted_by_a_stop_is_made_up_after_resuming(train_here: Train) -> None:
    sections: dict[str, Any] = {
        "duration": "8 steps", "data": {"eval": 0.3}, "eval": {"every": "4 steps"}, "batch": {"global": 8, "micro": 1},
    }  # fmt: skip
    straight = train_here(**sections)

    def in_evaluation(message: dict[str, Any], stop: Any) -> None:
        if message["kind"] == "step" and message["step"] == 4:
            stop.outcome = "interrupted"

    stopped = train_here(on_message=in_evaluation, **sections)
    assert not any("eval_loss" in line for line in stopped.metrics)
    path = stopped.directory / "checkpoints" / "step-00000004"
    resumed = train_here(directory=stopped.directory, resume=(4, path), **sections)
    _same_bits(straight, resumed)
    assert [line for line in resumed.metrics if "eval_loss" in line] == [
        line for line in straight.metrics if "eval_loss" in line
    ]


def _stop_at(step: int) -> Callable[[dict[str, Any], Any], None]:
    def on_message(message: dict[str, Any], stop: Any) -> None:
        if message["kind"] == "step" and message["step"] == step:
            stop.outcome = "preempted"

    return on_message


def test_tokens_are_counted_without_padding_and_over_the_whole_run(train_here: Train) -> None:
    run = train_here(duration="2 epochs", data={"packing": False})
    last = run.metrics[-1]
    assert last["tokens"] == 2 * run.plan.data.train.tokens
    assert last["loss_tokens"] == 2 * run.plan.data.train.loss_tokens
    assert last["step"] == run.plan.total_steps == 15  # 2 × 60 rows in batches of 8


def test_packed_rows_give_the_gradient_of_the_same_rows_unpacked(train_here: Train) -> None:
    """All rows in one step, packed and not: one update with the same gradient, so the same weights
    afterwards.
    """
    packed = train_here(
        duration="2 steps", batch={"global": 60, "micro": 60}, data={"packing": False}, optim={"warmup": "0%"}
    )
    sequences = train_here(duration="1 epoch", data={"packing": True}).plan.data.train.sequences
    one_bin_a_step = {"global": sequences, "micro": 1}
    bins = train_here(
        duration="2 steps", batch=one_bin_a_step, data={"packing": True}, optim={"warmup": "0%"}
    )
    assert sequences < 60
    assert bins.losses == pytest.approx(packed.losses, abs=1e-5)
    for name, tensor in packed.weights().items():
        assert torch.allclose(tensor, bins.weights()[name], atol=1e-5), name


def test_full_fine_tuning_in_bfloat16_resumes_bit_exactly(train_here: Train) -> None:
    """Trained weights are copied to bfloat16 for each product: a copy that outlived an update would
    show here.
    """
    sections: dict[str, Any] = {
        "model": {"dtype": "bfloat16"}, "adapter": None, "checkpoint": {"every": "2 steps"}, "duration": "4 steps",
    }  # fmt: skip
    straight = train_here(**sections)
    again = train_here(resume=(2, straight.directory / "checkpoints" / "step-00000002"), **sections)
    assert again.losses == straight.losses[2:]
    assert len(set(straight.losses)) == 4
    for name, tensor in straight.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


def test_a_run_that_resumes_without_a_compiler_reports_it(
    train_here: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled functions and torch's own round differently: neither the first screen nor a
    resume hides which of them compute.
    """
    sections: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "checkpoint": {"every": "3 steps"}}
    straight = train_here(**sections)
    if not straight.of_kind("ready")[0]["facts"]["kernels"]:
        pytest.skip("needs cc")
    path = straight.directory / "checkpoints" / "step-00000003"
    again = train_here(resume=(3, path), **sections)
    assert again.losses == straight.losses[3:]
    assert not [m for m in again.of_kind("warning") if m["code"] == "computed_differently"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    load_kernels.cache_clear()
    try:
        without = train_here(resume=(3, path), **sections)
    finally:
        monkeypatch.undo()
        load_kernels.cache_clear()
    facts = without.of_kind("ready")[0]["facts"]
    assert facts["kernels"] is False
    assert facts["no_kernels"] == "there is no C compiler (install cc)"
    assert facts["why"] == "the fast layers are not used: there is no C compiler (install cc)"
    (warning,) = [m for m in without.of_kind("warning") if m["code"] == "computed_differently"]
    assert "losses are not bit-exact" in warning["text"]
    assert warning["fix"] == "if it should be as before: there is no C compiler (install cc)"
