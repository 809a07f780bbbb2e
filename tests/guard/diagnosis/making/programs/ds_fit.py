# ruff: noqa: ICN001, ANN001, ANN201, PLW1508
# mypy: ignore-errors
"""DeepSpeed's engine on CPU; FAULT is what goes wrong, on rank BAD."""

import argparse
import datetime
import json
import os
import signal
import time

import deepspeed
import torch
from torch import nn

FAULT, BAD = os.environ.get("FAULT", ""), int(os.environ.get("BAD", 1))
HERE = int(os.environ.get("RANK", 0)) == BAD
LIMIT = datetime.timedelta(seconds=float(os.environ.get("LIMIT", 8)))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        if FAULT == "slow" and HERE and i > 40:
            time.sleep(120)
        if FAULT == "row" and HERE and i > 40:
            return json.loads('{"text": "an unfinished')
        return torch.randn(16), i % 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo", timeout=LIMIT)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=Rows()
    )
    for step, (x, y) in enumerate(loader):
        if FAULT == "kill" and HERE and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.cross_entropy(engine(x), y)
        if FAULT == "nan" and step > 3:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    engine.save_checkpoint(os.environ.get("OUT", "out"), tag="final")
    if FAULT == "twice":
        torch.distributed.destroy_process_group()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
