"""Starts torchrun as LLaMA-Factory 0.9.5 does (src/llamafactory/launcher.py): statically, with the
number of ranks that this node counts by itself.
"""

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path


def main() -> None:
    """Starts ddp.py with our arguments."""
    words = (
        "torchrun --nnodes {nnodes} --node_rank {node_rank} --nproc_per_node {nproc_per_node} "
        "--master_addr {master_addr} --master_port {master_port} {file_name} {args}"
    ).format(
        nnodes=os.getenv("NNODES", "1"),
        node_rank=os.getenv("NODE_RANK", "0"),
        nproc_per_node=os.getenv(
            "NPROC_PER_NODE", str(len(os.getenv("CUDA_VISIBLE_DEVICES", "0,1").split(",")))
        ),
        master_addr=os.getenv("MASTER_ADDR", "127.0.0.1"),
        master_port=os.getenv("MASTER_PORT", "29533"),
        file_name=Path(__file__).with_name("ddp.py"),
        args=" ".join(sys.argv[1:]),
    )
    process = subprocess.run(words.split(), env=deepcopy(os.environ), check=True)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
