"""The only reader of the environment and of this machine."""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from unisono.guard.facts.environment import (
    Environment,
    all_variables,
    package_versions,
    read_environment,
    take_token,
)
from unisono.guard.facts.machine import DeviceProbe, Machine, no_gpus, probe_nvidia, read_machine
from unisono.guard.facts.network import InfinibandPort, NetworkProbe, SystemNetwork, read_infiniband
from unisono.guard.facts.nvidia import DetailsProbe, probe_details
from unisono.guard.facts.path_probes import identity_of

__all__ = [
    "Environment",
    "Machine",
    "Probes",
    "all_variables",
    "identity_of",
    "no_gpus",
    "package_versions",
    "read_environment",
    "read_machine",
    "take_token",
]


# struct timex is 208 bytes on 64 bits; it begins with modes, and 0 changes nothing.
_TIMEX_BYTES = 256
_NOT_SYNCHRONISED = 5  # TIME_ERROR


class Clock(Protocol):
    """A clock."""

    def wall(self) -> float:
        """Seconds since 1970 by the system clock; for display and for comparing machines, never for
        waiting.
        """
        ...

    def monotonic(self) -> float:
        """Monotonic seconds; for waiting."""
        ...


class SystemClock:
    """The system's implementation."""

    def wall(self) -> float:
        """The system's time of day."""
        return time.time()

    def monotonic(self) -> float:
        """The system's monotonic clock."""
        return time.monotonic()


def is_synchronised() -> bool | None:
    """Whether a time service synchronizes the kernel's clock; None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _NOT_SYNCHRONISED


@dataclass(frozen=True)
class Probes:
    """All readers of the machine that tests can replace.

    Attributes:
        devices: lists the accelerators: "8 GPUs visible here, 2 there" is tried with it on a
            machine without any.
        network: lists interfaces, and resolves names.
        clock: the wall clock and the monotonic one.
        packages: all installed distributions and their versions.
        details: what the accelerators are and how they are joined; asked where that is judged, not
            for a start.
        infiniband: the ports of InfiniBand and RoCE adapters.
    """

    devices: DeviceProbe = probe_nvidia
    network: NetworkProbe = field(default_factory=SystemNetwork)
    clock: Clock = field(default_factory=SystemClock)
    packages: Callable[[], dict[str, str]] = package_versions
    details: DetailsProbe = probe_details
    infiniband: Callable[[], tuple[InfinibandPort, ...]] = read_infiniband
