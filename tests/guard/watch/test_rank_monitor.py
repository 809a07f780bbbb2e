"""What a front sees of its ranks, with real processes.

Run: pytest tests/guard/watch/test_rank_monitor.py
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.guard.watch.conftest import Watched, watch_deeds
from unisono.guard.supervise.stack_collection import py_spy
from unisono.guard.watch.views import Look, RankView

Start = Callable[..., Watched]
HERE = str(Path(__file__).parent / "standins" / "rank.py")
DEEDS = ("sleep", "spin", "gil", "fifo", "stopped")
together = pytest.mark.xdist_group("stalled")


class Seen(NamedTuple):
    """Of one rank: two views, and a look that began after the first."""

    before: RankView
    look: Look
    after: RankView


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Ranks that do not come back, each in its own way, as their front has seen them.

    They are ended: one of them spins.
    """
    with ExitStack() as stack:
        ranks = watch_deeds(tmp_path_factory.mktemp("stalled"), DEEDS, stack)
        ranks.until(lambda views: all(view.beat is not None and view.beat.pulse_ns for view in views))
        pid = ranks.local.pid(DEEDS.index("stopped"))
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        ranks.idle()
        silent = (DEEDS.index("gil"), DEEDS.index("stopped"))
        before = ranks.until(lambda views: all(views[rank].pulse_idle_s > 1.2 for rank in silent))
        silenced = {DEEDS.index("stopped")}  # it may have no stack to tell
        looks = ranks.look_until(lambda look: look.rank in silenced or bool(look.stack), *range(len(DEEDS)))
        spins = before[DEEDS.index("spin")]
        after = ranks.until(lambda views: views[spins.rank].process.cpu_s >= spins.process.cpu_s + 0.2)
        return {deed: Seen(before[rank], looks[rank], after[rank]) for rank, deed in enumerate(DEEDS)}


def stands_in(look: Look, function: str) -> bool:
    """Whether the innermost frame is in a function of the stand-in."""
    return look.stack[0].startswith(f"{HERE}:") and look.stack[0].endswith(f" in {function}")


@together
def test_a_rank_that_sleeps_has_a_pulse_and_a_stack(stalled: dict[str, Seen]) -> None:
    view, look, after = stalled["sleep"]
    assert (view.process.state, "nanosleep" in view.process.waits_in) == ("S", True)
    assert view.pulse_idle_s < 3  # it comes twice a second where the machine has nothing else to do
    assert after.process.cpu_s - view.process.cpu_s < 0.2
    assert view.beat is not None
    assert (view.beat.phase, view.beat.step) == ("data", 7)
    assert stands_in(look, "sleep"), look.stack
    assert (look.how, look.rows) == ("faulthandler", (11, 12, 13))


@together
def test_a_rank_that_spins_uses_cpu_time(stalled: dict[str, Seen]) -> None:
    view, look, after = stalled["spin"]
    assert "R" in (view.process.state, after.process.state)  # now and then it waits for Python's lock
    assert after.process.cpu_s - view.process.cpu_s >= 0.19
    assert stands_in(look, "spin"), look.stack


@together
def test_a_rank_that_holds_the_interpreter_has_no_pulse_and_still_a_stack(stalled: dict[str, Seen]) -> None:
    view, look, after = stalled["gil"]
    assert view.process.state == "S"
    assert "nanosleep" in view.process.waits_in
    assert after.process.cpu_s - view.process.cpu_s < 0.2
    assert stands_in(look, "gil"), look.stack
    assert look.how == "faulthandler"


@together
def test_a_rank_that_waits_for_a_pipe_reports_it(stalled: dict[str, Seen]) -> None:
    view, look, _ = stalled["fifo"]
    assert (view.process.state, "pipe_read" in view.process.waits_in) == ("S", True)
    assert view.pulse_idle_s < 3  # it comes twice a second where the machine has nothing else to do
    assert stands_in(look, "fifo"), look.stack


@together
def test_a_stopped_rank_is_named_by_the_system_and_gets_no_signal(stalled: dict[str, Seen]) -> None:
    view, look, after = stalled["stopped"]
    assert view.process.state == after.process.state == "T"
    if py_spy() is not None:
        assert (look.how, look.stack[0].endswith(" in work")) == ("py-spy", True)
    else:
        assert look.stack == ()
        assert look.how == "the process is stopped, and no signal reaches it"


@together
def test_a_view_and_a_look_travel_as_json(stalled: dict[str, Seen]) -> None:
    for view, look, _ in stalled.values():
        assert RankView.from_json(view.to_json()) == view
        assert Look.from_json(look.to_json()) == look


def test_a_rank_that_works_is_not_idle_and_a_look_at_it_costs_it_nothing(watched: Start) -> None:
    ranks = watched("work")
    ranks.until(lambda views: views[0].beat is not None and views[0].beat.phase == "compute")
    assert ranks.look_until(lambda look: bool(look.stack), 0)[0].stack[0].endswith(" in work")
    until = time.monotonic() + 1.5
    (view,) = ranks.until(lambda _: True)
    while time.monotonic() < until:
        (view,) = ranks.until(lambda _: True)
        assert view.idle_s < 1
        assert view.pulse_idle_s < 3  # it comes twice a second where the machine has nothing else to do
    assert view.process.state in ("R", "S")
    assert view.process.waits_in == ""
    assert not view.has_ended


def test_loaders_are_shown_by_their_states(watched: Start) -> None:
    ranks = watched("loader")
    (view,) = ranks.until(lambda views: views[0].idle_s > 1.2 and views[0].process.children != "")
    assert view.process.children == "S"
    loader = int((ranks.folder / "loader.pid").read_text())
    os.kill(loader, signal.SIGSTOP)
    ranks.until(lambda views: views[0].process.children == "T")


def test_a_rank_that_has_ended_reports_it_and_leaves_its_last_beat(watched: Start) -> None:
    ranks = watched("leave")
    (view,) = ranks.until(lambda views: views[0].has_ended)
    assert view.beat is not None
    assert view.beat.step == 7
    assert view.process.state in ("", "Z")
    assert not view.reported_result
    ranks.until(lambda _: ranks.local.all_ended)
    look = ranks.look(0)[0]
    assert (look.stack, look.how, look.rows) == ((), "the process has ended", (11, 12, 13))


def test_asking_a_rank_for_a_stack_it_cannot_report_yet_does_not_kill_it(watched: Start) -> None:
    ranks = watched("before_handler")
    ranks.until(lambda views: "nanosleep" in views[0].process.waits_in)
    look = ranks.look(0)[0]
    if py_spy() is not None:
        assert (look.how, look.stack[0].endswith(" in main")) == ("py-spy", True)
    else:
        assert look.how == "the process has only just started and cannot show its stack yet"
    (view,) = ranks.until(lambda _: True)
    assert (view.beat, view.has_ended) == (None, False)


def test_flight_recorder_distinguishes_ranks_in_different_collectives(watched: Start) -> None:
    ranks = watched("collective", "gathers_instead")
    views = ranks.until(
        lambda views: all(v.beat is not None and v.beat.comm == 6 and v.idle_s > 1.2 for v in views)
    )
    assert [view.beat.phase for view in views if view.beat is not None] == ["comm", "comm"]
    looks = ranks.look_until(lambda look: bool(look.stack and look.begun), 0, 1)
    assert [str(looks[rank].begun) for rank in (0, 1)] == ["all_reduce #6 [[1000]]", "all_gather #6 [[3]]"]
    assert [looks[rank].completed for rank in (0, 1)] == [5, 5]
    assert "in gathers_instead" in " ".join(looks[1].stack)
    assert "_run" not in " ".join(looks[1].stack), "the pulse's own thread is not what the rank does"
    assert '"pg_status"' in ranks.signs.raw(0).flight
    assert "most recent call first" in ranks.signs.raw(1).stacks


def test_time_in_which_the_front_itself_was_away_is_nobodys_idleness(watched: Start) -> None:
    ranks = watched("sleep")
    (before,) = ranks.idle(0.5)
    later = time.monotonic() + 3600
    (view,) = ranks.signs.views(later)
    assert view.idle_s == before.idle_s
    (view,) = ranks.signs.views(later + 0.5)
    assert view.idle_s == pytest.approx(before.idle_s + 0.5)


def test_looking_costs_little_for_a_rank_that_works(watched: Start) -> None:
    ranks = watched("work", "work")
    ranks.until(lambda views: all(view.beat is not None for view in views))
    own = psutil.Process()
    used = sum(own.cpu_times()[:2])
    began, count = time.monotonic(), 2000
    for number in range(count):
        ranks.signs.views(began + number * 0.2)  # so that /proc is read in every fifth
    each_s = (sum(own.cpu_times()[:2]) - used) / count / 2
    print(f"{each_s * 1e6:.1f} µs")
    assert each_s < 350e-6  # 50 to 70 alone; other work on the machine adds to it


def test_rank_reading_a_large_file_is_not_silent_and_a_sleeping_one_is(
    watched: Start,
) -> None:
    ranks = watched("reads", "own_thread")
    longest = 0.0

    def seen(views: list[RankView]) -> bool:
        nonlocal longest
        if views[0].beat is not None:  # before, it is Python's start
            longest = max(longest, views[0].idle_s)
        return (
            all(view.beat is not None and view.beat.phase == "load_model" for view in views)
            and views[1].idle_s > 6
        )

    ranks.until(seen)
    assert longest < 4
