"""The decision on a failure, over all orders of its news.

Pure. Run: pytest tests/guard/supervise/test_decision.py
"""

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from unisono.guard.supervise.decision import WAITS, Decision, Failures, NodeLoss, Waits, ended_well, is_victim
from unisono.guard.supervise.local_ranks import RankEnd

MAX_RANKS = 5
TICK_S = 0.1  # shorter than every wait that is drawn

News = RankEnd | NodeLoss
Moment = list[News]


def end(rank: int, returncode: int = 1, last: Any = None, end_reason: str = "") -> RankEnd:
    return RankEnd(rank, returncode, last, phase="train", step=4, end_reason=end_reason)


RESULT = end(0, 0, {"kind": "result"})
RAISED = end(0, 1, {"kind": "crashed", "error": "ValueError: x"})
VICTIM = end(0, 1, {"kind": "crashed", "error": "lost", "peer_lost": True})
ABORTED = end(0, -signal.SIGABRT)
KILLED = end(0, -signal.SIGKILL)
LEFT = end(0, 3)
ENDED_BY_FRONT = end(0, -signal.SIGKILL, end_reason="another rank failed")
KINDS = (RESULT, RAISED, VICTIM, ABORTED, KILLED, LEFT, ENDED_BY_FRONT)

losses = st.integers(1, 3).map(lambda node: NodeLoss(node, f"host{node}", "the connection was closed"))
waits = st.builds(
    Waits,
    settle_s=st.sampled_from([0.15, 0.3, 1.0]),
    only_victims_s=st.sampled_from([0.15, 2.0, 3.0]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Moment]:
    """What became known, moment by moment: each rank ends at most once, and each node is lost at
    most once.
    """
    ranks = draw(st.lists(st.integers(0, MAX_RANKS - 1), unique=True, max_size=MAX_RANKS))
    ends: list[News] = [replace(draw(st.sampled_from(KINDS)), rank=rank) for rank in ranks]
    news: list[News] = [*ends, *draw(st.lists(losses, max_size=3, unique_by=lambda loss: loss.node_rank))]
    moments: list[Moment] = [[] for _ in range(3)]
    for item in news:
        moments[draw(st.integers(0, 2))].append(item)
    return moments


def take(failures: Failures, moment: Moment, *, now: float) -> None:
    for item in moment:
        if isinstance(item, RankEnd):
            failures.rank_ended(item, now=now)
        else:
            failures.node_lost(item, now=now)


def replay(moments: Sequence[Moment], failures: Failures) -> list[Decision | None]:
    """The decision after each moment, then after each tick until the longest wait is over twice."""
    decisions = []
    ticks = len(moments) + int(2 * longest(failures.waits) / TICK_S) + 2
    for index in range(ticks):
        now = index * TICK_S
        take(failures, moments[index] if index < len(moments) else [], now=now)
        decisions.append(failures.decide(now=now))
    return decisions


def longest(waits: Waits) -> float:
    return max(waits.settle_s, waits.only_victims_s)


def names_somebody(decision: Decision | None) -> bool:
    return decision is not None and (decision.culprit is not None or decision.loss is not None)


world_sizes = st.sampled_from([None, MAX_RANKS])


@given(moments=histories(), waits=waits, world_size=world_sizes, data=st.data())
def test_the_order_of_news_of_the_same_moment_does_not_change_the_decision(
    moments: list[Moment], waits: Waits, world_size: int | None, data: st.DataObject
) -> None:
    expected = replay(moments, Failures(waits, world_size))
    shuffled = [data.draw(st.permutations(moment)) for moment in moments]
    assert replay(shuffled, Failures(waits, world_size)) == expected
    backwards = [moment[::-1] for moment in moments]
    assert replay(backwards, Failures(waits, world_size)) == expected


@given(moments=histories(), waits=waits, world_size=world_sizes)
@example(moments=[[VICTIM], [replace(KILLED, rank=1)]], waits=WAITS, world_size=None)
def test_victim_is_never_named_and_only_a_failed_rank_while_one_is_known(
    moments: list[Moment], waits: Waits, world_size: int | None
) -> None:
    failures = Failures(waits, world_size)
    for index, moment in enumerate(moments):
        take(failures, moment, now=index * TICK_S)
        before = failures.decide(now=index * TICK_S)
        failed = {
            rank for rank, one in failures.ends.items() if not ended_well(one) and not is_victim(one)
        }  # by themselves
        if before is None:
            continue
        assert before.culprit is None or not is_victim(before.culprit)
        if failed and before.after_s == index * TICK_S - (failures.first_at or 0.0):  # made just now
            assert before.loss is None
            assert before.culprit is not None
            assert before.culprit.rank in failed


@given(moments=histories(), waits=waits, world_size=world_sizes)
def test_a_failure_is_decided_on_after_the_longest_wait_at_the_latest(
    moments: list[Moment], waits: Waits, world_size: int | None
) -> None:
    failures = Failures(waits, world_size)
    replay(moments, failures)
    if failures.first_at is None:
        assert failures.decide(now=1000.0) is None
        return
    again = Failures(waits, world_size)
    for index, moment in enumerate(moments):
        take(again, moment, now=index * TICK_S)
    rounding_s = 1e-9  # 0.2 + 0.15 - 0.2 is less than 0.15
    assert again.decide(now=failures.first_at + longest(waits) + rounding_s) is not None


@given(moments=histories(), waits=waits, world_size=world_sizes)
def test_once_a_rank_or_node_is_named_the_decision_stays(
    moments: list[Moment], waits: Waits, world_size: int | None
) -> None:
    decisions = replay(moments, Failures(waits, world_size))
    named = [decision for decision in decisions if names_somebody(decision)]
    assert all(decision == named[0] for decision in named)
    if named:
        assert all(names_somebody(decision) for decision in decisions[decisions.index(named[0]) :])
    made = [decision is not None for decision in decisions]
    assert made == sorted(made), "a decision is not taken back"


@given(moments=histories(), waits=waits)
def test_knowing_the_number_of_ranks_decides_sooner_and_not_differently(
    moments: list[Moment], waits: Waits
) -> None:
    news = [item for moment in moments for item in moment]
    knowing, unknowing = Failures(waits, MAX_RANKS), Failures(waits)
    for index, item in enumerate(news):  # all of it before the first decision
        for failures in (knowing, unknowing):
            take(failures, [item], now=index * TICK_S / 10)
    sooner = [knowing.decide(now=now) or not unknowing.decide(now=now) for now in (0.1, 0.5, 1.5, 2.5)]
    assert all(sooner)
    late = [failures.decide(now=100.0) for failures in (knowing, unknowing)]
    who = [(one.culprit, one.loss) if one is not None else None for one in late]
    assert who[0] == who[1]


@given(moments=histories(), waits=waits, world_size=world_sizes)
def test_a_start_without_a_failure_is_not_decided_on(
    moments: list[Moment], waits: Waits, world_size: int | None
) -> None:
    well: list[Moment] = [
        [item for item in moment if isinstance(item, RankEnd) and ended_well(item)] for moment in moments
    ]
    assert set(replay(well, Failures(waits, world_size))) == {None}


def test_restarted_ranks_begin_without_failure_but_a_lost_node_stays_lost() -> None:
    failures = Failures()
    loss = NodeLoss(1, "b", "the connection was closed")
    failures.rank_ended(replace(KILLED, rank=1), now=1.0)
    failures.node_lost(loss, now=1.0)
    assert failures.decide(now=1.0) is not None
    failures.restart()
    assert (failures.first_at, failures.ends, failures.decide(now=9.0)) == (None, {}, None)
    failures.rank_ended(replace(VICTIM, rank=0), now=10.0)
    decision = failures.decide(now=10.0)
    assert decision is not None
    assert decision.loss == loss
