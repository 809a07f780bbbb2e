"""Stragglers: .venv/bin/python -m pytest tests/guard/watch/test_pace.py"""

from hypothesis import given
from hypothesis import strategies as st

from tests.guard.watch.run_views import run_view, view
from unisono.base.causes import Verdict
from unisono.guard.watch.verdicts import Pace


def run(step_times: list[tuple[float, float]], *, steps: int) -> list[Verdict]:
    """What is told of a run whose ranks take (data, computing) seconds a step; all wait for the
    slowest.
    """
    pace, reported = Pace(), []
    longest = max(sum(times) for times in step_times)
    for step in range(1, steps + 1):
        views = {
            rank: view(
                rank, step=step, shares_s=(data * step, compute * step, (longest - data - compute) * step, 0.0)
            )
            for rank, (data, compute) in enumerate(step_times)
        }  # fmt: skip
        pace.note(views, now=longest * step)
        found = pace.straggler(run_view(list(views.values())))
        if found is not None:
            reported.append(found)
    return reported


def test_slow_rank_is_reported_once_with_the_slow_part_of_its_step() -> None:
    (found,) = run([(0.01, 1.0), (0.01, 1.0), (0.9, 1.0), (0.01, 1.0)], steps=60)
    assert (found.cause, found.ranks, found.severity) == ("straggler", (2,), "warning")
    assert "in data" in found.summary
    (found,) = run([(0.01, 1.0), (0.01, 2.0)], steps=60)
    assert found.ranks == (1,)
    assert "in computing" in found.summary


def test_five_steps_and_ten_seconds_must_have_passed() -> None:
    assert run([(0.0, 1.0), (0.0, 2.0)], steps=5) == []
    assert run([(0.0, 20.0), (0.0, 40.0)], steps=5) == []
    assert run([(0.0, 0.01), (0.0, 0.02)], steps=400) == []


@given(st.lists(st.floats(0.2, 0.25), min_size=2, max_size=8))
def test_ranks_that_differ_by_less_than_thirty_percent_are_no_stragglers(times: list[float]) -> None:
    assert run([(0.0, time) for time in times], steps=80) == []
