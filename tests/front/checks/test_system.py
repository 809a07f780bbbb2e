"""What this machine lets a run have: each fault is made for real, and named with its remedy.

Run: pytest tests/front/checks/test_system.py
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.checks.doctor_process import doctor
from unisono.front.checks.machine_checks import judge_clock, judge_core_dumps
from unisono.guard.facts import is_synchronised
from unisono.guard.facts.limits import CoreDumps, read_core_dumps

_NOW = 1_800_000_000.0
TWO_DEVICES = [
    {"index": i, "uuid": f"GPU-{i}", "name": "H100", "memory_bytes": 80 << 30, "memory_free_bytes": 79 << 30, "capability": [9, 0]}
    for i in range(2)
]  # fmt: skip
_CUDA = {"gpus": TWO_DEVICES, "packages": {"torch": "2.13.0+cu130"}}


@contextlib.contextmanager
def group(controller: str, **files: str) -> Iterator[str]:
    """A control group with limits; gives the shell command that enters it."""
    one, two = Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup")
    root = one if one.is_dir() else two
    folder = root / f"unisono-test-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups: {error}")
    try:
        names = dict(name.split("__") for name in files)
        for version_1, version_2 in names.items():
            name = version_1 if root == one else version_2.replace("_", ".", 1)
            try:
                (folder / name.replace("_", ".", 1)).write_text(files[f"{version_1}__{version_2}"])
            except OSError as error:
                pytest.skip(f"needs limits of control groups: {error}")
        yield f"echo $$ > {folder}/cgroup.procs"
    finally:
        until = time.monotonic() + 10
        while (
            folder.is_dir() and time.monotonic() < until
        ):  # the kernel lets go of it a moment after its last process
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.02)


@pytest.mark.makes("system.limits", "pass")
@pytest.mark.makes("system.shm", "pass")
@pytest.mark.makes("system.cores", "pass")
@pytest.mark.makes("system.memory", "pass")
@pytest.mark.makes("system.versions", "pass")
@pytest.mark.makes("system.core_dumps", "pass")
@pytest.mark.makes("system.output", "pass")
@pytest.mark.makes("system.caches", "pass")
def test_on_a_good_machine_checks_pass_and_the_exit_code_is_0(tmp_path: Path) -> None:
    seen = doctor(tmp_path, before="ulimit -n 20000; ulimit -c 0")
    assert seen.code == 0, seen.out
    for name in ("limits", "shm", "cores", "memory", "versions", "core_dumps", "output", "caches"):
        assert seen.status(f"system.{name}") == "pass", seen.text(f"system.{name}")


@pytest.mark.makes("system.limits", "fail")
def test_too_few_open_files_fail_with_the_number_and_the_command(tmp_path: Path) -> None:
    seen = doctor(tmp_path, before="ulimit -n 100")
    assert seen.code == 6
    assert seen.status("system.limits") == "fail"
    assert "only 100 open files per process (ulimit -n)" in seen.text("system.limits")
    assert "`ulimit -n 65536` before the start" in seen.text("system.limits")


@pytest.mark.makes("system.limits", "warn")
def test_few_processes_warn_and_only_strict_ends_with_6(tmp_path: Path) -> None:
    with group("pids", pids_max__pids_max="300") as enter:
        seen = doctor(tmp_path, before=enter)
        strict = doctor(tmp_path, "--strict", before=enter)
    assert (seen.status("system.limits"), seen.code, strict.code) == ("warn", 0, 6)
    assert "processes and threads" in seen.text("system.limits")


@pytest.mark.makes("system.limits", "warn")
def test_an_endless_stack_warns_where_nccl_would_use_it(tmp_path: Path) -> None:
    answers = {**_CUDA, "packages": {**_CUDA["packages"], "nvidia-nccl-cu13": "2.27.3"}}  # type: ignore[dict-item]
    seen = doctor(tmp_path, before="ulimit -s unlimited", answers=answers)
    assert "unlimited stack size (ulimit -s) with NCCL 2.27.3" in seen.text("system.limits")


@pytest.mark.makes("system.shm", "fail")
def test_a_small_shm_fails_for_ranks_with_devices(tmp_path: Path) -> None:
    before = "mount -t tmpfs -o size=32m tmpfs /dev/shm"
    seen = doctor(tmp_path, before=before, unshare=True, answers=_CUDA)
    assert (seen.status("system.shm"), seen.code) == ("fail", 6)
    assert "/dev/shm has 32 MiB" in seen.text("system.shm")
    assert "--shm-size=8g" in seen.text("system.shm")


@pytest.mark.makes("system.shm", "warn")
def test_a_full_shm_warns_and_names_what_shows_leftovers(tmp_path: Path) -> None:
    before = "mount -t tmpfs -o size=128m tmpfs /dev/shm && head -c 100m /dev/zero > /dev/shm/left"
    seen = doctor(tmp_path, before=before, unshare=True)
    assert seen.status("system.shm") == "warn"
    assert "28 MiB free of 128 MiB; `ls -l /dev/shm` shows leftovers" in seen.text("system.shm")


@pytest.mark.makes("system.cores", "warn")
def test_more_ranks_than_cores_warn(tmp_path: Path) -> None:
    seen = doctor(tmp_path, "--nproc", "2", before="taskset -cp 0 $$ >/dev/null")
    assert seen.status("system.cores") == "warn"
    assert "2 ranks on 1 core" in seen.text("system.cores")


@pytest.mark.makes("system.memory", "warn")
def test_a_small_memory_limit_of_the_control_group_warns(tmp_path: Path) -> None:
    with group("memory", memory_limit_in_bytes__memory_max=str(700 << 20)) as enter:
        seen = doctor(tmp_path, before=enter)
    assert seen.status("system.memory") == "warn"
    assert "MiB of memory, but 1 GiB are reserved for the system" in seen.text("system.memory")


@pytest.mark.makes("system.core_dumps", "warn")
def test_endless_core_dumps_warn_where_they_become_files(tmp_path: Path) -> None:
    if not read_core_dumps().to_file:
        pytest.skip("needs core dumps that become files")
    seen = doctor(tmp_path, before="ulimit -c unlimited")
    assert seen.status("system.core_dumps") == "warn"
    assert "files of any size per crashed process" in seen.text("system.core_dumps")
    assert judge_core_dumps(CoreDumps(None, to_file=False, pattern="|/usr/bin/x")).status == "pass"


@pytest.mark.makes("system.clock", "fail")
def test_a_clock_that_is_before_our_own_files_fails(tmp_path: Path) -> None:
    seen = doctor(tmp_path, answers={"clock_offset_s": -10 * 365 * 86_400.0})
    assert (seen.status("system.clock"), seen.code) == ("fail", 6)
    assert "but unisono's files were installed on" in seen.text("system.clock")


@pytest.mark.makes("system.clock", "warn")
@pytest.mark.makes("system.clock", "pass")
def test_a_clock_is_judged_by_what_keeps_it() -> None:
    kept = {
        state: judge_clock(_NOW, installed_s=_NOW - 1e6, synchronised=state) for state in (True, False, None)
    }
    assert [kept[state].status for state in (True, False, None)] == ["pass", "warn", "unknown"]
    assert "timedatectl set-ntp true" in kept[False].fix[0]
    assert is_synchronised() in (True, False, None)  # the kernel is asked, and changes nothing


@pytest.mark.makes("system.versions", "warn")
def test_a_version_with_a_known_fault_warns_with_its_report(tmp_path: Path) -> None:
    answers = {**_CUDA, "packages": {"torch": "2.7.0+cu126"}}
    seen = doctor(tmp_path, answers=answers)
    assert seen.status("system.versions") == "warn"
    assert "pip install 'torch>=2.7.1'" in seen.text("system.versions")
    assert "https://github.com/pytorch/pytorch/issues/153960" in seen.text("system.versions")
