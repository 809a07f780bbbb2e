"""`--hosts` starts the other fronts over ssh, and none outlives the one that started it.

Run: pytest tests/jobs/runs/test_ssh.py

A real sshd on a loopback port with keys of the test's own; skipped where there is none.
"""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import front_server
from tests.needs import lacking
from tests.ports import free_port
from tests.sshd import ssh_server
from unisono.base.errors import UsageError
from unisono.guard.facts.network import SystemNetwork
from unisono.guard.places.topology import Accelerators, Topology, TopologyRequest, read_topology
from unisono.guard.rendezvous.head_address import address_towards, is_this_machine
from unisono.guard.rendezvous.remote_fronts import (
    RemoteCommand,
    SshFronts,
    find_head,
    forwarded_variables,
    remote_command,
    start_others,
)
from unisono.jobs.runs.head_nodes import remote_train
from unisono.jobs.runs.train_request import TrainRequest

LIMIT_S = 300.0
STANDIN = Path(__file__).parent / "standins" / "ssh_front.py"
TOKEN = b"a-secret-of-more-than-16-bytes"

# Stands in for the front on the other host: says its arguments and the token's length, then holds
# on to stdin.
_FRONT = """
import json, os, sys, time
token = sys.stdin.readline().strip()
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "token": len(token), "pid": os.getpid(),
                  "debug": os.environ.get("NCCL_ALGO")}), flush=True)
if "ends" in os.environ.get("FRONT", "") or "ends" in sys.argv:
    print("error: it cannot", file=sys.stderr); sys.exit(7)
sys.stdin.read()
print("lifeline closed", flush=True)
"""


def topology(*hosts: str, head: str | None = None) -> Topology:
    requested = TopologyRequest(hosts=hosts, head=head)
    return read_topology(requested, {}, Accelerators(0))


def wait_until(seen: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < limit, f"never: {what}"
        time.sleep(0.02)


def request(ssh: tuple[str, ...] = ("ssh",), **changes: object) -> TrainRequest:
    return TrainRequest(Path("c.yaml"), ssh=ssh, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """An sshd on a free loopback port; gives the ssh command line that reaches it."""
    folder = tmp_path_factory.mktemp("sshd")
    with ssh_server(folder) as options:
        yield options


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A python that, started as `-m unisono train …`, is the stand-in; and a working directory with
    a name that needs quotes.
    """
    script = tmp_path / "front.py"
    script.write_text(_FRONT)
    fake = tmp_path / "py thon"
    fake.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {script} "$@"\n')
    fake.chmod(0o755)
    here = tmp_path / "it's a folder; really $HOME"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", str(fake))
    return here


def start(ssh: tuple[str, ...], logs: Path, *hosts: str, **changes: object) -> SshFronts:
    return start_others(
        remote_train(request(ssh, **changes)), topology(*hosts), TOKEN, ("127.0.0.1", 29577), logs=logs,
        variables={"NCCL_ALGO": "Ring", "NODE_RANK": "3"},
    )  # fmt: skip


def log_text(logs: Path, host: str) -> str:
    path = logs / f"{host}-front.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_fronts_start_in_the_same_folder_with_the_token_and_end_with_stdin(
    sshd: tuple[str, ...], front: Path, tmp_path: Path
) -> None:
    """The token is on stdin, and in no command line or log."""
    logs = tmp_path / "logs"
    with start(sshd, logs, "127.0.0.1", "127.0.0.2", overrides=("optim.lr=1e-4", "output_dir=a b")) as fronts:
        for host in ("127.0.0.1", "127.0.0.2"):
            wait_until(lambda host=host: "}" in log_text(logs, host), f"{host} started")  # type: ignore[misc]
        assert fronts.failures() == {}
        texts = [log_text(logs, host) for host in ("127.0.0.1", "127.0.0.2")]
        pids = [int(re.search(r'"pid": (\d+)', text)[1]) for text in texts]  # type: ignore[index]
        words = [word for process in psutil.process_iter() for word in _command(process)]
        assert not any(TOKEN.decode() in word for word in words)
    for number, text in enumerate(texts, start=1):
        assert f'"cwd": "{front}"' in text
        assert f'"token": {len(TOKEN)}' in text
        assert '"debug": "Ring"' in text
        assert f'"--node-rank", "{number}"' in text
        assert '"output_dir=a b"' in text
        assert TOKEN.decode() not in text
    for host, pid in zip(("127.0.0.1", "127.0.0.2"), pids, strict=True):
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), "the front ends")  # type: ignore[misc]
        assert "lifeline closed" in log_text(logs, host)
        assert (logs / f"{host}-front.log").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_fronts_end_when_the_one_that_started_them_is_killed(
    sshd: tuple[str, ...], front: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    fronts = start(sshd, logs, "127.0.0.1")
    try:
        wait_until(lambda: "}" in log_text(logs, "127.0.0.1"), "it started")
        pid = int(re.search(r'"pid": (\d+)', log_text(logs, "127.0.0.1"))[1])  # type: ignore[index]
        assert psutil.pid_exists(pid)
        fronts.fronts[0].process.kill()  # with its starter the ssh client is gone, and the connection with it
        wait_until(lambda: not psutil.pid_exists(pid), "the front ends")
    finally:
        fronts.close()


@pytest.mark.slow
def test_a_front_that_ends_early_is_named_with_the_end_of_what_it_printed(
    sshd: tuple[str, ...], front: Path, tmp_path: Path
) -> None:
    with start(sshd, tmp_path / "logs", "127.0.0.1", overrides=("ends",)) as fronts:
        wait_until(fronts.failures, "it ended")
        verdict = fronts.failures()[1]
    assert (verdict.cause, verdict.hosts) == ("node_missing", ("127.0.0.1",))
    assert "exit code 7" in verdict.summary
    assert "error: it cannot" in verdict.summary


@pytest.mark.skipif(bool(lacking("ssh")), reason=lacking("ssh"))
def test_a_host_that_cannot_be_reached_is_named_in_seconds(tmp_path: Path) -> None:
    port = free_port()
    began = time.monotonic()
    with start(("ssh", "-p", str(port), "-F", "none"), tmp_path / "logs", "127.0.0.1") as fronts:
        wait_until(fronts.failures, "it failed")
        verdict = fronts.failures()[1]
    assert time.monotonic() - began < 30
    assert "node 1 (127.0.0.1)" in verdict.summary
    assert "refused" in verdict.summary.lower()
    assert verdict.fix[0].startswith("ssh -o BatchMode=yes 127.0.0.1 true")


def _login() -> dict[str, str]:
    """The variables of a person who types a whole front."""
    found = {
        name: value for name, value in os.environ.items() if not name.startswith(("UNISONO_TOKEN", "NNODES", "NODE_RANK"))
    }  # fmt: skip
    return {**found, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def sshd_as_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """One whose commands have this session's variables: whole fronts there have their ranks forked,
    too.
    """
    with ssh_server(tmp_path_factory.mktemp("sshd"), login=_login()) as options:
        yield options


def whole_front(
    sshd: tuple[str, ...], folder: Path, *words: str, model: object = "builtin:tiny", json_lines: bool = True
) -> "subprocess.Popen[str]":
    """`unisono train --hosts …` with real ranks on a small run, in a folder of its own."""
    body = {
        "model": model, "data": {"train": "rows.jsonl", "max_length": 64}, "duration": "4 steps", "batch": {"global": 4},
        "output_dir": "out", "device": "cpu",
    }  # fmt: skip
    rows = [{"instruction": f"say {n}", "output": f"it is {n}"} for n in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "c.yaml").write_text(json.dumps(body))
    command = [sys.executable, str(STANDIN), json.dumps(sshd), "train", "c.yaml", *words]
    return front_server.start(
        [*command, *(["--json"] if json_lines else [])], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_login()
    )  # fmt: skip


def ours(folder: Path) -> list[psutil.Process]:
    """Living processes that work in the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_one_command_trains_on_this_machine_and_on_a_different_over_ssh(
    sshd_as_here: tuple[str, ...], tmp_path: Path, model_dir: Path
) -> None:
    front = whole_front(
        sshd_as_here, tmp_path, "--hosts", "127.0.0.2", "--nproc", "1", model={"path": str(model_dir)}
    )
    out, err = front.communicate(timeout=150)
    assert front.returncode == 0, out + err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [node["node_rank"] for node in plan["nodes"]] == [0, 1]
    assert plan["world_size"] == 2
    assert json.loads((tmp_path / "out" / "result.json").read_text())["outcome"] == "completed"
    wait_until(lambda: not ours(tmp_path), "all of it ends")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_killed_starter_leaves_nothing_behind_on_the_other_host(
    sshd_as_here: tuple[str, ...], tmp_path: Path, model_dir: Path
) -> None:
    words = ("--hosts", "127.0.0.2", "--nproc", "1", "duration=2000000 steps")
    front = whole_front(sshd_as_here, tmp_path, *words, model={"path": str(model_dir)})
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        wait_until(
            lambda: front.poll() is not None or (metrics.exists() and metrics.stat().st_size),
            "the first step",
        )
        assert front.poll() is None, front.communicate()
        assert len(ours(tmp_path)) >= 4  # two fronts, two ranks
        front.kill()
        wait_until(lambda: not ours(tmp_path), "all of it ends")
    finally:
        front.kill()
        front.communicate()
        for process in ours(tmp_path):
            process.kill()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_host_that_cannot_be_reached_ends_the_start_with_its_name(
    sshd: tuple[str, ...], tmp_path: Path
) -> None:
    elsewhere = ("ssh", "-p", "1", *sshd[3:])  # nobody listens on port 1
    front = whole_front(elsewhere, tmp_path, "--hosts", "127.0.0.2", "--nproc", "1")
    out, err = front.communicate(timeout=100)
    assert front.returncode == 3, out + err
    result = json.loads(out.splitlines()[-1])
    assert result["verdict"]["cause"] == "node_missing"
    assert result["verdict"]["hosts"] == ["127.0.0.2"]
    assert "refused" in result["verdict"]["summary"].lower()


def test_without_ssh_it_is_reported_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        start(("no-such-ssh",), tmp_path / "logs", "127.0.0.1")
    assert "--node-rank" in "\n".join(caught.value.lines())


def test_the_remote_command_survives_the_shell_and_has_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a 'b' $(c)"
    folder.mkdir()
    monkeypatch.chdir(folder)
    requested = remote_train(
        request(nproc=2, restarts=0, overrides=("data.train=x y;z", "a=$(touch bad)"), debug_comm=True)
    )
    command = remote_command(requested, topology("b", "c"), 2, ("10.0.0.1", 5), variables={"A": "1 2"})
    words = shlex.split(command)
    assert words[:4] == ["cd", str(folder), "&&", "exec"]
    assert words[4:6] == ["env", "A=1 2"]
    assert words[7:] == [
        "-m", "unisono", "train", "c.yaml", "data.train=x y;z", "a=$(touch bad)", "--nodes", "3", "--node-rank", "2", "--head",
        "10.0.0.1:5", "--token-file", "-", "--join-timeout", "300", "--nproc", "2", "--restarts", "0", "--debug-comm",
    ]  # fmt: skip
    subprocess.run(["sh", "-c", command.replace("exec", "echo", 1)], check=True, capture_output=True)
    assert not list(folder.iterdir())
    assert "[fe80::1]:5" in remote_command(requested, topology("b"), 1, ("fe80::1", 5))


def test_what_comes_after_all_options_stays_there() -> None:
    requested = RemoteCommand(("run",), {"--uneven": True, "--devices": None}, ("--", "torchrun", "a b.py"))
    words = shlex.split(remote_command(requested, topology("b"), 1, ("10.0.0.1", 5)))
    assert words[words.index("run") :] == [
        "run", "--nodes", "2", "--node-rank", "1", "--head", "10.0.0.1:5", "--token-file", "-", "--uneven", "--", "torchrun", "a b.py",
    ]  # fmt: skip


def test_variables_that_must_be_equal_are_carried_and_node_ones_are_not() -> None:
    own = {
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "eth7",
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
        "WANDB_API_KEY": "x",
    }
    assert forwarded_variables(own) == {"NCCL_ALGO": "Ring"}


def test_head_is_the_address_towards_the_hosts_with_a_port_of_the_system() -> None:
    network = SystemNetwork()
    found = find_head(topology("127.0.0.2", "127.0.0.3"), network)
    assert (found.head_host, found.head_port) == ("127.0.0.1", 0)
    given = topology("127.0.0.2", head="127.0.0.5:1234")
    assert find_head(given, network) == given
    with pytest.raises(UsageError, match="cannot be resolved or reached"):
        find_head(topology("no-such-host.invalid"), network)


def test_this_machine_is_known_by_its_names_and_addresses() -> None:
    network = SystemNetwork()
    for name in ("localhost", "127.0.0.1", socket.gethostname(), f"me@{socket.gethostname()}"):
        assert is_this_machine(name, network), name
    assert not is_this_machine("192.0.2.1", network)
    assert not is_this_machine("127.0.0.2", network)
    assert address_towards("127.0.0.9", network) == "127.0.0.1"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.pid != os.getpid() else []
    except psutil.Error:
        return []
