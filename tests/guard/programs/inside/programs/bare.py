"""A loop of one's own, with the three lines."""

import unisono

with unisono.guarded() as guard:
    for number in guard.steps(range(1, 6)):
        guard.step(float("nan") if number == 4 else 1 / number)
