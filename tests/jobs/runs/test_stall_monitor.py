"""What the head makes of what it sees: with a clock of its own and ranks that are told.

Run: pytest tests/jobs/runs/test_stall_monitor.py
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.guard.watch.run_views import UNSEEN, look, view
from tests.guard.watch.test_foreign import rank as foreign
from tests.jobs.runs.test_culprits import plan
from unisono.base.causes import Verdict
from unisono.guard.supervise.evidence import RawEvidence
from unisono.guard.supervise.rank_monitor import StallMonitor
from unisono.guard.watch.views import Look, ProcessView, RankView
from unisono.trainer.config.training_sections import WatchSection


class FakeRanks:
    """Stands for this node's ranks: says what it is told to."""

    def __init__(self) -> None:
        self.seen: list[RankView] = []
        self.done: list[Look] = []
        self.requested: list[int] = []
        self.gathered: dict[int, RawEvidence] = {}
        self.looked = 0

    def views(self, now: float) -> list[RankView]:
        self.looked += 1
        return self.seen

    def look(self, ranks: Sequence[int]) -> None:
        self.requested += ranks

    def looks(self) -> list[Look]:
        done, self.done = self.done, []
        return done

    def links(self) -> list[str]:
        return []

    def forget(self) -> None:
        self.gathered.clear()

    def raw(self, rank: int) -> RawEvidence:
        return self.gathered.get(rank, RawEvidence())


class Scene:
    """A head, its ranks, a clock that is moved by hand, and what was shown."""

    def __init__(self, world_size: int = 3) -> None:
        self.now = 100.0
        self.shown: list[Any] = []
        self.signs = FakeRanks()
        config: Any = type("Config", (), {"watch": WatchSection()})()
        planned = plan(world_size, per_node=8).model_copy(update={"config": config, "total_steps": 100})
        self.watching = StallMonitor(planned, self.signs, None, self.shown.append, clock=lambda: self.now)

    def see(self, *views: RankView, after_s: float = 0.5) -> Verdict | None:
        self.now += after_s
        self.signs.seen = list(views)
        return self.watching.look()

    @property
    def warnings(self) -> list[tuple[str, tuple[int, ...]]]:
        found = [message["verdict"] for message in self.shown if message["kind"] == "warning"]
        return [(one["cause"], tuple(one["ranks"])) for one in found]


def test_it_looks_five_times_a_second_and_half_as_often_while_ranks_move() -> None:
    scene = Scene(2)

    def looks(seconds: float, *, idle: bool) -> int:
        before = scene.signs.looked
        for tick in range(int(seconds / 0.05)):
            idle_s = 0.05 * (tick + 1) if idle else 0.0
            scene.see(view(0, "compute", idle_s), view(1, "compute", 0.0), after_s=0.05)
        return scene.signs.looked - before

    assert looks(10.0, idle=False) == pytest.approx(24, abs=3)
    assert looks(4.0, idle=True) == pytest.approx(18, abs=3)
    assert looks(10.0, idle=False) == pytest.approx(24, abs=3)


def waiting(rank: int, idle_s: float) -> RankView:
    return view(rank, "comm", idle_s, comm=41)


def test_verdict_tells_when_its_culprit_was_named_not_when_the_run_ended() -> None:
    scene = Scene(2)
    assert scene.see(waiting(0, 4.7), view(1, "compute", 4.7)) is None
    verdict = scene.see(waiting(0, 31.0), view(1, "compute", 31.0), after_s=26.3)
    assert verdict is not None
    assert (verdict.ranks, verdict.named_after_s) == ((1,), 4.7)


def test_each_culprit_is_reported_once_however_often_the_finding_changes() -> None:
    scene = Scene(3)
    for turn in range(6):
        odd, other = (1, 2) if turn % 2 else (2, 1)
        scene.see(waiting(0, 6.0), waiting(other, 6.0), view(odd, "compute", 6.0 + turn))
    assert scene.warnings == [("user_code_stuck", (2,)), ("user_code_stuck", (1,))]


def test_evidence_of_an_earlier_problem_is_not_cited_in_a_later_one() -> None:
    scene = Scene(2)
    scene.see(waiting(0, 4.7), view(1, "compute", 4.7))
    assert set(scene.signs.requested) == {0, 1}
    scene.signs.done = [look(1, "mine.py:3 in slow")]
    scene.signs.gathered = {1: RawEvidence(stacks="slow")}
    scene.see(waiting(0, 5.2), view(1, "compute", 5.2))
    assert scene.watching.run_view.looks[1].stack
    scene.see(waiting(0, 0.0), view(1, "compute", 0.0))
    scene.signs.done = [look(0, "late.py:3 in late")]  # it was asked for before
    scene.see(waiting(0, 0.0), view(1, "compute", 0.0))
    scene.see(waiting(0, 4.7), view(1, "compute", 4.7), after_s=60.0)
    assert scene.watching.run_view.looks == {}
    assert scene.watching.raw()[1].stacks == ""


def test_a_look_at_a_rank_that_has_moved_on_since_counts_no_more() -> None:
    scene = Scene(3)
    waits = "/lib/torch/distributed/fsdp/_collectives.py:300 in all_gather"
    seen = [view(rank, "compute", 5.0) for rank in range(3)]
    scene.see(*seen)
    scene.signs.done = [look(0, waits), look(1, "mine.py:3 in slow"), look(2, waits)]
    scene.see(*[view(rank, "compute", 5.5) for rank in range(3)])
    assert scene.warnings == [("user_code_stuck", (1,))]
    scene.see(view(0, "compute", 9.0), view(1, "compute", 9.0), view(2, "compute", 1.5), after_s=3.5)
    assert set(scene.watching.run_view.looks) == {0, 1}


class Silent:
    """Stands for the head's end of the channel: nodes that say nothing."""

    def __init__(self, silences: dict[int, float]) -> None:
        self._silences = silences
        self.reported: list[Any] = []

    def silences(self) -> dict[int, float]:
        return self._silences

    def broadcast(self, message: Mapping[str, object]) -> None:
        self.reported.append(message)


def test_silent_node_keeps_its_own_name_though_others_were_left_out() -> None:
    whole = plan(4, per_node=1)
    left = whole.model_copy(update={"nodes": [node for node in whole.nodes if node.node_rank != 1]})
    config: Any = type("Config", (), {"watch": WatchSection()})()
    shown: list[Any] = []
    server: Any = Silent({1: 5.0, 3: 4.0})
    watching = StallMonitor(
        left.model_copy(update={"config": config, "total_steps": 100}),
        FakeRanks(),
        server,
        shown.append,
        clock=lambda: 100.0,
    )
    assert watching.look() is None
    host = whole.nodes[3].host
    assert [message["text"] for message in shown] == [
        f"node 3 ({host}) has been silent for 4 s; after 8 s it counts as lost"
    ]


def test_what_was_found_stands_between_two_looks() -> None:
    """Whoever asks more often than it looks must not hear that all is well again."""
    scene = Scene(world_size=1)
    nan = view(0, "compute", 0.1, step=5)
    stopped = replace(nan, process=replace(nan.process, state="T"), idle_s=60.0, pulse_idle_s=60.0)
    found = None
    for _ in range(40):
        found = found or scene.see(stopped, after_s=1.0)
    assert found is not None
    assert found.cause == "rank_stopped"
    again = scene.see(stopped, after_s=0.01)
    assert again is not None
    assert again.cause == "rank_stopped"
    assert scene.see(nan, after_s=1.0) is None
    assert scene.see(nan, after_s=0.01) is None


def stuck(since_s: float, *, still_s: float = 60.0, cpu_s: float = 9.0) -> list[RankView]:
    """Rank 1 of a program hangs for so long, while rank 0 waits for it."""
    hanging = foreign(1, idle=since_s, still=min(since_s, still_s))
    return [
        foreign(0, idle=since_s, pending=1),
        replace(hanging, process=ProcessView(state="S", cpu_s=cpu_s)),
    ]


def see_stuck(scene: Scene, first_s: float, last_s: float, **how: float) -> None:
    """Looks twice a second at a stall; all stacks that are requested come."""
    since_s = first_s
    while since_s <= last_s:
        scene.signs.done = [look(rank, f"mine.py:9 in rank_{rank}") for rank in set(scene.signs.requested)]
        scene.see(*stuck(since_s, **how))
        since_s += 0.5


def notes(scene: Scene, word: str) -> list[str]:
    return [m["text"] for m in scene.shown if m["kind"] == "note" and word in m["text"]]


def test_long_stall_is_investigated_once_and_reported_as_its_age_doubles() -> None:
    scene = Scene(2)
    see_stuck(scene, 1.0, 590.0)
    texts = [message["text"] for message in scene.shown if message["kind"] == "warning"]
    ages = [float(re.findall(r" for (\d+) s", text)[0]) for text in texts]
    assert 4 <= ages[0] <= 6
    assert all(later == pytest.approx(2 * earlier, abs=2) for earlier, later in pairwise(ages))
    assert len(texts) <= 8
    assert all("mine.py:9 in rank_1" in text for text in texts)
    assert len(notes(scene, "investigating")) == 1
    assert notes(scene, "move again") == []


def test_ranks_that_compile_in_their_first_step_are_inspected_without_a_message() -> None:
    scene = Scene(2)
    for since_s in range(120):
        scene.see(
            *(view(rank, "compute", float(since_s), times=UNSEEN, step=1) for rank in (0, 1)), after_s=1.0
        )
    assert scene.shown == []
    assert len(scene.signs.requested) == 2 * 4  # after 20 s, and every 30 s


def test_ranks_whose_collectives_complete_in_a_long_first_step_do_not_stall() -> None:
    scene = Scene(2)
    waits = "/lib/torch/distributed/distributed_c10d.py:3252 in all_reduce"

    def see(since_s: float, number: int) -> None:
        scene.see(*(view(rank, "compute", since_s, times=UNSEEN, step=1) for rank in (0, 1)), after_s=5.0)
        kinds = ["all_reduce", "all_gather"]
        scene.signs.done = [
            look(rank, waits, name=kind, number=number, completed=number - 1)
            for rank, kind in enumerate(kinds)
        ]

    for tick in range(20):
        see(20.0 + 5 * tick, number=tick)
    assert scene.warnings == []
    for tick in range(20, 24):
        see(20.0 + 5 * tick, number=20)
    assert [cause for cause, _ in scene.warnings] == ["collective_mismatch"]


def test_a_moment_in_which_a_rank_is_not_still_is_not_its_progress() -> None:
    """Signals, threads of libraries and the scheduler take CPU time, too."""
    scene = Scene(2)
    see_stuck(scene, 1.0, 9.0)
    for since_s in range(10, 60, 10):
        see_stuck(scene, since_s, since_s + 4.0, still_s=0.5)
        see_stuck(scene, since_s + 4.5, since_s + 9.5)
    assert notes(scene, "move again") == []
    assert len(notes(scene, "investigating")) == 1
    see_stuck(scene, 60.0, 80.0, still_s=0.5)
    assert notes(scene, "move again") == [], "never still, and yet it uses no processor"


def test_work_and_heartbeats_are_progress_and_reported_once() -> None:
    scene = Scene(2)
    see_stuck(scene, 1.0, 9.0)
    for tick in range(20):
        scene.see(*stuck(10.0 + tick / 2, still_s=0.3, cpu_s=9.0 + 0.4 * tick))
    assert len(notes(scene, "move again")) == 1
    see_stuck(scene, 30.0, 40.0)
    scene.see(foreign(0, idle=0.1), foreign(1, idle=0.1))
    assert len(notes(scene, "move again")) == 2


def test_ranks_that_end_do_not_move_again() -> None:
    scene = Scene(2)
    see_stuck(scene, 1.0, 9.0)
    ended = [replace(one, has_ended=True) for one in stuck(9.5)]
    scene.see(*ended)
    scene.see(*ended)
    assert notes(scene, "move again") == []
