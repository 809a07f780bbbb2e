"""The largest batch goes through forward and backward before step 1, so that memory fails now and not at hour nine."""

import resource
import time
from dataclasses import dataclass

import torch

from unisono.causes import Evidence, Verdict
from unisono.errors import RankDied
from unisono.model.forward import Rows
from unisono.plan import estimate_memory
from unisono.train.batches import load_rows
from unisono.train.evaluate import evaluating, evaluation_part
from unisono.train.run import Run
from unisono.units import show_bytes

_QUICK_S = 1.0


@dataclass(frozen=True)
class Trial:
    """What trying the longest batch has shown.

    Attributes:
        peak_bytes: of memory.
        step_time_s: of a step on this rank, estimated from the tokens of the batch and those of a mean step.
    """

    peak_bytes: int
    step_time_s: float


def try_longest(run: Run) -> Trial:
    """Runs the largest micro batch forward and backward, and one of evaluation.

    All ranks must call it: each tries for itself, with sharded weights in step.

    Raises:
        RankDied: with a verdict that names the batch's shape and two settings, if memory does not suffice.
    """
    run.report.phase("rehearse", "trying the longest batch")
    run.beats.enter("rehearse")
    group = run.data.longest()
    rows, batch = load_rows(run.data.table, group, run.device)
    shape = f"{len(group)} sequences, {batch.tokens} tokens, longest row {max(batch.lengths)}"
    try:
        if not run.exchange.keeps_pace:
            run.exchange.begin()  # where gradients have buffers, they are the ones that count
        held = _as_much_as_the_optimizer_will_hold(run)
        seconds = _time_of(run, rows)
        if seconds < _QUICK_S and not run.exchange.keeps_pace:
            # The first pass also warms up, and a step has the exchange and the update beside: the truth lies between.
            seconds = (seconds + _time_of(run, rows)) / 2
        run.optimizers.zero_grad()
        del held
        if run.evaluation is not None:
            first = next(run.evaluation.rounds())
            with torch.no_grad(), evaluating(run):
                evaluation_part(run, first, count=1)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(run, error, shape=shape, phase="rehearse") from error
    data = run.plan.data.train
    tokens = data.tokens / max(1, data.sequences) * run.plan.global_batch / run.group.world_size
    return Trial(peak_bytes(run.device), seconds * tokens / max(1, batch.tokens))


def _time_of(run: Run, rows: Rows) -> float:
    """Seconds of a forward and a backward."""
    began = time.perf_counter()
    if len(rows.labels) or run.exchange.keeps_pace:
        run.forward.loss(rows, count=max(1, len(rows.labels))).backward()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.perf_counter() - began


def _as_much_as_the_optimizer_will_hold(run: Run) -> list[torch.Tensor]:
    """Two moments of every trained parameter, which the first step allocates and every later forward has beside it."""
    if any(part.state for part in run.optimizers.parts.values()):
        return []
    return [torch.zeros_like(p).add_(1) for p in run.forward.loaded.trainable.values() for _ in range(2)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch says that memory ran out, on GPU or CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(run: Run, error: BaseException, *, shape: str, phase: str) -> RankDied:
    """What a user is told: the batch's shape, and two settings with what each saves."""
    cause = "cuda_oom" if run.device.type == "cuda" else "host_oom_killed"
    summary = f"memory ran out on {run.plan.device.name} with a batch of {shape}"
    verdict = Verdict(
        cause=cause, when="during", summary=summary, ranks=(run.group.rank,), hosts=(run.plan.host,), phase=phase, step=run.state.step,
        evidence=(Evidence(where=run.where, text=str(error)),), fix=tuple(_savings(run)),
    )  # fmt: skip
    return RankDied.of(
        summary,
        where=f"{run.where}, {phase}",
        why=str(error),
        fix="; ".join(_savings(run)),
        verdict=verdict,
    )


def _savings(run: Run) -> list[str]:
    """Two settings that save memory, each with how much by the estimate."""
    plan, config = run.plan, run.plan.config

    def total(micro: int, *, checkpointing: bool) -> int:
        return estimate_memory(
            plan.model, dtype=plan.dtype, adapter_rank=config.adapter.rank if config.adapter else None,
            micro_tokens=micro * plan.data.train.longest_sequence, longest_row=plan.data.train.longest_row,
            gradient_checkpointing=checkpointing, shards=run.group.world_size if run.sharded is not None else 1,
        ).total  # fmt: skip

    now = total(plan.micro_batch, checkpointing=plan.gradient_checkpointing)
    found = []
    if plan.micro_batch > 1:
        smaller = max(n for n in range(1, plan.micro_batch) if plan.global_batch % n == 0)
        saved = now - total(smaller, checkpointing=plan.gradient_checkpointing)
        found.append(f"batch.micro={smaller} saves about {show_bytes(saved)}, with the same result")
    if not plan.gradient_checkpointing:
        saved = now - total(plan.micro_batch, checkpointing=True)
        found.append(
            f"memory.gradient_checkpointing=true saves about {show_bytes(saved)}, for about a third more time"
        )
    if len(found) < 2:
        found.append(
            f"data.max_length={config.data.max_length // 2} halves the longest sequence; data.too_long says what becomes of the rest"
        )
    if len(found) < 2 and config.adapter is None:
        found.append(
            "adapter={kind: lora} trains a small part, and saves gradients and optimizer state of the rest"
        )
    return found[:2]


def peak_bytes(device: torch.device) -> int:
    """The most memory held so far: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
