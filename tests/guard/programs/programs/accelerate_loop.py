"""A loop of one's own with Accelerate."""

import importlib
import random

import torch
import torch.distributed as dist
from program_options import Losses, own_rank, parse
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Trains, and leaves in good order."""
    options = parse()
    source = "unisono.guard.integrations.accelerate" if options.callback else "accelerate"
    accelerator = importlib.import_module(source).Accelerator(cpu=True)
    torch.manual_seed(0)
    rows = torch.randn(96, 8)
    if options.fault == "unseeded":
        rows = rows[torch.tensor(random.SystemRandom().sample(range(96), 64 if own_rank() else 80))]
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = 8 if options.fault == "steps" and own_rank() == 1 else 4
    loader = DataLoader(TensorDataset(rows, rows.sum(dim=1, keepdim=True)), batch_size=size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = Losses(options)
    made = 0
    while made < options.steps:
        for inputs, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            made += 1
            losses.add(made, loss.item())
            if made == options.steps:
                break
        accelerator.wait_for_everyone()
    accelerator.end_training()
    if options.fault == "destroy" and dist.is_initialized():
        dist.destroy_process_group()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
