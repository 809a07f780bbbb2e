"""How a process that a front started ends. Run: pytest tests/base/child/test_process_exit.py"""

import os
import signal
import subprocess
import sys

import pytest

# As torch has: something that aborts the process where the interpreter is taken apart.
_ABORTS = """
import atexit, os, sys
from unisono.base.child import leave

class Aborts:
    def __del__(self, abort=os.abort):
        abort()

sys.kept = Aborts()
atexit.register(lambda: print("what was registered is called"))
print("said before", end="; ")
"""


def ended(words: str, *, out: int = subprocess.PIPE) -> tuple[int, str]:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", _ABORTS + words], stdout=out, stderr=subprocess.DEVNULL, env=buffered, text=True, timeout=60, check=False
    )  # fmt: skip
    return done.returncode, done.stdout or ""


def test_abort_during_interpreter_shutdown_keeps_the_exit_code() -> None:
    assert ended("sys.exit(75)")[0] == -signal.SIGABRT, "so it would be otherwise"
    assert ended("leave(75)") == (75, "said before; what was registered is called\n")


def test_exit_after_a_hang_calls_nothing_and_keeps_what_was_reported() -> None:
    assert ended("leave(5, orderly=False)") == (5, "said before; ")


@pytest.mark.parametrize("orderly", [True, False])
def test_a_reader_that_is_gone_changes_nothing(*, orderly: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(f"leave(3, orderly={orderly})", out=writing)[0] == 3
    finally:
        os.close(writing)
