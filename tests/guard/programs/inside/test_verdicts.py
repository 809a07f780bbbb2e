"""Somebody else's program stands still: who is named, for what.

Run: pytest tests/guard/programs/inside/test_verdicts.py
"""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from tests.guard.programs.inside.conftest import PROGRAMS
from tests.guard.programs.inside.front import TORCHRUN, Played

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
DDP = PROGRAMS / "ddp.py"
Start = Callable[..., Played]


def launched(start: Start, *words: object, nproc: int = 2) -> Played:
    return start(sys.executable, PROGRAMS / "launcher.py", nproc, *words, world_size=nproc)


def until_named(played: Played) -> tuple[str, tuple[int, ...]]:
    """What is said first of who is to blame, as a warning or at once as the verdict."""
    played.until(lambda: played.verdict or played.named or played.process.poll() is not None)
    if played.named:
        return played.named[0]
    assert played.verdict is not None, (played.printed, played.messages)
    return played.verdict.cause, played.verdict.ranks


def test_a_rank_that_is_stopped_is_named(guarded: Start) -> None:
    played = launched(guarded, DDP, "", 5000)
    played.until(lambda: "rank 1 step 5" in played.printed)
    os.kill(played.ranks.known[1].pid, signal.SIGSTOP)
    assert until_named(played) == ("rank_stopped", (1,))


def test_rank_asleep_in_user_code_is_named_by_line_while_the_run_continues(
    guarded: Start,
) -> None:
    played = launched(guarded, DDP, "sleep")
    assert until_named(played) == ("user_code_stuck", (1,))
    assert played.verdict is None
    (warning,) = [m for m in played.messages if m["kind"] == "warning"]
    played.until(lambda: any("ddp.py" in frame for frame in played.stack(1)))
    waits = [item["text"] for item in warning["verdict"]["evidence"] if "rank 0" in item["where"]]
    assert waits
    assert all("waits, " in text for text in waits), waits
    played.until(lambda: (begun := played.begun(0)) is not None and begun.name == "all_reduce")


def test_a_rank_that_makes_fewer_steps_is_named_also_under_torchrun(guarded: Start) -> None:
    """The last gradients of one rank meet the other's barrier: both have made as many steps, and
    one has begun another.
    """
    words = ["--nproc-per-node", "2", "--standalone", DDP, "unequal"]
    assert until_named(guarded(*TORCHRUN, *words)) == ("unequal_steps", (1,))


@pytest.mark.parametrize("words", [(), pytest.param(("thread",), marks=pytest.mark.long)])
def test_rank_whose_loop_is_over_is_named_even_if_no_step_start_is_seen(
    guarded: Start, words: tuple[str, ...]
) -> None:
    played = launched(guarded, PROGRAMS / "bareloop.py", "unequal", *words)
    assert until_named(played) == ("unequal_steps", (1,))
    played.until(lambda: played.verdict)
    assert played.verdict is not None
    assert "step 60 was the last" in played.verdict.summary
    assert any("bareloop.py" in frame and frame.endswith(" in main") for frame in played.stack(1))


@pytest.mark.long
def test_a_rank_that_sums_up_alone_within_its_loop_is_shown_and_not_blamed(guarded: Start) -> None:
    assert until_named(launched(guarded, PROGRAMS / "bareloop.py", "alone")) == ("collective_mismatch", ())


@pytest.mark.long
def test_of_three_ranks_the_one_in_a_different_collective_is_named(guarded: Start) -> None:
    played = launched(guarded, DDP, "other", nproc=3)
    assert until_named(played) == ("collective_mismatch", (1,))


@pytest.mark.long
def test_two_ranks_in_different_collectives_are_shown_and_none_is_blamed(guarded: Start) -> None:
    played = launched(guarded, DDP, "other")
    assert until_named(played) == ("collective_mismatch", ())


def test_ranks_that_split_rows_without_a_seed_are_refused_before_any_step(guarded: Start) -> None:
    """Both have equally many rows, so that nothing would ever show it."""
    played = launched(guarded, DDP, "unseeded")
    assert played.until_ended() == 3
    first, second = (one.facts for one in played.brought)
    assert {key for key in first if first[key] != second[key]} == {"order"}
    assert "step" not in played.printed
    assert played.events_of("refused", 1)[0]["text"] == "order differ"


def test_rank_that_evaluates_alone_is_not_named_however_long_others_wait(guarded: Start) -> None:
    """It computes, and so do processes that it starts; then a long look at files; nothing of it is
    a fault.
    """
    played = launched(guarded, DDP, "evaluate", 14)
    assert played.until_ended() == 0, played.printed
    assert (played.named, played.verdict) == ([], None)
    assert "rank 0 is done" in played.printed


def test_rank_stuck_at_the_very_end_is_named_though_nobody_waits_for_it(
    guarded: Start,
) -> None:
    """As with gloo in torch 2.13, where a process group that dies waits for its own thread, and
    that for Python's lock.
    """
    played = launched(guarded, DDP, "stands", 9)
    assert until_named(played) == ("gil_held", (1,))
    assert "rank 0 is done" in played.printed
    assert played.process.poll() is None, "it is named while it stands"


def test_a_second_destroy_is_not_an_error_and_is_reported(guarded: Start) -> None:
    played = launched(guarded, DDP, "twice", 9)
    assert played.until_ended() == 0, played.printed
    assert any("destroy_process_group was called again" in note for note in played.notes(1))
    assert played.events_of("result", 1)[0]["step"] == 9


@pytest.mark.long
def test_exception_is_reported_for_its_rank_and_the_other_lost_a_peer(
    guarded: Start,
) -> None:
    played = launched(guarded, DDP, "raise")
    assert played.until_ended() != 0
    (crashed,) = played.events_of("crashed", 1)
    assert (crashed["error"], crashed["peer_lost"], crashed["step"]) == (
        "ZeroDivisionError: a batch of nothing",
        False,
        8,
    )
    assert "ddp.py" in crashed["where"]
    (lost,) = played.events_of("crashed", 0)
    assert lost["peer_lost"]
