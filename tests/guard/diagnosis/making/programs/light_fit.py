# ruff: noqa: ANN001, ANN201, N812, PLW1508
# mypy: ignore-errors
"""Lightning on two CPU processes; MODE is what goes wrong."""

import os
import signal

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODE = os.environ.get("MODE", "")


class Net(L.LightningModule):
    """A layer that is used and one that may not be."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch, index):
        if index == 3 and self.global_rank == 1:
            if MODE == "exc":
                batch = {"x": batch[0]}
                return self.body(batch["pixel_values"]).sum()
            if MODE == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        h = self.body(batch[0])
        loss = (h if MODE == "unused" else self.spare(h)).pow(2).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss * float("nan") if MODE == "nan" and index > 2 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("DEVICES", 2)),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        detect_anomaly=MODE == "nan",
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4))
