"""Fully sharded data parallel, the second: as in torch's own tutorial, on CPU and gloo."""

import torch
import torch.distributed as dist
from program_options import Losses, parse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Trains, and leaves in good order."""
    options = parse()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    mesh = init_device_mesh(device, (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = Losses(options)
    draw = torch.Generator().manual_seed(rank)
    for step in range(1, options.steps - (3 if options.fault == "steps" and rank == 1 else 0) + 1):
        inputs = torch.randn(4, 16, generator=draw).to(device)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.add(step, loss.item())
    dist.barrier()
    dist.destroy_process_group()
    if options.fault == "destroy":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
