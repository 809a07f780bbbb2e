"""The disks that a run writes to: full, in memory, read-only, and one that hangs.

Run: pytest tests/front/checks/test_disks.py
"""

from pathlib import Path

import pytest

from tests.front.checks.doctor_process import doctor
from tests.jobs.nproc.disks import in_memory, on_a_device


@pytest.mark.makes("system.output", "fail")
def test_a_full_disk_fails_with_what_is_free(tmp_path: Path) -> None:
    with in_memory(tmp_path / "work", size=8 << 20) as disk:
        disk.fill(leave=64 << 10)
        seen = doctor(disk.path, env={"TMPDIR": str(tmp_path)})
    assert (seen.status("system.output"), seen.code) == ("fail", 6)
    assert "No space left on device" in seen.text("system.output")


@pytest.mark.makes("system.output", "warn")
@pytest.mark.makes("system.caches", "warn")
def test_an_output_dir_in_memory_and_a_small_cache_warn(tmp_path: Path) -> None:
    with in_memory(tmp_path / "work", size=128 << 20) as disk:
        seen = doctor(disk.path)
    assert (seen.status("system.output"), seen.status("system.caches"), seen.code) == ("warn", "warn", 0)
    assert "is in memory (tmpfs)" in seen.text("system.output")


@pytest.mark.makes("system.caches", "fail")
def test_a_read_only_cache_fails_and_the_variable_that_moves_it_is_named(tmp_path: Path) -> None:
    with in_memory(tmp_path / "cache", size=8 << 20) as disk:
        disk.read_only(on=True)
        seen = doctor(tmp_path)
    assert (seen.status("system.caches"), seen.code) == ("fail", 6)
    assert "Read-only file system" in seen.text("system.caches")
    assert "or set XDG_CACHE_HOME to a different folder" in seen.text("system.caches")


@pytest.mark.makes("system.output", "fail")
def test_a_disk_that_hangs_fails_within_its_limit_and_hangs_nobody(tmp_path: Path) -> None:
    with on_a_device(tmp_path / "work", tmp_path / "image", size=256 << 20) as disk:
        (disk.path / "runs").mkdir()
        disk.hang()
        seen = doctor(
            tmp_path, "--report", str(tmp_path / "r.html"), before=f"cd {disk.path}", env={"PYTHONDONTWRITEBYTECODE": "1"}
        )  # fmt: skip
        assert (seen.status("system.output"), seen.code) == ("fail", 6)
        assert "the storage does not answer: nothing for 10 s" in seen.text("system.output")
