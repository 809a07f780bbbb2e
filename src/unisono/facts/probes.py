"""What a front asks the machine through: the real probes, or a test's answers (DESIGN B9)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.facts.clock import Clock, SystemClock
from unisono.facts.infiniband import InfinibandPort, read_infiniband
from unisono.facts.machine import DeviceProbe, probe_nvidia
from unisono.facts.network import NetworkProbe, SystemNetwork
from unisono.facts.nvml import DetailsProbe, probe_details
from unisono.facts.versions import package_versions


@dataclass(frozen=True)
class Probes:
    """All that a front learns about its machine through something that tests can put in place.

    Attributes:
        devices: lists the accelerators: "8 GPUs visible here, 2 there" is tried with it on a machine without any.
        network: lists interfaces, and resolves names.
        clock: the wall clock and the monotonic one.
        packages: all installed distributions and their versions.
        details: what the accelerators are and how they are joined; asked where that is judged, not for a start.
        infiniband: the ports of InfiniBand and RoCE adapters.
    """

    devices: DeviceProbe = probe_nvidia
    network: NetworkProbe = field(default_factory=SystemNetwork)
    clock: Clock = field(default_factory=SystemClock)
    packages: Callable[[], dict[str, str]] = package_versions
    details: DetailsProbe = probe_details
    infiniband: Callable[[], tuple[InfinibandPort, ...]] = read_infiniband
