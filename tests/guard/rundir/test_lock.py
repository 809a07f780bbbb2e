"""One start at a time, tried with real processes. Run: pytest tests/guard/rundir/test_lock.py"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.jobs.nproc.disks import on_a_device
from unisono.base.errors import UsageError
from unisono.guard.facts.processes import stuck_threads
from unisono.guard.rundir import lock as lock_file
from unisono.guard.rundir.lock import RunLock, locked_if_ended, read_holder, recorded_holder

HOLD = """
import os, sys
from pathlib import Path
from unisono.guard.rundir.lock import RunLock
lock = RunLock(Path(sys.argv[1]), beat_s=0.05)
print(lock.acquire(sys.argv[2], os.getpid()), flush=True)
sys.stdin.readline()
lock.release()
"""


@contextmanager
def _holder(path: Path, host: str = "host-a") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until a line comes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_second_start_is_refused_naming_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.lock"
    with _holder(path) as holder:
        with pytest.raises(UsageError) as caught:
            RunLock(path).acquire("host-b", os.getpid())
        assert caught.value.exit_code == 2
        problem = caught.value.problems[0]
        assert f"process {holder.pid} on host-a, since 20" in problem.what
        assert f"kill {holder.pid} on host-a" in problem.fix
        assert problem.where == str(path)
        found = read_holder(path)
        assert found is not None
        assert (found.host, found.pid) == ("host-a", holder.pid)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_the_locks_place_is_refused_and_held_by_nobody(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "run.lock")
    assert read_holder(tmp_path / "run.lock") is None
    with pytest.raises(UsageError, match="cannot be used") as caught:
        RunLock(tmp_path / "run.lock").acquire("here", os.getpid())
    assert f"rm -r {tmp_path / 'run.lock'}" in caught.value.problems[0].fix


def test_held_lock_that_is_replaced_or_loses_its_directory_is_an_os_error(
    tmp_path: Path,
) -> None:
    """Its run goes on; a refusal would end it."""
    lock = RunLock(tmp_path / "out" / "run.lock")
    lock.acquire("here", os.getpid())
    try:
        shutil.rmtree(lock.path.parent)
        with pytest.raises(FileNotFoundError):
            lock.keep()
        lock.path.parent.mkdir()
        os.mkfifo(lock.path)
        with pytest.raises(OSError, match="not a regular file"):
            lock.keep()
        lock.path.unlink()
        assert lock.keep()
        assert not lock.keep()
    finally:
        lock.release()


def test_a_released_lock_is_free_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.lock"
    with _holder(path) as holder:
        holder.communicate("\n", timeout=30)
        assert not path.exists()
        assert read_holder(path) is None
        lock = RunLock(path)
        assert lock.acquire("host-b", os.getpid()) is None
        lock.release()
        lock.release()
    assert list(path.parent.iterdir()) == []


def test_the_lock_of_a_killed_holder_is_taken_over_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.lock"
    with _holder(path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        assert path.exists()
        limit = time.monotonic() + 30
        while (
            read_holder(path) is not None
        ):  # the `touch` that it was just starting has its lock for a moment
            assert time.monotonic() < limit
            time.sleep(0.01)
        lock = RunLock(path)
        note = lock.acquire("host-a", os.getpid())
        assert note is not None
        assert f"took over the lock of process {holder.pid} on host-a" in note
        content = json.loads(path.read_text())
        assert content["schema"] == 1
        assert (content["host"], content["pid"]) == ("host-a", os.getpid())
        assert len(content["nonce"]) == 16
        lock.release()


def test_stand_in_gets_only_a_dead_holders_lock_and_before_all_others(
    tmp_path: Path,
) -> None:
    """It gets nothing once the file is gone or a different start has been there since."""
    path = tmp_path / "out" / "run.lock"
    with _holder(path) as holder:
        dead = recorded_holder(path)
        assert dead is not None
        assert dead.pid == holder.pid
        with locked_if_ended(path, dead, limit_s=0) as is_ours:
            assert not is_ours, "it lives"
        holder.send_signal(signal.SIGKILL)
        with locked_if_ended(path, dead, limit_s=30) as is_ours:
            assert is_ours
            with pytest.raises(UsageError):
                RunLock(path).acquire("host-a", os.getpid())
    before = path.read_bytes()
    with RunLock(path) as lock:
        note = lock.acquire("host-a", os.getpid())
        assert note is not None, "who came between has left the dead holder's name"
        assert str(dead.pid) in note
        assert path.read_bytes() != before
    with locked_if_ended(path, dead, limit_s=0) as is_ours:
        assert not is_ours, "the file is gone"
    with _holder(path) as other:
        other.kill()
        other.wait(30)
        with locked_if_ended(path, dead, limit_s=1) as is_ours:
            assert not is_ours, "another start has been here since"


def test_of_many_starts_at_once_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "out" / "run.lock"
    command = [sys.executable, "-c", HOLD, str(path), "host-a"]
    pipe = subprocess.PIPE
    starts = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(5)]
    losers = [start for start in starts if start.stdout is not None and start.stdout.readline() == ""]
    assert len(losers) == 4
    for start in starts:
        _, errors = start.communicate("\n", timeout=60)
        assert start not in losers or "is active: process" in errors


def test_the_lock_makes_the_directory_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run.lock"
    with RunLock(path) as lock:
        lock.acquire("host-a", os.getpid())
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600


def test_holder_on_a_different_node_is_known_by_its_beats_without_a_flock(
    tmp_path: Path,
) -> None:
    """The other node's flock is not seen here: its file is beaten by a process that has no lock on
    it.
    """
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({"host": "far", "pid": 7, "nonce": "n", "since": "2026-01-01"}))
    beat = (
        "import os, sys, time\nwhile os.getppid() == int(sys.argv[2]): os.utime(sys.argv[1]);"
        " print(flush=True); time.sleep(0.02)"
    )
    beater = subprocess.Popen(
        [sys.executable, "-c", beat, str(path), str(os.getpid())], stdout=subprocess.PIPE, text=True
    )
    assert beater.stdout is not None
    beater.stdout.readline()
    waited: list[str] = []
    lock = RunLock(path, beat_s=5.0)
    with pytest.raises(UsageError, match="process 7 on far"):
        lock.acquire("host-a", os.getpid(), on_wait=waited.append)
    assert len(waited) == 1
    beater.kill()
    beater.communicate(timeout=30)
    note = RunLock(path, beat_s=0.1).acquire("host-a", os.getpid())
    assert note is not None
    assert "process 7 on far" in note


def test_a_holder_beats(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    with RunLock(path, beat_s=0.01) as lock:
        lock.acquire("host-a", os.getpid())
        first = path.stat().st_mtime_ns
        limit = 2000
        while path.stat().st_mtime_ns == first and limit:
            os.sched_yield()
            limit -= 1
            _wait_a_little()
        assert path.stat().st_mtime_ns > first


BEATS_WITHOUT_DESCRIPTORS = """
import os, resource, sys, time
from pathlib import Path
from unisono.guard.rundir.lock import RunLock
path = Path(sys.argv[1])
lock = RunLock(path, beat_s=0.05)
lock.acquire("host-a", os.getpid())
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    time.sleep(1)  # twenty beats
for fd in taken:
    os.close(fd)
before, limit = path.stat().st_mtime_ns, time.monotonic() + 60
while path.stat().st_mtime_ns == before and time.monotonic() < limit:
    time.sleep(0.05)
print(path.stat().st_mtime_ns > before)
taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
lock.release()
"""


def test_a_holder_without_free_descriptors_beats_again_once_there_are_some(tmp_path: Path) -> None:
    """Else a start on a different host would take over the lock of a living run."""
    words = [sys.executable, "-c", BEATS_WITHOUT_DESCRIPTORS, str(tmp_path / "run.lock")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def _wait_a_little() -> None:
    import select

    select.select([], [], [], 0.005)


def test_renamed_directory_keeps_its_lock_file_and_frees_the_old_place(tmp_path: Path) -> None:
    root = tmp_path / "out"
    first, second = RunLock(root / "run.lock"), RunLock(root / "run.lock")
    first.acquire("host-a", os.getpid())
    root.rename(tmp_path / "out.old-1")
    assert second.acquire("host-a", os.getpid()) is None
    first.release()
    assert (root / "run.lock").exists()
    second.release()


@pytest.mark.parametrize("content", ["", "torn {", "[]", '{"host": 1}'])
def test_a_torn_lock_file_is_taken(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(content)
    with RunLock(tmp_path / "run.lock") as lock:
        assert lock.acquire("host-a", os.getpid()) is None
        assert json.loads((tmp_path / "run.lock").read_text())["host"] == "host-a"


def test_a_lock_on_storage_that_hangs_holds_up_nobodys_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_file, "_LAST_BEAT_S", 0.5)
    with on_a_device(tmp_path / "disk", tmp_path / "image", size=16 << 20) as disk:
        with _holder(disk.path / "run.lock") as holder:
            disk.hang()
            time.sleep(0.5)  # several of its beats; none of them is a thread of the holder
            assert stuck_threads(holder.pid) == []
        assert holder.returncode == -signal.SIGKILL, "it could end"
        disk.answer()
        lock = RunLock(disk.path / "run.lock", beat_s=0.05)
        lock.acquire("host-a", os.getpid())
        disk.hang()
        time.sleep(0.2)
        lock.release()
        disk.answer()
