"""The same run on one, two and four ranks, replicated and sharded, is the same run.

Run: pytest tests/trainer/ranks/test_equality.py
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.ranks.conftest import CLASSIFIERS, KINDS, PREFERENCES, Done
from unisono.base.events import Reporter
from unisono.base.files import write_json
from unisono.trainer.plan.task_requests import ReadBackRequest
from unisono.trainer.task import read_back

pytestmark = pytest.mark.ranks

Runs = dict[tuple[str, str, int], Done]
_WAYS = ["ddp", "fsdp"]


def _losses_are_equal(run: Done, one: Done) -> None:
    assert run.losses == pytest.approx(one.losses, abs=1e-5)
    assert [(m["tokens"], m["loss_tokens"]) for m in run.metrics if "loss" in m] == [
        (m["tokens"], m["loss_tokens"]) for m in one.metrics if "loss" in m
    ], "the same rows in every step"


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        "lora",
        "dora",
        "full",
        "weighted",
        "narrow",
        "nan",
        "nf4",
        "int8",
        "gptq",
        "rollouts",
        "grpo",
        "grpo_few",
    ],
)
def test_two_ranks_give_the_losses_of_one(alone: dict[str, Done], two: Runs, kind: str, way: str) -> None:
    assert two[kind, way, 2].plan.strategy == way
    _losses_are_equal(two[kind, way, 2], alone[kind])


@pytest.mark.parametrize("way", _WAYS)
def test_metrics_of_answers_do_not_depend_on_the_ranks(alone: dict[str, Done], two: Runs, way: str) -> None:
    def figures(run: Done) -> list[tuple[float, ...]]:
        lines = [line for line in run.metrics if "eval_loss" in line]
        return [tuple(line[f"eval_{name}"] for name in ("longer", "rouge_l", "bleu")) for line in lines]

    assert len(figures(alone["lora"])) == 2
    for mine, other in zip(figures(two["lora", way, 2]), figures(alone["lora"]), strict=True):
        assert mine == pytest.approx(other, abs=1e-12)
    result = two["lora", way, 2].result["eval"]
    assert {"longer_before", "longer", "rouge_l_before", "rouge_l"} <= result.keys()


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", PREFERENCES)
def test_two_ranks_give_the_metrics_of_preferences_of_one(
    alone: dict[str, Done], two: Runs, kind: str, way: str
) -> None:
    """Steps and evaluations; a margin is a small difference of log-probabilities of about 50, so it
    has their absolute error.
    """
    _losses_are_equal(two[kind, way, 2], alone[kind])
    mine, wanted = two[kind, way, 2].figures, alone[kind].figures
    assert len(mine) == len(wanted) > 8 - (kind == "orpo")
    for line, other in zip(mine, wanted, strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_two_ranks_give_the_metrics_of_classifiers_of_one(
    alone: dict[str, Done], two: Runs, kind: str, way: str
) -> None:
    """Steps and evaluations; labels with weights, and several labels in a row."""
    _losses_are_equal(two[kind, way, 2], alone[kind])
    mine, wanted = two[kind, way, 2].figures, alone[kind].figures
    assert len(mine) == len(wanted) > 8
    for line, other in zip(mine, wanted, strict=True):
        assert line.keys() == other.keys() >= {"accuracy", "f1"} or "eval_f1" in line
        assert line == pytest.approx(other, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", ["embed", "embed_full"])
def test_two_ranks_compare_all_texts_of_the_batch_as_one_does(
    alone: dict[str, Done], two: Runs, kind: str, way: str
) -> None:
    """Steps, whose rows are compared with those of the other rank, and evaluations."""
    mine, wanted = two[kind, way, 2].figures, alone[kind].figures
    assert len(mine) == len(wanted) > 8
    for line, other in zip(mine, wanted, strict=True):
        assert line == pytest.approx(other, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", ["experts", "experts_whole"])
def test_router_losses_and_load_depend_on_neither_ranks_nor_micro_batches(
    alone: dict[str, Done], two: Runs, kind: str, way: str
) -> None:
    """Five micro batches, whose load is counted first, and a whole batch."""
    _losses_are_equal(two[kind, way, 2], alone["experts"])
    _losses_are_equal(alone[kind], alone["experts"])
    for run in (two[kind, way, 2], alone[kind]):
        assert len(run.figures) == 8
        for line, other in zip(run.figures, alone["experts"].figures, strict=True):
            assert line.keys() >= {
                "router_load_balancing",
                "router_z_loss",
                "expert_load_max",
                "experts_idle",
            }
            assert line == pytest.approx(other, rel=1e-5, abs=1e-5)
        norms = [[line["grad_norm"] for line in one.metrics] for one in (run, alone["experts"])]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", ["lora", "full", "narrow"])
def test_four_ranks_give_the_losses_of_one(alone: dict[str, Done], four: Runs, kind: str, way: str) -> None:
    """Ten sequences over four ranks leave a remainder; two (`narrow`) leave two ranks without any;
    the last batch is short.
    """
    _losses_are_equal(four[kind, way, 4], alone[kind])


def test_the_comparison_is_over_twenty_steps_with_a_short_last_batch(alone: dict[str, Done]) -> None:
    assert len(alone["lora"].losses) == 20
    assert alone["lora"].plan.total_sequences % 10 != 0
    assert alone["lora"].losses[-1] < alone["lora"].losses[0] - 0.05, (
        "it learns, so equal losses mean something"
    )


@pytest.mark.parametrize("way", _WAYS)
def test_final_weights_are_equal_and_gathered_whole(alone: dict[str, Done], two: Runs, way: str) -> None:
    for kind in ("lora", "dora", "full"):
        mine, wanted = two[kind, way, 2].weights(), alone[kind].weights()
        assert mine.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert mine[name].dtype == tensor.dtype
            assert torch.allclose(mine[name], tensor, atol=2e-4), name


def test_a_sharded_model_is_written_as_transformers_loads_it(two: Runs) -> None:
    model = AutoModelForCausalLM.from_pretrained(two["full", "fsdp", 2].directory / "model")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("kind", ["lora", "dora", "full", "nf4", "mixed", "mixed_full", "reward"])
def test_the_result_of_several_ranks_gives_the_logits_that_they_computed(
    two: Runs, kind: str, way: str
) -> None:
    run = two[kind, way, 2]
    write_json(run.directory / "plan.json", run.plan.to_json())
    found: dict[str, Any] = dict(read_back.run(ReadBackRequest(run.directory), Reporter(None)))
    assert found["compared"] == "logits"
    assert found["differs_by"] < (2e-2 if kind.startswith("mixed") else 1e-5)


@pytest.mark.parametrize("way", _WAYS)
def test_evaluation_over_the_ranks_is_that_of_one(alone: dict[str, Done], two: Runs, way: str) -> None:
    mine = {m["step"]: m["eval_loss"] for m in two["lora", way, 2].ended.of_kind(0, "eval")}
    wanted = {m["step"]: m["eval_loss"] for m in alone["lora"].ended.of_kind(0, "eval")}
    assert mine.keys() == wanted.keys() == {0, 10, 20}
    assert list(mine.values()) == pytest.approx(list(wanted.values()), abs=1e-5)


@pytest.mark.parametrize("way", _WAYS)
def test_answers_over_the_ranks_are_those_of_one(alone: dict[str, Done], two: Runs, way: str) -> None:
    mine, wanted = two["lora", way, 2], alone["lora"]
    assert mine.result["eval"]["exact_match"] == wanted.result["eval"]["exact_match"]
    assert [m["text"] for m in mine.ended.of_kind(0, "sample")] == [
        m["text"] for m in wanted.ended.of_kind(0, "sample")
    ]


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(("kind", "bound"), [("mixed", 0.03), ("mixed_full", 0.003)])
def test_bfloat16_beside_trained_float32_trains_on_several_ranks(
    alone: dict[str, Done], two: Runs, kind: str, bound: float, way: str
) -> None:
    """bfloat16 has eight bits: other micro batches round otherwise."""
    run = two[kind, way, 2]
    assert run.plan.dtype == "bfloat16"
    assert run.losses == pytest.approx(alone[kind].losses, rel=bound)


@pytest.mark.parametrize("way", _WAYS)
def test_a_step_that_is_not_a_number_is_skipped_on_all_ranks(two: Runs, way: str) -> None:
    run = two["nan", way, 2]
    (warning,) = [m for m in run.ended.of_kind(0, "warning") if m["code"] == "nan_step"]
    assert warning["step"] == 3
    assert run.ended.of_kind(1, "warning") == [], "what all know, rank 0 says once"
    assert run.result["outcome"] == "completed"


@pytest.mark.parametrize("way", _WAYS)
def test_only_rank_0_writes_and_reports_figures(two: Runs, way: str) -> None:
    for kind in KINDS:
        ended = two[kind, way, 2].ended
        steps = ended.of_kind(1, "step")
        assert [m["step"] for m in steps] == [m["step"] for m in ended.of_kind(0, "step")]
        assert all(set(m) == {"kind", "time", "step"} for m in steps)
        assert {"eval", "sample", "checkpoint"} & {m["kind"] for m in ended.messages[1]} == set()
        assert set(ended.last(1)) == {"kind", "time", "outcome", "exit_code", "step"}


@pytest.mark.parametrize("way", _WAYS)
def test_waiting_for_the_others_is_measured(two: Runs, way: str) -> None:
    lines = [m for m in two["lora", way, 2].metrics if "loss" in m]
    assert all(0 < m["comm_time_s"] < m["step_time_s"] for m in lines)


def test_one_rank_waits_for_nobody(alone: dict[str, Done]) -> None:
    assert {m["comm_time_s"] for m in alone["lora"].metrics if "loss" in m} == {0.0}


def test_reports_of_ranks_that_mean_the_same_run_are_equal(two: Runs) -> None:
    own = {"rank", "local_rank", "pid", "store_port"}
    a, b = two["lora", "ddp", 2].ended.reports
    assert {k: v for k, v in a.items() if k not in own} == {k: v for k, v in b.items() if k not in own}
    assert a["store_port"] > 0
    assert b["store_port"] is None
