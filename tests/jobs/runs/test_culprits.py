"""Who is named when several ranks end: pure. Run: pytest tests/jobs/runs/test_culprits.py"""

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.guard.watch.run_views import run_view, view
from unisono.base.causes import Verdict
from unisono.guard.places.ranks import DeviceChoice, NodePlace, RankPlace
from unisono.guard.supervise.decision import Decider, Decision, NodeLoss, first_cause
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.postmortem import apart, name_death, name_lost_node, name_victims, node_refused
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.guard.watch.views import RankView
from unisono.jobs.runs.run_records import ending_of
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan

CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True)
LOST_PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:29416"


def plan(world_size: int, per_node: int = 2) -> RunPlan:
    """A plan of which only the places are looked at."""
    ranks = [
        RankPlace(
            rank=r, node_rank=r // per_node, local_rank=r % per_node, host="abcdef"[r // per_node], device=CPU
        )
        for r in range(world_size)
    ]
    nodes = [
        NodePlace(node_rank=n, host="abcdef"[n], address="127.0.0.1", nproc=per_node, nproc_origin="--nproc")
        for n in range(-(-world_size // per_node))
    ]
    looked_at: Any = {
        "world_size": world_size,
        "ranks": ranks,
        "nodes": nodes,
        "store_host": "127.0.0.1",
        "resume": None,
        "total_steps": 10,
        "last_step": None,
        "config": RunConfig.model_validate({"model": "m", "data": {"train": "x"}, "output_dir": "o"}),
    }
    return RunPlan.model_construct(**looked_at)


def end(rank: int, returncode: int = 5, *, kind: str | None = None, **more: Any) -> RankEnd:
    last: Any = None if kind is None else {"kind": kind, **more}
    return RankEnd(rank=rank, returncode=returncode, last=last, phase="train", step=4)


def victim(rank: int) -> RankEnd:
    return end(rank, kind="crashed", error=LOST_PEER, peer_lost=True)


KILLED = -signal.SIGKILL


def test_killed_rank_is_blamed_at_once_though_a_victim_was_heard_of_first() -> None:
    decider = Decider(plan(4))
    decider.failures.rank_ended(victim(0), now=10.0)
    assert decider.decide(now=10.1) is None, "the culprit may still be on its way"
    decider.failures.rank_ended(end(3, KILLED), now=10.2)
    decision = decider.decide(now=10.2)
    assert decision is not None
    assert decision.culprit is not None
    assert decision.culprit.rank == 3
    verdict = name_death(decision.culprit, plan(4), after_s=decision.after_s)
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("rank_killed", (3,), ("b",))
    assert verdict.summary == "rank 3, node 1 (b) was killed by SIGKILL in phase train after step 4"


def test_an_exception_waits_a_moment_for_a_kill_that_may_have_caused_it() -> None:
    decider = Decider(plan(2))
    decider.failures.rank_ended(end(0, kind="crashed", error="RuntimeError: odd", where="x.py:3"), now=1.0)
    assert decider.decide(now=1.1) is None
    decider.failures.rank_ended(end(1, KILLED), now=1.2)
    decision = decider.decide(now=1.2)
    assert decision is not None
    assert decision.culprit is not None
    assert decision.culprit.rank == 1


def died_in(comm: int, *, rank: int, step: int = 12, elements: int = 1000) -> RankView:
    return view(rank, "comm", comm=comm, step=step, elements=elements, has_ended=True)


def test_ranks_lost_a_collective_apart_were_not_in_different_collectives() -> None:
    cut = run_view([died_in(41, rank=0), died_in(42, rank=1, step=13), died_in(41, rank=2)])
    assert apart(cut, None) is None
    found = apart(
        run_view([died_in(41, rank=0), died_in(41, rank=1, elements=1001), died_in(41, rank=2)]), None
    )
    assert found is not None
    assert (found.cause, found.ranks) == ("collective_mismatch", (1,))


def test_after_an_abort_only_what_is_known_for_sure_of_the_others_counts() -> None:
    aborted = end(1, -signal.SIGABRT)
    others = [view(0, "comm", comm=35, step=10), died_in(41, rank=2)]
    assert apart(run_view([others[0], died_in(41, rank=1), others[1]]), aborted) is None, (
        "rank 0 has moved since"
    )
    in_own_code = view(1, "compute", has_ended=True)
    assert apart(run_view([died_in(41, rank=0), in_own_code, died_in(40, rank=2)]), aborted) is None
    found = apart(
        run_view([died_in(41, rank=0), died_in(41, rank=1, elements=9), died_in(41, rank=2)]), aborted
    )
    assert found is not None
    assert found.ranks == (1,)


def test_an_abort_waits_a_moment_until_it_is_known_where_the_others_were() -> None:
    decider = Decider(plan(3))
    decider.failures.rank_ended(end(1, -signal.SIGABRT), now=1.0)
    assert decider.decide(now=1.1) is None
    assert decider.decide(now=1.4) is not None


def test_an_exception_alone_is_named_with_its_own_words() -> None:
    decider = Decider(plan(2))
    decider.failures.rank_ended(
        end(1, kind="crashed", error="ZeroDivisionError: {nothing}", where="x.py:3"), now=1.0
    )
    decider.failures.rank_ended(victim(0), now=1.05)
    decision = decider.decide(now=1.1)
    assert decision is not None, "all have ended: there is nobody left to wait for"
    assert decision.culprit is not None
    verdict = name_death(decision.culprit, plan(2))
    assert verdict.cause == "user_code_error"
    assert "ZeroDivisionError: {nothing}" in verdict.summary


def test_rank_that_left_early_with_a_result_is_the_culprit() -> None:
    early = RankEnd(rank=1, returncode=0, last={"kind": "result", "step": 12}, phase="train", step=12)
    ends = [early, victim(0)]
    assert first_cause(ends) is early
    assert name_death(early, plan(2)).cause == "unequal_steps"


def test_where_all_are_victims_nobody_is_blamed() -> None:
    decider = Decider(plan(2))
    decider.failures.rank_ended(victim(0), now=1.0)
    decider.failures.rank_ended(victim(1), now=1.1)
    decision = decider.decide(now=1.2)
    assert decision is not None
    assert decision.culprit is None
    verdict = name_victims(list(decider.ends.values()), plan(2))
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("rank_died_first", (), ())


def test_a_lost_node_is_named_and_not_its_victims() -> None:
    decider = Decider(plan(4))
    decider.failures.rank_ended(victim(0), now=1.0)
    decider.failures.node_lost(NodeLoss(1, "b", "the connection was closed"), now=1.1)
    decision = decider.decide(now=1.1)
    assert decision is not None
    assert decision.loss is not None
    verdict = name_lost_node(decision.loss)
    assert (verdict.cause, verdict.hosts) == ("node_unreachable", ("b",))
    assert verdict.summary.startswith("node 1 (b) ")


def test_what_was_ended_by_its_front_is_never_the_cause() -> None:
    ours = RankEnd(rank=0, returncode=KILLED, last=None, phase="train", step=4, end_reason="another rank")
    assert first_cause([ours]) is None


def test_all_ranks_with_a_result_are_the_end() -> None:
    decider = Decider(plan(2))
    for rank in (1, 0):
        decider.failures.rank_ended(end(rank, 0, kind="result"), now=1.0)
    assert decider.is_over
    assert decider.decide(now=9.0) is None


@given(order=st.permutations(range(4)), culprit=st.integers(0, 3), how=st.sampled_from(["kill", "raise"]))
def test_the_order_of_the_news_does_not_matter(order: list[int], culprit: int, how: str) -> None:
    ends = {rank: victim(rank) for rank in range(4)}
    ends[culprit] = end(culprit, KILLED) if how == "kill" else end(culprit, kind="crashed", error="E: x")
    found = first_cause([ends[rank] for rank in order])
    assert found is not None
    assert found.rank == culprit


@pytest.mark.parametrize("value", [{}, {"rank": "x"}, {"rank": 1, "last": [1]}, []])
def test_an_end_that_cannot_be_read_is_refused(value: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        RankEnd.from_json(value)


def test_an_end_survives_the_way_to_the_head() -> None:
    for one in (victim(1), end(0, KILLED)):
        assert RankEnd.from_json(one.to_json()) == one


def test_a_node_that_refuses_the_plan_ends_the_start_with_its_own_words() -> None:
    decider = Decider(plan(4))
    refused = {"problems": [{"what": "this node's copy of the plan cannot be written"}], "verdict": None}
    decider.node_refused(node_refused(1, "b", refused))
    decision = decider.decide(now=1.0)
    assert decision is not None
    assert decision.agreement is not None
    [verdict] = decision.agreement.fatal
    assert (verdict.cause, verdict.hosts) == ("node_refused", ("b",))
    assert "cannot be written" in verdict.summary


def test_who_holds_up_an_end_that_was_requested_does_not_make_it_a_stall() -> None:
    stuck = Verdict(cause="rank_stopped", when="during", summary="rank 1 is stopped", ranks=(1,))
    attempt = Attempt(0, 5, None, decision=Decision(verdict=stuck))
    assert ending_of(attempt, plan(2)).exit_code == 4
    attempt.stop_signal = signal.SIGTERM
    ending = ending_of(attempt, plan(2))
    assert (ending.exit_code, ending.outcome, ending.verdict) == (75, "preempted", stuck)


def test_rank_0_that_completes_a_step_early_has_left_the_others() -> None:
    job = plan(2)
    early = Attempt(
        9,
        5,
        None,
        last={"kind": "result", "exit_code": 0, "step": 9},
        ends={0: end(0, 0, kind="result", step=9)},
    )
    ending = ending_of(early, job)
    assert (ending.exit_code, ending.outcome, ending.progress.step) == (4, "stalled", 9)
    assert ending.verdict is not None
    assert (ending.verdict.cause, ending.verdict.ranks) == ("unequal_steps", (0,))
    hangs = ending_of(replace(early, ends={}), job)  # after its last word: there is no end of it yet
    assert hangs.verdict is not None
    assert (hangs.exit_code, hangs.verdict.cause, hangs.verdict.ranks) == (4, "unequal_steps", (0,))
    whole = replace(early, last={"kind": "result", "exit_code": 0, "step": 10})
    assert ending_of(whole, job).exit_code == 0
    asked = replace(early, last={"kind": "result", "exit_code": 75, "step": 9})
    assert ending_of(asked, job).exit_code == 75
    replayed = job.model_copy(update={"last_step": 9})
    assert ending_of(early, replayed).exit_code == 0
