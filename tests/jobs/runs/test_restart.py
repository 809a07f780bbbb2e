"""A dead run starts again where that can help, and stops where it cannot.

Run: pytest tests/jobs/runs/test_restart.py
"""

from hypothesis import given
from hypothesis import strategies as st

from unisono.base.causes import CATALOGUE, Verdict
from unisono.jobs.runs.restarts import Death, may_restart
from unisono.trainer.config import RunConfig


def verdict(cause: str) -> Verdict:
    return Verdict(cause=cause, when="during", summary=cause)


def test_a_killed_rank_starts_again() -> None:
    assert may_restart(verdict("rank_killed"), step=7, earlier=[], allowed=2)[0]


def test_an_exception_in_code_does_not() -> None:
    assert not may_restart(verdict("user_code_error"), step=7, earlier=[], allowed=2)[0]
    assert not may_restart(verdict("a cause that is in no catalogue"), step=7, earlier=[], allowed=2)[0]


def test_restarts_follow_the_catalogue_and_two_are_the_default() -> None:
    """Also after what the watch finds in ranks that live, but for a drift: what was saved last may
    have drifted, too.
    """
    allowed = RunConfig.model_fields["restarts"].default
    assert allowed == 2
    for cause in CATALOGUE.values():
        assert may_restart(verdict(cause.id), step=7, earlier=[], allowed=allowed)[0] == cause.retry_helps, (
            cause.id
        )
    stalls = (
        "rank_stopped",
        "rank_stalled",
        "gil_held",
        "user_code_stuck",
        "io_blocked",
        "data_starved",
    )
    assert all(may_restart(verdict(one), step=7, earlier=[], allowed=allowed)[0] for one in stalls)
    assert not may_restart(verdict("replicas_diverged"), step=7, earlier=[], allowed=allowed)[0]


def test_without_the_node_at_fault_only_the_number_of_restarts_counts() -> None:
    """The cause and its history do not count."""
    fault, earlier = verdict("gpu_fell_off"), [Death("gpu_fell_off", 7)]
    assert not may_restart(fault, step=7, earlier=[], allowed=2)[0]
    assert may_restart(fault, step=7, earlier=earlier, allowed=2, without_culprit=True)[0]
    assert not may_restart(fault, step=7, earlier=earlier, allowed=1, without_culprit=True)[0]


def test_the_same_finding_twice_without_progress_is_called_deterministic() -> None:
    again, why = may_restart(verdict("rank_killed"), step=7, earlier=[Death("rank_killed", 7)], allowed=9)
    assert not again
    assert "deterministic" in why


def test_steps_up_to_the_place_of_the_fault_are_no_progress() -> None:
    earlier = [Death("rank_killed", 7), Death("rank_killed", 9)]
    assert not may_restart(verdict("rank_killed"), step=9, earlier=earlier, allowed=9)[0]
    assert may_restart(verdict("rank_killed"), step=10, earlier=earlier, allowed=9)[0]


@given(st.integers(0, 5), st.integers(0, 5))
def test_it_never_starts_again_more_often_than_allowed(allowed: int, n: int) -> None:
    earlier = [Death("rank_killed", step) for step in range(n)]
    again, _ = may_restart(verdict("rank_killed"), step=1_000, earlier=earlier, allowed=allowed)
    assert again == (n < allowed)
