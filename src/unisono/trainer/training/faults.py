"""Faults that drills and tests inject into a run with `plan.faults`; a config cannot contain
them.

This list is complete. Steps are optimizer steps, from 1; a fault with a step occurs at that step.

Input of a rank, detected before step 1:
one_row_more      [rank, …]        these ranks have an additional row
unseeded_split    [rank, …]        these ranks split their rows with an unseeded generator
flip_weight_bit   [rank, …]        these ranks have a weight with one bit flipped
flip_reference_bit  [rank, …]      these ranks have a reference with such a weight (preference.reference: PATH)
other_tokenizer   [rank, …]        these ranks have a different tokenizer

Ends of a rank:
die               {rank, step, how: exception | sigkill | exit | exit0 | refuse | oom}    at the start of that step; exit0 exits as
                                   after success; oom allocates memory, at most `bytes`, until the
                                   kernel kills the rank
one_step_less     [rank, …]        these ranks take the run for one step shorter, and exit before the others
hang_in_teardown  {rank}           an extra thread keeps the process alive after its result
destroy_twice     {rank}           destroys the process group, which is then destroyed again

Hangs and delays:
stop              {rank, step}     SIGSTOP to itself
starve            {rank, step, fifo}        reads its batch from a FIFO without a writer
hold_gil          {rank, step, seconds}     in native code that holds the GIL
sleep             {rank, step, seconds}     in Python, between forward and backward
spin              {rank, step, seconds}     the same, in a busy loop
slow              {rank, step, seconds}     in each step from that one on

Different behaviour of one rank:
other_collective  {rank, step}     gathers where the others sum
other_shape       {rank, step}     sums a tensor with one element more
drift             {rank, step}     changes a trained weight
nan_steps         [step, …]        the gradient of these steps is NaN on all ranks
nan_loss          {rank, steps}    its part of the loss of these steps is NaN

Not faults, although they look like one:
pause             [{how: sleep | work | collect | evaluate | sync | save, seconds, steps: [step, …] or every, ranks: [rank, …] or none for all}, …]
                                   a slow first step, a compilation, a garbage collection of many
                                   objects; a slow round of the evaluation after that step; a slow
                                   sync of metrics before its save; a slow save
clock_jump        {step, seconds}  the wall clock of every rank is off by that much from then on
write_rows        directory        every rank records which rows went into each of its forwards
marks             directory        a rank records the time of its fault there, in ns of the monotonic clock: rank-00001
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from unisono.base.errors import UnfitError
from unisono.guard.watch import Beats
from unisono.trainer.data.token_table import Batch, TokenTable
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.run import Run

__all__ = [
    "at_the_end",
    "change_loaded",
    "change_reference",
    "change_table",
    "corrupt_gradient",
    "corrupt_loss",
    "in_compute",
    "in_data",
    "pause",
    "plan_of_rank",
    "wrap_group",
    "write_rows",
]


# ---- Input of a rank


def change_loaded(plan: RunPlan, rank: int, loaded: LoadedModel) -> None:
    """flip_weight_bit and other_tokenizer."""
    if rank in plan.faults.get("flip_weight_bit", ()):
        _flip_bit(loaded)
    if rank in plan.faults.get("other_tokenizer", ()):
        loaded.tokenizer.add_tokens(["<|of another tokenizer|>"])


def change_reference(plan: RunPlan, rank: int, loaded: LoadedModel) -> None:
    """flip_reference_bit."""
    if rank in plan.faults.get("flip_reference_bit", ()):
        _flip_bit(loaded)


def _flip_bit(loaded: LoadedModel) -> None:
    parameters = list(loaded.model.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    with torch.no_grad():
        (frozen or parameters)[0].data.view(torch.uint8).view(-1)[0] ^= 1


def change_table(plan: RunPlan, rank: int, table: TokenTable) -> TokenTable:
    """one_row_more and unseeded_split."""
    if rank in plan.faults.get("one_row_more", ()):
        table = _with_one_more(table)
    if rank in plan.faults.get("unseeded_split", ()):
        order = list(range(table.rows))
        random.SystemRandom().shuffle(order)
        table = dataclasses.replace(table, columns={name: v[order] for name, v in table.columns.items()})
    return table


def plan_of_rank(plan: RunPlan, rank: int) -> RunPlan:
    """one_step_less: the plan that this rank follows after all have agreed."""
    if rank not in plan.faults.get("one_step_less", ()):
        return plan
    return plan.model_copy(update={"total_steps": plan.total_steps - 1})


def _with_one_more(table: TokenTable) -> TokenTable:
    """The table with its last row repeated, as a sequence of its own."""
    last = table.rows_of(table.sequences - 1)[-1]
    extra = {"tokens": table.columns["length"][last], "loss_tokens": table.columns["loss"][last]}
    return dataclasses.replace(
        table,
        columns={name: np.append(values, values[last]) for name, values in table.columns.items()},
        sequence_rows=np.append(table.sequence_rows, table.rows),
        sequence_ends=np.append(table.sequence_ends, table.sequence_ends[-1] + 1),
        sequence_columns={
            name: np.append(values, extra[name]) for name, values in table.sequence_columns.items()
        },
    )


def wrap_group(group: Group, plan: RunPlan, beats: Beats) -> Group:
    """other_collective and other_shape: the group that this rank uses.

    Beats record the actual calls.
    """
    if "other_collective" in plan.faults or "other_shape" in plan.faults:
        return _FaultyGroup(group, plan, beats)
    return group


class _FaultyGroup:
    """A group whose sum is replaced by a different operation, once."""

    def __init__(self, group: Group, plan: RunPlan, beats: Beats) -> None:
        self._group, self._plan, self._beats = group, plan, beats
        self.rank, self.world_size, self.is_main = group.rank, group.world_size, group.is_main

    def sum(self, tensor: torch.Tensor) -> None:
        self._group.sum(self._instead(tensor))

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        return self._group.begin_sum(self._instead(tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor)

    def any(self, statement: bool) -> bool:  # noqa: FBT001 - as of the group
        return self._group.any(statement)

    def barrier(self) -> None:
        self._group.barrier()

    def figures(self, summed: torch.Tensor) -> list[float]:
        return self._group.figures(summed)

    def leave_note(self, note: str) -> None:
        self._group.leave_note(note)

    def has_note(self, note: str) -> bool:
        return self._group.has_note(note)

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to sum in place of `tensor`; a different collective may be called before."""
        step = self._beats.step
        if due_fault(self._plan, "other_collective", self.rank, step) is not None:
            mark(self._plan, self.rank)
            self._beats.begin_collective("all_gather", tensor.numel())
            with self._beats.waiting():
                dist.all_gather([torch.empty_like(tensor) for _ in range(self.world_size)], tensor)
        if due_fault(self._plan, "other_shape", self.rank, step) is not None:
            mark(self._plan, self.rank)
            return torch.cat([tensor, tensor.new_zeros(1)])
        return tensor


_FOR_EVER_S = 3600.0


def at_the_end(plan: RunPlan, rank: int) -> None:
    """hang_in_teardown and destroy_twice. No collective follows."""
    if plan.faults.get("hang_in_teardown", {}).get("rank") == rank:
        mark(plan, rank)
        # Python waits for such a thread before it exits, as for that of a tracker that cannot reach
        # its server.
        threading.Thread(target=time.sleep, args=(_FOR_EVER_S,), name="tracker").start()
    if plan.faults.get("destroy_twice", {}).get("rank") == rank:
        mark(plan, rank)
        dist.destroy_process_group()


def mark(plan: RunPlan, rank: int, *, again: bool = False) -> None:
    """Records the time of the fault, from which drills measure.

    The first one counts, unless `again`.
    """
    directory = plan.faults.get("marks")
    if directory is None:
        return
    path = Path(directory) / f"rank-{rank:05d}"
    now = f"{time.monotonic_ns()}\n"
    if again:
        path.write_text(now)
        return
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(now)


def due_fault(plan: RunPlan, name: str, rank: int, step: int) -> dict[str, Any] | None:
    """The fault of this name, if it is due on this rank at this step."""
    fault: dict[str, Any] | None = plan.faults.get(name)
    if fault is None or (fault["rank"], fault["step"]) != (rank, step):
        return None
    return fault


_SLICE_S = 0.5
_LITTER = 2_000_000
_litter: list[list[int]] = []  # kept for the whole run, like a large data set of Python objects


def pause(
    plan: RunPlan, rank: int, step: int, *places: str, on_slice: Callable[[], object] | None = None
) -> None:
    """Makes each pause that is due at one of these places.

    Args:
        plan: has the pauses.
        rank: of this process.
        step: the step in progress.
        places: the kinds of pause that apply here.
        on_slice: called twice a second to record progress.
    """
    for wanted in plan.faults.get("pause", ()):
        if wanted["how"] in places and rank in wanted.get("ranks", (rank,)) and _is_due(wanted, step):
            _PAUSES[wanted["how"]](float(wanted["seconds"]), on_slice or (lambda: None))


def _is_due(wanted: dict[str, Any], step: int) -> bool:
    every = wanted.get("every")
    return step in wanted.get("steps", ()) or (every is not None and step % every == 0)


def _sleep(seconds: float, on_slice: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_S))
        on_slice()


def _work(seconds: float, on_slice: Callable[[], object]) -> None:
    """Compiles source code, as an example of native work in Python."""
    source = "\n".join(f"x{i} = [{i}, {i} + x{i - 1}]" for i in range(1, 2000))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        compile(source, "<pause>", "exec")
        on_slice()


def _collect(seconds: float, on_slice: Callable[[], object]) -> None:
    """Runs full garbage collections of many objects; each holds the GIL."""
    if not _litter:
        _litter.extend([number] for number in range(_LITTER))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        gc.collect()
        on_slice()


_PAUSES: dict[str, Callable[[float, Callable[[], object]], None]] = {
    "sleep": _sleep,
    "work": _work,
    "collect": _collect,
    "evaluate": _sleep,
    "sync": _sleep,
    "save": _sleep,
}


def write_rows(plan: RunPlan, rank: int, step: int, batch: Batch) -> None:
    """write_rows: writes a line for each forward whose loss counts, with each row's id and the
    digest of its tokens.

    The line is written before the forward starts, so that a kill hides no row that was trained on.
    """
    directory = plan.faults.get("write_rows")
    if directory is None:
        return
    ends = np.cumsum(batch.lengths)
    tokens = [ids.tobytes() for ids in np.split(batch.input_ids, ends[:-1])]
    rows = [[name, xxhash.xxh3_64_hexdigest(ids)] for name, ids in zip(batch.row_ids, tokens, strict=True)]
    line = {
        "time": time.time(),
        "epoch": plan.epoch,
        "world_size": plan.world_size,
        "rank": rank,
        "step": step,
        "rows": rows,
    }
    with (Path(directory) / f"rank-{rank:05d}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def corrupt_loss(plan: RunPlan, rank: int, step: int, loss: torch.Tensor) -> torch.Tensor:
    """nan_loss: the loss of a micro batch, or NaN."""
    fault = plan.faults.get("nan_loss")
    if fault is None or rank != fault["rank"] or step not in fault["steps"]:
        return loss
    mark(plan, rank)
    return loss * math.nan


def corrupt_gradient(plan: RunPlan, step: int, parameter: torch.Tensor) -> None:
    """nan_steps: replaces the gradient by NaN."""
    if step in plan.faults.get("nan_steps", ()):
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, math.nan)
        else:
            parameter.grad.fill_(math.nan)


_MUTEX_BYTES = 64  # larger than any platform's pthread_mutex_t; zeros are an unlocked mutex
_BLOCK_BYTES = 8 << 20
_BLOCK_EVERY_S = 0.02


def in_data(plan: RunPlan, rank: int, step: int) -> None:
    """die, starve and one_step_less, where the batch of a step is built."""
    if (fault := due_fault(plan, "die", rank, step)) is not None:
        mark(plan, rank)
        _die(plan, rank, step, how=fault["how"], limit_bytes=fault.get("bytes", 0))
    if (fault := due_fault(plan, "starve", rank, step)) is not None:
        mark(plan, rank)
        with open(fault["fifo"], "rb") as source:  # noqa: PTH123 - blocks until a writer opens it
            source.read()
    if rank in plan.faults.get("one_step_less", ()) and step == plan.total_steps:
        mark(plan, rank)  # after this step it does what the others do not


def in_compute(run: Run, step: int) -> None:
    """stop, hold_gil, sleep, spin, slow, drift, clock_jump and pause, between the batch and its
    forward.
    """
    plan, rank = run.plan, run.group.rank
    if due_fault(plan, "stop", rank, step) is not None:
        mark(plan, rank)
        os.kill(os.getpid(), signal.SIGSTOP)
    for name, wait in (("hold_gil", _hold_gil), ("sleep", time.sleep), ("spin", _spin)):
        if (fault := due_fault(plan, name, rank, step)) is not None:
            mark(plan, rank)
            wait(fault["seconds"])
    slow = plan.faults.get("slow")
    if slow is not None and slow["rank"] == rank and step >= slow["step"]:
        mark(plan, rank)
        time.sleep(slow["seconds"])
    if due_fault(plan, "drift", rank, step) is not None:
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
    """Allocates until the kernel kills the process; slowly, so that the time of the last block is
    close to that of the kill.
    """
    taken: list[bytes] = []
    while len(taken) * _BLOCK_BYTES < limit_bytes:
        taken.append(b"\1" * _BLOCK_BYTES)
        mark(plan, rank, again=True)
        time.sleep(_BLOCK_EVERY_S)
    raise MemoryError(f"{limit_bytes} bytes were allocated, and this rank was not killed")


def _hold_gil(seconds: float) -> None:
    """Waits in C while holding the GIL.

    Not with sleep(3), which a signal interrupts, e.g. the one that requests stacks.
    """
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
    """Shifts this process's wall clock, as Python code sees it."""
    real = time.time
    time.time = lambda: real() + seconds
