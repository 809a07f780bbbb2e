"""What counts as rightly named. Run: pytest tests/front/drill/test_results.py"""

from dataclasses import replace

import pytest

from unisono.base.causes import find_cause
from unisono.base.errors import UsageError
from unisono.front.drill.drills import (
    DRILLS,
    Drill,
    FrontExit,
    History,
    NamedCause,
    choose,
    drills_table,
    judge,
    named_cause_in,
    skipped_result,
)
from unisono.front.drill.sandbox import Sandbox

STOPPED = Drill("sigstop", "a rank is stopped", ("rank_stopped",), (1,), limit_s=10.0, end_s=60.0)
QUIET = Drill("garbage", "strangers talk")
CUT = Drill("cut", "the network is cut", ("node_unreachable",), nodes=(1,), limit_s=10.0)
NAMED = NamedCause(104.0, 0, "rank_stopped", (1,), ("here",))
GOOD = History(100.0, [NAMED], [FrontExit(105.0, 4)])


def test_the_right_cause_and_culprit_in_time_with_its_exit_code_is_right() -> None:
    row = judge(STOPPED, GOOD)
    assert row.right
    assert row.is_good
    assert (row.named, row.ranks, row.named_after_s, row.ended_after_s) == ("rank_stopped", (1,), 4.0, 5.0)


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (replace(GOOD, detected=[]), "not reported within 10 s"),
        (replace(GOOD, detected=[replace(NAMED, cause="gil_held")]), "reported gil_held, rank 1"),
        (replace(GOOD, detected=[replace(NAMED, ranks=(0,))]), "reported rank_stopped, rank 0"),
        (replace(GOOD, detected=[replace(NAMED, ranks=(0, 1))]), "reported rank_stopped, rank 0, rank 1"),
        (replace(GOOD, detected=[replace(NAMED, ranks=(), hosts=())]), "reported rank_stopped, nobody"),
        (replace(GOOD, detected=[replace(NAMED, at=112.0)]), "detected after 12.0 s; 10 s are allowed"),
        (replace(GOOD, ends=[FrontExit(160.0, -9, by_drill=True)]), "the run did not end within 60 s"),
        (replace(GOOD, ends=[FrontExit(105.0, 0)]), "exit code 0 instead of 4"),
        (replace(GOOD, effect=None), "the run ended before the fault took effect, rank_stopped, rank 1"),
    ],
)
def test_anything_else_is_wrong_and_reports_why(history: History, why: str) -> None:
    row = judge(STOPPED, history)
    assert (row.right, row.why) == (False, why)


def test_a_head_that_is_killed_is_named_by_the_others_alone() -> None:
    (drill,) = choose(("head_killed",))
    gone = {"kind": "verdict", "cause": "node_unreachable", "ranks": [], "hosts": ["vm"]}
    reported = [
        named_cause_in(
            {**gone, "summary": f"node {node} (vm) is not heard any more"}, at=100.5, node=1, words=()
        )
        for node in (0, 1)
    ]
    ends = [FrontExit(100.1, -9), FrontExit(101.0, 4)]
    rows = [
        judge(drill, History(100.0, [one], ends, hosts=(None, None))) for one in reported if one is not None
    ]
    assert [row.right for row in rows] == [True, False], "a node that calls itself cut off is wrong"
    assert (rows[0].named_after_s, rows[0].ended_after_s) == (0.5, 1.0)


def test_victim_blamed_first_is_not_fixed_by_the_right_name_later() -> None:
    blamed = NamedCause(102.0, 0, "user_code_stuck", (0,), is_end=False)
    row = judge(STOPPED, replace(GOOD, detected=[blamed, NAMED]))
    assert (row.right, row.why) == (False, "reported user_code_stuck, rank 0")


def test_the_first_right_word_counts_be_it_a_warning_before_the_verdict() -> None:
    warning = replace(NAMED, at=103.0, is_end=False)
    assert judge(STOPPED, replace(GOOD, detected=[warning, NAMED])).named_after_s == 3.0


def test_where_nothing_is_wrong_nothing_may_be_named() -> None:
    good = History(100.0, [], [FrontExit(110.0, 0)])
    assert judge(QUIET, good).right
    assert not judge(QUIET, replace(good, detected=[replace(NAMED, cause="rank_killed")])).right
    assert not judge(QUIET, replace(good, ends=[FrontExit(110.0, 5)])).right


def test_that_a_rank_is_slow_on_a_busy_machine_is_not_a_wrong_name() -> None:
    slow = NamedCause(101.0, 0, "straggler", (0,), is_end=False)
    assert judge(QUIET, History(100.0, [slow], [FrontExit(110.0, 0)])).right
    assert judge(STOPPED, replace(GOOD, detected=[slow, NAMED])).right


def test_a_cut_network_is_right_when_both_halves_have_reported_it() -> None:
    head = NamedCause(106.0, 0, "node_unreachable", hosts=("b",))
    other = NamedCause(108.0, 1, "node_unreachable", hosts=("b",))
    both = History(100.0, [head, other], [FrontExit(109.0, 4), FrontExit(110.0, 4)], hosts=("a", "b"))
    row = judge(CUT, both)
    assert (row.right, row.hosts, row.named_after_s) == (True, ("b",), 8.0)
    assert judge(CUT, replace(both, detected=[head])).why == "not reported on every node"
    each_the_other = judge(CUT, replace(both, detected=[head, replace(other, hosts=("a",))]))
    assert (each_the_other.right, each_the_other.hosts) == (True, ("b",))
    assert not judge(CUT, replace(both, detected=[replace(head, hosts=("a",)), other])).right


def test_what_is_left_behind_is_not_good_also_where_the_name_is_right() -> None:
    row = judge(STOPPED, replace(GOOD, left_behind=["process 7: python -m unisono.worker"]))
    assert row.right
    assert not row.is_good


def test_what_was_skipped_is_reported_and_is_nobodys_fault() -> None:
    row = skipped_result(STOPPED, "mounts need root")
    assert row.is_good
    assert row.to_json()["skipped"] == "mounts need root"


def test_names_are_read_from_verdicts_warnings_and_agreed_words() -> None:
    """A warning counts if it holds a verdict or has the agreed words."""
    verdict = {"cause": "gil_held", "ranks": [1], "hosts": ["here"], "summary": "rank 1 …"}
    read = {"at": 1.0, "node": 0, "words": ("checkpoint_failed", "not enough space", "No space")}
    ended = named_cause_in({"kind": "verdict", **verdict}, **read)  # type: ignore[arg-type]
    assert ended == NamedCause(1.0, 0, "gil_held", (1,), ("here",))
    warned = named_cause_in({"kind": "warning", "code": "gil_held", "verdict": verdict}, **read)  # type: ignore[arg-type]
    assert warned == NamedCause(1.0, 0, "gil_held", (1,), ("here",), is_end=False)
    full = {"kind": "warning", "code": "checkpoint_failed", "text": "not enough space for checkpoint step-20"}
    assert named_cause_in(full, **read) == NamedCause(1.0, 0, "", is_end=False)  # type: ignore[arg-type]
    assert named_cause_in({**full, "text": "the storage hangs"}, **read) is None  # type: ignore[arg-type]
    assert named_cause_in({"kind": "step", "step": 3}, **read) is None  # type: ignore[arg-type]


def test_the_json_of_a_row_is_that_of_the_contract() -> None:
    contract = {"fault", "want", "named", "ranks", "right", "named_after_s", "ended_after_s", "left_behind", "skipped"}  # fmt: skip
    assert contract <= set(judge(STOPPED, GOOD).to_json())


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.fault)
def test_drill_wants_catalogued_causes_and_has_a_fault_or_a_blow(drill: Drill) -> None:
    assert all(find_cause(cause) for cause in drill.want)
    assert bool(drill.faults) or drill.sandbox is not Sandbox
    assert all(rank < drill.nproc * drill.sandbox().nodes for rank in drill.ranks)


def test_a_drill_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert [drill.fault for drill in choose(("sleep", "sigkill"))] == ["sigkill", "sleep"]
    with pytest.raises(UsageError, match="sigkil") as refused:
        choose(("sigkil",))
    assert "sigkill" in refused.value.problems[0].fix


def test_the_list_fits_into_80_columns_with_every_fault_and_cause() -> None:
    lines = drills_table(DRILLS)
    assert all(len(line) <= 80 for line in lines)
    words = " ".join(lines)
    assert all(drill.fault in words and all(cause in words for cause in drill.want) for drill in DRILLS)
