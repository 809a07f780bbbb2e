"""`unisono run` on two nodes: who disagrees is refused on both, before and inside the program.

Run: pytest tests/guard/programs/test_two_nodes.py
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.guard.programs.test_one_node import until
from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.network_namespaces import Ground, Own
from unisono.guard.programs.head_program import PORT_TRIES

BIN = Path(sys.executable).parent
STANDIN = str(Path(__file__).with_name("standin_launcher.py"))
TOKEN = "a secret that both nodes of this test share"
LIMIT_S = 300.0
PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
seen = torch.ones(1)
dist.all_reduce(seen)
print(f"world {int(seen)}", flush=True)
dist.destroy_process_group()
"""
DIES_ONCE = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
seen = torch.ones(1)
dist.all_reduce(seen)
print(f"world {int(seen)}", flush=True)
dist.destroy_process_group()
"""
TAKES_ITS_PORT_LATE = """
import atexit, gc, os, sys, time
from pathlib import Path
Path("port.tmp").write_text(os.environ["MASTER_PORT"])
Path("port.tmp").rename("port")
while not Path("go").exists():
    time.sleep(0.05)
Path("go").unlink()
os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
gc.disable()  # it would look at the million objects of the imports again and again
code = 0
try:
    exec(open("program.py").read())
except Exception:
    sys.excepthook(*sys.exc_info())
    code = 1
atexit._run_exitfuncs()
os._exit(code)  # without finalizing torch
"""
THIEF = """
import socket, sys
for address in (sys.argv[1], "0.0.0.0", "::"):
    thief = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    thief.bind((address, int(sys.argv[2])))
"""
SERVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listens", flush=True)
time.sleep(600)
"""
OTHER_ROWS = """
import gc, os
gc.disable()
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
dist.init_process_group("gloo")
data = Subset(TensorDataset(torch.randn(256, 8)), torch.randperm(256)[: 230 - 77 * dist.get_rank()].tolist())
for (rows,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    dist.all_reduce(rows)
    print("a step", flush=True)
"""
"""Each rank has drawn a split of its own, without a seed."""
Start = Callable[..., list[Front]]


@pytest.fixture
def start(ground: Ground, tmp_path: Path) -> Iterator[Start]:
    """Starts words on two nodes; `{node}`, `{head}` and `{port}` in them are filled in."""
    fronts: list[Front] = []
    port = ground.head_port()

    def begin(
        words: Sequence[str],
        *,
        nodes: Sequence[int] = (0, 1),
        variables: Sequence[Mapping[str, str]] = ({}, {}),
        own: Sequence[Own] = (),
    ) -> list[Front]:
        for node in nodes:
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            (folder / "program.py").write_text(PROGRAM)
            (folder / "dies_once.py").write_text(DIES_ONCE)
            (folder / "late.py").write_text(TAKES_ITS_PORT_LATE)
            (folder / "other_rows.py").write_text(OTHER_ROWS)
            filled = [word.format(node=node, head=ground.address(0), port=port) for word in words]
            environment = {
                "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/root"), "UNISONO_TOKEN": TOKEN,
                "OMP_NUM_THREADS": "1", **variables[node], **{name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LANG", "LC_"))},
            }  # fmt: skip
            if ground.apart:
                environment["GLOO_SOCKET_IFNAME"] = "eth0"
            place = own[node] if own else Own()
            fronts.append(
                Front(
                    filled,
                    node=node,
                    host=ground.host(node),
                    cwd=folder,
                    environment=environment,
                    json=False,
                    place=ground.place(node, place),
                    executed=ground.command(node, filled, place),
                )
            )
        return fronts

    yield begin
    for front in fronts:
        front.close()


def run(*words: str, flags: Sequence[str] = ()) -> list[str]:
    """`unisono run` with the topology of these nodes."""
    where = ["--nodes", "2", "--node-rank", "{node}", "--head", "{head}:{port}", "--output-dir", "out"]
    return [sys.executable, "-m", "unisono", "run", *where, *flags, "--", *words]


def ended(fronts: Sequence[Front], codes: Sequence[int]) -> None:
    """Waits for the end of all, and shows what they said where it is another one."""
    found = together(fronts, limit_s=LIMIT_S)
    assert found == list(codes), "\n".join(front.text() for front in fronts)


def last_words(front: Front) -> list[str]:
    """The verdict as a block."""
    lines = front.text("err").splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("WHAT ")]
    assert begins, front.text()
    return [line for line in lines[begins[-1] :] if line.startswith(("WHAT ", "EVIDENCE ", "FIX "))]


def test_unequal_numbers_inside_an_unchanged_launcher_are_refused_on_both(start: Start) -> None:
    """Its own count of devices is what differs: nothing in its arguments says so."""
    fronts = start(
        run(sys.executable, STANDIN, "program.py"),
        variables=({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "0"}),
    )
    ended(fronts, [3, 3])
    words = [last_words(front) for front in fronts]
    assert words[0] == words[1]
    assert "would start 2 ranks" in words[0][0]
    assert fronts[1].label in words[0][0]
    assert any("--uneven" in line for line in words[0])
    assert "world" not in "".join(front.text("out") for front in fronts)


@pytest.mark.long
def test_unequal_numbers_run_where_they_are_meant(start: Start) -> None:
    fronts = start(
        run(sys.executable, STANDIN, "program.py", flags=["--uneven"]),
        variables=({"NPROC_PER_NODE": "2"}, {"NPROC_PER_NODE": "1"}),
    )
    ended(fronts, [0, 0])
    assert "world 3" in fronts[0].text("out")
    assert "world 3" in fronts[1].text("out")


def test_other_words_on_one_node_are_refused_before_the_program_starts(start: Start) -> None:
    fronts = start(run(sys.executable, "-c", "open('started', 'w')", "--lr", "{node}"))
    ended(fronts, [3, 3])
    assert last_words(fronts[0]) == last_words(fronts[1])
    assert "--lr" in last_words(fronts[0])[0]


def test_a_node_that_never_comes_is_named(start: Start) -> None:
    (front,) = start(run("true", flags=["--join-timeout", "6"]), nodes=[0])
    assert front.wait(limit_s=LIMIT_S) == 3
    assert "[node_missing]" in front.text("err")
    assert "node 1" in last_words(front)[0]


def test_programs_without_a_launcher_meet_at_the_port_the_fronts_agreed_on(start: Start) -> None:
    """And the exit code of each is its own."""
    body = (
        "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], 'UNISONO_TOKEN' in"
        " os.environ); raise SystemExit(0)"
    )
    fronts = start(run(sys.executable, "-c", body))
    ended(fronts, [0, 0])
    printed = {front.text("out") for front in fronts}
    assert len(printed) == 1
    assert printed.pop().endswith("False")


@pytest.mark.ranks
def test_ranks_with_different_rows_are_refused_on_both_nodes_before_a_step(
    start: Start,
) -> None:
    fronts = start(run(sys.executable, "other_rows.py"))
    ended(fronts, [3, 3])
    words = [last_words(front) for front in fronts]
    assert words[0] == words[1]
    assert "[split_mismatch]" in words[0][0]
    assert all(f"rank {node}, {front.label}" in " ".join(words[0]) for node, front in enumerate(fronts))
    assert "a step" not in "".join(front.text("out") for front in fronts)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["unisono", "static", "c10d"])
def test_rank_killed_once_is_a_warning_on_both_nodes_if_launchers_restart(start: Start, backend: str) -> None:
    """Whatever the launchers keep of the first start, the second one's ranks meet each other."""
    ways = {
        "unisono": [],
        "static": ["--rdzv-backend", "static", "--master-addr", "{head}", "--master-port", "29717"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", "{head}:29717"],
    }
    fronts = start(run(sys.executable, STANDIN, *ways[backend], "--max-restarts", "2", "dies_once.py"))
    ended(fronts, [0, 0])
    assert all("world 2" in front.text("out") for front in fronts)
    assert "rank 1, node 1" in fronts[0].text("err")
    assert "killed by SIGKILL" in fronts[0].text("err")
    assert "may restart the ranks" in fronts[0].text("err")
    assert not any("WHAT " in front.text("err") for front in fronts)


@pytest.mark.long
def test_torchrun_by_hand_is_refused_and_agrees(start: Start) -> None:
    """Without a front: each launcher starts a small one of its own."""
    words = [
        str(BIN / "torchrun"), "--rdzv-backend", "unisono", "--rdzv-endpoint", "{head}:{port}", "--nnodes", "2", "--node-rank", "{node}",
        "program.py",
    ]  # fmt: skip
    fronts = start(words, variables=({"PET_NPROC_PER_NODE": "2"}, {"PET_NPROC_PER_NODE": "1"}))
    ended(fronts, [3, 3])
    assert last_words(fronts[0]) == last_words(fronts[1])


@pytest.mark.long
def test_torchrun_by_hand_trains_where_all_agree(start: Start) -> None:
    words = [
        str(BIN / "torchrun"), "--rdzv-backend", "unisono", "--rdzv-endpoint", "{head}:{port}", "--nnodes", "2", "--node-rank", "{node}",
        "--nproc-per-node", "1", "program.py",
    ]  # fmt: skip
    fronts = start(words)
    ended(fronts, [0, 0])
    assert all("world 2" in front.text("out") for front in fronts)


def _port_of(front: Front, folder: Path) -> str:
    """The MASTER_PORT of node 0's program, once that has begun."""
    place = folder / "node0" / "port"
    until(lambda: place.exists() or front.exit_code is not None, "the program has begun")
    port = place.read_text()
    place.unlink()
    return port


def _let_go(folder: Path) -> None:
    """The programs bind the port, and go on."""
    for node in (0, 1):
        (folder / f"node{node}" / "go").touch()
    until(lambda: not (folder / "node0" / "go").exists(), "the program goes on")


@contextmanager
def server_at(ground: Ground, port: str) -> Iterator[None]:
    """A process that listens on node 0's port, with SO_REUSEADDR."""
    words = [sys.executable, "-c", SERVER, ground.address(0), port]
    with subprocess.Popen(ground.command(0, words, Own()), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            yield
        finally:
            server.kill()


def test_program_whose_port_is_taken_by_a_server_gets_a_different_one(
    start: Start, ground: Ground, tmp_path: Path
) -> None:
    fronts = start(run(sys.executable, "late.py"))
    port = _port_of(fronts[0], tmp_path)
    with server_at(ground, port):
        _let_go(tmp_path)
        assert _port_of(fronts[0], tmp_path) != port
        _let_go(tmp_path)
        ended(fronts, [0, 0])
    for front in fronts:
        assert "world 2" in front.text("out")
        assert f"port {port} on node 0, MASTER_PORT of the program, was taken" in front.text("err")
        assert "WHAT " not in front.text("err")
    logs = tmp_path / "node0" / "out" / "logs"
    assert "EADDRINUSE" in next(logs.glob("*.log.1")).read_text()
    assert "EADDRINUSE" not in next(logs.glob("*.log")).read_text()


def test_ports_taken_at_every_try_are_the_cause_and_not_the_ended_ranks(
    start: Start, ground: Ground, tmp_path: Path
) -> None:
    fronts = start(run(sys.executable, "late.py"))
    with ExitStack() as servers:
        for _ in range(PORT_TRIES):
            servers.enter_context(server_at(ground, _port_of(fronts[0], tmp_path)))
            _let_go(tmp_path)
        ended(fronts, [3, 3])
    for front in fronts:
        words = last_words(front)
        assert "[port_in_use]" in words[0]
        assert "rank 0" in words[0]
        assert front.text("err").count("trying a different port") == PORT_TRIES - 1


def test_the_port_of_a_program_that_binds_it_late_cannot_be_taken_before(
    start: Start, ground: Ground, tmp_path: Path
) -> None:
    fronts = start(run(sys.executable, "late.py"))
    words = [sys.executable, "-c", THIEF, ground.address(0), _port_of(fronts[0], tmp_path)]
    thief = subprocess.run(
        ground.command(0, words, Own()), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert "Address already in use" in thief.stderr
    _let_go(tmp_path)
    ended(fronts, [0, 0])
    assert all("world 2" in front.text("out") for front in fronts)
