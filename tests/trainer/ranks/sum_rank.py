"""One rank of a sum: `sum_rank.py RANK WORLD PORT_FILE WAY`; prints a JSON line.

WAY is `dies` (rank 1 is gone before the second sum) or `differs` (instead of the second sum rank 1
enters a sum of one number).
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from unisono.trainer.training.process_group import Listener, Ranks, close_group

ELEMENTS = (1 << 20) + 37  # parts of different sizes


def values(rank: int) -> torch.Tensor:
    """The gradients of a rank, of very different sizes, so that the order of a sum is seen in its
    bits.
    """
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ELEMENTS, generator=generator) * 10.0 ** (4 * rank)


def port_of(file: Path) -> int:
    """The port that rank 0 has written."""
    while not file.is_file():
        time.sleep(0.01)
    return int(file.read_text())


def main() -> None:
    """Two sums, as in two steps."""
    rank, world, file, way = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    listener = Listener("127.0.0.1") if rank == 0 else None
    if listener is not None:
        file.with_suffix(".new").write_text(str(listener.port))
        file.with_suffix(".new").rename(file)
    store = ("127.0.0.1", port_of(file))
    group = Ranks("sums", rank=rank, world_size=world, device=torch.device("cpu"), store=store, listener=listener)  # fmt: skip
    buffer = torch.zeros(ELEMENTS)
    for step in range(2):
        if way == "dies" and rank == 1 and step == 1:
            os._exit(9)
        buffer.copy_(values(rank))
        try:
            if way == "differs" and rank == 1 and step == 1:
                group.any(False)
                os._exit(0)
            group.begin_sum(buffer)()
        except RuntimeError as error:
            print(json.dumps({"error": str(error)}))
            os._exit(0)
    close_group(orderly=True)


if __name__ == "__main__":
    main()
