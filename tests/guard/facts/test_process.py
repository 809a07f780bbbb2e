"""What the kernel says of real processes and connections.

Run: pytest tests/guard/facts/test_process.py
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.network_namespaces import Namespaces, Own, why_no_namespaces
from unisono.guard.facts.machine import NoGpuUtilization, gpu_utilization
from unisono.guard.facts.network import RetransmittingConnection, retransmitting_connections
from unisono.guard.facts.processes import child_states, frozen_cgroup, has_handler, read_stat, wait_channel

LIMIT_S = 30.0
_FREEZERS = Path("/sys/fs/cgroup/freezer")


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def state(pid: int) -> str:
    stat = read_stat(pid)
    return stat.state if stat is not None else ""


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        until(lambda: "nanosleep" in wait_channel(process.pid))
        yield process
        process.kill()


def test_a_process_that_sleeps_uses_nothing_and_reports_where_it_waits(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    stat = read_stat(sleeper.pid)
    assert stat is not None
    assert stat.state == "S"
    assert stat.cpu_s < 1


def test_stopped_process_is_in_state_t_and_a_dead_unreaped_one_in_state_z(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    """As `ps` shows them; once it is waited for, a dead process has no state."""
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: state(sleeper.pid) == "T")
    assert "T" in child_states(os.getpid())
    sleeper.kill()
    until(lambda: state(sleeper.pid) == "Z")
    sleeper.wait()
    assert read_stat(sleeper.pid) is None
    assert child_states(sleeper.pid) == wait_channel(sleeper.pid) == ""


def test_the_children_of_a_process_are_reported_by_their_states() -> None:
    script = "sleep 600 & echo $!; sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        stopped, asleep = (int(parent.stdout.readline()) for _ in range(2))
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: sorted(child_states(parent.pid)) == ["S", "T"])
        for child in (stopped, asleep):
            os.kill(child, signal.SIGKILL)


def test_cpu_time_of_all_threads_counts() -> None:
    begin = (
        "import threading\nfor _ in range(2): threading.Thread(target=lambda: [0 for _ in iter(int,"
        " 1)]).start()"
    )
    with subprocess.Popen([sys.executable, "-c", begin]) as process:
        until(lambda: (stat := read_stat(process.pid)) is not None and stat.cpu_s > 0.3)
        process.kill()


def test_a_name_with_spaces_and_brackets_hides_nothing(tmp_path: Path) -> None:
    script = "open('/proc/self/comm', 'w').write(') Z 1 (x'); import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        until(lambda: "Z 1" in Path(f"/proc/{process.pid}/comm").read_text())
        until(lambda: state(process.pid) == "S")
        process.kill()


def test_a_handler_is_seen_once_it_is_there() -> None:
    script = (
        "import sys, signal, faulthandler, time\nprint(flush=True); sys.stdin.readline()\n"
        "faulthandler.register(signal.SIGUSR2, chain=False)\nprint(flush=True); time.sleep(600)"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert not has_handler(process.pid, signal.SIGUSR2)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert has_handler(process.pid, signal.SIGUSR2)
        assert not has_handler(process.pid, signal.SIGUSR1)
        process.kill()
    assert not has_handler(process.pid, signal.SIGUSR2)


@pytest.fixture
def freezer() -> Iterator[Path]:
    folder = _FREEZERS / f"unisono-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups: {error.strerror}")
    yield folder
    folder.rmdir()


def test_a_frozen_control_group_is_found(sleeper: "subprocess.Popen[bytes]", freezer: Path) -> None:
    assert frozen_cgroup(sleeper.pid) is None
    (freezer / "cgroup.procs").write_text(str(sleeper.pid))
    (freezer / "freezer.state").write_text("FROZEN")
    try:
        until(lambda: frozen_cgroup(sleeper.pid) == freezer)
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        (_FREEZERS / "cgroup.procs").write_text(str(sleeper.pid))
    assert frozen_cgroup(sleeper.pid) is None


def test_a_frozen_group_of_version_2_is_found_by_its_file(tmp_path: Path) -> None:
    assert frozen_cgroup(os.getpid(), root=tmp_path) is None
    (tmp_path / "cgroup.freeze").write_text("1\n")
    assert frozen_cgroup(os.getpid(), root=tmp_path) == tmp_path


def test_without_a_driver_nothing_is_known_of_a_gpu() -> None:
    assert NoGpuUtilization().percent("GPU-1") is None
    assert gpu_utilization().percent("GPU-none-such") is None


def test_connections_without_problem_are_not_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert retransmitting_connections([os.getpid()]) == []


def test_a_table_of_the_kernel_is_read_for_both_families(tmp_path: Path) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "net").mkdir()
    for number, inode in enumerate((11, 12, 13)):
        (tmp_path / "7" / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
    row = "  {n}: {local} {peer} 01 00000010:00000000 {timer}:0000002B {again} 0 0 {inode} 2 0000 1 1 1 1 1"
    four = {"local": "0100000A:9C40", "peer": "0300000A:A111"}
    six = {"local": "0" * 32 + ":9C40", "peer": "B80D0120000000000000000001000000:1F90"}
    mapped = {"local": "0" * 32 + ":9C40", "peer": "0000000000000000FFFF00000300000A:0016"}
    (tmp_path / "7" / "net" / "tcp").write_text("head\n" + "\n".join([
        row.format(n=0, **four, timer="01", again="00000004", inode=11),
        row.format(n=1, **four, timer="01", again="00000000", inode=12),  # on its way
        row.format(n=2, **four, timer="01", again="00000009", inode=99),  # another process's
    ]))  # fmt: skip
    (tmp_path / "7" / "net" / "tcp6").write_text("head\n" + "\n".join([
        row.format(n=0, **six, timer="01", again="0000000A", inode=12),
        row.format(n=1, **mapped, timer="01", again="00000001", inode=13),
    ]))  # fmt: skip
    assert retransmitting_connections([5, 7], proc=tmp_path) == [
        RetransmittingConnection("[2001:db8::1]:8080", 10),
        RetransmittingConnection("10.0.0.3:41233", 4),
        RetransmittingConnection("10.0.0.3:22", 1),
    ]
    assert str(RetransmittingConnection("10.0.0.3:41233", 4)) == "→ 10.0.0.3:41233: 4 retransmissions"


def test_a_peer_that_a_cut_line_hides_is_named(tmp_path: Path) -> None:
    if why := why_no_namespaces():
        pytest.skip(why)
    ground = Namespaces(2, tmp_path)
    listen = (
        "import socket; s = socket.create_server(('', 7001)); print(flush=True); c, _ = s.accept();"
        " print(c.recv(9), flush=True); input()"
    )
    call = (
        "import socket; c = socket.create_connection(('10.231.7.2', 7001)); c.send(b'a'); input();"
        " c.send(b'b'); input()"
    )
    pipe = subprocess.PIPE
    try:
        words = [
            ground.command(node, [sys.executable, "-c", x], Own()) for node, x in ((1, listen), (0, call))
        ]
        with subprocess.Popen(words[0], stdin=pipe, stdout=pipe) as server:
            assert server.stdout is not None
            server.stdout.readline()
            with subprocess.Popen(words[1], stdin=pipe) as client:
                assert client.stdin is not None
                assert select.select([server.stdout], [], [], LIMIT_S)[0]
                server.stdout.readline()
                ground.inside(1, "ip", "link", "set", "eth0", "down")
                client.stdin.write(b"\n")
                client.stdin.flush()
                until(
                    lambda: (
                        [link.peer for link in retransmitting_connections([client.pid])]
                        == ["10.231.7.2:7001"]
                    )
                )
                until(lambda: retransmitting_connections([client.pid])[0].retransmissions > 1)
                client.kill()
            server.kill()
    finally:
        ground.close()
