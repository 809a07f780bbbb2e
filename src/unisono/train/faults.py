"""Faults that drills and tests put into a run, in `plan.faults`; a config cannot hold them.

This is all there are. Steps are optimizer steps, from 1; a fault with a step strikes at that step.

What a rank brings, found before step 1:
one_row_more      [rank, …]        these ranks have a row more than the others
unseeded_split    [rank, …]        these ranks have split their rows with a generator that nobody seeded
flip_weight_bit   [rank, …]        these ranks hold a weight with one bit turned
other_tokenizer   [rank, …]        these ranks have another tokenizer

How a rank ends:
die               {rank, step, how: exception | sigkill | exit | exit0 | refuse | oom}    at the start of that step; exit0 leaves as
                                   if all were well; oom takes memory, `bytes` at most, until the kernel kills the rank
one_step_less     [rank, …]        these ranks believe that the run has a step less, and leave before the others
hang_in_teardown  {rank}           a thread of its own keeps the process after its result
destroy_twice     {rank}           it destroys the process group, which is then destroyed again

How a rank hangs, or is late:
stop              {rank, step}     SIGSTOP to itself
starve            {rank, step, fifo}        reads its batch from a FIFO that nobody writes
hold_gil          {rank, step, seconds}     in native code that keeps Python's lock
sleep             {rank, step, seconds}     in Python, between forward and backward
spin              {rank, step, seconds}     the same, in a loop
slow              {rank, step, seconds}     in each step from that one on

What a rank does otherwise than the rest:
other_collective  {rank, step}     gathers where the others sum
other_shape       {rank, step}     sums a tensor with an element more
drift             {rank, step}     changes a weight that is trained
nan_steps         [step, …]        the gradient of these steps is not a number, on all ranks
nan_loss          {rank, steps}    its part of the loss of these steps is not a number

What is no fault, though it looks like one:
pause             [{how: sleep | work | collect | evaluate | sync | save, seconds, steps: [step, …] or every, ranks: [rank, …] or none for all}, …]
                                   a slow first step, a compiler's work, a garbage collection of many objects; a slow round of the
                                   evaluation after that step; metrics that are slow to be synced before its save; a slow save of it
clock_jump        {step, seconds}  the wall clock of every rank is off by so much from then on
write_rows        directory        every rank writes down which rows went into each of its forwards
marks             directory        a rank that a fault strikes leaves the moment there, in ns of the monotonic clock: rank-00001
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

from unisono.data.token_table import Batch, TokenTable
from unisono.errors import UnfitError
from unisono.model.load import LoadedModel
from unisono.plan import RunPlan
from unisono.train.process_group import Group
from unisono.train.run import Run
from unisono.watch import Beats

__all__ = [
    "among",
    "at_the_end",
    "believed",
    "change_loaded",
    "change_table",
    "in_compute",
    "in_data",
    "pause",
    "spoil_gradient",
    "spoil_loss",
    "write_rows",
]


def change_loaded(plan: RunPlan, rank: int, loaded: LoadedModel) -> None:
    """flip_weight_bit and other_tokenizer."""
    if rank in plan.faults.get("flip_weight_bit", ()):
        parameters = list(loaded.model.parameters())
        frozen = [p for p in parameters if not p.requires_grad]
        with torch.no_grad():
            (frozen or parameters)[0].data.view(torch.uint8).view(-1)[0] ^= 1
    if rank in plan.faults.get("other_tokenizer", ()):
        loaded.tokenizer.add_tokens(["<|of another tokenizer|>"])


def change_table(plan: RunPlan, rank: int, table: TokenTable) -> TokenTable:
    """one_row_more and unseeded_split."""
    if rank in plan.faults.get("one_row_more", ()):
        table = _with_one_more(table)
    if rank in plan.faults.get("unseeded_split", ()):
        order = list(range(table.rows))
        random.SystemRandom().shuffle(order)
        table = dataclasses.replace(table, columns={name: v[order] for name, v in table.columns.items()})
    return table


def believed(plan: RunPlan, rank: int) -> RunPlan:
    """one_step_less: the plan as this rank believes it to be once all have agreed on it."""
    if rank not in plan.faults.get("one_step_less", ()):
        return plan
    return plan.model_copy(update={"total_steps": plan.total_steps - 1})


def _with_one_more(table: TokenTable) -> TokenTable:
    """The last row once more, as a sequence of its own."""
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


def among(group: Group, plan: RunPlan, beats: Beats) -> Group:
    """other_collective and other_shape: the group as this rank will use it. Beats record what is really called."""
    if "other_collective" in plan.faults or "other_shape" in plan.faults:
        return _Odd(group, plan, beats)
    return group


class _Odd:
    """A group whose sum is another operation, once."""

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
        """What is summed in place of `tensor`; before that another collective may come."""
        step = self._beats.step
        if struck(self._plan, "other_collective", self.rank, step) is not None:
            mark(self._plan, self.rank)
            self._beats.begin_collective("all_gather", tensor.numel())
            with self._beats.waiting():
                dist.all_gather([torch.empty_like(tensor) for _ in range(self.world_size)], tensor)
        if struck(self._plan, "other_shape", self.rank, step) is not None:
            mark(self._plan, self.rank)
            return torch.cat([tensor, tensor.new_zeros(1)])
        return tensor


_FOR_EVER_S = 3600.0


def at_the_end(plan: RunPlan, rank: int) -> None:
    """hang_in_teardown and destroy_twice. No collective comes after this."""
    if plan.faults.get("hang_in_teardown", {}).get("rank") == rank:
        mark(plan, rank)
        # Python waits for such a thread before it leaves, as for a tracker's that cannot reach its server.
        threading.Thread(target=time.sleep, args=(_FOR_EVER_S,), name="tracker").start()
    if plan.faults.get("destroy_twice", {}).get("rank") == rank:
        mark(plan, rank)
        dist.destroy_process_group()


def mark(plan: RunPlan, rank: int, *, again: bool = False) -> None:
    """Leaves the moment for who times the drill. The first one counts, unless `again`."""
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


def struck(plan: RunPlan, name: str, rank: int, step: int) -> dict[str, Any] | None:
    """The fault of this name, if it strikes this rank at this step."""
    fault: dict[str, Any] | None = plan.faults.get(name)
    if fault is None or (fault["rank"], fault["step"]) != (rank, step):
        return None
    return fault


_SLICE_S = 0.5
_LITTER = 2_000_000
_litter: list[list[int]] = []  # kept over the run, as a large data set in Python objects is


def pause(
    plan: RunPlan, rank: int, step: int, *places: str, on_slice: Callable[[], object] | None = None
) -> None:
    """Does each pause that is due at one of these places.

    Args:
        plan: holds the pauses.
        rank: this one.
        step: that is worked on, evaluated or saved.
        places: the ways to pause that belong here.
        on_slice: progress is told by it, twice a second.
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
    """Compiles, which is Python's own native work."""
    source = "\n".join(f"x{i} = [{i}, {i} + x{i - 1}]" for i in range(1, 2000))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        compile(source, "<pause>", "exec")
        on_slice()


def _collect(seconds: float, on_slice: Callable[[], object]) -> None:
    """Full collections of many objects; each of them holds Python's lock."""
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
    """write_rows: a line for a forward whose loss counts, with each row's id and the digest of the tokens that went in.

    A line is on its way to the disk before the forward begins, so that a kill hides nothing that was trained on.
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


def spoil_loss(plan: RunPlan, rank: int, step: int, loss: torch.Tensor) -> torch.Tensor:
    """nan_loss: the loss of a micro batch, or what is no number."""
    fault = plan.faults.get("nan_loss")
    if fault is None or rank != fault["rank"] or step not in fault["steps"]:
        return loss
    mark(plan, rank)
    return loss * math.nan


def spoil_gradient(plan: RunPlan, step: int, parameter: torch.Tensor) -> None:
    """nan_steps."""
    if step in plan.faults.get("nan_steps", ()):
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, math.nan)
        else:
            parameter.grad.fill_(math.nan)


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
