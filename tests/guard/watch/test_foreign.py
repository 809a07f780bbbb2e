"""Who is named in somebody else's program, and who never is.

Run: pytest tests/guard/watch/test_foreign.py
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from unisono.base.causes import Verdict
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.guard.watch.judge import judge
from unisono.guard.watch.verdicts import Patience
from unisono.guard.watch.views import (
    Beat,
    Collective,
    Look,
    PhaseTimes,
    ProcessView,
    RankView,
    RunView,
    Suspicion,
)

_CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=1 << 30, bfloat16=False)


def rank(
    number: int, *, idle: float = 6.0, pending: int = 0, still: float = 0.0, phase: str = "program", step: int = 9,
    micro: int = 1, longest: float = 0.01, pulse_idle: float = 0.1, state: str = "S", mean: float = 0.02,
) -> RankView:  # fmt: skip
    beat = Beat(
        version=9, at_ns=0, phase=phase, step=step, micro=micro, comm=3, kind="barrier", elements=0, done=0, total=0, digest=0,
        shares_s=(0, 0, 0, 0), pulse_ns=1, answered=0, times=PhaseTimes(50, 50 * mean, longest), begun=20, pending=pending, still_s=still,
        is_foreign=True,
    )  # fmt: skip
    return RankView(number, 0, beat, idle, pulse_idle, ProcessView(state=state))


def judged(
    *views: RankView, looks: Sequence[Look] = (), patience: Patience | None = None
) -> Suspicion | Verdict | None:
    places = {
        v.rank: RankPlace(rank=v.rank, node_rank=0, local_rank=v.rank, host="a", device=_CPU) for v in views
    }
    run_view = RunView(places, {v.rank: v for v in views}, looks={look.rank: look for look in looks})
    return judge(run_view, patience or Patience())


def begun(
    number: int,
    name: str,
    count: int,
    sizes: str = "[[72]]",
    *,
    recurs: bool = False,
    may_step: bool | None = None,
) -> Look:
    collective = Collective("0:default_pg", count, name, sizes)
    return Look(number, stack=("x.py:1 in f",), begun=collective, recurs=recurs, may_step=may_step)


def named(found: Suspicion | Verdict | None) -> tuple[str, tuple[int, ...]] | None:
    if isinstance(found, Verdict):
        return found.cause, found.ranks
    return (found.verdict.cause, found.verdict.ranks) if found is not None and found.is_named else None


@pytest.mark.parametrize("idle", [5.0, 29.0])
def test_silence_of_all_is_not_a_finding_at_first_where_nobody_waits(idle: float) -> None:
    """They sleep between two jobs, or wait for a file: who knows."""
    assert judged(rank(0, idle=idle, still=idle), rank(1, idle=idle, still=idle)) is None


@pytest.mark.parametrize(
    "working",
    [
        {"still": 10.0}, {"pending": 1}, {"phase": "comm"}, {"step": 1},
        {"mean": 2.0},  # seconds: 31 s are less than 20 steps
    ],
    ids=str,
)  # fmt: skip
def test_one_rank_that_does_something_is_enough_for_all(working: dict[str, Any]) -> None:
    """They evaluate, compile, download, or have not begun."""
    idle = rank(0, idle=31.0, still=31.0)
    found = judged(idle, rank(1, **{"idle": 31.0, "still": 31.0, **working}))
    assert found is None or found.verdict.ranks != (0, 1)  # type: ignore[union-attr]


def test_a_busy_gpu_is_not_idle() -> None:
    idle = rank(0, idle=60.0, still=60.0)
    busy = replace(idle, process=replace(idle.process, gpu_percent=40))
    assert judged(idle, replace(busy, rank=1)) is None


def test_ranks_that_are_all_idle_are_named_by_line_and_ended_at_the_limit() -> None:
    looks = [Look(number, stack=("/x/prog.py:9 in reward",)) for number in range(3)]
    views = [rank(number, idle=31.0, still=31.0) for number in range(3)]
    unseen = judged(*views)
    assert isinstance(unseen, Suspicion)
    assert not unseen.is_named
    assert unseen.to_inspect == (0, 1, 2)
    found = judged(*views, looks=looks)
    assert named(found) == ("user_code_stuck", (0, 1, 2))
    assert isinstance(found, Suspicion)
    assert "ranks 0, 1 and 2 at /x/prog.py:9 in reward" in found.verdict.summary
    assert found.ends_in_s is None, "without a limit it is only reported"
    ended = judged(*views, looks=looks, patience=Patience(idle_limit_s=31.0))
    assert isinstance(ended, Verdict)
    assert ended.ranks == (0, 1, 2)


SITE = "/v/lib/python3.11/site-packages"
TRL, SCORE = f"{SITE}/trl/trainer/grpo_trainer.py", "/x/rewards.py:9 in score"
GET, CLIENT = f"{SITE}/requests/api.py:59 in get", f"{SITE}/trl/generation/vllm_client.py"
IN_REWARD, IN_TURN = f"{TRL}:1601 in _calculate_rewards", f"{TRL}:1771 in _generate_single_turn"
SYNC = f"{SITE}/trl/generation/vllm_generation.py:490 in sync_weights"


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        ((GET, SCORE, IN_REWARD), f"waiting for the reward, at {GET}, called from {SCORE}"),
        ((SCORE, IN_REWARD), f"waiting for the reward, at {SCORE}"),
        ((SCORE, f"{SITE}/verl/workers/reward_manager/naive.py:80 in __call__"), f"waiting for the reward, at {SCORE}"),
        ((f"{CLIENT}:400 in generate", IN_TURN), f"sampling answers, at {CLIENT}:400 in generate"),
        ((f"{CLIENT}:815 in update_named_param", SYNC, IN_TURN), f"sending weights to the sampler, at {CLIENT}:815"),
        ((SCORE, f"{TRL}:1 in train"), f"(a) at {SCORE}"),
    ],
)  # fmt: skip
def test_what_a_trainer_with_rewards_does_is_told_by_its_stack(stack: tuple[str, ...], text: str) -> None:
    shown = judged(rank(0, idle=31.0, still=31.0), looks=[Look(0, stack=stack)])
    assert isinstance(shown, Suspicion)
    assert text in shown.verdict.summary


def test_before_the_first_step_ten_minutes_may_pass() -> None:
    for seconds, is_found in ((599.0, False), (601.0, True)):
        views = [rank(number, idle=seconds, still=seconds, step=1) for number in range(2)]
        assert (judged(*views) is not None) == is_found


def test_why_all_are_idle_is_seen_in_their_stacks_and_what_they_read() -> None:
    views = [rank(number, idle=31.0, still=31.0) for number in range(2)]
    loader = (
        "/lib/python3.11/queue.py:171 in get",
        "/site-packages/torch/utils/data/dataloader.py:1240 in _try_get_data",
        "/x/prog.py:7 in main",
    )
    looks = [Look(number, stack=loader) for number in range(2)]
    assert named(judged(*views, looks=looks)) == ("data_starved", (0, 1))
    asking = replace(views[1], process=replace(views[1].process, reads_input=True))
    assert named(judged(views[0], asking, looks=looks)) == ("waits_for_input", (0, 1))


@pytest.mark.parametrize("idle", [5.0, 60.0, 5000.0])
def test_a_rank_that_works_is_not_named_however_long_others_wait(idle: float) -> None:
    for state in "RSD":
        found = judged(rank(0, idle=idle, pending=1), rank(1, idle=idle, still=0.5, state=state))
        assert named(found) is None
        assert not isinstance(found, Verdict)


def test_hanging_rank_is_named_with_its_line_and_ended_when_torch_would() -> None:
    """The other rank waits for it in a collective."""
    waiting, still = rank(0, pending=1), rank(1, still=4.0)
    first = judged(waiting, still)
    assert isinstance(first, Suspicion)
    assert not first.is_named, "it has not been looked at"
    assert set(first.to_inspect) >= {0, 1}
    mine = begun(1, "all_reduce", 8)
    assert named(judged(waiting, still, looks=[mine])) is None, "what the other waits for is looked up first"
    looked = judged(waiting, still, looks=[mine, begun(0, "all_reduce", 9)])
    assert named(looked) == ("user_code_stuck", (1,))
    assert isinstance(looked, Suspicion)
    assert "x.py:1" in looked.verdict.summary
    (waits,) = [item.text for item in looked.verdict.evidence if "rank 0" in item.where]
    assert waits.startswith("waits, ")
    assert "all_reduce #9" in waits
    unanswered = judged(rank(0, idle=20, pending=1), rank(1, idle=20, still=18), looks=[mine])
    assert named(unanswered) == ("user_code_stuck", (1,)), "a look that never comes is not waited for"
    late = judged(rank(0, idle=601, pending=1), rank(1, idle=601, still=600))
    assert isinstance(late, Verdict)


def test_a_rank_that_others_wait_for_but_only_since_now_is_not_named() -> None:
    assert judged(rank(0, idle=2.0, pending=1), rank(1, idle=60, still=60)) is None


def test_other_collectives_are_a_verdict_as_soon_as_they_are_named() -> None:
    looks = [begun(0, "all_reduce", 9), begun(1, "barrier", 9, "[]"), begun(2, "all_reduce", 9)]
    views = [rank(0, pending=1), rank(1, pending=1, phase="comm"), rank(2, pending=1)]
    found = judged(*views, looks=looks)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("collective_mismatch", (1,))


def test_ranks_that_nobody_has_looked_at_are_in_no_known_collective() -> None:
    found = judged(rank(0, pending=1), rank(1, pending=1, phase="comm"))
    assert isinstance(found, Suspicion)
    assert not found.is_named
    assert set(found.to_inspect) == {0, 1}


def test_a_look_that_reported_nothing_is_not_a_look_and_is_requested_again() -> None:
    """Of a rank that had no processor for as long as it was looked at."""
    blind = [Look(0), Look(1, stack=("x.py:1 in f",))]
    found = judged(rank(0, pending=1), rank(1, pending=1, phase="comm"), looks=blind)
    assert isinstance(found, Suspicion)
    assert not found.is_named
    assert set(found.to_inspect) == {0, 1}
    still = judged(rank(0, pending=1), rank(1, still=4.0), looks=[Look(0), Look(1)])
    assert isinstance(still, Suspicion)
    assert not still.is_named
    assert set(still.to_inspect) == {0, 1}


def test_unequal_pieces_of_an_all_to_all_are_one_collective() -> None:
    looks = [begun(0, "all_to_all", 9, "[[3]]"), begun(1, "all_to_all", 9, "[[5]]")]
    assert named(judged(rank(0, pending=1), rank(1, pending=1), looks=looks)) is None


def test_rank_without_a_batch_for_the_step_of_the_others_made_fewer_steps() -> None:
    looks = [begun(0, "all_reduce", 9), begun(1, "barrier", 9, "[]")]
    found = judged(rank(0, pending=1), rank(1, pending=1, phase="comm", micro=0), looks=looks)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("unequal_steps", (1,))
    assert "step 8 was the last" in found.summary


def test_rank_with_no_way_back_to_its_steps_made_fewer_than_the_others() -> None:
    """The others are in a collective of their steps."""
    looks = [
        begun(0, "all_reduce", 9, recurs=True, may_step=True),
        begun(1, "barrier", 9, "[]", may_step=False),
    ]
    found = judged(rank(0, pending=1, micro=0), rank(1, pending=1, phase="comm", micro=0), looks=looks)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("unequal_steps", (1,))
    assert "step 8 was the last" in found.summary
    assert "this operation comes after its loop" in " ".join(item.text for item in found.evidence)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"recurs": True, "may_step": True}, {"may_step": True}),  # it evaluates in its loop
        ({"recurs": True, "may_step": True}, {}),  # nobody knows
        ({"recurs": True, "may_step": False}, {"may_step": False}),  # both are done
        ({"may_step": True}, {"may_step": False}),  # what is odd may be the first's
    ],
)
def test_else_both_are_shown_and_none_is_blamed(first: dict[str, Any], second: dict[str, Any]) -> None:
    looks = [begun(0, "all_reduce", 9, **first), begun(1, "barrier", 9, "[]", **second)]
    found = judged(rank(0, pending=1, micro=0), rank(1, pending=1, phase="comm", micro=0), looks=looks)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("collective_mismatch", ())


def test_a_long_collective_of_all_is_not_a_finding_at_first() -> None:
    looks = [begun(0, "broadcast", 1), begun(1, "broadcast", 1)]
    assert named(judged(rank(0, idle=20, pending=1), rank(1, idle=20, pending=1), looks=looks)) is None
    assert named(judged(rank(0, idle=31, pending=1), rank(1, idle=31, pending=1), looks=looks)) == (
        "rank_stalled",
        (),
    )


def test_interpreter_that_hangs_asleep_is_named_once_all_others_are_done() -> None:
    done = replace(rank(0), reported_result=True, has_ended=True)
    stands = rank(1, idle=12, pulse_idle=12)
    assert named(judged(done, stands, looks=[Look(1, stack=("x.py:1 in f",))])) == ("gil_held", (1,))
    assert isinstance(judged(done, rank(1, idle=601, pulse_idle=601)), Verdict)
    both = judged(rank(0, idle=13, pulse_idle=13), stands, looks=[begun(0, "all_gather", 3)])
    assert named(both) == ("gil_held", (0,))
    assert judged(stands) is None, "a program of one rank may call what it likes"
    assert judged(done, rank(1, idle=9, pulse_idle=9)) is None
    assert judged(done, rank(1, idle=12, pulse_idle=12, state="R")) is None, "it compiles"


def test_an_interpreter_that_hangs_is_named_where_others_wait_for_it() -> None:
    alone = [rank(0, idle=12, still=0), rank(1, idle=12, pulse_idle=12)]
    assert judged(*alone) is None
    found = judged(
        rank(0, idle=12, pending=1),
        rank(1, idle=12, pulse_idle=12, state="R"),
        looks=[begun(1, "barrier", 3)],
    )
    assert named(found) == ("gil_held", (1,))


def test_a_stopped_rank_is_named_whatever_others_do() -> None:
    found = judged(rank(0, idle=0.2), rank(1, idle=3.5, state="T"))
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("rank_stopped", (1,))


def test_ranks_with_unlike_step_counts_in_one_collective_are_together() -> None:
    """A generator and a trainer make steps of their own, and meet."""
    ranks = [rank(0, pending=1, phase="comm", step=9), rank(1, pending=1, phase="comm", step=3)]
    together = [begun(0, "broadcast", 4), begun(1, "broadcast", 4)]
    assert named(judged(*ranks, looks=together)) is None
    apart = [begun(0, "all_reduce", 4), begun(1, "barrier", 4, "[]")]
    found = judged(*ranks, looks=apart)
    assert isinstance(found, Verdict)
    assert (found.cause, found.ranks) == ("unequal_steps", (1,))
