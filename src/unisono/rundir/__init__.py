"""A run's directory (DESIGN A3): the names of its files, its lock, its metrics, and what state it is in."""

from unisono.rundir.layout import RunDir

__all__ = ["RunDir"]
