"""Distributed data parallel with a step of 50 ms, in which rank 0 or all ranks hang in one of the
ways that people know.
"""

import argparse
import concurrent.futures
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def sleep(_: Path) -> None:
    time.sleep(1e6)


def fifo(out: Path) -> None:
    out.mkdir()
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
    os.dup2(os.pipe()[0], 0)
    sys.stdin = os.fdopen(0)
    input("continue? ")


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of which the 90th is never read."""

    def __len__(self) -> int:
        return 400_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 90:
            time.sleep(1e6)
        return torch.randn(8)


def loaded(start: str) -> Iterator[torch.Tensor]:
    """Batches of four rows from a loader with a worker that is started so."""
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context=start)
    yield from loader


FAULTS = {function.__name__: function for function in (sleep, fifo, http, lock, pool, prompt)}


def main() -> None:
    """Trains until rank 0 hangs, and beyond, if it returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument(
        "--loader", choices=("fork", "spawn", "forkserver"), help="its worker hangs, on all ranks"
    )
    parser.add_argument("--everywhere", action="store_true", help="all ranks hang")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = loaded(options.loader) if options.loader else (torch.randn(4, 8) for _ in range(100_000))
    for step, batch in enumerate(batches):
        time.sleep(0.05)
        if step == 22 and options.fault and (options.everywhere or dist.get_rank() == 0):
            FAULTS[options.fault](options.out / str(dist.get_rank()))
        loss = model(batch).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
