"""Distributed data parallel as in torch's own tutorial: a linear model, a distributed sampler, one
all-reduce a step.
"""

import torch
import torch.distributed as dist
from program_options import Losses, parse
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main() -> None:
    """Trains, and leaves in good order."""
    options = parse()
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(256, 8)
    data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    if options.fault == "unseeded":  # every rank draws its own nine tenths
        chosen = torch.rand(256, generator=torch.Generator().manual_seed(torch.seed())) < (0.9 - 0.3 * rank)
        data = Subset(data, chosen.nonzero().flatten().tolist())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    losses = Losses(options)
    steps = options.steps - (3 if options.fault == "steps" and rank == 1 else 0)
    made, epoch = 0, 0
    while made < steps:
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            made += 1
            losses.add(made, loss.item())
            if made == steps:
                break
        epoch += 1
        if options.fault == "unseeded":
            dist.barrier()  # as those do who save at the end of an epoch
    dist.barrier()
    dist.destroy_process_group()
    if options.fault == "destroy":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
