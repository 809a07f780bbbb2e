"""What a run has left behind is found. Run: pytest tests/front/drill/test_leftovers.py"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.front.drill.execution import Traces, processes_in

LISTENS = """
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
if os.fork():
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    return Traces(tmp_path / "work", tmp_path / "tmp")


def own(found: list[str]) -> list[str]:
    """Without shared memory of others: whatever runs on this machine meanwhile may have some for a
    moment.
    """
    return [item for item in found if not item.startswith("/dev/shm/") or item == _shared()]


def _shared() -> str:
    return f"/dev/shm/unisono-test-{os.getpid()}"


@pytest.fixture
def orphan(traces: Traces) -> Iterator[int]:
    """A process that listens, in a session of its own, whose parent is gone."""
    parent = subprocess.Popen(
        [sys.executable, "-c", LISTENS], cwd=traces.folder, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.wait(30)
    yield pid
    parent.stdout.close()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_a_run_that_left_nothing_is_believed_at_once(traces: Traces) -> None:
    traces.note()
    assert own(traces.left_behind(patience_s=0)) == []


def test_an_orphan_and_its_port_are_found_and_gone_when_it_has_ended(traces: Traces, orphan: int) -> None:
    traces.note()
    (port,) = traces.ports.values()
    found = traces.left_behind(patience_s=0)
    assert any(item.startswith(f"process {orphan}: ") for item in found)
    assert f"port {port}" in found
    os.kill(orphan, signal.SIGKILL)
    assert traces.left_behind(patience_s=5) == []


def test_shared_memory_that_nobody_has_open_is_found(traces: Traces) -> None:
    path = Path(_shared())
    with path.open("xb"):
        try:
            assert own(traces.left_behind(patience_s=0)) == []  # somebody uses it
        finally:
            path.unlink()
    path.touch()
    try:
        assert own(traces.left_behind(patience_s=0)) == [str(path)]
    finally:
        path.unlink()


def test_temporary_files_are_found(traces: Traces) -> None:
    (traces.temporary / "tmpabc").mkdir()
    assert own(traces.left_behind(patience_s=0)) == [str(traces.temporary / "tmpabc")]


def test_processes_of_others_are_not_looked_for(tmp_path: Path) -> None:
    assert processes_in(tmp_path / "nowhere") == []
