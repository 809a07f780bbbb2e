"""One optimizer step: the micro batches of a global batch, clip, update.

    loss = Σ over the loss tokens of the global batch of the cross entropy / their number

Each micro batch contributes its sum divided by the global number of loss tokens, so gradients add up to those of the global batch for any
number of micro batches and ranks.
"""

import math
import time
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from unisono.model.forward import Rows
from unisono.model.sharding import full_tensor
from unisono.train import faults
from unisono.train.front_io import flags_of, outcome_of
from unisono.train.gradient_sync import FIXED_SCALARS, scalars_of_a_step
from unisono.train.optim import lr_factor
from unisono.train.run import Run, StepBatches, embedding_noise, load_rows, seed_torch
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
    total, data_time = _add_up(run, batches)
    faults.corrupt_gradient(run.plan, batches.step, next(iter(run.forward.loaded.trainable.values())))
    summed = run.gradient_sync.finish(_scalars(run, total))
    norm = _clip(run, section.max_grad_norm)
    # The only wait for the device in a step: these figures decide whether the update is made, and whether it is the last.
    run.gradient_sync.wait_for_own_part()
    (loss, *rest), norm_value = run.group.figures(summed), float(norm)
    comm_time = run.gradient_sync.wait_and_time()
    flags, odd = rest[:2], rest[2:]
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
    )


def _add_up(run: Run, batches: StepBatches) -> tuple[torch.Tensor, float]:
    """Runs forward and backward on this rank's micro batches; gives the sum of their losses, and seconds spent on data."""
    micros: list[tuple[list[int], list[int]] | None] = list(zip(batches.groups, batches.places, strict=True))
    if run.gradient_sync.needs_equal_rounds:
        # Every forward is collective, so a rank without rows runs one whose loss does not count.
        micros += [None] * (batches.rounds - len(micros))
    total = torch.zeros((), device=run.device)
    data_time = 0.0
    smoothing = run.plan.config.optim.label_smoothing
    for number, micro in enumerate(micros, start=1):
        sequences, places = micro or (run.data.shortest(), [0])
        run.beats.begin_micro(sequences)
        before = time.perf_counter()
        rows, batch = load_rows(run.data.table, sequences, run.device)
        rows = _with_noise(run, rows, sequences, places)
        data_time += time.perf_counter() - before
        run.beats.enter("compute")
        if micro is not None:
            faults.write_rows(run.plan, run.group.rank, batches.step, batch)
        if number == 1:
            faults.in_compute(run, batches.step)
        seed_torch(run.plan.config.seed, "dropout", places[0])
        run.generator_watch.torch_was_seeded()
        if number == len(micros):
            run.gradient_sync.before_last_backward()
        if len(rows.labels) or run.gradient_sync.needs_equal_rounds:
            loss = run.forward.loss(rows, count=batches.loss_tokens, smoothing=smoothing)
            loss = faults.corrupt_loss(run.plan, run.group.rank, batches.step, loss)
            if micro is None:
                loss = loss * 0.0
            loss.backward()
            total += loss.detach()
    return total, data_time


def _with_noise(run: Run, rows: Rows, sequences: list[int], places: list[int]) -> Rows:
    """The rows with noise for their embeddings, if the config asks for it."""
    alpha = run.plan.config.model.embedding_noise
    if not alpha:
        return rows
    noise = embedding_noise(
        alpha,
        seed=run.plan.config.seed,
        places=places,
        tokens=run.data.tokens_of(sequences),
        lengths=rows.lengths,
        hidden_size=run.forward.loaded.base.get_input_embeddings().weight.shape[1],
        device=run.device,
    )
    return replace(rows, noise=noise)


def _scalars(run: Run, total: torch.Tensor) -> torch.Tensor:
    """(3 + ranks,) float32: the loss, the stop request, and for each rank whether its own loss is NaN or infinite."""
    own = torch.zeros(scalars_of_a_step(run.group.world_size), device=run.device)
    own[0] = total
    if run.stop.outcome is not None:
        own[1:FIXED_SCALARS] = torch.tensor(flags_of(run.stop.outcome))
    own[FIXED_SCALARS + run.group.rank] = ~torch.isfinite(total)
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
