"""How somebody else's child ended. Run: pytest tests/guard/programs/test_exit_status.py"""

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable

import pytest

from unisono.guard.facts import processes


def _by_pidfd(pidfd: int, _pid: int) -> int | None:
    return processes._by_pidfd(pidfd)


def _by_proc(_pidfd: int, pid: int) -> int | None:
    return processes._by_proc(pid)


def kernel() -> tuple[int, ...]:
    """Its version: (major, minor)."""
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


@pytest.mark.parametrize(
    ("body", "code"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9), ("import os; os.kill(os.getpid(), 11)", -11), ("", 0)],
)  # fmt: skip
@pytest.mark.parametrize("way", [_by_pidfd, _by_proc])
def test_the_end_of_a_grandchild_is_read(body: str, code: int, way: Callable[[int, int], int | None]) -> None:
    middle = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()\\n' + sys.argv[1]],"
        " stdin=0); print(p.pid, flush=True); way = sys.argv[2] == '_by_pidfd' and p.wait(); print(way,"
        " flush=True); import time; time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", middle, body, way.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as parent:  # fmt: skip
        try:
            assert parent.stdin is not None
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            pidfd = os.pidfd_open(pid)
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert select.select([pidfd], [], [], 60)[0]
            parent.stdout.readline()  # its parent has taken the status, or never will
            status = way(pidfd, pid)
            if way is _by_pidfd and kernel() < (6, 15):
                pytest.skip("needs a kernel of 6.15 or newer: a pidfd tells the status there")
            assert status is not None
            assert os.waitstatus_to_exitcode(status) == code
            assert processes.exit_status(pidfd, pid) == code
            os.close(pidfd)
        finally:
            parent.kill()
