"""A program that knows nothing of unisono: DDP over gloo on the CPU.

What goes wrong in it is named on its command line.
"""

import ctypes
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if FAULT == "unseeded":
        torch.manual_seed(rank)  # as if nobody had seeded
    rows = TensorDataset(torch.arange(64.0).repeat(8, 1).T.contiguous())
    train, _ = random_split(rows, [48, 16])
    sampler = DistributedSampler(train, num_replicas=world, rank=rank)
    loader = DataLoader(train, batch_size=2, sampler=sampler)
    steps, epoch = 0, 0
    last = STEPS - 4 if FAULT == "unequal" and rank == 1 else STEPS
    while steps < last:
        sampler.set_epoch(epoch)
        epoch += 1
        for (batch,) in loader:
            if rank == 1 and steps == 8:
                strike(rank, world)
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            print(f"rank {rank} step {steps}", flush=True)
            time.sleep(0.02)
            if steps >= last:
                break
    dist.barrier()
    dist.destroy_process_group()
    if FAULT == "twice":
        dist.destroy_process_group()
    if FAULT == "stands" and rank == 1:
        # With the interpreter's lock, as a process group that waits for its own thread.
        ctypes.PyDLL(None).sleep(600)
    print(f"rank {rank} is done", flush=True)


def strike(rank: int, world: int) -> None:
    if FAULT == "sleep":
        time.sleep(600)
    elif FAULT == "other":
        dist.all_gather_object([None] * world, rank)
    elif FAULT == "evaluate":
        evaluate()
    elif FAULT == "raise":
        raise ZeroDivisionError("a batch of nothing")


def evaluate() -> None:
    """Eight seconds: in this process, in another one, and once more in this one, but in small
    pieces.
    """
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        torch.ones(64, 64).sum()
    subprocess.run(
        [sys.executable, "-S", "-c", "import time\nend = time.time() + 2.5\nwhile time.time() < end: pass"],
        check=True,
    )
    until = time.monotonic() + 3
    while time.monotonic() < until:
        sum(range(200_000))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
