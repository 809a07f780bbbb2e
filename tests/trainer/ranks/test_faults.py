"""Ranks that differ, die, or are asked to stop. Run: pytest tests/trainer/ranks/test_faults.py"""

import signal
from typing import Any

import pytest
import torch

from tests.trainer.ranks.conftest import Workshop
from tests.trainer.ranks.front import RankProcess, kill_on_step
from unisono.base.errors import Disagreed
from unisono.guard.facts import Environment
from unisono.trainer.batches.table import TableSource
from unisono.trainer.training import setup
from unisono.trainer.training.join import find_place, make_rank_report
from unisono.trainer.worker.injected_faults import InjectedFaults

pytestmark = pytest.mark.ranks


def _reports(workshop: Workshop, **faults: Any) -> list[dict[str, Any]]:
    """What two ranks would report, made in this process."""
    plan = workshop.plan("narrow", world=2, strategy="ddp", faults=faults)
    device = torch.device("cpu")
    found = []
    for place in plan.ranks:
        hooks = (InjectedFaults(plan, place.rank),)
        loaded = setup._load_model(plan, device, hooks)
        data = TableSource.of(plan, place, setup._open_tables(plan, device, hooks)["train"])
        port = 4000 if place.rank == 0 else None
        found.append(make_rank_report(plan, place, device=device, loaded=loaded, data=data, store_port=port))
    return [report.to_json() for report in found]


def _differing(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {key for key in a if a[key] != b[key]} - {"rank", "local_rank", "pid", "store_port"}


def test_ranks_without_a_fault_report_the_same(workshop: Workshop) -> None:
    assert _differing(*_reports(workshop)) == set()


@pytest.mark.parametrize(
    ("fault", "differ"),
    [
        ("one_row_more", {"rows", "sequences", "rows_digest", "order_digest", "tokens", "loss_tokens"}),
        ("unseeded_split", {"rows_digest"}),
        ("flip_weight_bit", {"frozen_values_digest", "odd_tensors"}),
        ("other_tokenizer", {"tokenizer_digest"}),
    ],
)  # fmt: skip
def test_what_a_rank_has_otherwise_is_in_its_report(workshop: Workshop, fault: str, differ: set[str]) -> None:
    a, b = _reports(workshop, **{fault: [1]})
    assert _differing(a, b) - {"first_difference"} == differ
    if fault == "flip_weight_bit":
        odd = {name for name in a["odd_tensors"] if a["odd_tensors"][name] != b["odd_tensors"][name]}
        assert len(odd) == 1, "the one tensor with the turned bit is named"


@pytest.mark.parametrize("how", ["exception", pytest.param("sigkill", marks=pytest.mark.long)])
def test_the_victim_of_a_dead_rank_knows_that_it_is_one(workshop: Workshop, how: str) -> None:
    faults = {"die": {"rank": 1, "step": 3, "how": how}}
    ended = workshop.one(workshop.plan("narrow", world=2, strategy="ddp", faults=faults)).ended
    victim = ended.last(0)
    assert victim["kind"] == "crashed"
    assert victim["peer_lost"] is True, victim["error"]
    if how == "exception":
        assert ended.last(1)["kind"] == "crashed"
        assert ended.last(1)["peer_lost"] is False
        assert "as the fault wants it" in ended.last(1)["error"]
    assert ended.codes == [5, 5 if how == "exception" else -signal.SIGKILL]


@pytest.mark.parametrize(
    ("number", "outcome", "code"),
    [
        (signal.SIGTERM, "preempted", 75),
        pytest.param(signal.SIGINT, "interrupted", 130, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    workshop: Workshop, number: signal.Signals, outcome: str, code: int
) -> None:
    plan = workshop.plan("dropout", world=2, strategy="ddp" if code == 75 else "fsdp", duration="500 steps")
    done = workshop.one(plan, on_message=kill_on_step(1, 3, number))
    a, b = (done.ended.last(rank) for rank in range(2))
    assert (a["outcome"], a["exit_code"]) == (b["outcome"], b["exit_code"]) == (outcome, code)
    assert 3 <= a["step"] == b["step"] < 500
    assert done.ended.codes == [code, code]
    assert (done.directory / "checkpoints" / f"step-{a['step']:08d}" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("environment", "reported"),
    [
        (Environment(world_size=3, rank=0, local_rank=0), "WORLD_SIZE is 3 for rank 0, but the plan has 2"),
        (Environment(world_size=2, rank=1, local_rank=0), "LOCAL_RANK is 0 for rank 1, but the plan has 1"),
        (Environment(world_size=2, rank=7, local_rank=7), "RANK is 7, but the plan has ranks 0 to 1"),
        (Environment(), "RANK is not set, but the plan has ranks 0 to 1"),
    ],
)
def test_a_rank_that_is_not_the_planned_one_refuses(
    workshop: Workshop, environment: Environment, reported: str
) -> None:
    with pytest.raises(Disagreed) as caught:
        find_place(workshop.plan("narrow", world=2, strategy="ddp"), environment)
    assert reported in caught.value.problems[0].what
    assert caught.value.verdict is not None
    assert caught.value.verdict.cause == "plan_mismatch"


def test_one_rank_looks_at_no_variable(workshop: Workshop) -> None:
    assert find_place(workshop.plan("narrow"), Environment(world_size=8, rank=5, local_rank=5)).rank == 0


def test_ranks_that_get_no_word_leave_without_a_collective(workshop: Workshop) -> None:
    """Rank 1 believes to be another and refuses; rank 0 waits for the word, and its front goes."""

    def let_go(sender: int, message: dict[str, Any], ranks: list[RankProcess]) -> None:
        del sender
        if message["kind"] == "rank_report":
            ranks[0].process.stdin.close()  # type: ignore[union-attr]  # it is a pipe

    plan = workshop.plan("narrow", world=2, strategy="ddp")
    ended = workshop.one(
        plan, on_message=let_go, environment=lambda rank: {"RANK": "7"} if rank else {}
    ).ended
    assert ended.codes == [3, 3]
    assert ended.last(0)["kind"] == "rank_report"
    assert ended.last(1)["kind"] == "refused"
    assert ended.last(1)["exit_code"] == 3


def test_the_first_rows_are_shown_where_their_order_differs(workshop: Workshop) -> None:
    a, b = _reports(workshop, unseeded_split=[1])
    assert len(a["first_difference"]) == 8
    assert a["first_difference"] != b["first_difference"]
