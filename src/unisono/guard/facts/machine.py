"""This machine: host name, processors, memory, disk, and its accelerators in plain values: as the
driver lists them, health, topology, utilization.
"""

import os
import platform
import queue
import re
import shutil
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from unisono.base.text import one_line
from unisono.guard.facts.limits import available_memory, usable_cores


@dataclass(frozen=True)
class Gpu:
    """One accelerator as the driver sees it. `index` is the physical one."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    capability: tuple[int, int]
    bus_id: str = ""
    """PCI address, e.g. `0000:07:00.0`."""
    numa_node: int | None = None
    """The nearest NUMA node; None on machines with one."""


@dataclass(frozen=True)
class Machine:
    """Hardware of a node."""

    host: str
    cores: int
    memory_available_bytes: int
    cpu_name: str
    cpu_bfloat16: bool
    gpus: list[Gpu] = field(default_factory=list)
    gpu_note: str = ""
    """Why no accelerators were found."""
    compiles: bool = False
    """Whether Triton can be expected to compile for them."""


class DeviceProbe(Protocol):
    """Lists the accelerators of this machine."""

    def __call__(self) -> tuple[list[Gpu], str]:
        """All accelerators, and a note if there are none."""
        ...


def probe_nvidia() -> tuple[list[Gpu], str]:
    """Asks the NVIDIA driver, without a CUDA context: through nvidia-ml-py, or where that is not
    installed through its own nvidia-smi.
    """
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return _ask_nvidia_smi()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA device: {error}"
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())], ""
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        bus_id = pci_address(driver_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    except nvml.NVMLError:  # some virtual GPUs are on no bus
        bus_id = ""
    return Gpu(
        index,
        driver_text(nvml.nvmlDeviceGetUUID(handle)),
        driver_text(nvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        (int(major), int(minor)),
        bus_id,
        numa_node_of(bus_id),
    )


_QUERY = "index,uuid,name,memory.total,memory.free,compute_cap,pci.bus_id"
_ANSWER_S = 30.0  # without its persistence daemon the driver initializes each device first


def _ask_nvidia_smi() -> tuple[list[Gpu], str]:
    command = ("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWER_S)
        return [_gpu_of_line(line) for line in done.stdout.splitlines() if line.strip()], ""
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if not Path("/proc/driver/nvidia").exists():
            return [], "no NVIDIA driver"
        said = error.stdout if isinstance(error, subprocess.CalledProcessError) else str(error)
        return (
            [],
            (
                "found an NVIDIA driver, but nvidia-ml-py is not installed (pip install nvidia-ml-py), and"
                f" nvidia-smi failed: {one_line(said, limit=200)}"
            ),
        )


def _gpu_of_line(line: str) -> Gpu:
    """One device of nvidia-smi's answer; memory is in MiB.

    Raises:
        ValueError: if the driver does not tell a number.
    """
    index, uuid, name, total, free, capability, bus_id = (word.strip() for word in line.split(","))
    major, minor = capability.split(".")
    address = pci_address(bus_id)
    sizes = (int(total) << 20, int(free) << 20)
    return Gpu(int(index), uuid, name, *sizes, (int(major), int(minor)), address, numa_node_of(address))


def pci_address(bus_id: str) -> str:
    """A PCI address in the format of /sys: `00000000:07:00.0` becomes `0000:07:00.0`."""
    domain, colon, device = bus_id.strip("\0").lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{device}" if colon else bus_id


def numa_node_of(address: str, *, folder: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device; None if the machine has one, or unknown."""
    try:
        node = int((folder / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def driver_version(*, root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA kernel driver, from its files; None if there is none."""
    version = _content_of(root / "sys/module/nvidia/version").strip()
    if version:
        return version
    # Older drivers and some containers have only this one.
    text = _content_of(root / "proc/driver/nvidia/version")
    return _first_match(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", text) or None


def driver_text(value: str | bytes | None) -> str:
    """A text as nvidia-ml-py gives it."""
    return (value.decode() if isinstance(value, bytes) else value or "").strip("\0")


def no_gpus() -> tuple[list[Gpu], str]:
    """A probe that asks no driver, for who needs only the host's name or its processor."""
    return [], ""


def read_machine(probe: DeviceProbe = probe_nvidia) -> Machine:
    """Reads this machine's hardware."""
    gpus, note = probe()
    name, bfloat16 = _cpu()
    return Machine(
        host=re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "localhost",
        cores=usable_cores(),
        memory_available_bytes=available_memory(),
        cpu_name=name,
        cpu_bfloat16=bfloat16,
        gpus=gpus,
        gpu_note=note,
        compiles=not triton_trouble(),
    )


def triton_trouble() -> str:
    """Why Triton cannot compile here, with the fix; empty if it probably can.

    Each kernel has a part in C that calls Python.
    """
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # where Triton looks
    if not any(map(shutil.which, compilers)):
        return f"Triton finds no C compiler, {' or '.join(compilers)} (install gcc, or set CC to a compiler)"
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if not header.is_file():
        return f"Triton needs Python's headers, and {header} is missing (install python3-dev)"
    return ""


def _cpu() -> tuple[str, bool]:
    """The processor's name, and whether it has bfloat16 instructions."""
    text = _content_of(Path("/proc/cpuinfo"))
    name = _first_match(_MODEL_NAME, text) or platform.processor() or platform.machine()
    return name, bool(_bfloat16(_first_match(_CPU_FLAGS, text).split()))


_MODEL_NAME = r"^model name\s*:\s*(.+)$"
_CPU_FLAGS = r"^(?:flags|Features)\s*:\s*(.+)$"


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that holds `path`, or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of a machine.

    Attributes:
        name: of the model.
        vendor: `intel`, `amd`, `arm` or empty: NCCL decides by it whether devices may talk through
            the processor.
        sockets: how many.
        cores: of the machine, two threads of one core counted once.
        usable: by this process: CPU affinity and cgroup CPU quota.
        numa_nodes: hardware threads of each memory node, by number.
        usable_nodes: the memory nodes on which this process may run.
        bfloat16: how bfloat16 is multiplied: `amx`, `avx512`, `neon`, or empty: by emulation,
            slower than float32.
    """

    name: str
    vendor: str
    sockets: int
    threads: int
    cores: int
    usable: int
    numa_nodes: dict[int, int]
    usable_nodes: tuple[int, ...]
    bfloat16: str


def read_processors(
    *,
    info: Path = Path("/proc/cpuinfo"),
    nodes: Path = Path("/sys/devices/system/node"),
    allowed: frozenset[int] | None = None,
) -> Processors:
    """Reads the current values.

    Args:
        allowed: hardware threads that this process may use; None: looked up.
    """
    text = _content_of(info)
    allowed_threads = _allowed_threads() if allowed is None else allowed
    numa = _numa_nodes(nodes)
    places = set(
        zip(
            re.findall(r"^physical id\s*:\s*(\d+)", text, re.M),
            re.findall(r"^core id\s*:\s*(\d+)", text, re.M),
            strict=False,
        )
    )
    threads = len(re.findall(r"^processor\s*:", text, re.M)) or os.cpu_count() or 1
    return Processors(
        name=_first_match(_MODEL_NAME, text),
        vendor=_vendor(text),
        sockets=len({socket for socket, _ in places}) or 1,
        threads=threads,
        cores=len(places) or threads,
        usable=usable_cores(),
        numa_nodes={node: len(threads_of) for node, threads_of in numa.items()},
        usable_nodes=tuple(node for node, threads_of in numa.items() if threads_of & allowed_threads),
        bfloat16=_bfloat16(_first_match(_CPU_FLAGS, text).split()),
    )


def _vendor(text: str) -> str:
    word = _first_match(r"^vendor_id\s*:\s*(\S+)", text)
    name = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(word, "")
    return name or ("arm" if "CPU implementer" in text else "")


def _bfloat16(flags: list[str]) -> str:
    for flag, name in (("amx_bf16", "amx"), ("avx512_bf16", "avx512"), ("bf16", "neon")):
        if flag in flags:
            return name
    return ""


def _numa_nodes(folder: Path) -> dict[int, frozenset[int]]:
    nodes = {}
    for path in folder.glob("node[0-9]*"):
        threads = _parse_list(_content_of(path / "cpulist"))
        if threads:  # some nodes are memory alone
            nodes[int(path.name[4:])] = threads
    return dict(sorted(nodes.items()))


def _parse_list(text: str) -> frozenset[int]:
    """`0-3,8` is 0, 1, 2, 3, 8."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _allowed_threads() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.M)
    return match[1].strip() if match else ""


def _content_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


Level = Literal["internal", "single", "multiple", "hostbridge", "node", "system", "unknown"]
"""What two devices share on the way between them (NVML_TOPOLOGY_*): one board, one PCIe switch,
several PCIe switches, the host bridge of a processor, the processor's memory, or only the link
between the sockets.
"""

Peer = Literal["gpu", "switch", "other"]


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink that is up: what kind of device it leads to, and its address on the bus (empty:
    not reported).
    """

    peer: Peer
    bus_id: str = ""


@dataclass(frozen=True, slots=True)
class DeviceHolder:
    """A process that holds memory of a device.

    Attributes:
        pid: as this process sees it; in a container those of other users may be hidden or be the
            host's.
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
        fabric: of NVSwitch machines: empty (no such), `not started`, `in progress`, `completed`, or
            what went wrong.
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
    holders: tuple[DeviceHolder, ...] | None = None
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
        on_bus: addresses of NVIDIA's accelerators on the PCI bus, whether the driver answers for
            them or not.
        xids: the oldest first; None: the kernel's log cannot be read here.
        redirecting: by address of a device, the bridges above it that send what it exchanges with
            others through the host (ACS); None: only root can tell.
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
    """Queries the NVIDIA driver in a daemon thread: a driver that has lost its device may block for
    minutes.
    """

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
