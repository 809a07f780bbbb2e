"""The border's folder in memory: nobody's is removed, somebody's never; and the run's directory,
which one start has.

Run: pytest tests/guard/programs/test_border_directory.py
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from unisono.base.errors import UsageError
from unisono.base.files import read_object, write_json
from unisono.guard.facts import identity_of
from unisono.guard.integrations.border import HELD
from unisono.guard.programs.local_program import Program
from unisono.guard.programs.program_start import FolderWatch, ProgramDir, border, run_dir
from unisono.guard.rundir.lock import RunLock

_HOLDS = """
import sys
from unisono.guard.programs.program_start import border
with border() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A front that has a folder."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as front:
        assert front.stdout is not None
        yield front, Path(front.stdout.readline().strip())
        front.kill()


def assert_goes(folder: Path) -> None:
    """It is removed by this front, or by another one on this machine that came first."""
    limit = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_folder_of_a_front_killed_without_its_subreaper_goes_with_the_next(
    holder: tuple["subprocess.Popen[str]", Path],
) -> None:
    front, left = holder
    with border() as mine:
        assert left.exists(), "its front lives"
        assert mine.exists()
    front.kill()
    front.wait()
    with border():
        assert_goes(left)


def test_a_subreaper_alone_holds_it(holder: tuple["subprocess.Popen[str]", Path]) -> None:
    front, folder = holder
    script = (
        f"from unisono.guard.programs.subreaper import _hold; kept = _hold({str(folder)!r}); print(kept, flush=True);"
        " input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as subreaper:
        assert subreaper.stdout is not None
        assert subreaper.stdout.readline().strip() != "None"
        front.kill()
        front.wait()
        with border():
            assert folder.exists()
        subreaper.kill()
    with border():
        assert_goes(folder)


def test_what_no_front_of_this_version_has_made_is_left_alone() -> None:
    """An older one holds nothing, and may be at work."""
    folder = Path("/dev/shm") / f"unisono-{os.getuid()}-older-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        with border():
            assert folder.exists()
        assert not (folder / HELD).exists()
    finally:
        folder.rmdir()


def test_it_is_gone_with_its_front() -> None:
    with border() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_subreaper_keeps_the_folder_until_its_front_read_the_last_message(tmp_path: Path) -> None:
    with (
        border() as folder,
        Program(
            ["true"], environment=os.environ, log=tmp_path / "log", folder=folder, has_stdin=False
        ) as program,
    ):
        limit = time.monotonic() + 60
        while program.poll(1.0) is None:
            assert time.monotonic() < limit
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(program.subreaper_pid).wait(1.0)
        assert folder.exists()
        program.close()
        assert not folder.exists()


def test_second_simultaneous_start_in_a_directory_learns_who_holds_it(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with run_dir(out, is_head=True, host="a")[1]:
        with pytest.raises(UsageError, match=f"process {os.getpid()} on a") as refused:
            run_dir(out, is_head=True, host="a")
        assert refused.value.exit_code == 2
    run_dir(out, is_head=True, host="a")[1].release()  # nothing was written into it


def test_node_before_the_head_does_not_make_their_common_directory_used(
    tmp_path: Path,
) -> None:
    out = str(tmp_path / "out")
    run_dir(out, is_head=False, host="b")
    run, lock = run_dir(out, is_head=True, host="a")
    run.plan.write_text("{}")
    lock.release()
    with pytest.raises(UsageError, match="is not empty"):
        run_dir(out, is_head=True, host="a")


def test_a_directory_that_is_being_removed_is_made_again_once_it_is_gone(tmp_path: Path) -> None:
    """At the first look its lock is gone, and before that is made again the directory is, too."""
    shown: list[Any] = []
    run = ProgramDir(tmp_path / "out")
    lock = RunLock(run.lock)
    lock.acquire("here", os.getpid())
    try:
        watch = FolderWatch(run, lock, shown.append, lambda: write_json(run.plan, {}))
        seen = identity_of(run.root)
        shutil.rmtree(run.root)
        watch._judge(seen)
        assert (shown, watch.is_lost, run.root.exists()) == ([], False, False)
        watch.settle()
        assert "was removed or renamed while the program runs: it is created again" in shown[0]["text"]
        assert (watch.is_lost, lock.is_in_place(), run.plan.exists()) == (False, True, True)
    finally:
        lock.release()


_COUNTS = """
import sys, time
from pathlib import Path
for number in range(1000):
    print("line", number, flush=True)
    if Path(sys.argv[1]).exists():
        break
    time.sleep(0.1)
"""


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_removed_run_directory_is_recreated_and_a_replacement_left_alone(tmp_path: Path, how: str) -> None:
    """It is removed or replaced while the program runs."""
    out, end = tmp_path / "out", tmp_path / "end"
    words = ["run", "--output-dir", str(out), "--", sys.executable, "-c", _COUNTS, str(end)]
    with subprocess.Popen(
        [sys.executable, "-m", "unisono", *words], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as front:  # fmt: skip
        assert front.stderr is not None
        log, limit = out / "logs" / f"{socket.gethostname()}-program.log", time.monotonic() + 120
        while not log.exists() or "line 3" not in log.read_text():
            assert time.monotonic() < limit
            time.sleep(0.05)
        if how == "removed":
            shutil.rmtree(out)
        else:
            out.rename(tmp_path / "before")
            out.mkdir()
            (out / "mine").touch()
        printed = ""
        while "warning" not in printed:
            printed = front.stderr.readline()
            assert printed, "it ended without a word"
        end.touch()
        assert front.wait(120) == 0, front.stderr.read()
    if how == "replaced":
        assert f"{out} was replaced by a different directory" in printed
        assert [path.name for path in out.iterdir()] == ["mine"]
        return
    assert f"{out} was removed or renamed while the program runs: it is created again" in printed
    assert read_object(out / "result.json")["outcome"] == "completed"
    assert {path.name for path in out.iterdir()} == {"plan.json", "agreement.json", "result.json", "logs"}
    assert log.read_text().startswith("line 0\nline 1\n")
