"""What strikes a rank in the middle of a step."""

import ctypes
import os
import signal
import time

import torch

from unisono.errors import UnfitError
from unisono.plan import RunPlan
from unisono.train.faults.marking import mark, struck
from unisono.train.faults.pausing import pause
from unisono.train.run import Run

_MUTEX_BYTES = 64  # more than any platform's pthread_mutex_t; zeros are an open one
_BLOCK_BYTES = 8 << 20
_BLOCK_EVERY_S = 0.02


def in_data(plan: RunPlan, rank: int, step: int) -> None:
    """die and starve, where the batch of a step is made."""
    if (fault := struck(plan, "die", rank, step)) is not None:
        mark(plan, rank)
        _die(plan, rank, step, how=fault["how"], limit_bytes=fault.get("bytes", 0))
    if (fault := struck(plan, "starve", rank, step)) is not None:
        mark(plan, rank)
        with open(fault["fifo"], "rb") as source:  # noqa: PTH123 - waits here for somebody who writes
            source.read()
    if rank in plan.faults.get("one_step_less", ()) and step == plan.total_steps:
        mark(plan, rank)  # what it does after this step the others do not do with it


def in_compute(run: Run, step: int) -> None:
    """What happens between the batch and its forward: stop, hold_gil, sleep, spin, slow, drift, clock_jump, pause."""
    plan, rank = run.plan, run.group.rank
    if struck(plan, "stop", rank, step) is not None:
        mark(plan, rank)
        os.kill(os.getpid(), signal.SIGSTOP)
    for name, wait in (("hold_gil", _hold_gil), ("sleep", time.sleep), ("spin", _spin)):
        if (fault := struck(plan, name, rank, step)) is not None:
            mark(plan, rank)
            wait(fault["seconds"])
    slow = plan.faults.get("slow")
    if slow is not None and slow["rank"] == rank and step >= slow["step"]:
        mark(plan, rank)
        time.sleep(slow["seconds"])
    if struck(plan, "drift", rank, step) is not None:
        mark(plan, rank)
        with torch.no_grad():
            next(iter(run.forward.loaded.trainable.values())).view(-1)[0] += 1.0
    jump = plan.faults.get("clock_jump")
    if jump is not None and jump["step"] == step:
        mark(plan, rank)
        _put_clock_forward(jump["seconds"])
    pause(plan, rank, step, "sleep", "work", "collect")


def _die(plan: RunPlan, rank: int, step: int, *, how: str, limit_bytes: int) -> None:
    match how:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "exit0":
            os._exit(0)
        case "refuse":
            raise UnfitError.of(f"rank {rank} refuses at step {step}, as the fault wants it")
        case "oom":
            _take_memory(plan, rank, limit_bytes)
        case _:
            raise ValueError(f"rank {rank} dies at step {step}, as the fault wants it")


def _take_memory(plan: RunPlan, rank: int, limit_bytes: int) -> None:
    """Until the kernel has no more. Slowly, so that the moment of the last block is nearly that of the kill."""
    taken: list[bytes] = []
    while len(taken) * _BLOCK_BYTES < limit_bytes:
        taken.append(b"\1" * _BLOCK_BYTES)
        mark(plan, rank, again=True)
        time.sleep(_BLOCK_EVERY_S)
    raise MemoryError(f"{limit_bytes} bytes were taken, and nobody has killed this rank")


def _hold_gil(seconds: float) -> None:
    """Waits in C without giving Python's lock away. Not by sleep(3), which a signal ends, as the one that asks for stacks."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    until = time.clock_gettime(time.CLOCK_REALTIME) + seconds
    limit = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, limit)


def _spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def _put_clock_forward(seconds: float) -> None:
    """The wall clock of this process, as Python code sees it."""
    real = time.time
    time.time = lambda: real() + seconds
