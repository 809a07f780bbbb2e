"""Starts torchrun as LLaMA-Factory 0.9.5's launcher does: static mode by its arguments, ranks from
NPROC_PER_NODE or the visible devices.

python standin_launcher.py PROGRAM.py ARGUMENTS; the nodes come from NNODES, NODE_RANK, MASTER_ADDR
and MASTER_PORT.
"""

import os
import subprocess
import sys
from pathlib import Path


def visible() -> int:
    """As many as CUDA_VISIBLE_DEVICES names; 1 where it is not set, as on a machine with one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(named.split(",")) if named else 1


def main() -> int:
    """Starts torchrun, and waits."""
    env = os.environ
    nproc = env.get("NPROC_PER_NODE", str(visible()))
    command = [
        str(Path(sys.executable).parent / "torchrun"), "--nnodes", env.get("NNODES", "1"), "--node_rank", env.get("NODE_RANK", "0"),
        "--nproc_per_node", nproc, "--master_addr", env.get("MASTER_ADDR", "127.0.0.1"), "--master_port", env.get("MASTER_PORT", "29500"),
        *sys.argv[1:],
    ]  # fmt: skip
    return subprocess.run(command, env=dict(env), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
