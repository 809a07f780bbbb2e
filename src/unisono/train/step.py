"""One optimizer step: the micro batches of a global batch, clip, update.

    loss = Σ over the loss tokens of the global batch of the cross entropy / their number

Each micro batch adds its own sum divided by the global number, so that gradients add up to those of the whole, however it is cut.
"""

import math
import time
from dataclasses import dataclass

import torch

from unisono.train.batches import StepBatches, load_rows
from unisono.train.run import Run
from unisono.train.schedule import lr_factor
from unisono.train.streams import seed_torch


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave. `loss` and `grad_norm` may be not a number, and then nothing was changed."""

    loss: float
    grad_norm: float
    lr: float
    data_time_s: float
    step_time_s: float
    cpu_time_s: float
    """CPU seconds of the whole process, which a busy machine does not stretch."""

    @property
    def is_sound(self) -> bool:
        """Whether loss and gradient were numbers, so that the update was made."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def optimizer_step(run: Run, batches: StepBatches) -> StepOutcome:
    """Does one step; updates nothing if the loss or the gradient is not a number."""
    began, cpu_began = time.perf_counter(), time.process_time()
    section = run.plan.config.optim
    factor = lr_factor(
        batches.step,
        total=run.plan.total_steps,
        warmup=run.plan.warmup_steps,
        schedule=section.schedule,
        floor=section.min_lr,
    )
    run.optimizers.set_factor(factor)
    total = torch.zeros((), device=run.device)
    data_time = 0.0
    for micro_step, group in enumerate(batches.groups):
        before = time.perf_counter()
        rows, _ = load_rows(run.data.table, group, run.device)
        data_time += time.perf_counter() - before
        seed_torch(run.plan.config.seed, "dropout", run.data.position(batches.step, micro_step))
        run.watch.torch_was_seeded()
        if len(rows.labels):
            loss = run.forward.loss(rows, count=batches.loss_tokens)
            loss.backward()
            total += loss.detach()
    _inject(run, batches.step)
    norm = _clip(run, section.max_grad_norm)
    # One wait for the device a step: the two figures decide whether the update is made at all.
    loss_value, norm_value = float(total), float(norm)
    if math.isfinite(loss_value) and math.isfinite(norm_value):
        run.optimizers.step()
    run.optimizers.zero_grad()
    return StepOutcome(
        loss_value,
        norm_value,
        section.lr * factor,
        data_time,
        time.perf_counter() - began,
        time.process_time() - cpu_began,
    )


def _clip(run: Run, limit: float | None) -> torch.Tensor:
    """The norm of the whole gradient before it is scaled down to `limit`."""
    parameters = [p for p in run.forward.loaded.trainable.values() if p.grad is not None]
    if limit is not None:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def _inject(run: Run, step: int) -> None:
    """Faults of drills and tests: a gradient that is not a number at the steps that the plan names."""
    if step in run.plan.faults.get("nan_steps", ()):
        parameter = next(iter(run.forward.loaded.trainable.values()))
        parameter.grad = torch.full_like(parameter, math.nan)
