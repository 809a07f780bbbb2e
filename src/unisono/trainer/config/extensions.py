"""Parts of other installed packages, by their entry points."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points

SCHEDULES = "unisono.schedules"
"""Functions with the arguments of `schedules.Factor`."""
OPTIMIZERS = "unisono.optimizers"
"""Subclasses of torch.optim.Optimizer, called as described at `optimizers.OTHER`."""


@cache
def find_extension(group: str, name: str) -> EntryPoint | None:
    """The entry point with this name; None if no installed package has it. It is not loaded."""
    return next(iter(entry_points(group=group, name=name)), None)


def version_of(entry: EntryPoint) -> str:
    """The package of an entry point with its version, e.g. `schedulefree 1.4`."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
