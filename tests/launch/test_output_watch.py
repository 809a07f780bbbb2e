"""What becomes of a run when its directory is removed, renamed, replaced or made read-only in mid-run. Run: pytest tests/launch/test_output_watch.py"""

import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Until = Callable[[Callable[[], bool]], None]
Start = Callable[..., "subprocess.Popen[str]"]


def said_by(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a front has said on stdout and on stderr, once it has ended."""
    return process.communicate(timeout=240)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody can make or remove a name in it, root included; files that are open stay so."""
    if os.geteuid() != 0:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        yield
        folder.chmod(stat.S_IRWXU)
        return
    for words in (("--bind", str(folder), str(folder)), ("-o", "remount,bind,ro", str(folder))):
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
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
        shown, said = said_by(process)
    assert process.returncode == 6, said
    assert "Traceback" not in said
    assert "Read-only file system" in said or "Permission denied" in said
    assert shown.startswith("unfit: step "), shown
