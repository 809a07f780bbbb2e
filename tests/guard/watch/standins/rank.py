"""A rank that does one deed and no training.

Started as a worker; its plan is `{"deeds": {"0": "sleep"}, "folder": …}`.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unisono.base.child import end_with_front, parse_child_arguments
from unisono.guard.watch import Beats, Pulse
from unisono.trainer.worker.entry import _begin_to_beat


def main(argv: list[str]) -> None:
    arguments = parse_child_arguments(argv, named=False)
    end_with_front(arguments.front_pid)
    plan = json.loads(arguments.file.read_text())
    deed = plan["deeds"][os.environ["RANK"]]
    if deed == "before_handler":
        ctypes.CDLL(None).sleep(600)
    beats, pulse = _begin_to_beat(arguments.beat_fds)
    beats.begin_step(1)
    beats.begin_step(7)
    beats.begin_micro([11, 12, 13])
    globals()[deed](beats, pulse, Path(plan["folder"]))


def work(beats: Beats, pulse: Pulse, folder: Path) -> None:
    while True:
        beats.enter("compute")
        time.sleep(0.01)


def sleep(beats: Beats, pulse: Pulse, folder: Path) -> None:
    time.sleep(600)


def spin(beats: Beats, pulse: Pulse, folder: Path) -> None:
    while True:
        pass


def gil(beats: Beats, pulse: Pulse, folder: Path) -> None:
    time.sleep(0.3)  # one pulse at least
    while True:
        ctypes.PyDLL(None).sleep(600)  # a signal interrupts it


def fifo(beats: Beats, pulse: Pulse, folder: Path) -> None:
    os.read(os.open(folder / "fifo", os.O_RDWR), 1)


def loader(beats: Beats, pulse: Pulse, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "loader.pid").write_text(str(child.pid))
    child.wait()


def own_thread(beats: Beats, pulse: Pulse, folder: Path) -> None:
    beats.enter("load_model")
    time.sleep(600)


def reads(beats: Beats, pulse: Pulse, folder: Path) -> None:
    """Loads a model that is so large that nothing is heard of it for long."""
    beats.enter("load_model")
    with Path("/dev/zero").open("rb", buffering=0) as file:
        while True:
            file.read(1 << 20)
            time.sleep(0.02)


def leave(beats: Beats, pulse: Pulse, folder: Path) -> None:
    sys.exit(3)


def _join(beats: Beats, pulse: Pulse, folder: Path) -> Any:
    import torch.distributed as dist

    from unisono.base.torch_internals import flight_record

    pulse.answer = flight_record
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return dist


def collective(beats: Beats, pulse: Pulse, folder: Path) -> None:
    """Some sums that all take part in, then one that this rank waits in."""
    dist = _join(beats, pulse, folder)
    _sums(dist, beats, 5)
    _sums(dist, beats, 1, elements=1000)


def gathers_instead(beats: Beats, pulse: Pulse, folder: Path) -> None:
    import torch

    dist = _join(beats, pulse, folder)
    _sums(dist, beats, 5)
    beats.begin_collective("all_gather", 3)
    with beats.waiting():
        dist.all_gather([torch.zeros(3) for _ in range(dist.get_world_size())], torch.ones(3))


def barrier_instead(beats: Beats, pulse: Pulse, folder: Path) -> None:
    dist = _join(beats, pulse, folder)
    _sums(dist, beats, 5)
    beats.begin_collective("barrier", 0)
    with beats.waiting():
        dist.barrier()


def sleeps_after_sums(beats: Beats, pulse: Pulse, folder: Path) -> None:
    dist = _join(beats, pulse, folder)
    _sums(dist, beats, 5)
    time.sleep(600)


def _sums(dist: Any, beats: Beats, count: int, *, elements: int = 7) -> None:
    import torch

    for _ in range(count):
        beats.begin_collective("all_reduce", elements)
        with beats.waiting():
            dist.all_reduce(torch.ones(elements))


if __name__ == "__main__":
    main(sys.argv[1:])
