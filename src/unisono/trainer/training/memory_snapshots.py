"""Keeps finished steps of an adapter in memory that the front owns, so that the death of this
process loses no step, or few.

It is for adapters only: the trained state is small, and a copy costs little compared with a step.
The cost is measured before step 1 and again in the first steps; if it is too high, only every
second, fourth, … step is kept. All ranks decide alike: by the step's number.
"""

import errno
import mmap
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from unisono.base.errors import (
    Problem,
    UnfitError,
    storage_reason,
    storage_remedy,
    storage_verdict,
    storage_words,
)
from unisono.base.text import show_bytes
from unisono.guard.facts.limits import available_memory
from unisono.guard.rundir.records import without_nan
from unisono.trainer.checkpoint.snapshot import SLOTS, SlotLayout, Slots, TensorEntry, needed_bytes, slot_text
from unisono.trainer.checkpoint.state import DTYPES, OptimizerValues, RunValues, dtype_name
from unisono.trainer.model import foreach
from unisono.trainer.training.optim import state_before_a_step
from unisono.trainer.training.run import Contents, Run, contents_of
from unisono.trainer.training.saver import RankTensor

LIMIT = 0.01
"""The maximum cost of keeping steps, as a share of the time of all steps."""
MOST_EVERY = 64
"""If even one step in so many is too expensive to keep, none is kept."""
_TRIALS = 5
MEASURED = 10
_LEFT_OUT = 1  # the first step is warmup, and keeping it allocates the slots
_BLOCK_BYTES = 1 << 19  # copied, and digested while it is still in the cache
_MOST_OF_FREE = 0.1
_OFF = "; if a rank dies, the run resumes from its last checkpoint"


class MemorySnapshots:
    """This rank's newest steps in memory.

    Every rank of an adapter run has one; not every rank has memory for it.
    """

    def __init__(self, fd: int | None) -> None:
        """Keeps nothing yet.

        Args:
            fd: memory that this process inherited from its front; None: this rank keeps nothing,
                and only takes part in the decisions.
        """
        self._fd = fd
        self._slots: _TensorSlots | None = None
        self._lines: list[dict[str, float | None]] = []
        self._sequence = 0
        self._is_off = False
        self._every = 1
        self._costs: list[float] = []
        self._steps: list[float] = []

    def prepare(self, run: Run, *, step_time_s: float) -> int | None:
        """Decides before the first step, by an estimate, which steps are kept: every n-th; None if
        none.

        All ranks must call it.

        Args:
            run: before its first step.
            step_time_s: estimated time of a step.

        Raises:
            UnfitError: if the system does not provide the memory.
        """
        trial = _contents_after_a_step(run)
        if self._turned_off_at_once(run, trial):
            return None
        cost = self._try(run, self._fd, trial) if self._fd is not None else 0.0
        return self._decide(run, cost / max(step_time_s, 1e-9))

    def publish(self, run: Run, line: dict[str, float], *, step_time_s: float | None = None) -> None:
        """Keeps the present state, if this step is to be kept, with the line that is about to be
        written to metrics.jsonl.

        All ranks must call it.

        Args:
            run: after a step, or after its evaluation.
            line: this step's line of metrics.jsonl.
            step_time_s: time of the step; None after an evaluation, which is not measured.
        """
        if self._is_off:
            return
        measures = len(self._costs) < _LEFT_OUT + MEASURED
        is_turn = run.state.step % self._every == 0 or run.state.step == run.plan.total_steps
        if step_time_s is not None and not measures and not is_turn:  # an evaluation is too expensive to lose
            self._lines = [without_nan(line)]
            return
        began = time.perf_counter()
        if self._fd is not None:
            self._keep(run, self._fd, without_nan(line))
        self._sequence += 1
        if run.sharded is not None:
            run.group.barrier()  # each rank has only a part, so the step counts once all have kept theirs
        if step_time_s is not None and measures:
            self._costs.append(time.perf_counter() - began)
            self._steps.append(step_time_s)
            if len(self._costs) == _LEFT_OUT + MEASURED:
                self._judge(run)

    def _turned_off_at_once(self, run: Run, trial: Contents) -> bool:
        """Whether a rank has no place for its part, or too little memory.

        All ranks must call it.
        """
        needed = SLOTS * sum(part.tensor.nbytes for parts in trial.groups.values() for part in parts)
        free = available_memory() if self._fd is not None else 0
        too_much = self._fd is not None and needed > _MOST_OF_FREE * free
        if run.group.any(too_much):
            size = f"{show_bytes(needed)} of the {show_bytes(free)} that are free"
            self._turn_off(run, f"keeping each step in memory would take {size}: turned off{_OFF}")
        elif run.group.any(self._fd is None and run.group.rank in run.plan.mesh.checkpoint_writers):
            self._is_off = True  # the ranks were not started by the front: nothing would read the memory
        return self._is_off

    def _try(self, run: Run, fd: int, trial: Contents) -> float:
        """Seconds that keeping a step takes: the median of a few trials, which leave nothing
        behind.
        """
        slots = _TensorSlots(fd, trial, [], text_bytes=len(self._text(run, contents_of(run))))
        times = []
        for number in range(SLOTS + _TRIALS):
            began = time.perf_counter()
            slots.write(number, step=0, text=self._text(run, contents_of(run)))
            times.append(time.perf_counter() - began)
        os.ftruncate(fd, 0)
        return statistics.median(times[SLOTS:])  # the first write to a slot has the kernel map its pages

    def _decide(self, run: Run, share: float) -> int | None:
        """Which steps are kept, by the cost on the slowest rank.

        All ranks must call it, and get the same.
        """
        self._every = 1
        while run.group.any(share > LIMIT * self._every):
            self._every *= 2
            if self._every > MOST_EVERY:
                return None
        return self._every

    def _keep(self, run: Run, fd: int, line: dict[str, float | None]) -> None:
        same_step = bool(self._lines) and self._lines[0]["step"] == line["step"]
        self._lines = [*self._lines, line] if same_step else [line]
        slots = self._slots
        if slots is None or not slots.is_of(_state_tensors(run)):
            slots = self._new_slots(run, fd)
        text = self._text(run, slots.contents)
        if not slots.has_room(text):
            slots = self._new_slots(run, fd)
        slots.write(self._sequence, step=run.state.step, text=text)

    def _new_slots(self, run: Run, fd: int) -> "_TensorSlots":
        self._slots = None  # frees the old memory before new memory is allocated
        contents = contents_of(run)
        self._slots = _TensorSlots(
            fd, contents, _state_tensors(run), text_bytes=len(self._text(run, contents))
        )
        return self._slots

    def _text(self, run: Run, contents: Contents) -> bytes:
        values: RunValues = {"train": run.state.to_json(), "optimizer": _optimizer_values(run, contents)}
        if state := run.source.state():
            values["batches"] = state
        return slot_text(values, self._lines)

    def _judge(self, run: Run) -> None:
        """Decides again, once and after the same step on all ranks, by the cost measured on the
        slowest rank.

        All ranks must call it.
        """
        cost, step = (statistics.median(times[_LEFT_OUT:]) for times in (self._costs, self._steps))
        size = os.fstat(self._fd).st_size if self._fd is not None else 0
        expected = self._every
        every = self._decide(run, cost / step)
        run.report.send({"kind": "kept", "cost_s": cost, "step_time_s": step, "bytes": size, "every": every})
        figures = f"{cost / step:.1%} of the step time ({1e3 * cost:.3g} of {1e3 * step:.3g} ms)"
        if every is None:
            limit = f"even one step in {MOST_EVERY} would cost more than {LIMIT:.0%}"
            self._turn_off(run, f"keeping a step in memory costs {figures}, and {limit}: turned off{_OFF}")
        elif every > expected and run.group.is_main:
            price = f"{every - 1} finished step{'s' if every > 2 else ''}"
            text = f"keeping a step in memory costs {figures}: one step in {every} is kept, for at most {LIMIT:.0%}"
            run.report.send({"kind": "note", "text": f"{text}; if a rank dies, up to {price} may be lost"})

    def _turn_off(self, run: Run, text: str) -> None:
        self._is_off = True
        self._slots = None
        if self._fd is not None:
            os.ftruncate(self._fd, 0)  # the kept step would soon be out of date
        if run.group.is_main:
            run.report.send({"kind": "note", "text": text})


@dataclass(frozen=True)
class _Block:
    """Neighbouring tensors: where they are, and for each slot where they are copied to."""

    sources: list[torch.Tensor]
    targets: list[list[torch.Tensor]]
    end: int


class _TensorSlots:
    """The slots, with views for the run's tensors in each of them."""

    def __init__(self, fd: int, contents: Contents, state: list[torch.Tensor], *, text_bytes: int) -> None:
        self.contents = contents
        self._state = state
        parts = [(group, part) for group, members in contents.groups.items() for part in members]
        self._layout = SlotLayout(tuple(contents.groups), tuple(_entry(group, part) for group, part in parts))
        size = needed_bytes(self._layout, text_bytes=text_bytes)
        self._slots = Slots(_take_memory(fd, size), self._layout)
        sources = [part.tensor for _, part in parts]
        self._stage = None
        if any(source.is_cuda for source in sources):
            self._stage = _Stage(sources, self._layout)
            sources = self._stage.staged
        self._blocks = self._make_blocks(sources)

    def is_of(self, state: list[torch.Tensor]) -> bool:
        """Whether the optimizers' tensors are still those that the slots were made for."""
        return len(state) == len(self._state) and all(
            ours is theirs for ours, theirs in zip(state, self._state, strict=True)
        )

    def has_room(self, text: bytes) -> bool:
        """Whether a text fits into a slot."""
        return self._slots.fits(text)

    def write(self, sequence: int, *, step: int, text: bytes) -> None:
        """Writes the next slot."""
        if self._stage is not None:
            self._stage.fill()
        writing = self._slots.begin(sequence)
        for block in self._blocks:
            foreach.copy_(block.targets[writing.number], block.sources)
            writing.note(block.end)
        self._slots.commit(writing, step=step, text=text)

    def _make_blocks(self, sources: list[torch.Tensor]) -> list[_Block]:
        targets = [_views(memory, self._layout) for memory in self._slots.tensors]
        ends = [*self._layout.starts[1:], self._layout.tensor_bytes]
        blocks: list[_Block] = []
        first = begin = 0
        for number, end in enumerate(ends, start=1):
            if end - begin >= _BLOCK_BYTES or number == len(ends):
                members = [i for i in range(first, number) if sources[i].numel()]
                blocks.append(
                    _Block(
                        [sources[i] for i in members], [[slot[i] for i in members] for slot in targets], end
                    )
                )
                first, begin = number, end
        return blocks


class _Stage:
    """Copies tensors from a GPU to pinned host memory, in one transfer."""

    def __init__(self, sources: list[torch.Tensor], layout: SlotLayout) -> None:
        device = next(source.device for source in sources if source.is_cuda)
        self._flat = torch.empty(layout.tensor_bytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(layout.tensor_bytes, dtype=torch.uint8, pin_memory=True)
        self.staged = _views(self._pinned, layout)
        on_device = [i for i, source in enumerate(sources) if source.is_cuda]
        flat = _views(self._flat, layout)
        self._moved = [flat[i] for i in on_device], [sources[i] for i in on_device]
        rest = [i for i, source in enumerate(sources) if not source.is_cuda]
        self._copied = [self.staged[i] for i in rest], [sources[i] for i in rest]

    def fill(self) -> None:
        """Copies all tensors, and waits for the device: the step is kept only once its tensors are
        on the host.
        """
        foreach.copy_(*self._moved)
        self._pinned.copy_(self._flat, non_blocking=True)
        torch.cuda.current_stream(self._flat.device).synchronize()
        if self._copied[0]:
            foreach.copy_(*self._copied)


def _contents_after_a_step(run: Run) -> Contents:
    """The contents as they will be after a step: before the first step others of their
    size stand for the optimizer's missing tensors.
    """
    contents = contents_of(run)
    if any(part.state for part in run.optimizers.parts.values()):
        return contents
    moments = [
        RankTensor(f"{part.name}-{number}", moment, part.shape, part.offsets)
        for part in contents.groups["trainable"]
        for number, moment in enumerate(state_before_a_step(run.plan.config.optim, part.tensor))
    ]
    return Contents({**contents.groups, "moments": moments}, contents.values)


def _take_memory(fd: int, size: int) -> memoryview:
    """Allocates all pages now, not in the measured steps.

    Raises:
        UnfitError: if the system does not provide them. A limit of the file size applies to a
            memfd, too.
    """
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, size)
        return memoryview(mmap.mmap(fd, size))
    except OSError as error:
        why = storage_reason(error) if error.errno != errno.ENOMEM else "the machine has no memory left"
        problem = Problem(
            f"no shared memory of {size} bytes ({show_bytes(size)}) to keep each step in: {storage_words(error)}",
            f"rank memory (memfd), {size} bytes",
            why,
            storage_remedy(
                error, else_="free memory on this machine, or train a smaller adapter (adapter.rank)"
            ),
        )
        raise UnfitError(problem, verdict=storage_verdict(error, problem, phase="log")) from error


def _entry(group: str, part: RankTensor) -> TensorEntry:
    return TensorEntry(
        group, part.name, dtype_name(part.tensor.dtype), tuple(part.tensor.shape), part.shape, part.offsets
    )


def _views(memory: Any, layout: SlotLayout) -> list[torch.Tensor]:
    """The tensors of a layout as views of memory: a buffer, or a tensor of bytes."""
    flat = memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
    return [
        flat[start : start + entry.bytes].view(DTYPES[entry.dtype]).view(entry.shape)
        for entry, start in zip(layout.entries, layout.starts, strict=True)
    ]


def _state_tensors(run: Run) -> list[torch.Tensor]:
    """The optimizers' present tensors; they change if one is created again, e.g. after the first
    update.
    """
    return [
        value
        for part in run.optimizers.parts.values()
        for entries in part.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    ]


def _optimizer_values(run: Run, contents: Contents) -> dict[str, OptimizerValues]:
    """The optimizers' present values other than tensors, as in `contents_of`.

    Hyperparameters change; names do not.
    """
    known = contents.values["optimizer"]
    if any(values["values"] for values in known.values()):
        return contents_of(run).values["optimizer"]
    return {
        name: {
            "groups": [
                {**{key: value for key, value in group.items() if key != "params"}, "names": saved["names"]}
                for group, saved in zip(part.param_groups, known[name]["groups"], strict=True)
            ],
            "values": {},
        }
        for name, part in run.optimizers.parts.items()
    }
