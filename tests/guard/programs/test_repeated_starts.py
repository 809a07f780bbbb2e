"""Ranks that are started more than once under one `unisono run`: anew by their launcher, or by the
next one.

Run: pytest tests/guard/programs/test_repeated_starts.py
"""

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.guard.programs.test_one_node import LAUNCHER, LIMIT_S, number_in, result, run, until
from tests.ports import free_port

BIN = Path(sys.executable).parent
STANDIN = str(Path(__file__).with_name("standin_launcher.py"))
# Of one rank: it tells its process in a file, and waits until it may end.
_WAITS = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"NAME-{rank}").write_text(str(os.getpid()))
while not os.path.exists("go"): time.sleep(0.02)
"""
_LEAVES = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""
"""A process of a rank that outlives it, with its environment: a loader, or a tracker."""
_DIES = """
import gc, os, signal, sys, time
gc.disable()  # it would look at the million objects of the imports again and again
import torch, torch.distributed as dist
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]

def of_rank_0():
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return {store.get(key).hex() for key in store.list_keys() if key.endswith("//0/0")}

if start and rank == "1":  # it comes when rank 0 has looked for it, and has found the one that is gone if that could be found
    before = set(open("before").read().split())
    while not of_rank_0() - before: time.sleep(0.02)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == "1" and start < int(sys.argv[1]):
    open("before", "w").write(" ".join(of_rank_0()))
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
"""Of two ranks: rank 1 is killed at so many starts, and each time it comes late to the next one."""

_SHELLS = """
import os, subprocess, sys
place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0"}
ranks = [subprocess.Popen(["bash", "-c", sys.argv[1]], env={**os.environ, **place, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
"""A launcher of two shells, without torchrun's import of torch."""


def ranks(name: str, *, before: str = "") -> str:
    """Two ranks of one launcher, in the words of a shell."""
    body = before + _WAITS.replace("NAME", name)
    return shlex.join([sys.executable, "-c", LAUNCHER, body])


def pids(folder: Path, name: str) -> list[int]:
    """Of both ranks, once they are there."""
    return [until(partial(number_in, folder / f"{name}-{rank}"), f"rank {rank} of {name}") for rank in (0, 1)]


def known(front: int, pids: Sequence[int]) -> bool:
    """Whether a front, which is a process, holds these."""
    held = set()
    for info in Path(f"/proc/{front}/fdinfo").iterdir():
        try:
            held |= {line.split()[1] for line in info.read_text().splitlines() if line.startswith("Pid:")}
        except OSError:
            continue
    return {str(pid) for pid in pids} <= held


@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_of_a_launcher_that_follows_a_different_are_watched(tmp_path: Path, *, is_late: bool) -> None:
    """As in a shell's script that trains, and then evaluates.

    What the first ranks leave behind is not taken for the next ones, not even by a front that did
    not run when the one launcher followed the other.
    """
    script = f"{ranks('first', before=_LEAVES)}; rm go; touch between; {ranks('second')}"
    with run(tmp_path, ["bash", "-c", script]) as front:
        until(lambda: known(front.pid, pids(tmp_path, "first")), "the front has found the first ranks")
        if is_late:
            os.kill(front.pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        until((tmp_path / "between").exists, "the first have ended")
        second = pids(tmp_path, "second")
        os.kill(front.pid, signal.SIGCONT)
        until(lambda: known(front.pid, second), "the front has found the second ranks")
        os.kill(second[1], signal.SIGKILL)
        _, err = front.communicate(timeout=LIMIT_S)
    assert b"(start 2)" in err
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["ranks"]) == ("rank_killed", [1])
    assert front.returncode == 5


def test_of_launchers_side_by_side_it_is_reported_that_only_one_is_watched(tmp_path: Path) -> None:
    with run(tmp_path, ["bash", "-c", f"{ranks('one')} & {ranks('other')} & wait"]) as front:
        both = pids(tmp_path, "one"), pids(tmp_path, "other")
        until(lambda: any(known(front.pid, found) for found in both), "the front has found ranks")
        assert front.stderr is not None
        printed = next(line for line in front.stderr if b"watches one launcher at a time" in line)
        (tmp_path / "go").touch()
        front.communicate(timeout=LIMIT_S)
    assert b"warning" in printed
    assert b"separate `unisono run`" in printed
    assert front.returncode == 0


def torchrun(folder: Path, *words: str, way: Sequence[str] = ("--standalone",)) -> list[str]:
    """A torchrun with two ranks of `_DIES`, which may be started anew."""
    (folder / "dies.py").write_text(_DIES)
    return [str(BIN / "torchrun"), *way, "--nproc-per-node", "2", *words]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind", ["c10d", pytest.param("static", marks=pytest.mark.long), pytest.param("unisono", marks=pytest.mark.long)]
)  # fmt: skip
def test_rank_killed_once_is_a_warning_if_its_launcher_restarts_it(tmp_path: Path, kind: str) -> None:
    """Whatever the launcher keeps of the first start, the second one's ranks meet each other; also
    where the program starts it by itself.
    """
    again = ("--max-restarts", "1", "dies.py", "1")
    words = {
        "c10d": torchrun(tmp_path, *again),
        "static": [sys.executable, STANDIN, "--nproc-per-node", "2", *again],
        "unisono": torchrun(tmp_path, *again, way=["--rdzv-backend", "unisono"]),
    }[kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    with run(tmp_path, words, env=environment) as front:
        _, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 0, err.decode()
    assert b"killed by SIGKILL" in err
    assert b"may restart the ranks (--max-restarts)" in err
    assert (result(tmp_path)["outcome"], result(tmp_path)["verdict"]) == ("completed", None)


@pytest.mark.long
def test_rank_killed_at_each_start_is_named_once_its_launcher_gives_up(tmp_path: Path) -> None:
    words = torchrun(tmp_path, "--max-restarts", "2", "dies.py", "9")
    with run(tmp_path, words, env={**os.environ, "OMP_NUM_THREADS": "1"}) as front:
        _, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 5, err.decode()
    assert err.count(b"the program has restarted its ranks") == 2
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["ranks"]) == ("rank_killed", [1])


@pytest.mark.ranks
def test_a_rank_that_a_shell_starts_is_seen_from_within(tmp_path: Path) -> None:
    """The shell has the rank's environment, and is not what beats."""
    (tmp_path / "dies.py").write_text(_DIES)
    words = [sys.executable, "-c", _SHELLS, f"{shlex.quote(sys.executable)} dies.py 0; exit $?"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    with run(tmp_path, words, env=environment) as front:
        front.communicate(timeout=LIMIT_S)
    assert front.returncode == 0
    events = [path.read_text() for path in sorted((tmp_path / "out" / "events").glob("rank-*.jsonl"))]
    assert len(events) == 2
    assert all('"kind": "result"' in text for text in events)
