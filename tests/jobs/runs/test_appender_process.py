"""Lines that are appended by a process of their own.

Run: pytest tests/jobs/runs/test_appender_process.py
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs.nproc.disks import in_memory
from unisono.guard.supervise.rank_logs import Appender


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Also between two looks: what is there now may not be there when it is read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def keep_adding(appender: Appender, line: bytes) -> None:
    """Until that is refused, or the limit is over."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        appender.add(line)
        time.sleep(0.001)


def test_lines_are_appended_in_order_and_only_their_owner_reads_them(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "it's a log.times", tmp_path / "new.times"
    first.write_text("old\n")
    for path in (first, second):
        appender = Appender(path)
        for number in range(1000):
            appender.add(f"{number}\n".encode())
        appender.close()
    lines = [str(number) for number in range(1000)]
    assert first.read_text().split() == ["old", *lines]
    assert second.read_text().split() == lines
    assert second.stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_torn_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "torn.times"
    path.write_text("[1.0, 5]\n[2.0, 1")
    for number in range(2):
        appender = Appender(path)
        appender.add(f"[3.0, {number}]\n".encode())
        appender.close()
    assert path.read_text() == "[1.0, 5]\n[2.0, 1\n[3.0, 0]\n[3.0, 1]\n"


def test_without_a_line_nothing_is_begun(tmp_path: Path) -> None:
    appender = Appender(tmp_path / "none")
    appender.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_reported_once_with_the_reason(tmp_path: Path) -> None:
    with ExitStack() as stack:
        disk = stack.enter_context(in_memory(tmp_path / "disk", size=1 << 16))
        disk.fill(leave=0)
        appender = Appender(disk.path / "full.times")
        with pytest.raises(OSError, match="No space left"):
            keep_adding(appender, b"a line\n")
        appender.add(b"not tried any more\n")
        appender.close()


def test_file_that_does_not_answer_delays_neither_the_writing_nor_the_end(
    tmp_path: Path,
) -> None:
    """A pipe without a reader stands for the disk: the process waits in open()."""
    os.mkfifo(tmp_path / "fifo")
    appender = Appender(tmp_path / "fifo")
    with pytest.raises(OSError, match="does not answer"):
        keep_adding(appender, bytes(4096))
    began = time.monotonic()
    appender.close()
    assert time.monotonic() - began < 15


def test_a_writer_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from unisono.guard.supervise.rank_logs import"
        " Appender\nappender = Appender(Path(sys.argv[1])); appender.add(b'a line\\n');"
        " print(appender._process.pid, flush=True); time.sleep(600)"
    )
    words = (sys.executable, "-c", program, str(tmp_path / "file"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    until(lambda: is_gone(pid))
    assert (tmp_path / "file").read_text() == "a line\n"
