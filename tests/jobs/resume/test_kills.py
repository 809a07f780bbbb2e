"""kill -9 of one rank, of all, of the front, of the head's front changes no bit.

Run: pytest tests/jobs/resume/test_kills.py
"""

import random

import pytest

from tests.jobs.resume.conftest import JobOf, Reference
from tests.jobs.resume.killed_runs import ANSWERS, MIX, PREFERENCES, Kind, Layout, Struck, beat, draw_blows

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

Each = dict[Kind, int]
STEPS = 24  # of the long ones

# Five of each kind over all layouts, the first of each in a layout aimed at a save.
FEW: dict[Layout, Each] = {
    Layout("fsdp", 4, "full"): {"one rank": 1, "all ranks": 1, "the front": 1},
    Layout("ddp", 2, "full"): {"one rank": 2, "all ranks": 2, "the front": 1},
    Layout("fsdp", 2, "lora"): {"one rank": 2, "all ranks": 2, "the front": 2},
    Layout("single", 1, "lora"): {"the front": 1},
    Layout("ddp", 2, "full", nodes=2): {"the head's front": 5},
    Layout("ddp", 2, "dpo"): {"one rank": 1, "all ranks": 1, "the front": 1},
    Layout("ddp", 2, "grpo"): {"one rank": 2, "all ranks": 1, "the front": 1},
}


def _survives(
    job_of: JobOf, reference: Reference, layout: Layout, each: Each, *, steps: int = STEPS
) -> list[Struck]:
    wanted = reference(layout, steps)
    blows = draw_blows(each, random.Random(len(layout.name)), start_s=wanted.start_s)
    struck = list(beat(lambda: job_of(layout.nodes), layout, blows, wanted, steps=steps))
    assert len(struck) == sum(each.values())
    assert all(blow.survived and blow.bit_equal for blow in struck), struck
    return struck


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layout", FEW, ids=lambda layout: layout.id)
def test_a_run_that_is_killed_ends_bit_equal_to_the_undisturbed_one(
    job_of: JobOf, reference: Reference, layout: Layout
) -> None:
    each = FEW[layout]
    # A blow comes after one to three steps of a start: all of them meet one run.
    _survives(job_of, reference, layout, each, steps=2 + 3 * sum(each.values()))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", PREFERENCES, ids=lambda layout: layout.id)
def test_many_kills_of_runs_with_a_reference_change_no_bit(
    job_of: JobOf, reference: Reference, layout: Layout
) -> None:
    _survives(job_of, reference, layout, PREFERENCES[layout])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ANSWERS, ids=lambda layout: layout.id)
def test_many_kills_of_runs_that_sample_answers_change_no_bit(
    job_of: JobOf, reference: Reference, layout: Layout
) -> None:
    _survives(job_of, reference, layout, ANSWERS[layout])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", MIX, ids=lambda layout: layout.id)
def test_many_kills_change_no_bit(job_of: JobOf, reference: Reference, layout: Layout) -> None:
    struck = _survives(job_of, reference, layout, MIX[layout])
    assert sum(blow.moment == "inside a save" for blow in struck) >= max(1, len(struck) // 4), struck
