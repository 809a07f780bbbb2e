"""The learning rate over a run, a pure function of the step; and the rates that are usual."""

from unisono.trainer.config import RunConfig
from unisono.trainer.config.optimizers import optimizer_named
from unisono.trainer.config.schedules import Parameters, schedule_named
from unisono.trainer.config.sections import PREFERENCE
from unisono.trainer.plan.run_plan import RunPlan


def factor_at(plan: RunPlan, step: int) -> float:
    """The factor of every learning rate at an optimizer step of a run, from 1."""
    section = plan.config.optim
    parameters = Parameters(section.min_lr, section.schedule_start, section.cycles, section.power)
    position = step - 1 + section.schedule_start
    factor = schedule_named(section.schedule).factor
    return factor(position, plan.total_steps, plan.warmup_steps, parameters)


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
    if optimizer_named(config.optim.kind).scales_rate:
        usual, what = 1.0, config.optim.kind
    rates = {"optim.lr": (usual, what)}
    return rates | (
        {"optim.muon_lr": (0.02, "Muon")} if "muon_lr" in optimizer_named(config.optim.kind).keys else {}
    )


def beyond_training(config: RunConfig) -> list[str]:
    """A line for each learning rate with which no run is known to train."""
    rates = {"optim.lr": config.optim.lr, "optim.muon_lr": config.optim.muon_lr}
    return [
        f"{key} is {rates[key]:g}, with which the loss will become NaN or stay high: {usual:g} is usual for {what}"
        for key, (usual, what) in usual_rates(config).items()
        if rates[key] > max(_HIGHEST[key], usual)
    ]


def unusual_schedule(config: RunConfig) -> list[str]:
    """A line for each value of `optim` that takes away what its optimizer is for."""
    section, lines = config.optim, []
    if optimizer_named(section.kind).scales_rate and section.lr < 0.1:
        lines.append(
            f"optim.lr is {section.lr:g}, a factor of the learning rate that {section.kind} finds: 1 is usual"
        )
    if section.kind == "schedule_free" and section.schedule != "constant":
        lines.append(
            f"optim.schedule is {section.schedule}: schedule_free averages the weights instead of lowering the"
            " learning rate, so `optim.schedule: constant` is usual"
        )
    return lines


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
