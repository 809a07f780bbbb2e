"""Faults that drills and tests inject into a run with `plan.faults`; a config cannot contain
them.

This list is complete. Steps are optimizer steps, from 1; a fault with a step occurs at that step.

Input of a rank, detected before step 1:
one_row_more      [rank, …]        these ranks have an additional row
unseeded_split    [rank, …]        these ranks split their rows with an unseeded generator
flip_weight_bit   [rank, …]        these ranks have a weight with one bit flipped
flip_reference_bit  [rank, …]      these ranks have a reference with such a weight
                                   (preference.reference: PATH)
other_tokenizer   [rank, …]        these ranks have a different tokenizer

Ends of a rank:
die               {rank, step, how: exception | sigkill | exit | exit0 | refuse | oom}
                                   at the start of that step; exit0 exits as after success; oom
                                   allocates memory, at most `bytes`, until the kernel kills the
                                   rank
one_step_less     [rank, …]        these ranks take the run for one step shorter, and exit before
                                   the others
hang_in_teardown  {rank}           an extra thread keeps the process alive after its result
destroy_twice     {rank}           destroys the process group, which is then destroyed again

Hangs and delays:
stop              {rank, step}     SIGSTOP to itself
starve            {rank, step, fifo}        reads its batch from a FIFO without a writer
hold_gil          {rank, step, seconds}     in native code that holds the GIL
sleep             {rank, step, seconds}     in Python, between forward and backward
spin              {rank, step, seconds}     the same, in a busy loop
slow              {rank, step, seconds}     in each step from that one on

slow_sampling     {rank, seconds}  each token of sampled answers takes so much longer
reward            true             the rewards of the config fail by themselves (front/drill)

Different behaviour of one rank:
other_collective  {rank, step}     gathers where the others sum
other_shape       {rank, step}     sums a tensor with one element more
drift             {rank, step}     changes a trained weight
nan_steps         [step, …]        the gradient of these steps is NaN on all ranks
nan_loss          {rank, steps}    its part of the loss of these steps is NaN

Not faults, although they look like one:
pause             [{how: sleep | work | collect | evaluate | sync | save, seconds,
                    steps: [step, …] or every, ranks: [rank, …] or none for all}, …]
                                   a slow first step, a compilation, a garbage collection of many
                                   objects; a slow round of the evaluation after that step; a slow
                                   sync of metrics before its save; a slow save
clock_jump        {step, seconds}  the wall clock of every rank is off by that much from then on
write_rows        directory        every rank records which rows went into each of its forwards
marks             directory        a rank records the time of its fault there, in ns of the
                                   monotonic clock: rank-00001
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
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from unisono.base.errors import UnfitError
from unisono.guard.facts import read_environment
from unisono.guard.watch import Beats
from unisono.trainer.batches.source import Micro
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.hooks import RunHook, Work
from unisono.trainer.training.join import find_place
from unisono.trainer.training.process_group import Group


class PlannedFault(TypedDict, total=False):
    """One of `plan.faults`; above are the fields of each."""

    rank: int
    step: int
    steps: list[int]
    every: int
    how: str
    seconds: float
    bytes: int
    fifo: str


def faults_of(plan: RunPlan) -> tuple[RunHook, ...]:
    """The hooks of this process's rank; none if the plan names no faults."""
    return (InjectedFaults(plan, find_place(plan, read_environment()).rank),) if plan.faults else ()


class InjectedFaults(RunHook):
    """Causes the faults of a plan on one rank."""

    def __init__(self, plan: RunPlan, rank: int) -> None:
        self._plan, self._rank, self._faults = plan, rank, plan.faults
        self._loaded: LoadedModel | None = None

    def model_loaded(self, loaded: LoadedModel) -> None:
        """flip_weight_bit, other_tokenizer and slow_sampling."""
        self._loaded = loaded
        slow = self._faults.get("slow_sampling")
        if slow is not None and slow["rank"] == self._rank:
            loaded.model.get_input_embeddings().register_forward_pre_hook(
                lambda *_: self._sleep_in_sampling(slow["seconds"])
            )
        if self._is_named("flip_weight_bit"):
            _flip_bit(loaded)
        if self._is_named("other_tokenizer"):
            loaded.tokenizer.add_tokens(["<|of another tokenizer|>"])

    def _sleep_in_sampling(self, seconds: float) -> None:
        if not torch.is_grad_enabled():
            mark(self._plan, self._rank)
            time.sleep(seconds)

    def reference_loaded(self, loaded: LoadedModel) -> None:
        """flip_reference_bit."""
        if self._is_named("flip_reference_bit"):
            _flip_bit(loaded)

    def table_opened(self, table: TokenTable) -> TokenTable:
        """one_row_more and unseeded_split."""
        if self._is_named("one_row_more"):
            table = _with_one_more(table)
        if self._is_named("unseeded_split"):
            order = list(range(table.rows))
            random.SystemRandom().shuffle(order)
            table = dataclasses.replace(table, columns={name: v[order] for name, v in table.columns.items()})
        return table

    def ranks_joined(self, group: Group, beats: Beats) -> Group:
        """other_collective and other_shape. Beats record the actual calls."""
        if "other_collective" in self._faults or "other_shape" in self._faults:
            return _FaultyGroup(group, self._plan, beats)
        return group

    def plan_agreed(self, plan: RunPlan) -> RunPlan:
        """one_step_less."""
        if not self._is_named("one_step_less"):
            return plan
        self._plan = self._plan.model_copy(update={"total_steps": plan.total_steps - 1})
        return plan.model_copy(update={"total_steps": plan.total_steps - 1})

    def step_begins(self, step: int) -> None:
        """die, starve and one_step_less."""
        if (fault := self._due("die", step)) is not None:
            _die(self._plan, self._rank, step, how=fault["how"], limit_bytes=fault.get("bytes", 0))
        if (fault := self._due("starve", step)) is not None:
            with open(fault["fifo"], "rb") as source:  # noqa: PTH123 - blocks until a writer opens it
                source.read()
        if self._is_named("one_step_less") and step == self._plan.total_steps:
            mark(self._plan, self._rank)  # after this step it does what the others do not

    def forward_begins(self, step: int, micro: Micro | None, *, is_first: bool) -> None:
        """write_rows; and stop, hold_gil, sleep, spin, slow, drift, clock_jump and pause."""
        if micro is not None:
            _write_rows(self._plan, self._rank, step, micro)
        if not is_first:
            return
        if self._due("stop", step) is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        for name, wait in (("hold_gil", _hold_gil), ("sleep", time.sleep), ("spin", _spin)):
            if (fault := self._due(name, step)) is not None:
                wait(fault["seconds"])
        slow = self._faults.get("slow")
        if slow is not None and slow["rank"] == self._rank and step >= slow["step"]:
            mark(self._plan, self._rank)
            time.sleep(slow["seconds"])
        if self._due("drift", step) is not None:
            with torch.no_grad():
                self._first_trained().view(-1)[0] += 1.0
        jump = self._faults.get("clock_jump")
        if jump is not None and jump["step"] == step:
            mark(self._plan, self._rank)
            _put_clock_forward(jump["seconds"])
        self._pause(step, lambda: None, "sleep", "work", "collect")

    def loss_computed(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """nan_loss."""
        fault = self._faults.get("nan_loss")
        if fault is None or self._rank != fault["rank"] or step not in fault["steps"]:
            return loss
        mark(self._plan, self._rank)
        return loss * math.nan

    def gradients_computed(self, step: int) -> None:
        """nan_steps."""
        if step in self._faults.get("nan_steps", ()):
            parameter = self._first_trained()
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, math.nan)
            else:
                parameter.grad.fill_(math.nan)

    def work_begins(self, work: Work, step: int, advance: Callable[[], object]) -> None:
        """pause."""
        self._pause(step, advance, work)

    def run_ends(self) -> None:
        """hang_in_teardown and destroy_twice."""
        if self._faults.get("hang_in_teardown", {}).get("rank") == self._rank:
            mark(self._plan, self._rank)
            # Python waits for such a thread before it exits, as for that of a tracker that cannot
            # reach its server.
            threading.Thread(target=time.sleep, args=(_FOR_EVER_S,), name="tracker").start()
        if self._faults.get("destroy_twice", {}).get("rank") == self._rank:
            mark(self._plan, self._rank)
            dist.destroy_process_group()

    def _first_trained(self) -> torch.nn.Parameter:
        assert self._loaded is not None
        return next(iter(self._loaded.trainable.values()))

    def _is_named(self, name: str) -> bool:
        """Whether a fault is one of this rank."""
        return self._rank in self._faults.get(name, ())

    def _due(self, name: str, step: int) -> PlannedFault | None:
        """A fault that is due on this rank at this step. Its time is recorded."""
        fault = due_fault(self._plan, name, self._rank, step)
        if fault is not None:
            mark(self._plan, self._rank)
        return fault

    def _pause(self, step: int, advance: Callable[[], object], *kinds: str) -> None:
        """Makes each pause of these kinds that is due; `advance` is called twice a second."""
        for pause in self._faults.get("pause", ()):
            if (
                pause["how"] in kinds
                and self._rank in pause.get("ranks", (self._rank,))
                and _is_due(pause, step)
            ):
                _PAUSES[pause["how"]](float(pause["seconds"]), advance)


# ---- Input of a rank


def _flip_bit(loaded: LoadedModel) -> None:
    parameters = list(loaded.model.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    with torch.no_grad():
        (frozen or parameters)[0].data.view(torch.uint8).view(-1)[0] ^= 1


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


def due_fault(plan: RunPlan, name: str, rank: int, step: int) -> PlannedFault | None:
    """The fault of this name, if it is due on this rank at this step."""
    fault: PlannedFault | None = plan.faults.get(name)
    if fault is None or (fault["rank"], fault["step"]) != (rank, step):
        return None
    return fault


_SLICE_S = 0.5
_LITTER = 2_000_000
_litter: list[list[int]] = []  # kept for the whole run, like a large data set of Python objects


def _is_due(fault: PlannedFault, step: int) -> bool:
    every = fault.get("every")
    return step in fault.get("steps", ()) or (every is not None and step % every == 0)


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


def _write_rows(plan: RunPlan, rank: int, step: int, micro: Micro) -> None:
    """Writes a line for each forward whose loss counts, with each row's id and the digest of its
    tokens.

    The line is written before the forward starts, so that a kill hides no row that was trained on.
    """
    directory = plan.faults.get("write_rows")
    if directory is None:
        return
    tokens = [ids.cpu().numpy().tobytes() for ids in micro.rows.input_ids.split(micro.rows.lengths)]
    rows = [[name, xxhash.xxh3_64_hexdigest(ids)] for name, ids in zip(micro.row_ids, tokens, strict=True)]
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


_MUTEX_BYTES = 64  # larger than any platform's pthread_mutex_t; zeros are an unlocked mutex
_BLOCK_BYTES = 8 << 20
_BLOCK_EVERY_S = 0.02


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
