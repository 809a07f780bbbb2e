"""The drawing of ranks over time. Run: pytest tests/guard/diagnosis/test_timeline.py"""

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.diagnosis.run_facts import EventKind, LogEvent, Origin, RankFacts, RunFacts
from unisono.guard.diagnosis.timeline import LEAST_WIDTH, MOST_ROWS, draw

SIGNS = set(" -+w~FEX#")


def event(
    rank: int | None,
    time: float | None,
    kind: EventKind = "progress",
    *,
    line: int = 1,
    host: str | None = None,
    source: str = "a.log",
) -> LogEvent:
    return LogEvent(source, line, line, "x", kind, None, "text", Origin(rank=rank, host=host), time)


def run_of(*events: LogEvent, ranks: int = 0) -> RunFacts:
    events = tuple(replace(one, line=number, order=number) for number, one in enumerate(events, 1))
    return RunFacts(events=events, ranks={rank: RankFacts(rank) for rank in range(ranks)})


def row(lines: list[str], label: str) -> str:
    (found,) = (line for line in lines if line[1:].startswith(label + " "))
    return found.partition("|")[2].rstrip("|")


def test_the_first_cause_is_marked_and_what_followed_stands_to_its_right() -> None:
    facts = run_of(
        event(0, 0), event(1, 0), event(1, 50, "error"), event(0, 90, "consequence"), event(0, 100, "death")
    )
    lines = draw(facts, first="a.log:3", ranks=(1,), width=100)
    culprit, victim = row(lines, "rank 1"), row(lines, "rank 0")
    assert 0.45 < culprit.index("#") / len(culprit) < 0.55
    assert culprit.index("#") < victim.index("~") < victim.index("X") == len(victim) - 1
    assert [line[0] for line in lines if line[1:].startswith("rank")] == [" ", ">"]
    assert "00:00:00" in lines[0]
    assert "00:01:40 (+100 s)" in lines[0]


def test_a_rank_that_nobody_heard_of_has_a_row_that_reports_it() -> None:
    lines = draw(run_of(event(0, 0), event(0, 9), ranks=3), width=80)
    assert "no line of its own" in row(lines, "rank 2")


def test_without_times_a_row_shows_places_in_the_log_and_it_is_reported() -> None:
    lines = draw(run_of(*(event(0, None) for _ in range(5))), width=80)
    assert any("no line has a time" in line for line in lines)


def test_a_line_without_a_time_is_as_late_as_the_one_above_it() -> None:
    facts = run_of(event(0, 0), event(0, 50), event(0, None, "error"), event(0, 100))
    cells = row(draw(facts, width=100), "rank 0")
    assert 0.45 < cells.index("E") / len(cells) < 0.55


def test_hosts_whose_clocks_do_not_overlap_are_not_drawn_on_one_scale() -> None:
    apart = run_of(
        event(0, 0, host="a"), event(0, 10, host="a"), event(1, 3600, host="b"), event(1, 3610, host="b")
    )
    lines = draw(apart, width=80)
    assert any("do not overlap" in line for line in lines)
    assert row(lines, "rank 0 a").strip() == row(lines, "rank 1 b").strip() != ""
    near = run_of(
        event(0, 0, host="a"), event(0, 10, host="a"), event(1, 5, host="b"), event(1, 12, host="b")
    )
    assert not any("do not overlap" in line for line in draw(near, width=80))


def test_of_a_thousand_ranks_the_culprit_is_among_those_shown() -> None:
    facts = run_of(*(event(rank, rank % 7) for rank in range(1000)), ranks=1000)
    lines = draw(facts, ranks=(777,), width=80)
    assert len([line for line in lines if "|" in line]) == MOST_ROWS
    assert any(line.startswith(">rank 777") for line in lines)
    assert any("968 more" in line for line in lines)


times = st.one_of(st.none(), st.floats(-1e15, 1e15, allow_nan=False))
kinds: st.SearchStrategy[EventKind] = st.sampled_from(
    ("warning", "error", "consequence", "progress", "finished", "death", "fact")
)
events = st.lists(st.builds(lambda rank, time, kind, host, source: event(rank, time, kind, host=host, source=source),
                            st.one_of(st.none(), st.integers(0, 40)), times, kinds, st.one_of(st.none(), st.text(max_size=30)), st.text(max_size=40)), max_size=60)  # fmt: skip


@given(events, st.integers(0, 200))
def test_lines_fit_the_terminal_and_are_plain_without_colour(found: list[LogEvent], width: int) -> None:
    facts = run_of(*found)
    lines = draw(facts, first="a.log:1", ranks=(1,), width=width)
    assert max(map(len, lines)) <= max(width, LEAST_WIDTH)
    for line in lines:
        assert line.isprintable()
        if "|" in line and line.endswith("|") and "no line of its own" not in line:
            assert set(line.rpartition("|")[0].rpartition("|")[2]) <= SIGNS
    coloured = draw(facts, first="a.log:1", ranks=(1,), width=width, colour=True)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured] == lines
