"""A fork server that many fronts share puts what it forks where the front is, or refuses.

Run: pytest tests/jobs/runs/test_shared_fork_server.py
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs.runs.conftest import wait_until
from tests.jobs.runs.test_fork_server import is_gone
from tests.needs import lacking, need_user_namespaces
from tests.shared_fork_server import SHARED

LIGHT = "tests.jobs.runs.standins.light_shared_server"
FRONT = [sys.executable, "-m", "tests.jobs.runs.standins.shared_front"]


class Shared:
    """A shared server, and the environment of its fronts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "socket"
        self.environment = {
            "PATH": os.environ["PATH"], "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LC_CTYPE": "C.UTF-8",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }  # fmt: skip
        with (folder / "printed").open("w+b") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", LIGHT, str(self.path), "--front-pid", str(os.getpid())],
                env=self.environment, stdout=printed, stderr=printed, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        wait_until(self.path.exists)

    def front(self, *words: str, before: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
        environment = self.environment | {SHARED: str(self.path)} | variables
        return subprocess.Popen([*before, *FRONT, *words], env=environment, stdout=subprocess.PIPE, text=True)

    def facts(self, *, before: tuple[str, ...] = (), **variables: str) -> list[dict[str, Any]]:
        """Of the process that was forked for a front, and of that which it executed."""
        with self.front(before=before, **variables) as front:
            assert front.stdout is not None
            return [json.loads(line) for line in front.stdout]


@contextlib.contextmanager
def staying(
    shared: Shared, *, before: tuple[str, ...] = (), **variables: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any], "subprocess.Popen[str]"]]:
    """A front that lives until it is killed at the end, with what it has had forked and
    executed.
    """
    with shared.front("--stays", before=before, **variables) as front:
        assert front.stdout is not None
        forked, executed = (json.loads(front.stdout.readline()) for _ in range(2))
        try:
            yield forked, executed, front
        finally:
            front.kill()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Without the number of the pipe on which the process reports."""
    argv = facts["argv"]
    fd = argv[argv.index("--report-fd") + 1]
    assert facts["fds"] == [0, 1, 2, int(fd)], "its own descriptors alone"
    text = json.dumps({name: value for name, value in facts.items() if name != "fds"})
    return dict(
        json.loads(
            text.replace(f"--report-fd\\u0000{fd}", "--report-fd\\u0000N").replace(
                f'"--report-fd", "{fd}"', '"--report-fd", "N"'
            )
        )
    )


ROOT = lacking("unshare", root=True)
PLACES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "limits": ("bash", "-c", 'ulimit -n 500; ulimit -c 0; umask 027; exec "$@"', "sh"),
    "less important": ("nice", "-n", "7"),
    "one core": ("taskset", "-c", "0"),
    "other namespaces": ("unshare", "--net", "--uts", "--ipc", "--mount"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_forked_process_is_where_its_front_is(shared: Shared, place: str, tmp_path: Path) -> None:
    if place == "other namespaces" and ROOT:
        pytest.skip(ROOT)
    forked, executed = shared.facts(before=PLACES[place])
    assert not (tmp_path / "refusals").exists()
    assert forked["parent"] == forked["server"]
    assert executed["parent"] == executed["front"]
    assert comparable(forked["facts"]) == comparable(executed["facts"])


@pytest.mark.parametrize(
    ("variables", "before", "why"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, (), "HF_ENDPOINT is different in its environment"),
        ({}, ("bash", "-c", 'trap "" USR2; exec "$@"', "sh"), "SigIgn is different in its status"),
        ({}, ("unshare", "--user", "--map-root-user"), "the user namespace is different"),
    ],
)
def test_a_front_that_cannot_be_followed_gets_a_server_of_its_own(
    shared: Shared, variables: dict[str, str], before: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    if "--user" in before:
        need_user_namespaces()
    with staying(shared, before=before, **variables) as (forked, _, front):
        server = psutil.Process(forked["server"])
        assert server.ppid() == forked["front"] == front.pid
        assert forked["parent"] == forked["server"]
        assert why in (tmp_path / "refusals").read_text()
    wait_until(lambda: is_gone(forked["server"]))


def test_killed_front_ends_its_processes_and_the_next_front_is_served(shared: Shared) -> None:
    with staying(shared) as (forked, executed, _):
        assert psutil.Process(forked["server"]).ppid() == shared.process.pid
    wait_until(lambda: all(map(is_gone, (forked["server"], forked["pid"], executed["pid"]))))
    after, _ = shared.facts()
    assert after["parent"] == after["server"] != forked["server"]


def test_killed_shared_server_ends_all_and_the_next_front_starts_its_own(shared: Shared) -> None:
    with staying(shared) as (forked, _, _):
        shared.process.kill()
        wait_until(lambda: is_gone(forked["server"]) and is_gone(forked["pid"]))
    after, _ = shared.facts()
    assert after["parent"] == after["server"]


def test_a_visitor_who_sends_nonsense_or_nothing_harms_nobody(shared: Shared) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nonsense:
        nonsense.connect(str(shared.path))
        nonsense.send(b"front")
        assert b"refused" in nonsense.recv(4096)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(shared.path))
        forked, _ = shared.facts()
    assert forked["parent"] == forked["server"]
