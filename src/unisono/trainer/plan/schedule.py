"""The learning rate over a run, a pure function of the step; and the rates that are usual."""

import math
from typing import Literal

from unisono.trainer.config import RunConfig
from unisono.trainer.config.sections import PREFERENCE
from unisono.trainer.plan.run_plan import RunPlan

Schedule = Literal["cosine", "linear", "constant", "wsd", "cosine_with_restarts", "polynomial"]

_WSD_DECAY = 0.2  # share of the run that is the decay of wsd (warmup, stable, decay: arXiv:2404.06395)


def factor_at(plan: RunPlan, step: int) -> float:
    """The factor of every learning rate at an optimizer step of a run, from 1."""
    section = plan.config.optim
    return lr_factor(
        step,
        total=plan.total_steps,
        warmup=plan.warmup_steps,
        schedule=section.schedule,
        floor=section.min_lr,
        start=section.schedule_start,
        cycles=section.cycles,
        power=section.power,
    )


def lr_factor(
    step: int,
    *,
    total: int,
    warmup: int,
    schedule: Schedule,
    floor: float,
    start: int = 1,
    cycles: int = 1,
    power: float = 1.0,
) -> float:
    """The factor of the learning rate at an optimizer step: a pure function of the step, so
    resuming needs no state for it.

    With `start` 0 the formulas are those of transformers' `get_scheduler`, whose first step is at
    position 0.

    Args:
        step: from 1 to `total`.
        total: steps of the run.
        warmup: steps in which the factor rises, with `start` 1 from 1/(warmup + 1), with 0 from 0.
        schedule: the shape after the warmup.
        floor: the factor at the end.
        start: the position of step 1 in the schedule: 1, or 0.
        cycles: number of cosines of `cosine_with_restarts` (arXiv:1608.03983).
        power: exponent of `polynomial`.
    """
    place = step - 1 + start
    if place < warmup + start:
        return place / (warmup + start)
    done = (place - warmup) / max(1, total - warmup)  # 0 <= done <= 1
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "cosine_with_restarts":
            in_cycle = cycles * done % 1.0 if done < 1 else 1.0
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * in_cycle))
        case "polynomial":
            return floor + (1 - floor) * (1 - done) ** power
        case "wsd":
            return 1.0 if done <= 1 - _WSD_DECAY else floor + (1 - floor) * (1 - done) / _WSD_DECAY


_HIGHEST = {"optim.lr": 0.1, "optim.muon_lr": 1.0}
"""Above these no run is known to train: AdamW moves every value by about its rate in a step, Muon
every matrix by about its own in norm.
"""


def usual_rates(config: RunConfig) -> dict[str, tuple[float, str]]:
    """The learning rates that a config has, by key: the usual one, and for what it is.

    Preference objectives take a tenth (docs/how-to/preferences.md), and all weights a tenth of what
    an adapter takes.
    """
    usual, what = (2e-4, "an adapter") if config.adapter is not None else (2e-5, "all weights")
    if config.objective in PREFERENCE:
        usual, what = usual / 10, f"{what} with objective {config.objective}"
    found = {"optim.lr": (usual, what)}
    return found | ({"optim.muon_lr": (0.02, "Muon")} if config.optim.kind == "muon" else {})


def beyond_training(config: RunConfig) -> list[str]:
    """A line for each learning rate with which no run is known to train."""
    rates = {"optim.lr": config.optim.lr, "optim.muon_lr": config.optim.muon_lr}
    return [
        f"{key} is {rates[key]:g}, with which the loss will become NaN or stay high: {usual:g} is usual for {what}"
        for key, (usual, what) in usual_rates(config).items()
        if rates[key] > _HIGHEST[key]
    ]


def lower_rates(config: RunConfig) -> str:
    """What to set where the loss became NaN, e.g. `optim.lr=5e-05 (0.0002 is usual for an
    adapter)`: a quarter, or the usual rate if it was beyond any.
    """
    rates = {"optim.lr": config.optim.lr, "optim.muon_lr": config.optim.muon_lr}
    parts = []
    for key, (usual, what) in usual_rates(config).items():
        lower = usual if rates[key] > _HIGHEST[key] else float(f"{rates[key] / 4:.2g}")
        parts.append(f"{key}={lower:g} ({usual:g} is usual for {what})")
    return " ".join(parts)
