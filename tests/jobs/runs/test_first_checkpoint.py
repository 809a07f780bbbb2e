"""What is said of all checkpoints after the first one, and when it is due.

Run: pytest tests/jobs/runs/test_first_checkpoint.py
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unisono.guard.supervise.child_process import Programs
from unisono.jobs.remote_checkpoint.verification import (
    FirstCheckpoint,
    SavedCheckpoint,
    estimate,
    still_due,
    summary,
)
from unisono.trainer.checkpoint.retention import DiskSpace
from unisono.trainer.checkpoint.writer import StorageFull
from unisono.trainer.plan import ResumePoint, RunPlan

if TYPE_CHECKING:
    from unisono.base.messages import CheckpointMessage, Message

GB = 10**9


def plan_of(
    total: int, every: int, *, resume: int | None = None, rehearse: bool = True, **section: Any
) -> RunPlan:
    """A plan with what matters here; nothing else of it is looked at."""
    from unisono.trainer.config import RunConfig

    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "eval": 0.1},
            "output_dir": "o",
            "checkpoint": section,
        }
    )
    point = ResumePoint(step=resume, path="p") if resume is not None else None
    fields: dict[str, Any] = {
        "config": config, "total_steps": total, "checkpoint_every": every, "keep_every": None, "resume": point, "rehearse": rehearse,
    }  # fmt: skip
    return RunPlan.model_construct(**fields)


def summary_text(total: int, every: int, *, free: float, step: int = 1, **section: Any) -> str:
    saved = SavedCheckpoint(step, Path("checkpoints/step-00000001"), int(1.6 * GB), 3.2, 0.1)
    room = DiskSpace(int(free * GB), saved.bytes, (step,))
    return summary(plan_of(total, every, **section), saved, room, read_s=1.1)


def test_size_and_time_of_all_are_reported_in_a_line() -> None:
    assert (
        summary_text(2400, 200, free=53.4)
        == "rehearsal: checkpoint of 1.6 GB in 3.2 s (0.1 s of it blocking), read back and verified in 1.1 s;"
        " 12 more every 200 steps, at most 5 on disk: 8 GB of 55 GB free; 38 s in all"
    )


@pytest.mark.parametrize(
    ("total", "every", "words"),
    [
        (2399, 200, "; 12 more every 200 steps, at most 5 on disk: "),
        (100, 200, "; one more at step 100, at most 2 on disk: 3.2 GB of"),
        (1, 200, "read back and verified in 1.1 s; it is the only one"),
    ],
)
def test_short_runs_have_fewer(total: int, every: int, words: str) -> None:
    assert words in summary_text(total, every, free=50)


def test_the_best_is_one_more() -> None:
    assert "at most 6 on disk: 9.6 GB of" in summary_text(2400, 200, free=50, best="eval_loss")


def test_start_after_a_death_rehearses_only_if_the_one_before_left_nothing() -> None:
    fresh, later = plan_of(9, 3), plan_of(9, 3, resume=3)
    assert (fresh.rehearsed_step, later.rehearsed_step) == (1, 4)
    assert plan_of(9, 3, rehearse=False).rehearsed_step is None
    assert still_due(fresh, None)
    assert not still_due(fresh, ResumePoint(step=1, path="p"))
    assert still_due(later, ResumePoint(step=3, path="p"))
    assert not still_due(later, ResumePoint(step=4, path="p"))


def test_programs_get_the_same_figures_in_the_first_checkpoints_object() -> None:
    saved = SavedCheckpoint(1, Path("checkpoints/step-00000001"), int(1.6 * GB), 3.2, 0.1)
    room = DiskSpace(50 * GB, saved.bytes, (1,))
    assert estimate(plan_of(2400, 200), saved, room, read_s=1.1) == {
        "more": 12, "at_once": 5, "bytes": 5 * saved.bytes, "free_bytes": room.bytes, "seconds": 12 * 3.2, "read_back_s": 1.1,
    }  # fmt: skip
    alone = estimate(plan_of(1, 200), saved, room, read_s=1.1)
    assert (alone["more"], alone["at_once"], alone["bytes"], alone["seconds"]) == (0, 1, saved.bytes, 0)


def test_first_checkpoint_without_room_ends_with_disk_full_as_verdict(
    tmp_path: Path,
) -> None:
    summary_text: list[Any] = []
    plan = plan_of(9, 3).model_copy(update={"host": "ada"})
    first = FirstCheckpoint(plan, programs=Programs(), leftovers={}, show=summary_text.append)
    full = StorageFull(tmp_path / "step-00000001", needed_bytes=2000, free_bytes=500)
    assert full.verdict is not None
    warned = full.verdict.model_copy(update={"severity": "warning"}).to_json()
    first.on_message(
        0, {"kind": "warning", "code": "checkpoint_failed", "step": 1, "text": str(full), "verdict": warned}
    )
    error = first.look()
    assert error is not None
    assert error.exit_code == 6
    assert error.verdict is not None
    assert (error.verdict.cause, error.verdict.severity, error.verdict.hosts) == (
        "disk_full",
        "fatal",
        ("ada",),
    )


def test_message_of_the_first_checkpoint_is_shown_even_without_an_estimate() -> None:
    """It is held back for the estimate until the end."""
    summary_text: list[Any] = []
    first = FirstCheckpoint(plan_of(9, 3), programs=Programs(), leftovers={}, show=summary_text.append)
    step: Message = {"kind": "step", "step": 1}
    saved: CheckpointMessage = {"kind": "checkpoint", "step": 1, "path": "p", "bytes": 1, "seconds": 0.1}
    later: Message = {**saved, "step": 3}
    for message in (step, saved, later):
        first.pass_on(message)
    assert summary_text == [step, later]
    first.finish()
    assert summary_text == [step, later, saved]
