"""What the front writes into a directory that hangs. Run: pytest tests/launch/test_bounded.py"""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nproc.disks import on_a_device
from unisono.errors import UnfitError
from unisono.facts.threads import stuck_threads
from unisono.launch import bounded
from unisono.launch.bounded import RunsDisk


def test_what_is_only_nice_is_not_waited_for_and_comes_before_the_rest(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    disk, done = RunsDisk(tmp_path, said.append), []
    disk.later(lambda: time.sleep(0.3))
    disk.later(lambda: done.append("curve"))
    disk.later((tmp_path / "missing" / "curve").unlink)  # a failure is none of the run
    assert done == []
    assert disk.write("the result", lambda: done.append("result")) is None
    assert done == ["curve", "result"]
    assert said == []


def test_storage_that_hangs_is_told_once_and_never_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "STUCK_S", 1.0)
    said: list[dict[str, Any]] = []
    with on_a_device(tmp_path / "disk", tmp_path / "image", size=16 << 20) as mounted:
        disk = RunsDisk(mounted.path, said.append)
        mounted.hang()
        assert disk.write("the result", lambda: (mounted.path / "result.json").write_text("{}")) is None
        assert disk.write("the curve", lambda: (mounted.path / "loss.svg").write_text("")) is None
        with pytest.raises(UnfitError, match="the plan cannot be written"):
            disk.need("the plan", lambda: (mounted.path / "plan.json").write_text("{}"))
        assert stuck_threads(os.getpid()) == []
    assert [message["code"] for message in said] == ["storage_blocked"]
    assert "the storage does not answer" in said[0]["text"]
