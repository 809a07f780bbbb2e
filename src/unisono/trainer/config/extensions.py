"""Names of parts that unisono does not have: classes in files of the user's own, and entry points
of other installed packages.
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

SCHEDULES = "unisono.schedules"
"""Functions with the arguments of `schedules.Factor`."""
OPTIMIZERS = "unisono.optimizers"
"""Subclasses of torch.optim.Optimizer, called as described at `optimizers.OTHER`."""


def own_class(name: str) -> tuple[Path, str] | None:
    """File and class of a `FILE.py:CLASS`; None for any other name."""
    path, colon, kind = name.rpartition(":")
    return (Path(path), kind) if colon and path.endswith(".py") else None


@cache
def find_extension(group: str, name: str) -> EntryPoint | None:
    """The entry point with this name; None if no installed package has it. It is not loaded."""
    return next(iter(entry_points(group=group, name=name)), None)


def version_of(entry: EntryPoint) -> str:
    """The package of an entry point with its version, e.g. `schedulefree 1.4`."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
