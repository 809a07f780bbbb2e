"""A dead run starts again where that can help, and stops where it cannot. Run: pytest tests/launch/test_restart.py"""

from hypothesis import given
from hypothesis import strategies as st

from unisono.causes import Verdict
from unisono.launch.restart import Death, may_restart


def verdict(cause: str) -> Verdict:
    return Verdict(cause=cause, when="during", summary=cause)


def test_a_killed_rank_starts_again() -> None:
    assert may_restart(verdict("rank_killed"), step=7, earlier=[], allowed=2)[0]


def test_an_exception_in_code_does_not() -> None:
    assert not may_restart(verdict("user_code_error"), step=7, earlier=[], allowed=2)[0]
    assert not may_restart(verdict("a cause that is in no catalogue"), step=7, earlier=[], allowed=2)[0]


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
