"""A training on two nodes, and ways to lose one of them."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.nodes.network_namespaces import Namespaces
from tests.run.guarded import PROGRAMS, Guarded, Program

_WORDS = ("--out", "out", "--steps", "50000", "--step-s", "0.05")
TRAINING = Program(
    "torch DDP, a launcher as LLaMA-Factory's, two nodes",
    "",
    (sys.executable, str(PROGRAMS / "launcher.py"), *_WORDS),
)
_RANK_OF_ITS_NODE = """
import os, runpy, sys
os.environ |= {"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": os.environ["NNODES"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
sys.path[0] = sys.argv.pop(1)
runpy.run_path(f"{sys.path[0]}/ddp.py", run_name="__main__")
"""
WITHOUT_LAUNCHER = Program(
    "torch DDP, a rank on each of two nodes", "", (sys.executable, "-c", _RANK_OF_ITS_NODE, str(PROGRAMS), *_WORDS)
)  # fmt: skip


@contextlib.contextmanager
def training_on_two_nodes(
    apart: Namespaces, folder: Path, program: Program = TRAINING
) -> Iterator[list[Guarded]]:
    """A rank on each, which have made some steps and would go on for long."""
    begun: list[Guarded] = []
    try:
        for node in range(2):
            own = folder / f"node{node}"
            own.mkdir()
            changes = {
                "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": apart.address(0), "MASTER_PORT": str(apart.head_port()),
                "NPROC_PER_NODE": "1", "UNISONO_TOKEN": "0123456789abcdef0123456789abcdef", "GLOO_SOCKET_IFNAME": "eth0",
            }  # fmt: skip
            begun.append(Guarded(program, own, changes=changes, ground=apart, node=node))
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
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut(apart: Namespaces, node: int) -> None:
    """Nothing comes from the node any more, nor goes there."""
    apart.inside(node, "ip", "link", "set", "eth0", "down")


def lose_power(apart: Namespaces, node: int) -> None:
    """Both."""
    cut(apart, node)
    kill(apart, node)
