"""A node is lost while a program runs under `unisono run` on two. Run: pytest tests/run/test_lost_node.py"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nodes.ground import Ground, Namespaces, why_no_namespaces
from tests.run.guarded import LIMIT_S, PROGRAMS, Guarded, Program
from tests.run.test_one_node import until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

_WORDS = (str(PROGRAMS / "launcher.py"), "--out", "out", "--steps", "50000", "--step-s", "0.02")
TRAINING = Program("a training for hours", "", (sys.executable, *_WORDS))
TOKEN = "0123456789abcdef0123456789abcdef"
NAMED_S = 60.0  # some 8 s of silence are due
SILENT_S = 3.0


@pytest.fixture
def apart(ground: Ground) -> Namespaces:
    """Nodes whose network can be cut."""
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    return ground


@pytest.fixture
def both(apart: Namespaces, tmp_path: Path) -> Iterator[list[Guarded]]:
    """A rank on each of two nodes, in the midst of a training."""
    begun = []
    try:
        for node in range(2):
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            changes = {
                "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": apart.address(0), "MASTER_PORT": str(apart.head_port()),
                "NPROC_PER_NODE": "1", "UNISONO_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            begun.append(Guarded(TRAINING, folder, changes=changes, ground=apart, node=node))
        for node, guarded in enumerate(begun):
            guarded.pid_at(node, 4)
        yield begun
    finally:
        apart.open()
        for guarded in begun:
            guarded.close()


def kill(apart: Namespaces, node: int) -> None:
    """All that runs on a node, its front as well."""
    for pid in apart.pids(node):
        os.kill(pid, signal.SIGKILL)


def cut(apart: Namespaces, node: int) -> None:
    """Nothing comes from the node any more, nor goes there."""
    apart.inside(node, "ip", "link", "set", "eth0", "down")


def lose_power(apart: Namespaces, node: int) -> None:
    cut(apart, node)
    kill(apart, node)


@pytest.mark.parametrize("blow", [lose_power, kill, cut])
def test_a_node_that_is_lost_is_named_and_nothing_of_the_program_is_left(
    blow: Callable[[Namespaces, int], None], both: list[Guarded], apart: Namespaces
) -> None:
    blow(apart, 1)
    ended = both[0].ended(since=time.monotonic())
    assert ended.verdict is not None, both[0].front.text()
    assert (ended.verdict.cause, ended.verdict.hosts) == ("node_unreachable", (apart.host(1),))
    assert ended.exit_code == 4
    assert ended.named_s is not None
    assert ended.named_s < NAMED_S
    seconds = ended.verdict.named_after_s
    assert seconds is not None
    assert (seconds < SILENT_S) == (blow is kill), (
        "silence is counted, and a broken connection is seen at once"
    )
    both[1].front.wait(limit_s=LIMIT_S)
    until(lambda: not any(apart.pids(node) for node in range(2)), "nothing is left on either node")


@pytest.mark.parametrize("blow", [lose_power, cut])
def test_a_node_that_loses_the_head_says_so_and_ends_its_ranks(
    blow: Callable[[Namespaces, int], None], both: list[Guarded], apart: Namespaces
) -> None:
    blow(apart, 0)
    ended = both[1].ended(since=time.monotonic())
    assert ended.verdict is not None, both[1].front.text()
    assert ended.verdict.cause == "node_unreachable"
    assert ended.exit_code == 4
    both[0].front.wait(limit_s=LIMIT_S)
    until(lambda: not any(apart.pids(node) for node in range(2)), "nothing is left on either node")
