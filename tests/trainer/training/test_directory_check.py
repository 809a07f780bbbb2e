"""A rank's look at the run's directory. Run: pytest tests/trainer/training/test_directory_check.py"""

import os
import time
from pathlib import Path

import pytest

from tests import fuse
from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.writer import StorageFailed
from unisono.trainer.training.directory_check import DirectoryCheck


def with_lock(folder: Path) -> RunDir:
    folder.mkdir(exist_ok=True)
    files = RunDir(folder)
    files.lock.write_text("this start")
    return files


def test_directory_that_stays_is_not_lost_whatever_happens_to_its_lock(tmp_path: Path) -> None:
    files = with_lock(tmp_path / "run")
    check = DirectoryCheck(files)
    assert not check.is_lost()
    files.lock.rename(tmp_path / "old")  # as after a restore: the same content in another file
    files.lock.write_text("this start")
    assert not check.is_lost()
    check.require(3)


@pytest.mark.parametrize("how", ["removed", "renamed", "another start's"])
def test_a_lost_directory_is_noticed_at_once_and_for_good(how: str, tmp_path: Path) -> None:
    files = with_lock(tmp_path / "run")
    check = DirectoryCheck(files)
    if how == "another start's":
        files.lock.unlink()
        files.lock.write_text("a different start")
    else:
        files.root.rename(tmp_path / "moved")
    assert check.is_lost()
    with_lock(tmp_path / "run")
    assert check.is_lost()
    with pytest.raises(StorageFailed, match="step 3 cannot be saved"):
        check.require(3)


def test_storage_that_does_not_respond_does_not_hold_the_step(tmp_path: Path) -> None:
    if fuse.why_unavailable():
        pytest.skip(fuse.why_unavailable())
    files = with_lock(tmp_path / "run")
    check = DirectoryCheck(files)
    device = fuse.mount(files.root)
    try:
        began = time.monotonic()
        assert not any(check.is_lost() for _ in range(50))
        assert time.monotonic() - began < 5, "only the first look is waited for"
    finally:
        os.close(device)
        fuse.unmount(files.root)
