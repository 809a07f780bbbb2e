"""This machine: host name, processors, memory, disk, and accelerators as the driver lists them."""

import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unisono.facts.limits import available_memory, usable_cores


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


class DeviceProbe(Protocol):
    """Lists the accelerators of this machine."""

    def __call__(self) -> tuple[list[Gpu], str]:
        """All accelerators, and a note if there are none."""
        ...


def probe_nvidia() -> tuple[list[Gpu], str]:
    """Asks the NVIDIA driver through nvidia-ml-py, without a CUDA context."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        note = "found an NVIDIA driver, but nvidia-ml-py is not installed: pip install nvidia-ml-py"
        return [], note if Path("/proc/driver/nvidia").exists() else "no NVIDIA driver"
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
        bus_id = pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    except nvml.NVMLError:  # some virtual GPUs are on no bus
        bus_id = ""
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetUUID(handle)),
        _text(nvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        (int(major), int(minor)),
        bus_id,
        numa_node_of(bus_id),
    )


def pci_address(bus_id: str) -> str:
    """A PCI address in the format of /sys: `00000000:07:00.0` becomes `0000:07:00.0`."""
    domain, colon, rest = bus_id.strip("\0").lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if colon else bus_id


def numa_node_of(address: str, *, folder: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device; None if the machine has one, or unknown."""
    try:
        node = int((folder / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def driver_version(*, root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA kernel driver, from its files; None if there is none."""
    try:
        return (root / "sys/module/nvidia/version").read_text().strip() or None
    except OSError:
        pass  # older drivers and some containers have only the next one
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]+)", text)
    return found[1] if found else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
    )


def _cpu() -> tuple[str, bool]:
    """The processor's name, and whether it has bfloat16 instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), False
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    return (name[1].strip() if name else platform.machine()), bool(
        words & {"avx512_bf16", "amx_bf16", "bf16"}
    )


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
        vendor: `intel`, `amd`, `arm` or empty: NCCL decides by it whether devices may talk through the processor.
        sockets: how many.
        cores: of the machine, two threads of one core counted once.
        usable: by this process: CPU affinity and cgroup CPU quota.
        numa_nodes: hardware threads of each memory node, by number.
        usable_nodes: the memory nodes on which this process may run.
        bfloat16: how bfloat16 is multiplied: `amx`, `avx512`, `neon`, or empty: by emulation, slower than float32.
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
    own = _allowed_threads() if allowed is None else allowed
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
        name=_first_match(r"^model name\s*:\s*(.+)$", text),
        vendor=_vendor(text),
        sockets=len({socket for socket, _ in places}) or 1,
        threads=threads,
        cores=len(places) or threads,
        usable=usable_cores(),
        numa_nodes={node: len(threads_of) for node, threads_of in numa.items()},
        usable_nodes=tuple(node for node, threads_of in numa.items() if threads_of & own),
        bfloat16=_bfloat16(_first_match(r"^(?:flags|Features)\s*:\s*(.+)$", text).split()),
    )


def _vendor(text: str) -> str:
    word = _first_match(r"^vendor_id\s*:\s*(\S+)", text)
    known = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(word, "")
    return known or ("arm" if "CPU implementer" in text else "")


def _bfloat16(flags: list[str]) -> str:
    for flag, name in (("amx_bf16", "amx"), ("avx512_bf16", "avx512"), ("bf16", "neon")):
        if flag in flags:
            return name
    return ""


def _numa_nodes(folder: Path) -> dict[int, frozenset[int]]:
    found = {}
    for path in folder.glob("node[0-9]*"):
        threads = _parse_list(_content_of(path / "cpulist"))
        if threads:  # some nodes are memory alone
            found[int(path.name[4:])] = threads
    return dict(sorted(found.items()))


def _parse_list(text: str) -> frozenset[int]:
    """`0-3,8` is 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _allowed_threads() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _first_match(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.M)
    return found[1].strip() if found else ""


def _content_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
