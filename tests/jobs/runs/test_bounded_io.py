"""What the front writes into a directory that hangs. Run: pytest tests/jobs/runs/test_bounded_io.py"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nproc.disks import on_a_device
from unisono.base.causes import Verdict
from unisono.base.errors import UnfitError
from unisono.guard.facts import storage
from unisono.guard.facts.processes import stuck_threads
from unisono.guard.facts.storage import STUCK_S, RunsDisk
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.supervise.node_messages import JobEnded
from unisono.jobs.runs.member_supervisor import keep_end


def test_what_is_only_nice_is_not_waited_for_and_comes_before_the_rest(tmp_path: Path) -> None:
    printed: list[Any] = []
    disk, done = RunsDisk(tmp_path, printed.append), []
    disk.later(lambda: time.sleep(0.3))
    disk.later(lambda: done.append("curve"))
    disk.later((tmp_path / "missing" / "curve").unlink)  # a failure is none of the run
    assert done == []
    assert disk.write("the result", lambda: done.append("result")) is None
    assert done == ["curve", "result"]
    assert printed == []


def test_storage_that_hangs_is_reported_once_and_never_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "STUCK_S", 1.0)
    printed: list[Any] = []
    with on_a_device(tmp_path / "disk", tmp_path / "image", size=16 << 20) as mounted:
        disk = RunsDisk(mounted.path, printed.append)
        mounted.hang()
        assert disk.write("the result", lambda: (mounted.path / "result.json").write_text("{}")) is None
        assert disk.write("the curve", lambda: (mounted.path / "loss.svg").write_text("")) is None
        with pytest.raises(UnfitError, match="the plan cannot be written"):
            disk.need("the plan", lambda: (mounted.path / "plan.json").write_text("{}"))
        assert stuck_threads(os.getpid()) == []
    assert [message["code"] for message in printed] == ["storage_blocked"]
    assert "the storage does not answer" in printed[0]["text"]


@pytest.mark.fault("the storage of output_dir does not answer when a run is started")
@pytest.mark.parametrize("inside", ["", "new/run"], ids=["the directory is there", "it is to be made"])
def test_a_start_on_storage_that_hangs_ends_and_reports_it(front: Any, tmp_path: Path, inside: str) -> None:
    """Else its first file would hold it in the kernel, where not even SIGKILL ends it."""
    with on_a_device(tmp_path / "disk", tmp_path / "image", size=16 << 20) as mounted:
        front.config(train="rows", output_dir=str(mounted.path / inside))
        mounted.hang()
        process = front.start()
        try:
            code = process.wait(5 * STUCK_S)
        finally:
            mounted.answer()  # else one that hangs could not even be killed
            process.kill()
        _, reported = process.communicate(timeout=60)
        assert code == 6, reported
        assert "error: nothing was started: the storage of output_dir does not answer" in reported
        assert f"where: {mounted.path}" in reported
        assert front.run().returncode == 0


def test_what_a_node_writes_last_does_not_hold_it_where_its_storage_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "STUCK_S", 1.0)
    printed: list[Any] = []
    verdict = Verdict(cause="rank_stopped", when="during", summary="rank 1 is stopped")
    result = {"outcome": "stalled", "exit_code": 4, "output_dir": "out"}
    last = JobEnded(4, (verdict,), result=result)
    with on_a_device(tmp_path / "disk", tmp_path / "image", size=16 << 20) as mounted:
        run, lock = RunDir(mounted.path / "out"), RunLock(mounted.path / "out" / "run.lock")
        lock.acquire("here", os.getpid())
        mounted.hang()
        disk = RunsDisk(run.root, printed.append)
        kept = keep_end(run, last, head="ada", shared=False, show=printed.append, disk=disk)
        lock.release()
        assert kept.exit_code == 4
        assert stuck_threads(os.getpid()) == []
        mounted.answer()
        assert not run.result.exists()
    assert [message["code"] for message in printed] == ["storage_blocked"]
    assert printed[0]["text"].startswith("how the run ended cannot be written")
