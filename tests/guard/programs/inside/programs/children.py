"""A program that makes its ranks by itself, with the start method that is named, and has a loader
with processes in each of them.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset


def rank_main(rank: int, folder: str, context: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), num_workers=1, multiprocessing_context=context)
    for (batch,) in loader:
        total = batch.sum()
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1 and "raise" in sys.argv:
        raise ZeroDivisionError("a batch of nothing")


if __name__ == "__main__":
    mp.start_processes(rank_main, args=(sys.argv[1], sys.argv[2]), nprocs=2, start_method=sys.argv[2])
    print("all done", flush=True)
