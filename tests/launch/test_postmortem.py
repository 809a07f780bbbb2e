"""Ranks that died of a collective that does not belong to the others'. Run: pytest tests/launch/test_postmortem.py"""

import signal
from dataclasses import replace

import pytest

from tests.watch.seeing import picture, view
from unisono.launch.postmortem import apart
from unisono.launch.ranks import RankEnd

ABORTED = RankEnd(0, -signal.SIGABRT, None, "train", 7)


@pytest.mark.parametrize("idle_s", [0.0, 0.05, 3.0])
def test_a_rank_that_gloo_ended_for_anothers_size_is_no_culprit_however_lately_the_other_came(
    idle_s: float,
) -> None:
    dead = replace(view(0, "comm", 0.0, comm=41, elements=80), has_ended=True)
    found = apart(picture([dead, view(1, "comm", idle_s, comm=41, elements=160)]), ABORTED)
    assert found is not None
    assert found.cause == "collective_mismatch"


def test_a_rank_that_has_gone_on_since_is_not_where_it_was_seen() -> None:
    dead = replace(view(0, "comm", 0.0, comm=41, elements=80), has_ended=True)
    assert apart(picture([dead, view(1, "comm", 0.05, comm=42, elements=160)]), ABORTED) is None
    assert apart(picture([dead, view(1, "compute", 0.05, comm=41)]), ABORTED) is None


def test_a_rank_that_was_killed_is_the_culprit_whatever_the_others_wait_in() -> None:
    dead = replace(view(0, "comm", 0.0, comm=41, elements=80), has_ended=True)
    killed = replace(ABORTED, returncode=-signal.SIGKILL)
    assert apart(picture([dead, view(1, "comm", 3.0, comm=41, elements=160)]), killed) is None
