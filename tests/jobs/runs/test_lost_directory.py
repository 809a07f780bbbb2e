"""What becomes of a run when its directory is removed, renamed, replaced or made read-only in
mid-run.

Run: pytest tests/jobs/runs/test_lost_directory.py
"""

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
PACED = {"how": "sleep", "seconds": 0.2, "every": 1}
STEPS = 12


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


def test_directory_that_turns_read_only_ends_with_6_and_a_shown_result(
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
def training(
    front: Any, started: Start, until: Until, rows: Path, request: pytest.FixtureRequest
) -> "subprocess.Popen[str]":
    """A front whose rank, a real one, has made four steps; an adapter, or all weights."""
    adapter = getattr(request, "param", {"rank": 2})
    front.config(train=str(rows), adapter=adapter, duration=f"{STEPS} steps", checkpoint={"every": "3 steps"})
    process = started(faults={"real": True, "pause": [PACED]})
    until(lambda: (front.out / "metrics.jsonl").exists() and len(front.steps()) >= 4)
    return process


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "response": "yes " * 9}) + "\n" for n in range(50))
    )
    return path


def rescued(front: Any) -> Path:
    """The directory beside the lost one."""
    (path,) = front.folder.glob("out-rescued-*")
    return Path(path)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["removed", "renamed"])
@pytest.mark.parametrize("training", [{"rank": 2}, None], ids=["adapter", "all weights"], indirect=True)
def test_directory_that_disappears_ends_with_6_and_a_save_beside_it(
    front: Any, training: "subprocess.Popen[str]", how: str
) -> None:
    elsewhere = front.folder / "elsewhere"
    front.out.rename(elsewhere)
    if how == "removed":
        shutil.rmtree(elsewhere)
    shown, printed = output_of(training)
    assert training.returncode == 6, printed
    print(printed, shown)
    beside = rescued(front)
    (checkpoint,) = (beside / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 4
    what = "removed" if how == "removed" else f"renamed to {elsewhere}"
    assert f"{front.out} was {what} after step {step}" in printed
    assert f"step {step} was saved in {beside}" in printed
    assert f"run the same command with output_dir={beside}" in printed
    assert f"checkpoint: {beside.name}/checkpoints/{checkpoint.name}" in shown
    assert not front.out.exists(), "it is not made again"
    assert len(losses(beside)) == step
    again = front.run(f"output_dir={beside}", faults={"real": True})
    assert again.returncode == 0, again.stderr
    assert json.loads((beside / "result.json").read_text())["step"] == STEPS
    if how == "renamed":
        return
    straight = front.run(f"output_dir={front.folder / 'straight'}", faults={"real": True})
    assert straight.returncode == 0, straight.stderr
    assert losses(beside) == losses(front.folder / "straight")


def test_stop_after_the_directory_is_gone_saves_the_last_step_beside_it(
    front: Any, training: "subprocess.Popen[str]"
) -> None:
    training.send_signal(signal.SIGSTOP)  # so that it forwards the signal after the removal
    training.send_signal(signal.SIGTERM)
    front.out.rename(front.folder / "elsewhere")
    training.send_signal(signal.SIGCONT)
    _, printed = output_of(training)
    assert training.returncode == 6, printed
    assert len(list((rescued(front) / "checkpoints").iterdir())) == 1


def test_nothing_is_written_into_a_directory_that_replaced_it(
    front: Any, training: "subprocess.Popen[str]"
) -> None:
    mine = front.folder / "new"
    mine.mkdir()
    (mine / "mine").write_text("not the run's")
    front.out.rename(front.folder / "elsewhere")
    mine.rename(front.out)
    shown, printed = output_of(training)
    assert training.returncode == 6, printed
    assert f"{front.out} was renamed to {front.folder / 'elsewhere'}" in printed
    assert "[output_removed]" in printed
    assert "next:" not in shown
    assert {path.name for path in front.out.iterdir()} == {"mine"}


def test_run_whose_lock_another_start_took_ends_and_leaves_the_directory(
    front: Any, training: "subprocess.Popen[str]"
) -> None:
    other = RunLock(front.folder / "other" / "run.lock")
    other.acquire("host-b", 4711)
    (front.folder / "other" / "run.lock").replace(front.out / "run.lock")
    shown, printed = output_of(training)
    assert training.returncode == 6, printed
    assert f"{front.out / 'run.lock'} was removed or replaced" in printed
    assert "next:" not in shown
    holder = read_holder(front.out / "run.lock")
    assert holder is not None
    assert (holder.host, holder.pid) == ("host-b", 4711)
    assert not (front.out / "result.json").exists()
    assert len(list((rescued(front) / "checkpoints").iterdir())) == 1
    other.release()


def test_rank_killed_after_the_directory_is_gone_leaves_its_step_beside_it(
    front: Any, started: Start, until: Until, rows: Path
) -> None:
    pause = {"how": "sleep", "seconds": 3600, "steps": [5]}
    front.config(train=str(rows), adapter={"rank": 2}, restarts=2)
    process = started(faults={"real": True, "pause": [pause]})
    until(lambda: (front.out / "metrics.jsonl").exists() and len(front.steps()) == 4)
    (rank,) = [one for one in psutil.process_iter() if trains(one, front.out)]
    shutil.rmtree(front.out.rename(front.folder / "elsewhere"))
    rank.kill()
    _, printed = output_of(process)
    assert process.returncode == 5, printed
    assert f"{front.out} was removed, renamed or replaced after step 4" in printed
    assert f"step 4 was saved from memory in {rescued(front)}" in printed
    assert not front.out.exists()
    again = front.run(f"output_dir={rescued(front)}", faults={"real": True})
    assert again.returncode == 0, again.stderr
    assert "step 4" in again.stderr


def trains(process: psutil.Process, out: Path) -> bool:
    """Whether it is a rank of the run, whoever has forked it."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "unisono.worker" in words and any(word.startswith(f"{out}/") for word in words)
