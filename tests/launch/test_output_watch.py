"""What becomes of a run when its directory is removed, renamed, replaced or made read-only in
mid-run.

Run: pytest tests/launch/test_output_watch.py
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from unisono.guard.rundir.lock import RunLock, read_holder

Until = Callable[[Callable[[], bool]], None]
Start = Callable[..., "subprocess.Popen[str]"]
FILES = {
    "config.yaml",
    "plan.json",
    "environment.json",
    "agreement.json",
    "run.lock",
    "checkpoints",
}


def output_of(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a front has said on stdout and on stderr, once it has ended."""
    return process.communicate(timeout=240)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody can make or remove a name in it, root included; files that are open stay so."""
    if os.geteuid() != 0:
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in folders:
            path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        yield
        for path in folders:
            path.chmod(stat.S_IRWXU)
        return
    for words in (("--bind", str(folder), str(folder)), ("-o", "remount,bind,ro", str(folder))):
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"needs mounts: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_run_whose_directory_becomes_read_only_ends_with_6_and_shows_its_result(
    front: Any, started: Start, until: Until
) -> None:
    process = started(faults={"wait": 5})
    until(front.waits_before(5))
    with read_only(front.out):
        process.send_signal(signal.SIGTERM)
        shown, printed = output_of(process)
    assert process.returncode == 6, printed
    assert "Traceback" not in printed
    assert "Read-only file system" in printed or "Permission denied" in printed
    assert shown.startswith("unfit: step "), shown


@pytest.fixture
def training(front: Any, started: Start, until: Until) -> "subprocess.Popen[str]":
    """A front whose rank has made four steps, with a checkpoint after the third, and waits."""
    process = started(faults={"wait": 5})
    until(front.waits_before(5))
    until(lambda: holds(process.pid, front.out / "metrics.jsonl"))  # the front opens it after the first step
    watchers = psutil.Process(
        process.pid
    ).children  # one of them keeps the directory open; it starts beside the rank
    until(lambda: any(holds(child.pid, front.out) for child in watchers()))
    return process


def holds(pid: int, file: Path) -> bool:
    """Whether the process has the file open."""
    with contextlib.suppress(OSError):  # one was closed meanwhile
        return any(fd.readlink() == file for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def is_whole(folder: Path) -> bool:
    return folder.is_dir() and {path.name for path in folder.iterdir()} >= FILES


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_directory_that_is_removed_or_renamed_is_made_again_and_the_same_command_resumes(
    front: Any, training: "subprocess.Popen[str]", until: Until, how: str
) -> None:
    holder = read_holder(front.out / "run.lock")
    elsewhere = front.folder / "elsewhere"
    if how == "removed":
        shutil.rmtree(front.out)
    else:
        front.out.rename(elsewhere)
    until(lambda: is_whole(front.out))
    assert read_holder(front.out / "run.lock") == holder
    training.send_signal(signal.SIGTERM)
    shown, printed = output_of(training)
    assert training.returncode == 75, printed
    where = f"renamed to {elsewhere}" if how == "renamed" else "removed"
    assert f"{front.out} was {where} after step 4, while its run is active: it is created again" in printed
    lost = (
        f"what was saved before is in {elsewhere}"
        if how == "renamed"
        else "its checkpoints are gone (steps 3)"
    )
    assert lost in printed
    assert "checkpoint: out/checkpoints/step-00000005" in shown
    assert front.steps() == [1, 2, 3, 4, 5], (
        "the front has kept the lines, though its rank wrote into a file without a name"
    )
    again = front.run()
    assert again.returncode == 0, again.stderr
    assert front.read("result.json")["step"] == 10
    assert front.steps() == list(range(1, 11))


def test_nothing_is_written_into_a_directory_that_somebody_put_in_its_place(
    front: Any, training: "subprocess.Popen[str]"
) -> None:
    front.out.rename(front.folder / "elsewhere")
    front.out.mkdir()
    (front.out / "mine").write_text("not the run's")
    shown, printed = output_of(training)
    assert training.returncode == 6, printed
    assert (
        f"a different directory replaced {front.out}; the run's own is now {front.folder / 'elsewhere'}"
        in printed
    )
    assert "[output_removed]" in printed
    assert "next:" not in shown
    assert {path.name for path in front.out.iterdir()} == {"mine"}


def test_a_removed_plan_is_written_again_so_that_the_next_command_finds_a_run(
    front: Any, training: "subprocess.Popen[str]"
) -> None:
    for name in ("plan.json", "config.yaml", "data.json"):
        (front.out / name).unlink(missing_ok=True)
    training.send_signal(signal.SIGTERM)
    _, stderr = training.communicate(timeout=240)
    assert training.returncode == 75, stderr
    assert "plan.json in" in stderr
    assert "was removed while the run was active: it is written again" in stderr
    assert front.read("plan.json")["run_id"] == front.read("result.json")["run_id"]
    again = front.run()
    assert again.returncode == 0, again.stderr
    assert front.read("result.json")["step"] == 10


def test_removed_checkpoints_are_reported_and_not_promised(
    front: Any, training: "subprocess.Popen[str]", until: Until
) -> None:
    shutil.rmtree(front.out / "checkpoints")
    lines: list[str] = []
    assert training.stderr is not None
    while "checkpoints was removed" not in (lines or [""])[-1]:
        lines.append(training.stderr.readline())
        assert lines[-1], "".join(lines)
    assert "after step 4, while its run is active: its checkpoints are gone (steps 3)" in lines[-1]
    training.send_signal(signal.SIGKILL)
    output_of(training)
    again = front.run("--json")  # killed, it has not saved; the next start begins anew, and says nothing else
    result = json.loads(again.stdout.splitlines()[-1])
    assert (again.returncode, result["step"]) == (0, 10), again.stderr
    assert Path(result["checkpoint"]).is_dir()


def test_a_removed_lock_is_taken_again_and_keeps_a_second_start_out(
    front: Any, training: "subprocess.Popen[str]", until: Until
) -> None:
    lock = front.out / "run.lock"
    holder = read_holder(lock)
    lock.unlink()
    until(lock.exists)
    until(lambda: read_holder(lock) == holder)
    second = front.run()
    assert second.returncode == 2, second.stderr
    assert f"process {training.pid} on" in second.stderr
    training.send_signal(signal.SIGTERM)
    _, printed = output_of(training)
    assert training.returncode == 75, printed
    assert f"{lock} was removed after step 4, while its run is active: it is locked again" in printed
    assert not lock.exists()


def test_a_run_whose_lock_a_different_start_has_taken_ends_and_leaves_the_directory_to_it(
    front: Any, training: "subprocess.Popen[str]"
) -> None:
    other = RunLock(front.folder / "other" / "run.lock")
    other.acquire("host-b", 4711)
    (front.folder / "other" / "run.lock").replace(front.out / "run.lock")
    before = sorted(path.name for path in (front.out / "checkpoints").iterdir())
    shown, printed = output_of(training)
    assert training.returncode == 6, printed
    assert "a different start has taken the directory: process 4711 on host-b" in printed
    assert "next:" not in shown
    found = read_holder(front.out / "run.lock")
    assert found is not None
    assert (found.host, found.pid) == ("host-b", 4711)
    assert sorted(path.name for path in (front.out / "checkpoints").iterdir()) == before
    assert not (front.out / "result.json").exists()
    other.release()
