"""Extensions that other installed packages provide through their entry points."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LAUNCHERS = "unisono.launchers"
"""Subclasses of `jobs.launchers.launcher.Launcher`."""
CONFIG_READERS = "unisono.config_readers"
"""Objects or modules with the methods of `trainer.readers.registry.ConfigReader`."""
SCHEDULES = "unisono.schedules"
"""Functions with the arguments of `trainer.config.schedules.Factor`."""
OPTIMIZERS = "unisono.optimizers"
"""Subclasses of torch.optim.Optimizer, called as `trainer.config.optimizers.OTHER` describes."""


@cache
def extensions(group: str) -> "dict[str, EntryPoint]":
    """The entry points of a group by name. They are not loaded."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` does not pay

    return {entry.name: entry for entry in entry_points(group=group)}


def load_extension(entry: "EntryPoint") -> Any:
    """Imports what an entry point names.

    Raises:
        UsageError: if it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:  # the code of others
        from unisono.base.errors import UsageError  # nor the types of errors

        kind = entry.group.rpartition(".")[2].removesuffix("s").replace("_", " ")
        raise UsageError.of(
            f"{kind} {entry.name} cannot be imported: {error}",
            where=f"{entry.value}, an entry point of {version_of(entry)}",
            fix="reinstall its package, in a version for this unisono",
        ) from error


def version_of(entry: "EntryPoint") -> str:
    """The package of an entry point with its version, e.g. `schedulefree 1.4`."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
