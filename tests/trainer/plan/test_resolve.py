"""A plan is made of values alone; its numbers fit each other, whatever was asked.

Run: pytest tests/plan
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.base.errors import ConfigError
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.trainer.config import RunConfig
from unisono.trainer.config.reward_models import RewardModel
from unisono.trainer.plan import (
    DataSummary,
    ModelFacts,
    PlanInputs,
    RunPlan,
    SplitSummary,
    estimate_memory,
    resolve_plan,
)

MODEL = ModelFacts(
    directory="/m", model_type="llama", parameters=15_000_000, hidden_size=256, layers=6, intermediate_size=768,
    vocab_size=8000, linear_parameters=9_000_000, linear_in_out=60_000, weight_bytes=30_000_000, digest="d",
)  # fmt: skip


def split(rows: int = 1000, sequences: int = 1000, longest: int = 512) -> SplitSummary:
    return SplitSummary(
        rows=rows, sequences=sequences, tokens=sequences * longest // 2, loss_tokens=sequences, longest_sequence=longest,
        longest_row=longest,
    )  # fmt: skip


def inputs(
    sequences: int = 1000, *, memory_bytes: int = 10**12, has_eval: bool = True, kind: str = "cpu", total_steps: int = 77, **keys: Any
) -> PlanInputs:  # fmt: skip
    body = {
        "model": "m",
        "data": {"train": "d", "eval": 0.1 if has_eval else None},
        "output_dir": "o",
        **keys,
    }
    data = DataSummary(
        cache_dir="/c", cache_hit=False, cache_reason="new", train=split(sequences=sequences), eval=split() if has_eval else None,
        ledger={}, formats=[], template="own", total_steps=total_steps, digest="d",
    )  # fmt: skip
    device = DeviceChoice.model_validate(
        {"kind": kind, "name": "x", "memory_bytes": memory_bytes, "bfloat16": kind == "cuda"}
    )
    return PlanInputs(
        config=RunConfig.model_validate(body), run_id="r", output_dir="/o", host="h", device=device, threads=1, threads_origin="cores",
        model=MODEL, data=data, resume=None, resume_reason="fresh",
    )  # fmt: skip


def plan(*arguments: Any, **keys: Any) -> RunPlan:
    return resolve_plan(inputs(*arguments, **keys))


def on_ranks(ranks: int, **keys: Any) -> PlanInputs:
    given_inputs = inputs(**keys)
    places = [
        RankPlace(rank=rank, node_rank=0, local_rank=rank, host="h", device=given_inputs.device)
        for rank in range(ranks)
    ]
    return replace(given_inputs, ranks=places)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 6), st.integers(1, 6))
def test_sequences_times_forwards_times_ranks_are_the_global_batch(
    per_rank: int, accumulate: int, ranks: int, later_ranks: int
) -> None:
    of_ranks = {"per_rank": per_rank, "accumulate": accumulate}
    made = resolve_plan(on_ranks(ranks, batch=of_ranks))
    size = per_rank * accumulate * ranks
    assert (made.global_batch, made.micro_batch, made.batch_of_ranks) == (
        size,
        per_rank,
        (per_rank, accumulate),
    )
    # config.yaml says it with the keys that mean the same on any number of ranks
    assert made.config.model_dump(by_alias=True)["batch"] == {"global": size, "micro": per_rank}
    same = resolve_plan(on_ranks(ranks, batch={"global": size, "micro": per_rank}))
    assert (same.config_digest, same.total_steps) == (made.config_digest, made.total_steps)
    # a run that continues on other ranks
    later = resolve_plan(
        replace(on_ranks(later_ranks, batch=of_ranks), earlier_batch=(size, made.batch_of_ranks))
    )
    assert (later.global_batch, later.micro_batch, later.config) == (size, per_rank, made.config)
    by_its_config = replace(
        on_ranks(later_ranks, batch={"global": size, "micro": per_rank}), earlier_batch=(size, (2, 3))
    )
    assert resolve_plan(by_its_config).batch_of_ranks == (2, 3)


def test_tokens_become_steps_of_the_batch_that_the_ranks_make() -> None:
    """Before the plan the number of ranks is unknown, so the data are counted in sequences."""
    made = resolve_plan(
        on_ranks(2, batch={"per_rank": 2, "accumulate": 3}, duration="1M tokens", total_steps=121)
    )
    assert (made.total_steps, made.data.total_steps) == (11, 11)
    assert (
        resolve_plan(on_ranks(2, batch={"per_rank": 2}, duration="9 steps", total_steps=9)).total_steps == 9
    )


def test_a_product_beyond_any_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="1,000,000 × 2 × 3 ranks"):
        resolve_plan(on_ranks(3, batch={"per_rank": 1_000_000, "accumulate": 2}))


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 12))
def test_epochs_see_every_sequence_so_often_and_the_last_step_may_be_short(
    n: int, batch: int, epochs: int
) -> None:
    made = plan(n, batch={"global": batch}, duration=f"{epochs} epochs")
    assert made.total_sequences == n * epochs
    assert (made.total_steps - 1) * batch < made.total_sequences <= made.total_steps * batch


@pytest.mark.parametrize(("epochs", "sequences"), [("0.7", 7), ("0.3", 3), ("2.5", 25), ("0.11", 2)])
def test_a_part_of_an_epoch_is_rounded_up_to_whole_sequences(epochs: str, sequences: int) -> None:
    assert plan(10, duration=f"{epochs} epochs").total_sequences == sequences


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 10**6))
def test_steps_are_as_many_as_asked_and_all_full(n: int, batch: int, steps: int) -> None:
    made = plan(n, batch={"global": batch}, duration=f"{steps} steps")
    assert (made.total_steps, made.total_sequences) == (steps, steps * batch)


def test_tokens_take_the_steps_that_were_counted_from_the_data() -> None:
    assert plan(duration="2M tokens").total_steps == 77


@settings(deadline=None)
@given(
    st.integers(1, 600),
    st.integers(10**6, 10**11),
    st.sampled_from(["auto", True, False]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_the_micro_batch_always_divides_the_global_one(
    batch: int, memory: int, checkpointing: Any, kind: str
) -> None:
    keys = {"batch": {"global": batch}, "memory": {"gradient_checkpointing": checkpointing}}
    made = plan(memory_bytes=memory, kind=kind, **keys)
    assert batch % made.micro_batch == 0
    assert 1 <= made.micro_batch <= batch


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(10**6, 10**11), st.booleans())
def test_more_memory_never_means_a_smaller_micro_batch(batch: int, room: int, checkpointing: Any) -> None:
    small, large = (
        resolve_plan(
            inputs(batch={"global": batch}, memory_bytes=n, memory={"gradient_checkpointing": checkpointing})
        )
        for n in (room, room * 2)
    )
    assert large.micro_batch >= small.micro_batch


def test_what_fits_is_chosen_and_what_does_not_is_reported() -> None:
    roomy, tight = plan(memory_bytes=10**12), plan(memory_bytes=10**6)
    assert roomy.memory.total <= 0.8 * 10**12
    assert not roomy.gradient_checkpointing
    assert (tight.micro_batch, tight.gradient_checkpointing) == (1, True)
    assert "more than 80%" in tight.origins["memory"]


def test_a_micro_batch_that_was_requested_is_kept() -> None:
    assert plan(batch={"global": 16, "micro": 2}, memory_bytes=10**6).micro_batch == 2


@pytest.mark.parametrize(
    ("every", "steps"),
    [("200 steps", 200), ("1 epoch", 62), ("0.5 epochs", 31), ("0.001 epochs", 1), ("1M tokens", 244)],
)
def test_periods_become_steps(every: str, steps: int) -> None:
    """1000 sequences of 256 tokens, 16 a step: an epoch is 62.5 steps, a step 4096 tokens."""
    made = plan(eval={"every": every}, checkpoint={"every": every}, duration="9 epochs")
    assert (made.eval_every, made.checkpoint_every) == (steps, steps)


def test_without_evaluation_rows_there_is_no_evaluation() -> None:
    assert plan(has_eval=False).eval_every is None


@pytest.mark.parametrize(
    ("kind", "asked", "dtype"),
    [("cpu", "auto", "float32"), ("cuda", "auto", "bfloat16"), ("cpu", "bfloat16", "bfloat16")],
)
def test_auto_takes_the_dtype_that_the_device_has(kind: str, asked: str, dtype: str) -> None:
    assert plan(kind=kind, model={"path": "m", "dtype": asked}).dtype == dtype


@pytest.mark.parametrize(
    ("keys", "threads"),
    [
        ({}, 1),
        ({"origin": "OMP_NUM_THREADS"}, 8),
        ({"origin": "OMP_NUM_THREADS of node 1 (b), which has the fewest"}, 8),
        ({"kind": "cuda"}, 8),
        ({"width": 193}, 8),
        ({"model_type": "stable-diffusion"}, 8),
    ],
)
def test_a_small_model_gets_one_thread_unless_the_number_is_declared(
    keys: dict[str, Any], threads: int
) -> None:
    wide = MODEL.model_copy(update={"hidden_size": keys.get("width", 192), "model_type": keys.get("model_type", "llama")})  # fmt: skip
    given_inputs = replace(
        inputs(kind=keys.get("kind", "cpu")), threads=8, threads_origin=keys.get("origin", "8 cores for 1 rank"), model=wide
    )  # fmt: skip
    made = resolve_plan(given_inputs)
    assert made.threads == threads
    assert ("trains faster with one" in made.origins["threads"]) == (threads == 1)


def test_float16_on_a_cpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(model={"path": "m", "dtype": "float16"})
    assert "bfloat16" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        ({"has_eval": False, "eval": {"samples": 3}}, "eval.samples has no effect"),
        ({"optim": {"muon_lr": 0.1}}, "optim.muon_lr has no effect"),
        ({"optim": {"muon_scale": "adamw"}}, "optim.muon_scale has no effect"),
        ({"device": "cpu", "deterministic": True}, "deterministic has no effect"),
    ],
)
def test_a_setting_without_effect_is_named(keys: dict[str, Any], warned: str) -> None:
    assert [text for text in plan(**keys).warnings if text.startswith(warned)]


def test_defaults_that_were_written_out_are_not_warned_of() -> None:
    """As in a run's own config.yaml, which holds every key."""
    given_inputs = inputs(has_eval=False)
    written = RunConfig.model_validate(given_inputs.config.model_dump(mode="json", by_alias=True))
    again = PlanInputs(**{**vars(given_inputs), "config": written})
    assert resolve_plan(again).warnings == resolve_plan(given_inputs).warnings == []


@pytest.mark.parametrize(
    ("kind", "strategy", "adapter", "lines"),
    [("hrm_text", "fsdp", None, 1), ("hrm_text", "ddp", None, 0), ("hrm_text", "fsdp", {"rank": 4}, 0), ("llama", "fsdp", None, 0)],
)  # fmt: skip
def test_result_gathered_whole_by_one_rank_is_reported_before_the_run(
    kind: str, strategy: str, adapter: dict[str, Any] | None, lines: int
) -> None:
    given_inputs = inputs(parallel={"strategy": strategy}, adapter=adapter)
    ranks = [
        RankPlace(rank=n, node_rank=0, local_rank=n, host="h", device=given_inputs.device) for n in (0, 1)
    ]
    model = MODEL.model_copy(update={"model_type": kind})
    made = resolve_plan(replace(given_inputs, ranks=ranks, model=model))
    assert ["the whole model (30 MB) in host memory" in text for text in made.warnings] == [True] * lines


def test_a_plan_survives_being_written_and_read() -> None:
    made = plan()
    assert RunPlan.model_validate(made.to_json()) == made


@settings(deadline=None)
@given(
    st.integers(1, 10**5),
    st.integers(1, 10**4),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, 4, 64]),
)
def test_the_estimate_grows_with_tokens_and_shrinks_with_checkpointing(
    tokens: int, row: int, dtype: str, rank: int | None
) -> None:
    def total(tokens: int, *, checkpointing: bool = False) -> int:
        return estimate_memory(
            MODEL, dtype=dtype, adapter_rank=rank, micro_tokens=tokens, longest_row=row, gradient_checkpointing=checkpointing
        ).total  # fmt: skip

    assert total(tokens) < total(tokens * 2)
    assert total(tokens, checkpointing=True) < total(tokens)


def test_a_reward_model_has_no_logits_over_the_vocabulary() -> None:
    heads = []
    for vocabulary in (1_000, 100_000):
        model = MODEL.model_copy(update={"vocab_size": vocabulary})
        given = replace(inputs(objective="reward"), model=model)
        heads.append(resolve_plan(given).memory.loss_head)
    assert heads[0] == heads[1] < plan().memory.loss_head


def test_matrix_gradients_take_two_bytes_if_a_step_has_one_backward() -> None:
    found = {}
    for micro in (4, 8):
        batch = {"global": 8, "micro": micro}
        found[micro] = plan(
            adapter=None, batch=batch, model={"path": "m", "dtype": "bfloat16"}
        ).memory.trainable
    assert found[4] == MODEL.parameters * 16
    assert found[8] == MODEL.parameters * 16 - MODEL.linear_parameters * 2


def test_the_parts_of_an_estimate_are_its_sum() -> None:
    quantized = MODEL.model_copy(update={"quantized": "nf4"})
    for memory in (plan().memory, resolve_plan(replace(inputs(), model=quantized)).memory):
        parts = memory.weights + memory.trainable + memory.activations + memory.loss_head
        assert memory.total == parts + memory.dequantized


@pytest.mark.parametrize(
    ("every", "keep_every", "printed"), [(200, 1000, ""), (300, 1000, "at every 3000 steps"), (200, None, "")]
)
def test_checkpoints_kept_for_ever_are_worth_a_line_if_few_are_made(
    every: int, keep_every: int | None, printed: str
) -> None:
    section = {"every": f"{every} steps", "keep_every": f"{keep_every} steps" if keep_every else None}
    made = plan(checkpoint=section)
    assert made.keep_every == keep_every
    assert [printed in line for line in made.warnings if "keep_every" in line] == ([True] if printed else [])


def test_reward_models_count_where_they_compute_and_one_without_its_gpu_is_refused() -> None:
    models = [
        RewardModel(f"rewards.{number}.path", Path(f"/judge{number}"), device, "d", 1000 + number)
        for number, device in enumerate(("cpu", "cuda"))
    ]
    for kind, expected in (("cpu", 1000), ("cuda", 1001)):
        judged = [model for model in models if kind == "cuda" or model.device == "cpu"]
        bare, made = (
            resolve_plan(replace(inputs(kind=kind), reward_models=several)) for several in ([], judged)
        )
        assert made.memory.other_models == expected
        assert made.memory.total == bare.memory.total + expected
    with pytest.raises(ConfigError, match="/judge1 cannot compute on the GPU of its rank") as error:
        resolve_plan(replace(inputs(kind="cpu"), reward_models=models))
    assert error.value.problems[0].where == "rewards.1.device"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("adapter", [None, {"rank": 4}, {"rank": 4, "init": "pissa"}])
def test_a_copy_of_the_start_is_counted_whole_on_each_rank(
    adapter: dict[str, Any] | None, shards: int
) -> None:
    keys: dict[str, Any] = {
        "objective": "grpo", "rewards": ["exact"], "adapter": adapter, "batch": {"global": 16},
        "parallel": {"strategy": "fsdp" if shards > 1 else "auto"}, "has_eval": False,
    }  # fmt: skip
    made = resolve_plan(on_ranks(shards, grpo={"beta": 0.1}, **keys))
    is_new = adapter is not None and "init" not in adapter
    assert made.memory.other_models == (0 if is_new else MODEL.parameters * 4)
    assert resolve_plan(on_ranks(shards, **keys)).memory.other_models == 0
