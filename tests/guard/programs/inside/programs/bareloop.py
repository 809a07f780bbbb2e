"""DDP over gloo, and rows that are no loader's: nothing shows where a step begins.

Rank 1 has fewer of them, or sums up alone in its loop.

With a second word the loop is in a thread of its own, as Ray has it.
"""

import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(60 if FAULT == "unequal" and rank == 1 else 64):
        model(torch.full((2, 8), float(number))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        if FAULT == "alone" and rank == 1 and number == 59:
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        training = threading.Thread(target=main)
        training.start()
        training.join()
    else:
        main()
