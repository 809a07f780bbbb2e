"""The only reader of the environment and of this machine."""

from unisono.facts.environment import (
    Environment,
    all_variables,
    package_versions,
    read_environment,
    take_token,
)
from unisono.facts.machine import Machine, read_machine
from unisono.facts.probes import Probes

__all__ = [
    "Environment",
    "Machine",
    "Probes",
    "all_variables",
    "package_versions",
    "read_environment",
    "read_machine",
    "take_token",
]
