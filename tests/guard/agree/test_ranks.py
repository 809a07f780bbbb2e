"""The judgement of all ranks before their first collective.

Run: pytest tests/guard/agree/test_ranks.py
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guard.agree.making import rank, ranks
from unisono.base.causes import CATALOGUE, Verdict
from unisono.guard.agree.reports import RankReport
from unisono.guard.agree.rules import RANK_RULES
from unisono.guard.agree.training import COMPARED, compare_ranks

CHANGES: dict[str, Any] = {
    "rows": 890, "sequences": 899, "rows_digest": "x", "order_digest": "y", "total_steps": 169, "tokens": 1, "loss_tokens": 2,
    "parameters_digest": "z", "trainable_parameters": 3, "trained_values_digest": "a", "frozen_values_digest": "b",
    "tokenizer_digest": "c", "dtype": "bfloat16", "strategy": "fsdp", "seed": 7, "threads": 4, "resume_step": 40,
    "torch_version": "2.12.0", "collective_backend": "nccl", "world_size": 9, "device_kind": "cuda",
}  # fmt: skip


def changed(reports: list[RankReport], number: int, **changes: Any) -> list[RankReport]:
    return [report.model_copy(update=changes) if report.rank == number else report for report in reports]


def only(reports: list[RankReport]) -> Verdict:
    [verdict] = compare_ranks(reports, world_size=len(reports)).fatal
    return verdict


def test_equal_ranks_agree_and_every_check_passes() -> None:
    for number, per_node in ((1, 1), (2, 2), (4, 2), (3, 2)):
        agreement = compare_ranks(ranks(number, per_node=per_node), world_size=number)
        assert agreement.agreed
        assert {check.status for check in agreement.checks} == {"pass"}
        assert [check.id for check in agreement.checks] == list(RANK_RULES)


def test_the_table_of_what_is_compared_follows_the_rules() -> None:
    order = list(RANK_RULES)
    places = [order.index(compared.rule) for compared in COMPARED]
    assert places == sorted(places)


def test_an_unseeded_split_is_named_with_both_numbers() -> None:
    """Failure 5 of those that people report: train_test_split without a seed; the run stops at the
    end of the epoch.
    """
    reports = [
        rank(0, world=2, rows=896, first_difference=["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]),
        rank(1, world=2, rows=899, sequences=899, total_steps=169, rows_digest="x", order_digest="y",
             first_difference=["rows.jsonl:1", "rows.jsonl:7", "rows.jsonl:9"]),
    ]  # fmt: skip
    verdict = only(reports)
    assert verdict.cause == "split_mismatch"
    assert verdict.summary.startswith("rows: 896 on rank 0, 899 on rank 1; and 4 more differences")
    assert (verdict.ranks, verdict.hosts) == ((), ())
    assert "seed" in verdict.fix[0]
    texts = [f"{item.where}: {item.text}" for item in verdict.evidence]
    assert "rank 0: from position 1: rows.jsonl:2, rows.jsonl:3" in texts
    assert "rank 1: from position 1: rows.jsonl:7, rows.jsonl:9" in texts


def test_of_several_ranks_the_odd_one_is_named_with_node_and_host() -> None:
    verdict = only(changed(ranks(4), 3, order_digest="other"))
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("split_mismatch", (3,), ("b",))
    assert (
        verdict.summary
        == "order of rows: digest other on rank 3, node 1 (b); digest ooooooooooooooo… on ranks 0–2, nodes 0"
        " (a) and 1 (b)"
    )
    assert verdict.phase == "agree.ranks"


@pytest.mark.parametrize(
    ("change", "cause", "part"),
    [
        (
            {"tokenizer_digest": "x", "tokens": 1, "rows_digest": "y"},
            "tokenizer_files_mismatch",
            "tokenizer: digest x on rank 1",
        ),
        ({"frozen_values_digest": "x"}, "weights_mismatch", "frozen weights: digest x on rank 1"),
        ({"trained_values_digest": "x"}, "weights_mismatch", "initial values: digest x on rank 1"),
        (
            {"trainable_parameters": 9},
            "weights_mismatch",
            "trained parameters: 9 on rank 1, 205,000 on ranks 0 and 2",
        ),
        ({"dtype": "bfloat16"}, "plan_mismatch", "dtype: bfloat16 on rank 1, float32 on ranks 0 and 2"),
        ({"seed": 1234}, "plan_mismatch", "seed: 1234 on rank 1, 0 on ranks 0 and 2"),
        ({"resume_step": 40}, "resume_mismatch", "resumed step: 40 on rank 1, 0 on ranks 0 and 2"),
        ({"torch_version": "2.12.1"}, "version_mismatch", "torch: 2.12.1 on rank 1, 2.13.0 on ranks 0 and 2"),
        ({"world_size": 1}, "world_mismatch", "world size: 1 on rank 1, and 3 in the plan"),
        (
            {"device_kind": "cuda", "device_uuid": "GPU-1"},
            "device_mismatch",
            "device: cuda on rank 1, cpu on ranks 0 and 2",
        ),
    ],
)
def test_one_thing_that_differs_is_named(change: dict[str, Any], cause: str, part: str) -> None:
    agreement = compare_ranks(changed(ranks(3, per_node=3), 1, **change), world_size=3)
    verdict = agreement.fatal[0]
    assert verdict.cause == cause
    assert verdict.summary.startswith(part)
    assert verdict.ranks == (1,)
    assert verdict.hosts == ("a",)


def test_a_flipped_bit_is_traced_to_its_tensor() -> None:
    good = {"embed": "1", "layers.0.q": "2", "layers.1.q": "3"}
    reports = [report.model_copy(update={"odd_tensors": good}) for report in ranks(3, per_node=3)]
    reports = changed(reports, 2, frozen_values_digest="x", odd_tensors={**good, "layers.0.q": "9"})
    verdict = only(reports)
    assert verdict.summary.endswith("; first in layers.0.q")
    assert [item.text for item in verdict.evidence[-2:]] == ["layers.0.q: digest 9", "layers.0.q: digest 2"]


def test_two_ranks_on_one_device_are_both_named() -> None:
    reports = [
        report.model_copy(update={"device_kind": "cuda", "device_uuid": f"GPU-{min(report.rank, 2)}"})
        for report in ranks(4)
    ]
    verdict = only(reports)
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("duplicate_gpu", (2, 3), ("b",))
    assert verdict.summary == "ranks 2 and 3, node 1 (b) are bound to the same device GPU-2"


def test_ranks_that_are_missing_twice_or_outside_are_found() -> None:
    missing = compare_ranks(ranks(4)[:3], world_size=4).fatal[0]
    assert (missing.cause, missing.ranks) == ("world_mismatch", ())
    assert missing.summary == "rank 3 of 4 has not reported"
    twice = [*ranks(2), rank(1, world=2, pid=9)]
    assert "rank 1 has reported 2 times: pid 5001 on a, pid 9 on a" in only_first(twice, 2).summary
    assert only_first([*ranks(2), rank(5, world=2)], 2).summary == "rank 5, node 2 (c) in a world of 2"


def only_first(reports: list[RankReport], world_size: int) -> Verdict:
    return compare_ranks(reports, world_size=world_size).fatal[0]


def test_ranks_of_one_node_with_one_local_rank_are_found() -> None:
    verdict = only_first(changed(ranks(2), 1, local_rank=0), 2)
    assert (verdict.cause, verdict.ranks) == ("plan_mismatch", (0, 1))


def test_other_threads_are_a_warning() -> None:
    agreement = compare_ranks(changed(ranks(3, per_node=3), 1, threads=4), world_size=3)
    assert agreement.agreed
    assert [verdict.summary for verdict in agreement.warnings] == ["threads: 4 on rank 1, 1 on ranks 0 and 2"]


def test_what_was_not_digested_is_unknown_never_equal() -> None:
    agreement = compare_ranks(changed(ranks(2), 1, tokenizer_digest="", rows_digest=""), world_size=2)
    assert agreement.agreed
    unknown = {check.id: check.text for check in agreement.with_status("unknown")}
    assert unknown == {
        "ranks.tokenizer": "tokenizer: no digest was made by rank 1",
        "ranks.split": "row ids: no digest was made by rank 1",
    }
    assert [check.status for check in agreement.checks if check.id == "ranks.tokenizer"] == ["unknown"]
    assert compare_ranks([], world_size=2).with_status("unknown")


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=5, unique=True), st.integers(0, 4), st.randoms())
@settings(max_examples=80, deadline=None)
def test_order_changes_nothing_and_the_majority_is_never_blamed(
    keys: list[str], odd: int, rng: random.Random
) -> None:
    reports = changed(ranks(5, per_node=5), odd, **{key: CHANGES[key] for key in keys})
    agreement = compare_ranks(reports, world_size=5)
    shuffled = list(reports)
    rng.shuffle(shuffled)
    assert compare_ranks(shuffled, world_size=5).to_json() == agreement.to_json()
    assert agreement.agreed == (set(keys) <= {"threads"})
    for verdict in agreement.verdicts:
        assert set(verdict.ranks) <= {odd}


any_rank = st.builds(
    lambda number, changes: rank(number, **changes),
    st.integers(0, 4),
    st.fixed_dictionaries({}, optional={
        "rank": st.integers(-2, 5), "local_rank": st.integers(-1, 3), "node_rank": st.integers(-1, 2), "world_size": st.integers(-1, 5),
        "host": st.text(max_size=4), "device_kind": st.sampled_from(["cpu", "cuda"]), "device_uuid": st.one_of(st.none(), st.text(max_size=3)),
        "rows_digest": st.text(max_size=2), "first_difference": st.lists(st.text(max_size=3), max_size=3),
        "frozen_values_digest": st.text(max_size=2), "odd_tensors": st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
        "rows": st.one_of(st.none(), st.integers(0, 9)), "seed": st.integers(), "dtype": st.text(max_size=3),
    }),
)  # fmt: skip


@given(st.lists(any_rank, max_size=5), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_any_reports_are_judged_and_every_verdict_is_legal(
    reports: list[RankReport], world_size: int
) -> None:
    agreement = compare_ranks(reports, world_size=world_size)
    assert agreement.checks
    assert agreement.agreed == (not agreement.with_status("fail"))
    for verdict in agreement.verdicts:
        assert verdict.cause in CATALOGUE
        assert "before" in CATALOGUE[verdict.cause].when
        assert verdict.summary
        assert "\n" not in verdict.summary
        assert verdict.fix
        assert set(verdict.ranks) <= {max(0, report.rank) for report in reports}
    assert compare_ranks(reports[::-1], world_size=world_size).to_json() == agreement.to_json()


def test_1024_ranks_of_which_one_differs_are_reported_in_one_line() -> None:
    reports = changed(ranks(1024, per_node=8), 700, frozen_values_digest="x")
    verdict = only(reports)
    assert verdict.ranks == (700,)
    assert len(verdict.summary) < 200
