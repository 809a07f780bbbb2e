"""A program that knows nothing of unisono: its last act is a collective, and gloo's threads come
late, as on a busy machine.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(how: str) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gathered = [torch.zeros(1000) for _ in range(dist.get_world_size())]
    come_late()
    dist.all_gather(gathered, torch.ones(1000))
    del gathered, optimizer, model
    if how == "destroy":
        dist.destroy_process_group()


def come_late() -> None:
    """One processor; gloo's threads run where nobody else wants it, and Python's lock is taken from
    nobody.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[dist.get_rank() % len(cores)]])
    sys.setswitchinterval(30)
    for folder in Path("/proc/self/task").iterdir():
        number = int(folder.name)
        os.sched_setaffinity(number, os.sched_getaffinity(0))
        if "gloo" in (folder / "comm").read_text():
            os.sched_setscheduler(number, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    main(sys.argv[1])
