"""Processes that are forked are what exec would have begun, and end as they would.

Run: pytest tests/jobs/runs/test_fork_server.py
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs.runs.conftest import Place, wait_until
from tests.shared_fork_server import SHARED
from unisono.guard.facts import read_environment
from unisono.guard.facts.processes import living_ranks
from unisono.guard.supervise import fork_server
from unisono.guard.supervise.base_environment import early_environment
from unisono.guard.supervise.child_process import ChildProcess, child_environment
from unisono.guard.supervise.fork_server import ForkServer

REPORTED = "tests.jobs.runs.standins.reported_facts"
LIGHT = "tests.jobs.runs.standins.light_server"
ENDS = [
    {"exit": 0}, {"exit": 3}, {"exit": "a text"}, {"raise": "ä"}, {"fault": 1},
    *({"signal": int(number)} for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGUSR1, signal.SIGABRT, signal.SIGINT)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> str:
    """Servers of this file import little, fork the program of these tests, too, and are not that of
    the session, whose socket this gives.
    """
    session = os.environ.get(SHARED, "")
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.setattr(fork_server, "_SERVER", LIGHT)
    monkeypatch.setattr(fork_server, "_SERVED", (*fork_server._SERVED, REPORTED))
    return session


@pytest.fixture
def printed() -> list[str]:
    return []


@pytest.fixture
def server(printed: list[str]) -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer(printed.append)) as made:
        yield made


def pid_of(server: ForkServer) -> int:
    assert server.process is not None
    return server.process.pid


@pytest.fixture
def begin(tmp_path: Path, server: ForkServer) -> Iterator[Callable[..., ChildProcess]]:
    """Starts the program of these tests; with `forks=False` as a fresh interpreter."""
    with contextlib.ExitStack() as stack:

        def started(*, forks: bool = True, log: str = "log", **variables: str) -> ChildProcess:
            output = stack.enter_context((tmp_path / log).open("ab"))
            child = ChildProcess(
                lambda fd: [sys.executable, "-m", REPORTED, "--report-fd", str(fd), "--front-pid", str(os.getpid())],
                environment=environment(**variables), output=output, has_input=True, fork_server=server if forks else None, waits=True,
            )  # fmt: skip
            return stack.enter_context(child)

        yield started


def environment(**variables: str) -> dict[str, str]:
    here = {"PATH": os.defpath, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return here | variables


def receive(child: ChildProcess) -> dict[str, Any]:
    """Its first message."""
    found: list[Any] = []

    def has_come() -> bool:
        found.extend(child.read(0.05))
        return bool(found) or child.ended

    wait_until(has_come)
    assert found, "it has ended without a word"
    return found[0]


def end_of(child: ChildProcess, how: dict[str, Any]) -> int | None:
    receive(child)
    child.send(how)
    wait_until(lambda: bool(child.read(0.05)) or child.ended)
    return child.returncode


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_forked_process_is_what_exec_would_have_begun(
    begin: Callable[..., ChildProcess], server: ForkServer
) -> None:
    one = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's BLAS has one thread in a forked process
    variables = {"RANK": "3", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lö", **one}
    begin(
        RANK="0", TOKENIZERS_PARALLELISM="true", **one
    )  # the server has begun with another rank's variables
    forked, executed = (receive(begin(forks=forks, **variables)) for forks in (True, False))
    assert (forked["parent"], executed["parent"]) == (pid_of(server), os.getpid())
    for printed in (forked, executed):  # the pipe's number is in the command line, and is not the same
        fd = printed["facts"]["argv"][2]
        printed["facts"] = json.loads(
            json.dumps(printed["facts"]).replace(f"--report-fd\\u0000{fd}", "--report-fd\\u0000N")
        )
        for words in (printed["facts"]["argv"], printed["facts"]["orig_argv"]):
            words[words.index("--report-fd") + 1] = "N"
        assert printed["facts"]["fds"] == [0, 1, 2, int(fd)], "its own descriptors alone"
        del printed["facts"]["fds"]
    assert forked["facts"] == executed["facts"]


def test_what_is_shown_of_it_is_what_was_started(begin: Callable[..., ChildProcess]) -> None:
    child = begin(RANK="7")
    receive(child)
    process = psutil.Process(child.pid)
    assert process.cmdline()[1:3] == ["-m", REPORTED]
    assert process.environ() == environment(RANK="7")
    assert process.cmdline()[-2:] == ["--front-pid", str(os.getpid())]


def test_two_forked_processes_draw_differently(begin: Callable[..., ChildProcess]) -> None:
    one, two = (receive(begin())["drawn"] for _ in range(2))
    assert all(a != b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("how", ENDS, ids=str)
def test_its_end_is_reported_as_that_of_a_child(
    begin: Callable[..., ChildProcess], how: dict[str, Any]
) -> None:
    forked, executed = (end_of(begin(forks=forks, log=f"log-{forks}"), how) for forks in (True, False))
    assert forked == executed


def test_an_error_is_in_its_log(begin: Callable[..., ChildProcess], tmp_path: Path) -> None:
    assert end_of(begin(), {"raise": "out of order"}) == 1
    assert (tmp_path / "log").read_text().splitlines()[-1] == "ValueError: out of order"


def test_its_number_is_not_given_again_before_its_end_is_known(begin: Callable[..., ChildProcess]) -> None:
    child = begin()
    receive(child)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(child.pid))
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    wait_until(lambda: bool(child.read(0.05)) or child.ended)
    wait_until(lambda: not psutil.pid_exists(child.pid))


def test_what_the_imports_have_printed_is_in_each_log(
    begin: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    for log in ("one", "two"):
        receive(begin(log=log, LIGHT_SERVER_IMPORTS="tests.jobs.runs.standins.prints_at_import"))
        assert (tmp_path / log).read_text() == "an old name is used\n"


def test_signals_to_all_processes_of_a_job_leave_the_server_alone(
    begin: Callable[..., ChildProcess], server: ForkServer
) -> None:
    receive(begin())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        os.kill(pid_of(server), number)
    assert end_of(begin(), {"signal": int(signal.SIGTERM)}) == -signal.SIGTERM
    assert not is_gone(pid_of(server))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("tests.jobs.runs.standins.starts_a_thread", "2 threads run after the imports"),
        ("no.such.module", "ModuleNotFoundError: No module named 'no'"),
    ],
)
def test_a_server_that_could_not_fork_soundly_reports_it_once_and_does_not(
    begin: Callable[..., ChildProcess], printed: list[str], module: str, why: str
) -> None:
    for _ in range(2):
        assert receive(begin(LIGHT_SERVER_IMPORTS=module))["parent"] == os.getpid()
    (text,) = printed
    assert text.startswith(f"ranks are started without the fork server, each with its own imports: {why}")


def test_a_server_that_does_not_start_is_reported_once(
    begin: Callable[..., ChildProcess], printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_SERVER", "no.such.server")
    for _ in range(2):
        assert receive(begin())["parent"] == os.getpid()
    (text,) = printed
    assert "it ended with 1: " in text
    assert "No module named 'no'" in text


def test_killed_server_ends_its_processes_and_the_next_is_a_fresh_one(
    begin: Callable[..., ChildProcess], server: ForkServer, printed: list[str]
) -> None:
    child = begin()
    receive(child)
    os.kill(pid_of(server), signal.SIGKILL)
    wait_until(lambda: bool(child.read(0.05)) or child.ended)
    assert child.returncode == -signal.SIGKILL
    assert receive(begin())["parent"] == os.getpid()
    assert ["it ended with -9" in text for text in printed] == [True]


def test_a_thread_that_may_end_before_the_front_does_not_start_the_server(
    begin: Callable[..., ChildProcess],
) -> None:
    found: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: found.append(begin(forks=True)))
    thread.start()
    thread.join()
    assert receive(found[0])["parent"] == os.getpid()


def test_a_task_does_not_wait_for_the_imports(tmp_path: Path, server: ForkServer) -> None:
    found: list[str] = []
    with (tmp_path / "log").open("wb") as log:

        def is_forked() -> bool:
            found.append(_way(server, log))
            return found[-1] == "fork"

        wait_until(is_forked)
    assert found[0] == "exec"


def _way(server: ForkServer, log: Any) -> str:
    child = ChildProcess(
        lambda fd: [sys.executable, "-m", REPORTED, "--report-fd", str(fd), "--front-pid", str(os.getpid())],
        environment=environment(), output=log, has_input=True, fork_server=server,
    )  # fmt: skip
    with child:
        return "exec" if receive(child)["parent"] == os.getpid() else "fork"


_FRONT = f"""
import os, sys, signal, tempfile
from unisono.guard.supervise import fork_server
from unisono.guard.supervise.child_process import ChildProcess
fork_server._SERVER, fork_server._SERVED = {LIGHT!r}, ({REPORTED!r},)
server = fork_server.ForkServer(print)
child = ChildProcess(
    lambda fd: [sys.executable, "-m", {REPORTED!r}, "--report-fd", str(fd), "--front-pid", str(os.getpid())],
    environment=dict(os.environ), output=tempfile.TemporaryFile(), has_input=True, fork_server=server, waits=True,
)
while not child.read(): pass
print(server.process.pid, child.pid, flush=True)
signal.pause()
"""


def test_with_a_killed_front_end_the_server_and_all_that_it_has_forked() -> None:
    with subprocess.Popen([sys.executable, "-c", _FRONT], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pids = [int(word) for word in front.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(map(is_gone, pids))
        front.kill()
    wait_until(lambda: all(map(is_gone, pids)), limit_s=10)


def test_closing_leaves_no_process_and_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with (tmp_path / "log").open("wb") as log, contextlib.closing(ForkServer(print)) as server:
        child = ChildProcess(
            lambda fd: [sys.executable, "-m", REPORTED, "--report-fd", str(fd), "--front-pid", str(os.getpid())],
            environment=environment(), output=log, has_input=True, fork_server=server, waits=True,
        )  # fmt: skip
        with child:
            receive(child)
            pids = [child.pid, pid_of(server)]
    assert all(map(is_gone, pids))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_server_that_begins_early_forks_what_is_started_later(
    tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # of another launcher: no child gets it
    server.begin(early_environment())
    pid = pid_of(server)
    with (tmp_path / "log").open("wb") as log:
        child = ChildProcess(
            lambda fd: [sys.executable, "-m", REPORTED, "--report-fd", str(fd), "--front-pid", str(os.getpid())],
            environment=child_environment(threads=1, without=read_environment().leftovers), output=log, has_input=True, fork_server=server, waits=True,
        )  # fmt: skip
        with child:
            assert receive(child)["parent"] == pid_of(server) == pid


def test_an_early_server_does_not_wait_for_the_imports_of_its_front() -> None:
    code = "import sys, unisono.front.cli.train, unisono.guard.supervise.fork_server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pydantic", "yaml", "unisono.guard.facts", "unisono.trainer.plan"} & set(
        loaded.stdout.split()
    )


# From here on with the server's own imports.


@pytest.fixture
def alone(finished: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A run whose fronts start fork servers of their own."""
    monkeypatch.delitem(finished.environment, SHARED, raising=False)
    return finished


def ways(place: Place) -> set[str]:
    """How the ranks of the last start were started, as their events say."""
    lines = [
        line for path in sorted((place.out / "events").iterdir()) for line in path.read_text().splitlines()
    ]
    return {message["started"] for line in lines if "started" in (message := json.loads(line))}


@pytest.mark.slow
def test_forked_ranks_train_to_the_bits_of_fresh_interpreters(alone: Place, light: str) -> None:
    """Ranks whose libraries are to report more are fresh interpreters."""
    found = {}
    for way, words in (("fork", []), ("exec", ["--debug-comm"])):
        done = alone.train("--fresh", "--nproc", "2", *words)
        assert done.returncode == 0, done.stderr
        assert ways(alone) == {way}
        (weights,) = alone.out.glob("adapter/*.safetensors")
        found[way] = (alone.losses(), weights.read_bytes())
        alone.environment[SHARED] = (
            light  # a server of its own, beside fresh interpreters, tells nothing more
        )
    assert found["fork"] == found["exec"]


@pytest.mark.slow
def test_with_a_killed_front_end_its_ranks_and_their_server(alone: Place) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "unisono", "train", "c.yaml", "--fresh", "--nproc", "2", "duration=5000 steps"],
        cwd=alone.folder, env=alone.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as front:  # fmt: skip
        try:
            wait_until(lambda: len(living_ranks(front.pid)) == 2)
            below = [process.pid for process in psutil.Process(front.pid).children(recursive=True)]
            assert any("unisono.trainer.worker.fork_server" in psutil.Process(pid).cmdline() for pid in below)
        finally:
            front.kill()
    wait_until(lambda: all(map(is_gone, below)), limit_s=20)
    assert living_ranks(front.pid) == []
