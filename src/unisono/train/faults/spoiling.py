"""Losses and gradients that are no numbers."""

import math

import torch

from unisono.plan import RunPlan
from unisono.train.faults.marking import mark


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
