"""What a machine's accelerators are and how they are joined, in plain values: `facts.nvml` reads them, tests hand in recorded ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["internal", "single", "multiple", "hostbridge", "node", "system", "unknown"]
"""What two devices share on the way between them (NVML_TOPOLOGY_*): one board, one PCIe switch, several PCIe switches, the host
bridge of a processor, the processor's memory, or only the link between the sockets."""

Peer = Literal["gpu", "switch", "other"]


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink that is up: to which kind of thing it leads, and its address on the bus (empty: not told)."""

    peer: Peer
    bus_id: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a device.

    Attributes:
        pid: as this process sees it; in a container other people's may be hidden or be the host's.
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
    """How well a device is. None and empty: it does not tell, as many workstation cards do not.

    Attributes:
        ecc: whether memory errors are corrected.
        uncorrected: memory errors since the driver was loaded that could not be.
        pages_pending: memory pages wait for a restart to be taken out of use.
        rows_pending: the same of rows (Ampere and later).
        rows_failed: a row could not be replaced: the device is to be sent back.
        slowed: why its clock is held down.
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
        name: of its type.
        memory_bytes: all of it.
        memory_used_bytes: by anybody.
        numa_node: the memory that is near it; None on machines with one.
        capability: of CUDA.
        nvlinks: those that are up.
        nvlinks_down: how many are there and are not up.
        holders: who holds its memory; None: the driver does not tell.
        health: see there.
        mig: UUIDs of its slices; None: it is not sliced, and empty: it is, into none.
        compute_mode: `default`, `exclusive` (one process at a time) or `prohibited`.
        trouble: why it does not answer; empty: it does.
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
    peer_access: str = "not told"


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver wrote into the kernel's log.

    Attributes:
        bus_id: of the device.
        number: of NVIDIA's list.
        text: the rest of the line.
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
        driver: the version of the driver.
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
        """What is known of two devices."""
        return self.pairs.get((min(one, other), max(one, other)), Pair())

    def device(self, index: int) -> DeviceDetails | None:
        """The device with this physical index."""
        return next((device for device in self.devices if device.index == index), None)
