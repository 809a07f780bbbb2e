"""Learning rate schedules: a function and a line of `SCHEDULES` for each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps

from unisono.base import extensions


@dataclass(frozen=True, slots=True)
class Parameters:
    """Settings of a schedule: the keys of `optim` with these names.

    Attributes:
        min_lr: the factor at the end.
        start: `schedule_start`, the position of step 1: 1, or 0 as in transformers.
        cycles: number of cosines (arXiv:1608.03983).
        power: exponent of a decay.
    """

    min_lr: float = 0.0
    start: int = 1
    cycles: int = 1
    power: float = 1.0


Factor = Callable[[int, int, int, Parameters], float]
"""(step, total, warmup, parameters) → the factor of the learning rate, from 0 to 1. Pure, so
resuming needs no state for it.

`step` is the position of a step: from `parameters.start`, in a run of `total` steps. In the first
`warmup` steps the factor rises.
"""


@dataclass(frozen=True)
class Schedule:
    """A schedule and its names elsewhere.

    Attributes:
        factor: the factor at a step.
        keys: of the keys that only some schedules have (`OWN_KEYS`), those that it uses.
        transformers: its names there and in LLaMA-Factory, each with the arguments it takes and our
            keys for them.
        sd_scripts: its names there, each with the keys it takes and ours for them; an empty text if
            there is none.
    """

    factor: Factor
    keys: tuple[str, ...] = ()
    transformers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sd_scripts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


OWN_KEYS = ("cycles", "power")
"""Keys of `optim` that only some schedules use."""

_WSD_DECAY = 0.2  # share of the run that is the decay of wsd (warmup, stable, decay: arXiv:2404.06395)


def _after_ramp(factor: Factor) -> Factor:
    """The schedule after a linear warmup: from 1/(warmup + 1) at step 1, or from 0 if that is
    position 0.
    """

    @wraps(factor)
    def with_ramp(step: int, total: int, warmup: int, parameters: Parameters) -> float:
        if step < warmup + parameters.start:
            return step / (warmup + parameters.start)
        return factor(step, total, warmup, parameters)

    return with_ramp


def _done(step: int, total: int, warmup: int) -> float:
    """The share of the steps after the warmup that are done, from 0 to 1."""
    return (step - warmup) / max(1, total - warmup)


@_after_ramp
def _constant(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    del step, total, warmup, parameters
    return 1.0


@_after_ramp
def _linear(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    return parameters.min_lr + (1 - parameters.min_lr) * (1 - _done(step, total, warmup))


@_after_ramp
def _cosine(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    return _cosine_at(_done(step, total, warmup), parameters.min_lr)


@_after_ramp
def _cosine_with_restarts(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    done = _done(step, total, warmup)
    return _cosine_at(parameters.cycles * done % 1.0 if done < 1 else 1.0, parameters.min_lr)


@_after_ramp
def _polynomial(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    return parameters.min_lr + (1 - parameters.min_lr) * (1 - _done(step, total, warmup)) ** parameters.power


@_after_ramp
def _wsd(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    done = _done(step, total, warmup)
    if done <= 1 - _WSD_DECAY:
        return 1.0
    return parameters.min_lr + (1 - parameters.min_lr) * (1 - done) / _WSD_DECAY


@_after_ramp
def _inverse_sqrt(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    del total, parameters
    return 1 / math.sqrt((step - warmup) / (warmup or 10_000) + 1)


def _cosine_warmup_with_min_lr(step: int, total: int, warmup: int, parameters: Parameters) -> float:
    done = step + 1 - parameters.start  # steps, with this one
    if done <= warmup:
        return done / warmup
    return _cosine_at(_done(done, total, warmup), parameters.min_lr)


def _cosine_at(done: float, floor: float) -> float:
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


# fmt: off
SCHEDULES: dict[str, Schedule] = {
    "cosine": Schedule(_cosine, (), {"cosine": {}, "cosine_with_min_lr": {"min_lr": "min_lr", "min_lr_rate": "min_lr"}},
                       {"cosine": {}}),
    "linear": Schedule(_linear, (), {"linear": {}}, {"linear": {}}),
    "constant": Schedule(_constant, (), {"constant": {}, "constant_with_warmup": {}},
                         {"constant": {}, "constant_with_warmup": {}}),
    "wsd": Schedule(_wsd),
    "cosine_with_restarts": Schedule(_cosine_with_restarts, ("cycles",),
                                     {"cosine_with_restarts": {"num_cycles": "cycles"}},
                                     {"cosine_with_restarts": {"lr_scheduler_num_cycles": "cycles"}}),
    "polynomial": Schedule(_polynomial, ("power",), {"polynomial": {"power": "power", "lr_end": "min_lr"}},
                           {"polynomial": {"lr_scheduler_power": "power"}}),
    "inverse_sqrt": Schedule(_inverse_sqrt, (), {"inverse_sqrt": {}}, {"inverse_sqrt": {"lr_scheduler_timescale": ""}}),
    "cosine_warmup_with_min_lr": Schedule(_cosine_warmup_with_min_lr, (),
                                          {"cosine_warmup_with_min_lr": {"min_lr": "min_lr", "min_lr_rate": "min_lr"}}),
}
# fmt: on


def schedule_named(name: str) -> Schedule:
    """A schedule of the table, or of another package.

    Raises:
        KeyError: if there is none.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    entry = extensions.extensions(extensions.SCHEDULES)[name]
    return Schedule(extensions.load_extension(entry), OWN_KEYS)


def from_transformers(name: str) -> tuple[str, Mapping[str, str]] | None:
    """Our name of one of transformers' schedules, and our keys for its arguments; None if there is
    no such schedule here.
    """
    return _named({ours: schedule.transformers for ours, schedule in SCHEDULES.items()}, name)


def from_sd_scripts(name: str) -> tuple[str, Mapping[str, str]] | None:
    """Our name of one of sd-scripts' schedules, and our keys for its own; None if there is no such
    schedule here.
    """
    return _named({ours: schedule.sd_scripts for ours, schedule in SCHEDULES.items()}, name)


def _named(
    names: Mapping[str, Mapping[str, Mapping[str, str]]], name: str
) -> tuple[str, Mapping[str, str]] | None:
    return next(((ours, theirs[name]) for ours, theirs in names.items() if name in theirs), None)
