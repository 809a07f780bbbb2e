"""Lightning's Trainer on a linear model."""

import os
import random
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from program_options import Losses, own_rank, parse
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):
    """A linear model."""

    def __init__(self, losses: Losses) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self._losses = losses

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, wanted = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), wanted)
        self._losses.add(self.global_step + 1, loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing is done with it."""
        inputs, wanted = batch
        self.log("val", torch.nn.functional.mse_loss(self.layer(inputs), wanted), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Trains and evaluates."""
    options = parse()
    torch.manual_seed(0)
    rows = torch.randn(96, 8)
    if options.fault == "unseeded":
        rows = rows[torch.tensor(random.SystemRandom().sample(range(96), 64))]
    data = TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    steps = options.steps - (2 if options.fault == "steps" and own_rank() == 1 else 0)
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("DEVICES", "1")))
    callbacks: list[Callback] = []
    if options.callback:
        from unisono.integrations import LightningCallback

        callbacks.append(LightningCallback())
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), strategy="ddp" if world_size > 1 else "auto",
        max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=callbacks, default_root_dir=str(options.out), log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(
        Line(Losses(options)), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4)
    )
    if options.fault == "destroy" and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
