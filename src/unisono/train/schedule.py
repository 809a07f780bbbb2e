"""The learning rate of a step: a pure function of the step, so that resuming needs no state for it."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant", "wsd"]

_WSD_FALL = 0.2  # share of the run in which wsd falls (warm-up, stable, decay: arXiv:2404.06395)


def lr_factor(step: int, *, total: int, warmup: int, schedule: Schedule, floor: float) -> float:
    """What the learning rate is multiplied by at optimizer step `step`, from 1 to `total`.

    Args:
        step: counted from 1.
        total: steps of the run.
        warmup: steps in which the factor rises from 1/(warmup + 1) to 1.
        schedule: the form after the warm-up.
        floor: the factor at the end.
    """
    if step <= warmup:
        return step / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)  # 0 < done <= 1
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":
            return 1.0 if done <= 1 - _WSD_FALL else floor + (1 - floor) * (1 - done) / _WSD_FALL
