"""One optimizer step: the micro batches of a global batch, clip, update.

    loss = Σ over the units of the global batch of their loss / their number

A unit is a loss token, a pair, or a rated answer (see `objectives.objective`). Each micro batch contributes its sum divided by the global
number, so gradients add up to those of the global batch for any number of micro batches and ranks.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from unisono.model.forward import Rows
from unisono.model.sharding import full_tensor
from unisono.train import faults
from unisono.train.evaluation import first_sum
from unisono.train.front_io import flags_of, outcome_of
from unisono.train.optim import FIXED_SCALARS, lr_factor, scalars_of_a_step
from unisono.train.pictures import with_pictures
from unisono.train.run import Run, StepBatches, embedding_noise, load_micro, seed_torch
from unisono.train.saving import wait_for_copies


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step. `loss` or `grad_norm` may be NaN or infinite; then no update was made."""

    loss: float
    grad_norm: float
    lr: float
    data_time_s: float
    step_time_s: float
    cpu_time_s: float
    """CPU seconds of the whole process; other load on the machine does not change them much."""
    comm_time_s: float
    """Seconds spent waiting for the other ranks' gradients."""
    odd_ranks: list[int]
    """Ranks whose own part of the loss is NaN or infinite."""
    metrics: dict[str, float]
    """Those of the objective."""

    @property
    def is_sound(self) -> bool:
        """Whether loss and gradient were finite, so that the update was made."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def optimizer_step(run: Run, batches: StepBatches) -> StepOutcome:
    """Does one step; updates nothing if the loss or the gradient is NaN or infinite. All ranks must call it."""
    began, cpu_began = time.perf_counter(), time.process_time()
    section = run.plan.config.optim
    factor = lr_factor(
        batches.step,
        total=run.plan.total_steps,
        warmup=run.plan.warmup_steps,
        schedule=section.schedule,
        floor=section.min_lr,
        start=section.schedule_start,
        cycles=section.cycles,
        power=section.power,
    )
    run.optimizers.set_factor(factor)
    run.gradient_sync.begin()
    known = _known_first(run, batches)
    total, sums, data_time = _add_up(run, batches, known=known)
    faults.corrupt_gradient(run.plan, batches.step, next(iter(run.forward.loaded.trainable.values())))
    summed = run.gradient_sync.finish(_scalars(run, total, sums))
    norm = _clip(run, section.max_grad_norm)
    # The only wait for the device after the backward: these figures decide whether the update is made, and whether it is the last.
    run.gradient_sync.wait_for_own_part()
    (loss, *rest), norm_value = run.group.figures(summed), float(norm)
    comm_time = run.gradient_sync.wait_and_time()
    flags, odd, found = rest[:2], rest[2 : 2 + run.group.world_size], rest[2 + run.group.world_size :]
    run.agreed_stop = outcome_of(flags)
    run.beats.enter("update")
    if math.isfinite(loss) and math.isfinite(norm_value):
        wait_for_copies(run)
        run.optimizers.step()
    run.optimizers.zero_grad()
    return StepOutcome(
        loss=loss,
        grad_norm=norm_value,
        lr=section.lr * factor,
        data_time_s=data_time,
        step_time_s=time.perf_counter() - began,
        cpu_time_s=time.process_time() - cpu_began,
        comm_time_s=comm_time,
        odd_ranks=[rank for rank, is_odd in enumerate(odd) if is_odd],
        metrics=run.objective.figures(found, known=known),
    )


def _micros(run: Run, batches: StepBatches) -> list[tuple[list[int], list[int]] | None]:
    """Sequences and their places of each micro batch of this rank; None for one that only takes part in a collective forward."""
    micros: list[tuple[list[int], list[int]] | None] = list(zip(batches.groups, batches.places, strict=True))
    if run.gradient_sync.needs_equal_rounds:
        # Every forward is collective, so a rank without rows runs one whose loss does not count.
        micros += [None] * (batches.rounds - len(micros))
    return micros


def _known_first(run: Run, batches: StepBatches) -> float:
    """What the objective needs of the whole global batch before its loss, a mean over units; without gradient and dropout."""
    if not run.objective.first_sides:
        return 0.0

    def groups() -> Iterator[list[int]]:
        for micro in _micros(run, batches):
            run.beats.enter("compute")
            yield micro[0] if micro is not None else []

    own = first_sum(run, run.data.table, groups())
    summed = torch.tensor([own], dtype=torch.float64, device=run.device)
    run.group.sum(summed)  # all ranks participate
    return run.group.figures(summed)[0] / batches.counts.units


def _add_up(run: Run, batches: StepBatches, *, known: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Runs forward and backward on this rank's micro batches; gives the sums of their losses and metrics, and seconds spent on data."""
    micros = _micros(run, batches)
    objective = run.objective
    total = torch.zeros((), device=run.device)
    sums = torch.zeros(2 * len(objective.metrics), device=run.device)
    data_time = 0.0
    for number, group in enumerate(micros, start=1):
        sequences, places = group or (run.data.shortest(), [0])
        run.beats.begin_micro(sequences)
        before = time.perf_counter()
        micro, batch = load_micro(
            run.data.table, sequences, run.device, sides=objective.sides, reference=run.reference.get("train")
        )
        micro = replace(micro, rows=_with_noise(run, micro.rows, sequences, places))
        micro = with_pictures(run, run.data.table, micro, batch.units, places)
        data_time += time.perf_counter() - before
        run.beats.enter("compute")
        if group is not None:
            faults.write_rows(run.plan, run.group.rank, batches.step, batch)
        if number == 1:
            faults.in_compute(run, batches.step)
        seed_torch(run.plan.config.seed, "dropout", places[0])
        run.generator_watch.torch_was_seeded()
        if number == len(micros):
            run.gradient_sync.before_last_backward()
        if len(micro.rows.labels) or run.gradient_sync.needs_equal_rounds:
            part = objective.loss(run.forward, micro, counts=batches.counts, known=known)
            loss = faults.corrupt_loss(run.plan, run.group.rank, batches.step, part.loss)
            if group is None:
                loss = loss * 0.0
            else:
                sums += part.sums
            loss.backward()
            total += loss.detach()
    return total, sums, data_time


def _with_noise(run: Run, rows: Rows, sequences: list[int], places: list[int]) -> Rows:
    """The rows with noise for their embeddings, if the config asks for it."""
    alpha = run.plan.config.model.embedding_noise
    if not alpha:
        return rows
    noise = embedding_noise(
        alpha,
        seed=run.plan.config.seed,
        places=places,
        tokens=_tokens_of(run, rows, sequences),
        lengths=rows.lengths,
        hidden_size=run.forward.loaded.base.get_input_embeddings().weight.shape[1],
        device=run.device,
    )
    return replace(rows, noise=noise)


def _tokens_of(run: Run, rows: Rows, sequences: list[int]) -> list[int]:
    """Tokens of each sequence in these rows, which may lack a side of each unit."""
    units = [len(run.data.table.rows_of(sequence)) for sequence in sequences]
    sides = len(rows.lengths) // sum(units)
    ends = np.cumsum([0, *units]) * sides
    return [sum(rows.lengths[first:end]) for first, end in pairwise(ends.tolist())]


def _scalars(run: Run, total: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """(3 + ranks + sums,) float32: the loss, the stop request, for each rank whether its own loss is NaN or infinite, and sums of metrics."""
    own = torch.zeros(scalars_of_a_step(run.group.world_size, metrics=len(sums) // 2), device=run.device)
    own[0] = total
    if run.stop.outcome is not None:
        own[1:FIXED_SCALARS] = torch.tensor(flags_of(run.stop.outcome))
    own[FIXED_SCALARS + run.group.rank] = ~torch.isfinite(total)
    own[FIXED_SCALARS + run.group.world_size :] = sums
    return own


def _clip(run: Run, limit: float | None) -> torch.Tensor:
    """Clips the gradient to the norm `limit`; gives its norm before. All ranks must call it."""
    parameters = [p for p in run.forward.loaded.trainable.values() if p.grad is not None]
    if parameters and isinstance(parameters[0], DTensor):
        norm = full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm
    if limit is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
