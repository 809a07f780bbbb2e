"""A run goes on with other ranks or another strategy: the same rows, each once.

Run: pytest tests/jobs/resume/test_world_sizes.py
"""

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.resume.conftest import JobOf, Reference
from tests.jobs.resume.killed_runs import PATIENCE_S, Layout, last_step, outcome_of, steps_once, written
from tests.jobs.resume.trained_rows import each_equally_often, rows_of, worlds

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1800)]

ONE, FOUR = Layout("single", 1, "plain"), Layout("fsdp", 4, "plain")
DDP, FSDP = Layout("ddp", 2, "full"), Layout("fsdp", 2, "full")
STEPS = 24


def _killed_after(job: Job, layout: Layout, steps: int) -> None:
    """Lets the run make some steps more, and kills the front, whose ranks go with it."""
    already = last_step(job)
    layout.config(job, steps=STEPS)
    (front,) = layout.start(
        job, slow={"rank": 0, "step": 1, "seconds": 0.1}
    )  # so that it is not over by then
    job.until(
        lambda: front.exit_code is not None or last_step(job) >= already + steps,
        limit_s=PATIENCE_S,
        what="some steps",
    )
    assert front.exit_code is None, front.text()
    front.kill()
    job.wait_gone()


def _goes_on(job: Job, layout: Layout) -> Front:
    layout.config(job, steps=STEPS)
    (front,) = layout.start(job)
    assert front.wait(limit_s=PATIENCE_S) == 0, front.text()
    return front


def _chain(job_of: JobOf, layouts: list[Layout], reference: Reference) -> None:
    """Each layout takes over from the one before, which is killed."""
    job = job_of(1)
    for layout in layouts[:-1]:
        _killed_after(job, layout, 3)
    last = _goes_on(job, layouts[-1])
    wanted = reference(Layout("single", 1, layouts[0].tuning), STEPS)
    rows, outcome = rows_of(written(job)), outcome_of(job)
    assert rows == wanted.rows
    assert each_equally_often(rows)
    assert steps_once(outcome, STEPS)
    for line, other in zip(outcome["lines"], wanted.outcome["lines"], strict=True):
        assert (line["step"], line.get("tokens")) == (other["step"], other.get("tokens"))
        for key in ("loss", "eval_loss"):
            assert line.get(key) == (pytest.approx(other[key], rel=1e-5) if key in other else None), line
    assert worlds(written(job)) == [
        layout.ranks for at, layout in enumerate(layouts) if at == 0 or layout.ranks != layouts[at - 1].ranks
    ]
    _says_what_is_not_to_the_bit(last, layouts)


def _says_what_is_not_to_the_bit(front: Front, layouts: list[Layout]) -> None:
    before, now = layouts[-2:]
    warnings = [line for line in front.messages("plan")[-1]["warnings"] if "not bit-exactly" in line]
    if now.ranks != before.ranks:
        assert any(
            f"world_size is {now.ranks}" in line and f"was {before.ranks}" in line for line in warnings
        ), warnings
    if now.strategy != before.strategy and "fsdp" in (now.strategy, before.strategy):
        # Between one rank and ddp it is the number alone that changes.
        assert any("strategy" in line and now.strategy in line for line in warnings), warnings


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([FOUR, Layout("ddp", 2, "plain"), ONE, FOUR], id="4 to 2 to 1 to 4"),
        # The strategy changes above, too; this is whole weights, and nothing else changes.
        pytest.param([DDP, FSDP, DDP], id="ddp to fsdp to ddp", marks=pytest.mark.long),
    ],
)
def test_run_that_changes_its_ranks_takes_the_rows_of_the_undisturbed_one(
    job_of: JobOf, reference: Reference, layouts: list[Layout]
) -> None:
    _chain(job_of, layouts, reference)


@pytest.mark.long
@pytest.mark.parametrize("tuning", ["plain", "full"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ddp", 4), ("ddp", 2)), (("fsdp", 4), ("fsdp", 2)), (("fsdp", 4), ("ddp", 2)), (("ddp", 4), ("fsdp", 2)),
        (("ddp", 2), ("single", 1)), (("fsdp", 2), ("single", 1)), (("single", 1), ("ddp", 4)), (("single", 1), ("fsdp", 4)),
        (("ddp", 2), ("fsdp", 2)), (("fsdp", 2), ("ddp", 2)), (("fsdp", 3), ("fsdp", 2)),
    ],
    ids=lambda value: f"{value[0]}{value[1]}" if isinstance(value, tuple) else None,
)  # fmt: skip
def test_every_pair_of_layouts_takes_the_same_rows(
    job_of: JobOf, reference: Reference, tuning: str, before: tuple[str, int], after: tuple[str, int]
) -> None:
    _chain(job_of, [Layout(*before, tuning), Layout(*after, tuning)], reference)
