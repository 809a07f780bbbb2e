"""A training loop with a common mistake: every rank splits the rows by itself, with a seed of its
own, so that ranks have different numbers of batches.

torchrun --nproc-per-node 2 examples/unequal_split.py                     hangs at the end of the epoch, until the process group's timeout
unisono run -- torchrun --nproc-per-node 2 examples/unequal_split.py      names the cause and the rank in seconds
"""

import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ROWS, KEPT, BATCH = 2_000, 0.9, 8


def main() -> None:
    """Trains for an epoch, as far as the other ranks do."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank = dist.get_rank()
    split = random.Random(rank)  # noqa: S311 - the mistake: the seed must be the same on all ranks
    rows = [row for row in range(ROWS) if split.random() < KEPT]
    mine = rows[rank :: dist.get_world_size()]
    batches = len(mine) // BATCH
    print(f"--> Training Set Length = {len(mine)} (rank {rank}), {batches} batches", flush=True)

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(batches):
        loss = model(torch.randn(BATCH, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # an all-reduce: it needs the other rank
        optimizer.step()
    dist.barrier()
    print(f"rank {rank} has finished, process {os.getpid()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
