"""Distributed data parallel with a step of 50 ms, in which rank 0 hangs in one of the ways that people know."""

import argparse
import concurrent.futures
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def sleep(_: Path) -> None:
    time.sleep(1e6)


def fifo(out: Path) -> None:
    path = out / "fifo"
    os.mkfifo(path)
    path.read_text()


def http(_: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname()) as request,
    ):
        request.recv(1)


def lock(_: Path) -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def pool(_: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: threads.submit(int).result()).result()


def prompt(_: Path) -> None:
    sys.stdin = os.fdopen(os.pipe()[0])
    input("continue? ")


FAULTS = {function.__name__: function for function in (sleep, fifo, http, lock, pool, prompt)}


def main() -> None:
    """Trains until rank 0 hangs, and beyond, if it returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        time.sleep(0.05)
        if step == 22 and dist.get_rank() == 0:
            (options.out / "stalls").touch()
            FAULTS[options.fault](options.out)
        loss = model(torch.randn(4, 8)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
