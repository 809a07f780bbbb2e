"""`unisono run --hosts`: the same program on another node over ssh.

A real sshd on loopback, real torchrun, real ranks.

Skipped with the reason where there is no sshd.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import front_server
from tests.ports import free_port
from tests.sshd import as_program, ssh_server
from unisono.base.errors import UsageError
from unisono.guard.programs.program_request import RunRequest, refuse_launcher
from unisono.jobs.launchers.launchers import find_launcher

BIN = Path(sys.executable).parent
LIMIT_S = 150.0
PROGRAM = """
import gc, os, sys, time
gc.disable()  # it would look at the million objects of the imports again and again
import torch, torch.distributed as dist
if "RANK" not in os.environ:  # without torchrun: one rank on each node
    os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": os.environ["NNODES"], "GROUP_RANK": os.environ["NODE_RANK"], "LOCAL_RANK": "0"}
dist.init_process_group("gloo")
seen = torch.ones(1)
dist.all_reduce(seen)
print(f"world {int(seen)} node {os.environ['GROUP_RANK']} stdin {sys.stdin.read()!r}", flush=True)
while "waits" in sys.argv:
    open(f"here-{dist.get_rank()}", "w").close()
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the program; `ssh` in PATH reaches the sshd."""
    keys = tmp_path / "sshd"
    keys.mkdir()
    with ssh_server(keys) as options:
        monkeypatch.setenv("PATH", f"{as_program(options, keys)}:{BIN}:{os.environ['PATH']}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        for name in ("UNISONO_TOKEN", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        folder = tmp_path / "a folder"
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        yield folder


def typed(place: Path, *words: str) -> "subprocess.Popen[str]":
    return front_server.start(
        [sys.executable, "-m", "unisono", "run", "--hosts", "127.0.0.2", "--output-dir", "out", "--join-timeout", "60", *words],
        cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ours(folder: Path) -> list[psutil.Process]:
    """Living processes that work in the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(seen: object, what: str) -> None:
    assert callable(seen)
    limit = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < limit, f"never: {what}"
        time.sleep(0.05)


def test_one_command_starts_the_same_program_on_a_different_node(place: Path) -> None:
    front = typed(place, "--", "torchrun", "--nproc-per-node", "1", "program.py")
    out, err = front.communicate("for the program here", timeout=LIMIT_S)
    assert front.returncode == 0, out + err
    assert "started over SSH: node 1 on 127.0.0.2" in err
    assert "world 2 node 0 stdin 'for the program here'" in out
    there = (place / "out" / "logs" / "127.0.0.2-front.log").read_text()
    assert "world 2 node 1 stdin ''" in there  # its own stdin is the lifeline
    plan = json.loads((place / "out" / "plan.json").read_text())
    assert [node["node_rank"] for node in plan["nodes"]] == [0, 1]
    until(lambda: not ours(place), "all of it ends")


def test_a_starter_that_is_killed_leaves_nothing_on_the_other_node(place: Path) -> None:
    front = typed(place, "--", "python", "program.py", "waits")
    try:
        assert front.stdin is not None
        front.stdin.close()
        front.stdin = None
        until(lambda: front.poll() is not None or (place / "here-1").exists(), "both ranks are there")
        assert front.poll() is None, front.stderr.read() if front.stderr else ""
        front.send_signal(signal.SIGKILL)
        until(lambda: not ours(place), "all of it ends")
    finally:
        front.kill()
        front.communicate()
        for process in ours(place):
            process.kill()


def test_a_host_without_an_answer_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = place / "dead"
    dead.mkdir()
    as_program(("ssh", "-p", str(free_port()), "-F", "none"), dead)  # nobody listens there
    monkeypatch.setenv("PATH", f"{dead}:{os.environ['PATH']}")
    out, err = typed(place, "--", "torchrun", "program.py").communicate(timeout=LIMIT_S)
    assert "[node_missing]" in err, out + err
    assert "node 1 (127.0.0.2) did not join: ssh could not start it" in err


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["torchrun", "--node-rank", "0", "program.py"], "--node-rank 0 selects one node"),
        (
            ["torchrun", "--nnodes", "3", "program.py"],
            "--hosts makes 2 nodes with this one, but --nnodes is 3",
        ),
    ],
)
def test_program_arguments_that_cannot_hold_for_all_nodes_are_refused(
    place: Path, words: list[str], printed: str
) -> None:
    front = typed(place, "--", *words)
    out, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 2, out + err
    assert printed in err
    assert "fix:" in err


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("slurm", "srun --ntasks-per-node=1 unisono run -- torchrun 'my train.py'"),
        ("ray", "unisono run -- torchrun 'my train.py'"),
        ("slrm", "did you mean `slurm`?"),
        ("local", "--launcher local runs on one node"),
    ],
)
def test_a_launcher_that_does_not_start_programs_reports_what_to_type(name: str, printed: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_launcher(RunRequest(("torchrun", "my train.py"), launcher=find_launcher(name), nodes="2"))
    assert printed in "\n".join(caught.value.lines())
    refuse_launcher(RunRequest(("true",), launcher=find_launcher("nodes"), nodes="2"))
    refuse_launcher(RunRequest(("true",), launcher=find_launcher("local")))
