"""The first copy in checkpoint.storage is looked at there.

Run: pytest tests/jobs/runs/test_storage_trial.py
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import UnisonoError
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.interrupts import Interrupts
from unisono.jobs.remote_checkpoint import storage as uploads
from unisono.jobs.remote_checkpoint.storage import CopyResult, FirstCopy, Uploads, more_bytes, summary
from unisono.trainer.checkpoint.manifest import MANIFEST
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import CopyRead

Until = Callable[[Callable[[], bool]], None]
OURS = Programs()
SLEEPS = Programs(task=(sys.executable, "-c", "import time; time.sleep(600)"))
DIES = Programs(task=(sys.executable, "-c", "raise SystemExit(9)"))


def plan_of(folder: Path, *, total: int = 9) -> RunPlan:
    """A plan with what matters here; nothing else of it is looked at."""
    section = {"storage": f"file://{folder}/copies"}
    config = RunConfig.model_validate(
        {"model": "m", "data": {"train": "t"}, "output_dir": str(folder / "out"), "checkpoint": section}
    )
    fields: dict[str, Any] = {
        "config": config, "run_id": "20260101-000000-00000001", "host": "ada", "total_steps": total, "checkpoint_every": 3, "keep_every": None,
        "resume": None, "rehearse": True,
    }  # fmt: skip
    return RunPlan.model_construct(**fields)


class Beside:
    """The two companions of a start whose ranks have just saved step 1."""

    def __init__(self, folder: Path, until: Until, programs: Programs) -> None:
        self.shown: list[Any] = []
        self.until = until
        self.run = RunDir(folder / "out")
        self.run.checkpoints.mkdir(parents=True)
        self.plan = plan_of(folder)
        self.uploading = Uploads(
            self.plan, self.run, programs=programs, leftovers={}, interrupts=Interrupts(), show=self.shown.append
        )  # fmt: skip
        self.first = FirstCopy(
            self.plan, self.uploading, programs=programs, leftovers={}, show=self.shown.append
        )
        self.there = folder / "copies" / "out" / self.plan.run_id / "step-00000001"

    def save(self, step: int = 1) -> None:
        def fill(directory: Path) -> None:
            (directory / "state.json").write_bytes(b"x" * 20_000)

        path = CheckpointStore(self.run.checkpoints, key=b"k" * 32).save(
            step, fill, run_id=self.plan.run_id, config_digest="d", world_size=1, threads=1, holder="ada"
        )  # fmt: skip
        self.uploading.on_message(0, {"kind": "checkpoint", "path": str(path), "step": step})

    def upload(self) -> None:
        """Until something came of it, or somebody was warned."""
        self.until(lambda: bool(self.uploading.look() or self.uploading.first or self.codes()))

    def judge(self) -> UnisonoError | None:
        """Until the rehearsal is over."""
        self.until(lambda: self.first.look() is not None or "rehearsal" in self.text())
        return self.first.look()

    def text(self) -> str:
        return "\n".join(message["text"] for message in self.shown)

    def codes(self) -> list[str]:
        return [message["code"] for message in self.shown if message["kind"] == "warning"]


@pytest.fixture
def beside(tmp_path: Path, until: Until) -> Iterator[Callable[[Programs], Beside]]:
    made: list[Beside] = []

    def make(programs: Programs) -> Beside:
        made.append(Beside(tmp_path, until, programs))
        return made[-1]

    yield make
    for one in made:
        one.first.finish()
        one.uploading.__exit__()


def test_what_comes_back_whole_is_reported_with_what_all_copies_will_take(
    beside: Callable[[Programs], Beside],
) -> None:
    run = beside(OURS)
    run.save()
    run.upload()
    assert run.judge() is None
    found = re.search(
        r"rehearsal: copy of 20 kB in .* s \(.*B/s\), read back completely from"
        r" file://\S+/copies/out/\S+/step-00000001 in .* s;"
        r" 3 more every 3 steps, at most 4 there: 60 kB more of .*B free; .* s in all",
        run.text(),
    )
    assert found, run.text()
    assert run.codes() == []


def test_a_copy_that_comes_back_otherwise_ends_the_run_and_counts_no_more(
    beside: Callable[[Programs], Beside],
) -> None:
    run = beside(OURS)
    run.save()
    run.upload()
    (run.there / "state.json").write_bytes(b"x" * 19_999 + b"y")
    error = run.judge()
    assert error is not None
    assert error.exit_code == 7
    (problem,) = error.problems
    assert problem.what.startswith("the first copy differs when read back: ")
    assert problem.where == f"{run.uploading.url}/{run.plan.run_id}/step-00000001"
    assert "the manifest has 20000 bytes with digest" in problem.why
    assert "checkpoint.storage=null. The same command then resumes" in problem.fix
    assert not (run.there / MANIFEST).exists(), "the next start uploads it again"


def test_refused_first_copy_ends_the_run_and_a_later_one_is_a_warning(
    beside: Callable[[Programs], Beside],
) -> None:
    run = beside(OURS)
    run.there.parents[1].parent.mkdir()
    run.there.parents[1].write_text("a file where a directory should be")
    run.save()
    run.upload()
    error = run.judge()
    assert error is not None
    assert error.exit_code == 6
    assert "the first copy was not made: " in error.problems[0].what
    assert error.problems[0].where.startswith("file://")
    assert "name a directory in which you may create files" in error.problems[0].fix
    assert error.verdict is not None
    assert (error.verdict.cause, error.verdict.hosts, error.verdict.step) == ("storage_unfit", ("ada",), 1)
    assert run.shown == []
    run.uploading.wait()
    assert run.shown == [], "the end of that run does not wait for what has failed"

    run.save(3)
    run.until(lambda: bool(run.uploading.look() or run.codes()))
    assert run.codes() == ["upload_failed"]


def test_first_copy_that_does_not_move_is_waited_for_as_any_other(
    beside: Callable[[Programs], Beside], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "STALLED_S", 0.2)
    run = beside(SLEEPS)
    run.save()
    run.upload()
    error = run.judge()
    assert error is not None
    assert error.exit_code == 6
    assert "the first copy was not made: no progress for 0.2 s" in error.problems[0].what


def test_a_child_that_dies_reports_nothing_of_the_storage(beside: Callable[[Programs], Beside]) -> None:
    run = beside(DIES)
    run.save()
    run.upload()
    assert run.codes() == ["upload_failed"]
    assert run.first.look() is None


def test_where_the_room_is_not_known_nothing_is_reported_of_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, total=2400)
    copied = CopyResult(tmp_path / "step-00000001", 3 * 10**9, 20.0)
    found = CopyRead(bytes=3 * 10**9, seconds=15.0, steps=[1], free_bytes=None)
    line = summary(plan, copied, found, location="s3://bucket/runs/out/r/step-00000001")
    assert line.startswith(
        "rehearsal: copy of 3 GB in 20 s (150 MB/s), read back completely from"
        " s3://bucket/runs/out/r/step-00000001 in 15 s; 800 more"
    )
    assert "free" not in line
    assert more_bytes(plan, copied, found) >= 9 * 10**9
    alone = summary(plan_of(tmp_path, total=1), copied, found, location="p")
    assert alone.endswith("in 15 s; it is the only one")
