"""What the system lets a process have. Run: pytest tests/guard/facts/test_limits.py"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.guard.facts.limits import available_memory, cgroup_folders, read_limits, usable_cores


def test_this_machine_has_cores_memory_and_limits() -> None:
    found = read_limits()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory_bytes > 1 << 20
    assert found.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found.shm_bytes is None or (found.shm_free_bytes or 0) <= found.shm_bytes


def test_without_shared_memory_its_size_is_unknown(tmp_path: Path) -> None:
    found = read_limits(shm=tmp_path / "none")
    assert (found.shm_bytes, found.shm_free_bytes) == (None, None)


def test_limits_of_the_shell_are_those_of_the_process() -> None:
    program = (
        "from unisono.guard.facts.limits import read_limits; f = read_limits(); print(f.open_files, f.stack_bytes,"
        " f.locked_memory_bytes)"
    )
    shell = f"ulimit -n 64; ulimit -s unlimited; ulimit -l 64; exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs limits that may be changed: {done.stderr.strip()[-200:]}")
    assert done.stdout.split() == ["64", "None", "65536"]


def group(root: Path, path: str, **files: str) -> None:
    """Writes files of a cgroup; `__` in a name stands for a dot."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_limit_of_all_groups_above_holds(tmp_path: Path) -> None:
    own, info = tmp_path / "own", tmp_path / "meminfo"
    own.write_text("0::/job/step\n")
    info.write_text("MemTotal: 1\nMemAvailable: 8000000 kB\n")
    root = tmp_path / "cgroup"
    group(root, "job/step", memory__max="max", memory__current="5000", cpu__max="max 100000")
    group(root, "job", memory__max="1000000", memory__current="400000", cpu__max="100000 100000",
          memory__stat="anon 1\ninactive_file 100000\n")  # fmt: skip
    assert available_memory(root=root, cgroup_file=own, info=info) == 700_000
    assert usable_cores(root=root, cgroup_file=own) == 1
    assert [folder.name for folder in cgroup_folders("memory", root=root, cgroup_file=own)] == [
        "step",
        "job",
        "cgroup",
    ]


def test_version_1_is_read_too_and_its_no_limit_is_none(tmp_path: Path) -> None:
    own, info = tmp_path / "own", tmp_path / "meminfo"
    own.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    info.write_text("MemAvailable: 1000 kB\n")
    root = tmp_path / "cgroup"
    group(root, "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="77")
    group(root, "memory/job", memory__limit_in_bytes="500000", memory__usage_in_bytes="100000")
    group(root, "cpu/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert available_memory(root=root, cgroup_file=own, info=info) == 400_000
    assert usable_cores(root=root, cgroup_file=own) == 1


def test_without_proc_a_guess_is_better_than_nothing(tmp_path: Path) -> None:
    assert available_memory(root=tmp_path, cgroup_file=tmp_path / "none", info=tmp_path / "none") == 8 * 10**9
