"""Where ranks spend their time, as their front writes it down.

Run: .venv/bin/python -m pytest tests/guard/supervise/test_timeline.py
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.guard.rundir import RunDir
from unisono.guard.supervise.node_messages import TimelineLines
from unisono.guard.supervise.timeline import RankTime, Timeline, read_entry, thin_file, thinned
from unisono.guard.watch import Beats
from unisono.guard.watch.views import BeatMemory, Glance

PLAYED_S = 1800


def entries_of(path: Path) -> list[Any]:
    """All entries; each line must be one."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [read_entry(line) for line in lines]
    assert None not in found, "a torn line"
    return [entry for entry in found if entry is not None]


def simulate(known: RankTime, phases: list[tuple[str, float]], *, every: float = 0.1) -> list[Any]:
    """Entries for a rank that goes through phases, given with their seconds, and is sampled as a
    front does it.
    """
    found: list[Any] = []
    now = began = 0.0
    shares = dict.fromkeys(("data", "compute", "comm", "other"), 0.0)
    glance = None
    for number, (phase, seconds) in enumerate(phases):
        began = sum(length for _, length in phases[:number])
        while now < began + seconds - 1e-9:
            glance = Glance(phase, number, number + 1, 0, tuple(shares.values()))  # type: ignore[arg-type]
            found += known.note(glance, now, at=began)
            now += every
        shares[phase if phase in shares else "other"] += seconds
    assert glance is not None
    return found + known.end(glance, now)


def test_phase_over_a_tenth_of_a_second_is_an_entry_with_start_and_length() -> None:
    found = simulate(
        RankTime(3, 0.0), [("data", 0.05), ("compute", 0.4), ("comm", 0.08), ("compute", 0.3)], every=0.02
    )
    phases: list[Any] = [entry for entry in found if not isinstance(entry["seconds"], dict)]
    assert [(e["phase"], e["seconds"], e["time"]) for e in phases] == [
        ("compute", 0.4, 0.05),
        ("compute", pytest.approx(0.3, abs=0.03), 0.53),
    ]
    assert phases[0] == {"schema": 1, "time": 0.05, "rank": 3, "phase": "compute", "step": 2, "seconds": 0.4}


@pytest.mark.parametrize(
    "phases",
    [
        [("compute", 0.03), ("comm", 0.02)] * 700,
        [("compute", 33.0)],
        [("load_model", 12.0), ("compute", 25.0)],
    ],
)
def test_summaries_come_every_ten_seconds_and_add_up_to_the_time_passed(
    phases: list[tuple[str, float]],
) -> None:
    found = simulate(RankTime(0, 0.0), phases)
    summaries = [entry for entry in found if isinstance(entry["seconds"], dict)]
    total = sum(length for _, length in phases)
    assert len(summaries) >= total // 10.2
    assert sum(sum(entry["seconds"].values()) for entry in summaries) == pytest.approx(total, abs=0.2)
    of_compute = sum(entry["seconds"]["compute"] for entry in summaries)
    assert of_compute == pytest.approx(
        sum(length for phase, length in phases if phase == "compute"), rel=0.05
    )


def test_a_rank_that_stays_in_a_phase_is_seen_in_it_before_it_leaves() -> None:
    known = RankTime(1, 0.0)
    glance = Glance("comm", 4, 7, 0, (0.0, 0.0, 0.0, 0.0))
    found = [entry for tenth in range(205) for entry in known.note(glance, tenth / 10, at=0.3)]
    assert [(e["phase"], e["since"]) for e in found] == [("comm", 0.3), ("comm", 0.3)]


@pytest.mark.parametrize("step_s", [0.22, 20.0])
def test_a_file_has_at_most_a_megabyte_an_hour_and_no_torn_line(tmp_path: Path, step_s: float) -> None:
    made, path = Timeline(RunDir(tmp_path), 0, dict), RunDir(tmp_path).timeline(0)
    path.parent.mkdir()
    known = [RankTime(rank, 0.0) for rank in range(8)]
    sizes, at = [], [0.0] * 8
    glances = [Glance("compute", 0, 0, 0, (0.0, 0.0, 0.0, 0.0))] * 8
    made._ranks = dict(enumerate(known))
    for number in range(int(PLAYED_S / step_s * 2)):
        half = step_s / 2
        now = number * half
        for rank, one in enumerate(known):
            share = (0.0, number // 2 * half, number // 2 * half, 0.0)
            glances[rank] = Glance("comm" if number % 2 else "compute", number, number // 2, 0, share)
            made._add(one.note(glances[rank], now, at=at[rank]))
            at[rank] = now
        if number % 40 == 0:
            made._write()
            sizes.append(path.stat().st_size if path.exists() else 0)
    assert max(sizes) <= 1_100_000, "the last write before it is thinned may be above"
    found = entries_of(path)
    assert {entry["rank"] for entry in found} <= set(range(8))
    assert found[-1]["time"] > found[0]["time"]


def test_thinning_keeps_the_longest_phases_and_the_sums_of_all_seconds() -> None:
    phases: list[Any] = [
        {"schema": 1, "time": float(n), "rank": n % 2, "phase": "comm", "step": n, "seconds": 0.1 + n % 17}
        for n in range(200)
    ]
    summaries: list[Any] = [
        {
            "schema": 1,
            "time": n * 10.0,
            "rank": n % 2,
            "phase": "comm",
            "step": n,
            "seconds": {"data": 1.0, "comm": 9.0},
        }
        for n in range(21)
    ]
    kept = thinned([*phases, *summaries])
    assert len(kept) < 70
    longest = max(phases, key=lambda e: e["seconds"])
    assert longest in kept
    seconds = [entry["seconds"] for entry in kept if isinstance(entry["seconds"], dict)]
    assert sum(sum(one.values()) for one in seconds) == 210.0


def test_an_unreadable_line_does_not_prevent_thinning(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b'{"torn\n' + b'{"schema":1,"time":1,"rank":0,"phase":"data","step":1,"seconds":1.0}\n' * 9
    )
    thin_file(path)
    assert entries_of(path)


def until(condition: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    """Waits for an event, with a limit."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


def test_front_writes_what_a_rank_beats_and_mends_an_earlier_torn_line(tmp_path: Path) -> None:
    path = RunDir(tmp_path).timeline(0)
    path.parent.mkdir()
    path.write_bytes(b'{"schema":1,"time":1.0,"rank":0,"ph')
    with contextlib.closing(BeatMemory(5)) as memory:
        beats = Beats.inherited(memory.record_fd)
        beats.begin_step(1)
        beats.enter("load_model")
        with Timeline(RunDir(tmp_path), 0, lambda: {5: memory}):
            time.sleep(0.3)  # the phase lasts that long
            beats.enter("compute")
            until(lambda: path.read_bytes().count(b"\n") >= 2)
            beats.enter("comm")
    first, *rest = path.read_bytes().splitlines()
    assert read_entry(first) is None
    found = [json.loads(line) for line in rest]
    assert found[0]["phase"] == "load_model"
    assert found[0]["rank"] == 5
    assert found[0]["seconds"] >= 0.3
    assert isinstance(found[-2]["seconds"], dict) or isinstance(found[-1]["seconds"], dict), "a last summary"


def test_a_head_keeps_the_same_lines_as_a_node_with_a_disk_of_its_own(tmp_path: Path) -> None:
    head, node = RunDir(tmp_path / "head"), RunDir(tmp_path / "node")
    for run in (head, node):
        run.root.mkdir()
    with contextlib.closing(BeatMemory(5)) as memory, Timeline(head, 0, dict) as kept:
        beats = Beats.inherited(memory.record_fd)
        beats.begin_step(1)
        with Timeline(node, 1, lambda: {5: memory}, is_sent=True) as written:
            beats.enter("compute")
            until(node.timeline(1).parent.exists)
            time.sleep(0.3)  # the phase lasts that long
            assert written.take_news() is None, "not yet: nothing has ended"
        news = written.take_news()
        assert news is not None
        assert written.take_news() is None
        foreign = '{"schema":1,"time":1,"rank":0,"phase":"data","step":1,"seconds":1.0}'
        kept.take(1, TimelineLines((*news.lines, foreign, "{torn")), {5})
    assert entries_of(head.timeline(1)) == entries_of(node.timeline(1)) != []


def test_the_cost_of_sampling_is_under_a_thousandth_of_steps_of_50_ms() -> None:
    memories = {rank: BeatMemory(rank) for rank in range(8)}
    writers = [Beats.inherited(memory.record_fd) for memory in memories.values()]
    try:
        made = Timeline(RunDir(Path("/nonexistent")), 0, lambda: memories)
        for writer in writers:
            writer.begin_step(1)
        best = float("inf")
        for _ in range(20):
            for writer in writers:
                writer.enter("compute")
            began = time.thread_time()
            made.sample()
            best = min(best, time.thread_time() - began)
    finally:
        for memory in memories.values():
            memory.close()
    per_step_s = best * (0.05 / 0.075)  # a sample takes 0.075 s on average to come
    assert per_step_s < 5 * 50e-6, "five times the bound, for a busy machine"
