"""Accelerators in plain values: details, health, topology; and their current utilization."""

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Level = Literal["internal", "single", "multiple", "hostbridge", "node", "system", "unknown"]
"""What two devices share on the way between them (NVML_TOPOLOGY_*): one board, one PCIe switch, several PCIe switches, the host
bridge of a processor, the processor's memory, or only the link between the sockets."""

Peer = Literal["gpu", "switch", "other"]


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink that is up: what kind of device it leads to, and its address on the bus (empty: not reported)."""

    peer: Peer
    bus_id: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a device.

    Attributes:
        pid: as this process sees it; in a container those of other users may be hidden or be the host's.
        memory_bytes: None: the driver does not tell.
        user: who runs it; empty: not seen here.
        command: how it was started; empty: not seen here.
    """

    pid: int
    memory_bytes: int | None = None
    user: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a device. None and empty: not reported, as by many workstation cards.

    Attributes:
        ecc: whether memory errors are corrected.
        uncorrected: uncorrectable memory errors since the driver was loaded.
        pages_pending: memory pages wait for a restart to be taken out of use.
        rows_pending: the same of rows (Ampere and later).
        rows_failed: row remapping failed: the device needs replacement.
        fabric: of NVSwitch machines: empty (no such), `not started`, `in progress`, `completed`, or what went wrong.
    """

    ecc: bool | None = None
    uncorrected: int | None = None
    pages_pending: bool | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    slowed: tuple[str, ...] = ()
    fabric: str = ""


@dataclass(frozen=True, slots=True)
class DeviceDetails:
    """One accelerator.

    Attributes:
        index: the physical one, in the order of the bus, as nvidia-smi counts.
        uuid: `GPU-…`; empty where it does not answer.
        bus_id: as /sys spells it: `0000:07:00.0`.
        memory_bytes: all of it.
        memory_used_bytes: by anybody.
        numa_node: the memory that is near it; None on machines with one.
        nvlinks_down: how many are there and are not up.
        holders: who holds its memory; None: the driver does not tell.
        health: see there.
        mig: UUIDs of its slices; None: it is not sliced, and empty: it is, into none.
        compute_mode: `default`, `exclusive` (one process at a time) or `prohibited`.
        trouble: why it does not respond; empty: it does.
    """

    index: int
    uuid: str = ""
    bus_id: str = ""
    name: str = ""
    memory_bytes: int = 0
    memory_used_bytes: int = 0
    numa_node: int | None = None
    capability: tuple[int, int] = (0, 0)
    nvlinks: tuple[NvLink, ...] = ()
    nvlinks_down: int = 0
    holders: tuple[Holder, ...] | None = None
    health: Health = field(default_factory=Health)
    mig: tuple[str, ...] | None = None
    compute_mode: str = "default"
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two devices.

    Attributes:
        level: what they share.
        peer_access: empty: each reads and writes the other's memory; else why not.
    """

    level: Level = "unknown"
    peer_access: str = "not reported"


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver wrote into the kernel's log.

    Attributes:
        age_s: seconds ago; None: not known.
    """

    bus_id: str
    number: int
    text: str
    age_s: float | None = None


@dataclass(frozen=True)
class DevicesDetails:
    """All accelerators of a machine.

    Attributes:
        devices: by index.
        pairs: by indices, the lower first.
        driver_cuda: the newest CUDA that it knows, as (12, 4).
        on_bus: addresses of NVIDIA's accelerators on the PCI bus, whether the driver answers for them or not.
        xids: the oldest first; None: the kernel's log cannot be read here.
        redirecting: by address of a device, the bridges above it that send what it exchanges with others through the host (ACS);
            None: only root can tell.
        note: why there are no devices; empty where there are, or where nothing is to be expected.
    """

    devices: tuple[DeviceDetails, ...] = ()
    pairs: Mapping[tuple[int, int], Pair] = field(default_factory=dict)
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    on_bus: tuple[str, ...] = ()
    xids: tuple[Xid, ...] | None = None
    redirecting: Mapping[str, tuple[str, ...]] | None = None
    note: str = ""

    def pair(self, one: int, other: int) -> Pair:
        """Level and peer access of two devices."""
        return self.pairs.get((min(one, other), max(one, other)), Pair())

    def device(self, index: int) -> DeviceDetails | None:
        """The device with this physical index."""
        return next((device for device in self.devices if device.index == index), None)


_FRESH_S = 3.0


class GpuUtilization(Protocol):
    """Utilization of devices. Called several times per second, so it must be cheap."""

    def percent(self, uuid: str) -> int | None:
        """Utilization in percent; None: unknown, or not yet known."""
        ...


class NoGpuUtilization:
    """Knows of none."""

    def percent(self, uuid: str) -> int | None:
        """Not known."""
        del uuid
        return None


class NvidiaUtilization:
    """Queries the NVIDIA driver in a daemon thread: a driver that has lost its device may block for minutes."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._requested: set[str] = set()
        self._known: dict[str, tuple[float, int]] = {}
        threading.Thread(target=self._run, name="gpu-use", daemon=True).start()

    def percent(self, uuid: str) -> int | None:
        """The last value if recent; requests a new one."""
        if uuid not in self._requested:
            self._requested.add(uuid)
            self._wanted.put(uuid)
        at, percent = self._known.get(uuid, (0.0, 0))
        return percent if time.monotonic() - at < _FRESH_S and uuid in self._known else None

    def _run(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return  # nothing is known, as without a driver
        while True:
            uuid = self._wanted.get()
            try:
                rates = nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByUUID(uuid))
                self._known[uuid] = time.monotonic(), int(rates.gpu)
            except nvml.NVMLError:
                self._known.pop(uuid, None)
            self._requested.discard(uuid)


def gpu_utilization() -> GpuUtilization:
    """By nvidia-ml-py, where that is installed."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return NoGpuUtilization()
    return NvidiaUtilization(pynvml)
