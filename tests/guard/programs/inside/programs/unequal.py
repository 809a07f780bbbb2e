"""A loop of one's own with the three lines, and no loader of torch: rank 1 has fewer batches, and
waits at the end.
"""

import torch
import torch.distributed as dist

import unisono

dist.init_process_group("gloo")
batches = range(20 if dist.get_rank() else 24)
with unisono.guarded() as guard:
    for number in guard.steps(batches):
        dist.all_reduce(torch.ones(8 + number % 2))  # as with rows of several lengths
        guard.step(1.0)
dist.barrier()
dist.destroy_process_group()
