"""Joins the other rank by what its launcher has set, sums once, and leaves."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {int(total)}", flush=True)
dist.destroy_process_group()
