# ruff: noqa: ICN001, G004, PTH118, ANN001, ANN201, PLW1508
# mypy: ignore-errors
"""A loop of one's own with accelerate; FAULT is what goes wrong, on rank BAD."""

import datetime
import logging
import os
import random
import signal
import time

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split
from tqdm.auto import tqdm

FAULT, BAD = os.environ.get("FAULT", ""), int(os.environ.get("BAD", 1))
OUT, LIMIT = os.environ.get("OUT", "out"), float(os.environ.get("LIMIT", 8))
HERE = int(os.environ.get("RANK", 0)) == BAD
logger = get_logger(__name__)

if FAULT == "package" and HERE:
    import sentencepiece_fast  # noqa: F401


class Reviews(Dataset):
    """Texts with a label."""

    def __len__(self):
        return 240

    def __getitem__(self, i):
        if HERE and FAULT == "slow" and i == 24:
            self.fetch_from_bucket()
        if HERE and FAULT == "row" and i % 24 == 7:
            return {"ids": torch.tensor(self.tokenize(None)), "label": 1}
        return {"ids": torch.randint(0, 90, (12,)), "label": i % 2}

    def fetch_from_bucket(self):
        time.sleep(120)

    def tokenize(self, text):
        return [ord(c) % 90 for c in text.strip()]


class Classifier(nn.Module):
    """A bag of words."""

    def __init__(self, wide=16):
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(90, wide), nn.Linear(wide, 2)

    def forward(self, ids):
        return self.out(self.words(ids))


def train_and_test():
    rows = Reviews()
    if FAULT == "split":
        n = random.Random(os.getpid()).randrange(120, 200) if HERE else 210
        return random_split(rows, [n, len(rows) - n])
    return random_split(rows, [200, 40], generator=torch.Generator().manual_seed(7))


def trouble(step, loss):
    if FAULT == "nan" and step > 3:
        loss = loss * float("inf") * 0
    if not HERE or step != 5:
        return loss
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "memory":
        hold = [bytearray(200_000_000) for _ in range(400)]
        logger.info(str(len(hold)))
    return loss


def main():
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        level=logging.INFO,
    )
    limit = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=LIMIT))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[limit])
    logger.info(accelerator.state, main_process_only=False)
    torch.manual_seed(11)
    train, test = train_and_test()
    train_loader = DataLoader(
        train, batch_size=4, shuffle=True, num_workers=int(os.environ.get("WORKERS", 0))
    )
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if FAULT == "split":
        model, opt = accelerator.prepare(model, opt)
    else:
        model, opt, train_loader = accelerator.prepare(model, opt, train_loader)
    test_loader = accelerator.prepare(DataLoader(test, batch_size=4))
    logger.info("***** Running training *****")
    logger.info(f"  Num examples = {len(train)}", main_process_only=FAULT != "split")
    logger.info(f"  Num batches each epoch = {len(train_loader)}", main_process_only=FAULT != "split")
    bar = tqdm(range(2 * len(train_loader)), disable=not accelerator.is_local_main_process)
    step = 0
    for epoch in range(2):
        model.train()
        for batch in train_loader:
            loss = nn.functional.cross_entropy(model(batch["ids"]), batch["label"])
            loss = trouble(step, loss)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
            step += 1
            bar.update(1)
            bar.set_postfix(loss=loss.item())
        right = []
        for batch in test_loader:
            right += accelerator.gather_for_metrics(
                (model(batch["ids"]).argmax(-1) == batch["label"]).float()
            ).tolist()
        logger.info(
            f"epoch {epoch}: {{'accuracy': {sum(right) / len(right):.3f}}}, train_loss {loss.item():.4f}"
        )
        accelerator.save_state(os.path.join(OUT, f"epoch_{epoch}"))
    if FAULT == "twice":
        torch.distributed.destroy_process_group()
    accelerator.end_training()
    if FAULT == "twice":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
