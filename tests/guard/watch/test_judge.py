"""Who is blamed, and when: .venv/bin/python -m pytest tests/guard/watch/test_judge.py"""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.guard.watch.run_views import QUICK, UNSEEN, look, run_view, view
from unisono.base.causes import Verdict
from unisono.guard.watch import PHASES
from unisono.guard.watch.judge import judge
from unisono.guard.watch.verdicts import Patience
from unisono.guard.watch.views import NodeView, PhaseTimes, RankView, Suspicion

AUTO = Patience()
_IN_STEP = [phase.name for phase in PHASES if phase.in_step and not phase.waits]
_ANY = [phase.name for phase in PHASES]


def named(found: Suspicion | Verdict | None) -> Verdict:
    """The verdict, if somebody is named."""
    if isinstance(found, Suspicion):
        assert found.is_named, found
        return found.verdict
    assert found is not None
    return found


def waiting(rank: int, idle_s: float, **more: Any) -> RankView:
    return view(rank, "comm", idle_s, comm=41, **more)


def test_a_stopped_rank_is_named_and_ends_the_run_after_three_seconds() -> None:
    early = judge(run_view([waiting(0, 2.0), view(1, "compute", 2.0, state="T")]), AUTO)
    assert isinstance(early, Suspicion)
    assert not early.is_named
    found = judge(run_view([waiting(0, 3.1), view(1, "compute", 3.1, pulse_idle_s=3.1, state="T")]), AUTO)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks, found.hosts) == ("rank_stopped", (1,), ("a",))
    assert "state T" in found.summary
    assert any("rank 0" in item.where and "waits" in item.text for item in found.evidence)
    assert "who stopped it" in found.fix[0]
    assert not any("kill -CONT" in fix for fix in found.fix), "it is gone when this is read"


def test_rank_in_a_frozen_control_group_is_stopped_not_blocked_on_storage() -> None:
    found = judge(
        run_view([waiting(0, 3.1), view(1, "compute", 3.1, state="D", waits_in="__refrigerator")]), AUTO
    )
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("rank_stopped", (1,))
    assert "frozen" in found.summary


def test_a_rank_held_by_a_debugger_is_not_taken_for_stopped() -> None:
    assert judge(run_view([waiting(0, 2.9), view(1, "compute", 2.9, state="t")]), AUTO) is None


def test_rank_whose_second_thread_is_silent_too_holds_the_interpreter_lock() -> None:
    found = judge(run_view([waiting(0, 5.0), view(1, "compute", 5.0, pulse_idle_s=5.0, state="R")]), AUTO)
    verdict = named(found)
    assert (verdict.cause, verdict.ranks) == ("gil_held", (1,))
    assert isinstance(found, Suspicion), "naming is fast, acting is slow"


@pytest.mark.parametrize(
    ("phase", "more", "cause"),
    [
        ("compute", {"state": "S"}, "user_code_stuck"),
        ("compute", {"state": "R"}, "user_code_stuck"),
        ("data", {"state": "S", "waits_in": "pipe_read"}, "data_starved"),
        ("data", {"state": "S", "children": "Z"}, "data_starved"),
        ("log", {"state": "D", "waits_in": "nfs_wait_bit_killable"}, "io_blocked"),
        ("data", {"state": "D"}, "io_blocked"),
    ],
)
def test_a_rank_that_does_not_come_back_is_named_by_what_it_waits_for(
    phase: str, more: dict[str, Any], cause: str
) -> None:
    def seen(idle_s: float) -> Suspicion | Verdict | None:
        return judge(run_view([waiting(0, idle_s), view(1, phase, idle_s, **more), waiting(2, idle_s)]), AUTO)

    assert seen(2.9) is None
    assert (named(seen(4.6)).cause, named(seen(4.6)).ranks) == (cause, (1,))
    assert isinstance(seen(29.0), Suspicion)
    ended = seen(30.0)
    assert isinstance(ended, Verdict)
    assert ended.cause == cause


def test_one_rank_alone_that_does_not_come_back_is_named_too() -> None:
    verdict = named(judge(run_view([view(0, "compute", 5.0)]), AUTO))
    assert (verdict.cause, verdict.ranks) == ("user_code_stuck", (0,))


@pytest.mark.parametrize(("percent", "is_waiting"), [(100, True), (95, True), (40, False), (None, False)])
def test_a_rank_whose_gpu_computes_without_an_end_waits_for_it(
    percent: int | None, *, is_waiting: bool
) -> None:
    """On an H100 the rank spins in a copy from the device (state R), and the GPU is at 100 %."""
    rank = view(0, "compute", 5.0, state="R")
    rank = replace(rank, process=replace(rank.process, gpu_percent=percent))
    verdict = named(judge(run_view([rank]), AUTO))
    assert (verdict.cause, verdict.ranks) == ("user_code_stuck", (0,))
    assert ("waits for a GPU" in verdict.summary) == is_waiting
    assert any("CUDA_LAUNCH_BLOCKING" in fix for fix in verdict.fix)


def test_the_stack_of_the_culprit_is_in_the_verdict() -> None:
    views = [waiting(0, 5.0), view(1, "compute", 5.0)]
    verdict = named(judge(run_view(views, looks=[look(1, "hooks.py:7 in wait", "loop.py:3 in train")]), AUTO))
    assert "hooks.py:7 in wait" in verdict.summary
    assert [item.text for item in verdict.evidence if item.where.endswith("stack")] == [
        "hooks.py:7 in wait",
        "loop.py:3 in train",
    ]


def test_sharded_ranks_waiting_inside_forward_are_victims_by_their_stack() -> None:
    views = [view(0, "compute", 5.0), view(1, "compute", 5.0), view(2, "compute", 5.0)]
    unsure = judge(run_view(views), AUTO)
    assert isinstance(unsure, Suspicion)
    assert not unsure.is_named
    assert set(unsure.to_inspect) == {0, 1, 2}
    waits = "/lib/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:300 in foreach_all_gather"
    looks = [
        look(0, waits, name="all_gather", number=9, completed=8), look(1, "mine.py:3 in slow", name="all_gather", number=8, completed=8),
        look(2, waits, name="all_gather", number=9, completed=8),
    ]  # fmt: skip
    assert named(judge(run_view(views, looks=looks), AUTO)).ranks == (1,)


def test_a_different_collective_names_the_odd_rank() -> None:
    views = [waiting(0, 5.0), waiting(1, 5.0, kind="all_gather"), waiting(2, 5.0)]
    early = judge(run_view(views), AUTO)
    assert isinstance(early, Suspicion)
    assert set(early.to_inspect) == {0, 1, 2}, "the flight recorder is asked first"
    verdict = judge(run_view([replace(v, idle_s=6.1) for v in views]), AUTO)
    assert isinstance(verdict, Verdict)
    assert (verdict.cause, verdict.ranks) == ("collective_mismatch", (1,))
    assert "all_gather" in verdict.summary
    assert "all_reduce" in verdict.summary


def test_a_different_size_names_the_odd_rank() -> None:
    views = [waiting(0, 6.1), waiting(1, 6.1), waiting(2, 6.1, elements=1001)]
    assert named(judge(run_view(views), AUTO)).ranks == (2,)


def test_flight_recorder_distinguishes_kinds_of_equally_many_collectives() -> None:
    views = [waiting(0, 5.0), waiting(1, 5.0), waiting(2, 5.0)]
    looks = [
        look(rank, name=name, number=18) for rank, name in enumerate(["all_reduce", "barrier", "all_reduce"])
    ]
    verdict = named(judge(run_view(views, looks=looks), AUTO))
    assert (verdict.cause, verdict.ranks) == ("collective_mismatch", (1,))


def test_two_ranks_in_different_collectives_are_shown_and_neither_blamed() -> None:
    verdict = named(judge(run_view([waiting(0, 6.1), waiting(1, 6.1, kind="barrier", elements=0)]), AUTO))
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("collective_mismatch", (), ())


def test_rank_with_fewer_steps_is_named_if_it_waits_in_a_later_collective() -> None:
    views = [waiting(0, 6.1), waiting(1, 6.1, step=11, kind="barrier"), waiting(2, 6.1)]
    verdict = named(judge(run_view(views), AUTO))
    assert (verdict.cause, verdict.ranks) == ("unequal_steps", (1,))


def test_rank_that_handed_over_its_result_while_others_wait_left_early() -> None:
    views = [waiting(0, 2.5), view(1, "close", 2.5, reported_result=True, has_ended=True)]
    verdict = judge(run_view(views), AUTO)
    assert isinstance(verdict, Verdict)
    assert (verdict.cause, verdict.ranks) == ("unequal_steps", (1,))


def test_rank_that_left_after_the_same_collective_did_not_leave_early() -> None:
    """Its part of it is on a way that a checkpoint fills, too."""
    left = view(1, "close", 9.0, comm=41, reported_result=True)
    found = judge(run_view([waiting(0, 9.0), left]), AUTO)
    assert isinstance(found, Suspicion), "what fills the way may end"
    assert (found.verdict.cause, found.verdict.ranks) == ("rank_stalled", ())
    found = judge(run_view([waiting(0, 9.0), replace(left, beat=None)]), AUTO)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("unequal_steps", (1,)), "nothing is known of its collectives"


def test_rank_that_just_fell_silent_is_not_blamed_for_a_long_wait() -> None:
    """Though it is behind: it moved while the other did not."""
    views = [view(0, "data", 33.0), view(1, "compute", 3.0, step=11)]
    verdict = judge(run_view(views), AUTO)
    assert isinstance(verdict, Verdict)
    assert (verdict.cause, verdict.ranks) == ("data_starved", (0,))
    views = [view(0, "data", 33.0), view(1, "compute", 32.0, step=11)]
    assert named(judge(run_view(views), AUTO)).ranks == (1,)


def test_nothing_is_reported_of_ranks_that_wait_for_one_on_its_way_out() -> None:
    """Which storage that hangs makes long; what it has said itself is the cause."""
    out = view(0, "save", 25.0, comm=39, state="D", pulse_idle_s=25.0, has_ended=True)
    assert judge(run_view([out, waiting(1, 25.0)]), AUTO) is None
    assert judge(run_view([out, waiting(1, 99.0), waiting(2, 99.0)]), AUTO) is None
    assert judge(run_view([replace(out, has_ended=False), waiting(1, 25.0)]), AUTO) is not None


def test_a_rank_that_hangs_on_its_way_out_is_not_a_problem_of_the_run() -> None:
    views = [
        view(0, "finish", 9.0),
        view(1, "close", 99.0, state="T", pulse_idle_s=99.0, reported_result=True),
    ]
    found = judge(run_view([replace(views[0], idle_s=0.1), views[1]]), AUTO)
    assert found is None, "rank 0 writes the result"
    views = [view(rank, "close", 99.0, state="T", pulse_idle_s=99.0, reported_result=True) for rank in (0, 1)]
    assert judge(run_view(views), AUTO) is None


def test_long_past_waits_do_not_delay_naming_a_collective_that_never_ends() -> None:
    """The long waits were for a rank that evaluates alone."""
    patient = replace(QUICK, longest_s=60.0)
    views = [waiting(0, 5.0), waiting(1, 5.0, times=patient), waiting(2, 5.0, times=patient)]
    assert named(judge(run_view(views), AUTO)).cause == "rank_stalled"
    odd = [*views[:2], waiting(2, 6.1, times=patient, kind="barrier")]
    verdict = judge(run_view([replace(one, idle_s=6.1) for one in odd]), AUTO)
    assert isinstance(verdict, Verdict)
    assert (verdict.cause, verdict.ranks) == ("collective_mismatch", (2,))


def test_a_silent_node_is_named_where_all_others_wait_in_one_collective() -> None:
    views = [waiting(0, 5.0), waiting(1, 5.0)]
    nodes = [NodeView(0, "a"), NodeView(1, "b", silent_s=4.8)]
    verdict = named(judge(run_view(views, nodes=nodes, world=3, per_node=2), AUTO))
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("node_unreachable", (), ("b",))


def test_link_that_acknowledges_nothing_is_reported_without_blaming_a_rank() -> None:
    views = [waiting(0, 5.0), waiting(1, 5.0, node_rank=1)]
    nodes = [NodeView(0, "a", links=("→ 10.0.0.2:4000: 5 retransmissions",)), NodeView(1, "b")]
    verdict = named(judge(run_view(views, nodes=nodes, per_node=1), AUTO))
    assert (verdict.cause, verdict.ranks) == ("node_unreachable", ())
    assert "10.0.0.2:4000" in verdict.summary


def test_a_rank_behind_what_the_network_did_not_carry_is_not_blamed() -> None:
    views = [waiting(0, 7.0), waiting(1, 7.0), view(2, "comm", 7.0, comm=40, elements=999, node_rank=1)]
    cut = [NodeView(0, "a", links=("→ 10.0.0.2:4000: 5 retransmissions",)), NodeView(1, "b")]
    found = judge(run_view(views, nodes=cut, per_node=2), AUTO)
    assert isinstance(found, Suspicion), "it may come back"
    assert (found.verdict.cause, found.verdict.ranks) == ("node_unreachable", ())
    healthy = [NodeView(0, "a"), NodeView(1, "b")]
    assert named(judge(run_view(views, nodes=healthy, per_node=2), AUTO)).cause == "collective_mismatch"


def test_nobody_is_blamed_for_a_collective_that_hangs_without_a_reason() -> None:
    found = judge(run_view([waiting(0, 5.0), waiting(1, 5.0)]), AUTO)
    assert named(found).ranks == ()
    assert isinstance(found, Suspicion)


@pytest.mark.parametrize(
    "phase", ["start", "load_model", "resume", "rehearse", "compute", "evaluate", "save"]
)
def test_a_phase_whose_length_is_not_known_yet_is_given_ten_minutes(phase: str) -> None:
    def seen(idle_s: float) -> Suspicion | Verdict | None:
        return judge(
            run_view([waiting(0, idle_s, times=UNSEEN), view(1, phase, idle_s, times=UNSEEN, step=1)]), AUTO
        )

    before = seen(599.0)
    assert before is None or (isinstance(before, Suspicion) and before.is_quiet and not before.is_named)
    assert isinstance(seen(600.0), Verdict)


def test_ranks_that_all_wait_are_reported_before_the_second_step_has_shown_how_long_that_takes() -> None:
    def seen(idle_s: float, waits: str) -> Suspicion | Verdict | None:
        views = [
            waiting(0, idle_s, times=UNSEEN, step=1),
            view(1, "compute", idle_s, times=UNSEEN, step=1, comm=40),
        ]
        if idle_s < 20.0:
            assert judge(run_view(views), AUTO) is None
        looks = [
            look(rank, waits, name=name, number=9, completed=8)
            for rank, name in enumerate(["all_reduce", "all_gather"])
        ]
        return judge(run_view(views, looks=looks), AUTO)

    in_torch = "/lib/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:300 in foreach_all_gather"
    unsure = seen(20.0, "mine.py:3 in slow")
    assert isinstance(unsure, Suspicion)
    assert (unsure.is_quiet, unsure.is_named, unsure.to_inspect) == (True, False, (0, 1))
    assert not isinstance(seen(599.0, "mine.py:3 in slow"), Verdict), "it may compile"
    early = seen(20.0, in_torch)
    assert isinstance(early, Suspicion)
    assert not early.is_named
    assert named(seen(30.0, in_torch)).cause == "collective_mismatch"
    assert isinstance(seen(599.0, in_torch), Suspicion)
    assert isinstance(seen(600.0, in_torch), Verdict)
    together = judge(run_view([waiting(rank, 30.0, times=UNSEEN, step=1) for rank in (0, 1)]), AUTO)
    assert named(together).cause == "rank_stalled"


@pytest.mark.parametrize(("times", "idle_s", "ends_s"), [(QUICK, 6.1, 30.0), (UNSEEN, 31.0, 600.0)])
def test_ranks_whose_last_collective_completed_are_inspected_again_and_end_at_last(
    times: PhaseTimes, idle_s: float, ends_s: float
) -> None:
    in_torch = "/lib/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:300 in foreach_all_gather"

    def seen(idle_s: float, *, has_moved: bool) -> Suspicion | Verdict | None:
        views = [view(rank, "compute", idle_s, times=times, step=1) for rank in (0, 1)]
        names = ["all_reduce", "all_gather"]
        looks = [look(rank, in_torch, name=name, number=9, completed=8) for rank, name in enumerate(names)]
        return judge(run_view(views, looks=[replace(one, has_moved=has_moved) for one in looks]), AUTO)

    unsure = seen(idle_s, has_moved=True)
    assert isinstance(unsure, Suspicion)
    assert not unsure.is_named
    assert unsure.to_inspect == (0, 1)
    assert named(seen(idle_s, has_moved=False)).cause == "collective_mismatch"
    assert isinstance(seen(ends_s, has_moved=True), Verdict)


def test_the_configs_patience_replaces_what_is_learned_and_the_ten_minutes() -> None:
    patience = Patience.of("2 minutes")
    for times in (UNSEEN, QUICK):
        views = [waiting(0, 119.0), view(1, "compute", 119.0, times=times)]
        assert not isinstance(judge(run_view(views), patience), Verdict)
        views = [replace(one, idle_s=120.0) for one in views]
        assert isinstance(judge(run_view(views), patience), Verdict)


_moving = st.builds(
    view, rank=st.just(0), phase=st.sampled_from(_ANY), idle_s=st.floats(0, 1.0), pulse_idle_s=st.floats(0, 2.9),
    state=st.sampled_from("RSDt"), children=st.sampled_from(["", "S", "ZS"]), step=st.integers(1, 100), comm=st.integers(0, 50),
    kind=st.sampled_from(["all_reduce", "barrier", "broadcast"]), times=st.sampled_from([UNSEEN, QUICK]),
)  # fmt: skip
_stuck = st.builds(
    view,
    rank=st.just(0),
    phase=st.sampled_from(_IN_STEP),
    idle_s=st.floats(4.6, 500),
    state=st.sampled_from("RSD"),
)
_victims = st.builds(
    view, rank=st.just(0), phase=st.sampled_from(["comm"]), idle_s=st.floats(0, 500), comm=st.just(41)
)


@given(st.lists(_moving, min_size=1, max_size=8))
def test_a_run_that_moves_is_never_judged(views: list[RankView]) -> None:
    numbered = [replace(one, rank=rank) for rank, one in enumerate(views)]
    assert judge(run_view(numbered), AUTO) is None


@given(st.lists(_victims, min_size=1, max_size=6), _stuck, st.randoms())
def test_who_waits_is_never_blamed(victims: list[RankView], culprit: RankView, chance: random.Random) -> None:
    views = [*victims, culprit]
    chance.shuffle(views)
    numbered = [replace(one, rank=rank) for rank, one in enumerate(views)]
    (guilty,) = [one.rank for one in numbered if one.beat and one.beat.phase != "comm"]
    assert named(judge(run_view(numbered), AUTO)).ranks == (guilty,)


@given(st.lists(st.one_of(_moving, _stuck, _victims), min_size=1, max_size=6), st.randoms())
def test_the_order_of_ranks_does_not_matter(views: list[RankView], chance: random.Random) -> None:
    numbered = [replace(one, rank=rank) for rank, one in enumerate(views)]
    other = list(numbered)
    chance.shuffle(other)
    assert judge(run_view(numbered), AUTO) == judge(run_view(other), AUTO)


@given(st.lists(st.one_of(_moving, _stuck, _victims), min_size=1, max_size=6), st.floats(0, 1000))
def test_more_silence_never_takes_a_verdict_back(views: list[RankView], more_s: float) -> None:
    numbered = [replace(one, rank=rank) for rank, one in enumerate(views)]
    found = judge(run_view(numbered), AUTO)
    later = judge(run_view([replace(v, idle_s=v.idle_s + more_s) for v in numbered]), AUTO)
    assert not isinstance(found, Verdict) or isinstance(later, Verdict)
