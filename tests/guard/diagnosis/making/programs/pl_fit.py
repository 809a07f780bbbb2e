# ruff: noqa: ICN001, ANN001, ANN201, N812, PLW1508
# mypy: ignore-errors
"""Lightning with a data module, validation and checkpoints; FAULT is what goes wrong, on rank
BAD.
"""

import datetime
import os
import random
import signal
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

FAULT, BAD = os.environ.get("FAULT", ""), int(os.environ.get("BAD", 1))
LIMIT = float(os.environ.get("LIMIT", 8))


class Waves(Dataset):
    """Sine waves and their frequency."""

    def __init__(self, n=200):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if FAULT == "slow" and i > 40 and rank() == BAD:
            time.sleep(120)
        if FAULT == "row" and i > 40 and rank() == BAD:
            raise OSError(f"waves/{i:05d}.wav: unexpected end of file, 1024 of 4096 samples")
        f = 1 + i % 7
        return torch.sin(torch.arange(16) * f / 3), torch.tensor([float(f)])


def rank():
    d = torch.distributed
    return d.get_rank() if d.is_initialized() else 0


class WaveData(L.LightningDataModule):
    def setup(self, stage):
        rows = Waves()
        if FAULT == "split":
            n = random.Random(os.getpid()).randrange(60, 140) if rank() == BAD else 180
            self.train, self.val = random_split(rows, [n, len(rows) - n])
            print(
                f"[rank {rank()}] {len(self.train)} train rows, {len(self.val)} validation rows", flush=True
            )
        else:
            self.train, self.val = random_split(rows, [160, 40], generator=torch.Generator().manual_seed(3))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=FAULT == "split")

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Frequency(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if FAULT == "nan" and index > 3:
            loss = loss / 0 * 0
        if FAULT == "kill" and index == 4 and rank() == BAD:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "memory" and index == 4 and rank() == BAD:
            self.cache = [torch.ones(60_000_000) for _ in range(400)]
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val/loss", nn.functional.mse_loss(self.net(x), y), prog_bar=True, sync_dist=FAULT == "sync")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_fit_end(self):
        if FAULT == "twice":
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    L.seed_everything(5)
    more = {"gpus": 2} if FAULT == "argument" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("DEVICES", 2)),
        num_nodes=int(os.environ.get("NODES", 1)),
        strategy=DDPStrategy(timeout=datetime.timedelta(seconds=LIMIT)),
        max_epochs=2,
        logger=False,
        use_distributed_sampler=FAULT != "split",
        default_root_dir=os.environ.get("OUT", "out"),
        callbacks=[ModelCheckpoint(dirpath=os.environ.get("OUT", "out"), every_n_epochs=1)],
        **more,
    )
    trainer.fit(Frequency(), WaveData())
    if FAULT == "twice":
        torch.distributed.destroy_process_group()
