"""A training on two nodes, and ways to lose one of them."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.guard.programs.guarded import PROGRAMS, Guarded, Program
from tests.jobs.nodes.network_namespaces import Namespaces

_WORDS = ("--out", "out", "--steps", "50000", "--step-s", "0.05")
TRAINING = Program(
    "torch DDP, a launcher as LLaMA-Factory's, two nodes",
    "",
    (sys.executable, str(PROGRAMS / "launcher.py"), *_WORDS),
)
_BY_HAND = f"""
import os, sys
sys.path.insert(0, {str(PROGRAMS)!r})
from program_options import Losses, parse
import torch, torch.distributed as dist
if "RANK" not in os.environ:  # without torchrun: one rank on each node
    os.environ |= {{"RANK": os.environ["NODE_RANK"], "WORLD_SIZE": os.environ["NNODES"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}}
options = parse()
dist.init_process_group()
weights, losses = torch.zeros(8, requires_grad=True), Losses(options)
for step in range(1, options.steps + 1):
    rows = torch.randn(4, 8)
    loss = (rows @ weights - rows.sum(dim=1)).pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, weights)
    dist.all_reduce(gradient)
    weights.data -= 0.05 * gradient
    losses.add(step, loss.item())
"""
"""A training without DistributedDataParallel and optimizers, whose imports take half of what the
start of a rank costs.
"""
WITHOUT_LAUNCHER = Program("a rank on each of two nodes", "", (sys.executable, "training.py", *_WORDS))
LAUNCHED = Program(
    "a launcher as LLaMA-Factory's, two nodes", "", (sys.executable, str(Path(__file__).with_name("standin_launcher.py")), "training.py", *_WORDS)
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
            (own / "training.py").write_text(_BY_HAND)
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
