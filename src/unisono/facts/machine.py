"""This machine: host name, cores, memory, disk, devices. The probe of devices is a protocol, so that tests can answer."""

import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Gpu:
    """One accelerator as the driver sees it. `index` is the physical one."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What one node has."""

    host: str
    cores: int
    memory_available_bytes: int
    cpu_name: str
    cpu_bfloat16: bool
    gpus: list[Gpu] = field(default_factory=list)
    gpu_note: str = ""
    """Why there are no accelerators, or could not be seen."""


class DeviceProbe(Protocol):
    """Lists the accelerators of this machine."""

    def __call__(self) -> tuple[list[Gpu], str]:
        """All of them, and a note where there are none."""
        ...


def probe_nvidia() -> tuple[list[Gpu], str]:
    """Asks the NVIDIA driver through nvidia-ml-py, without a CUDA context."""
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        note = "a driver is here, but nvidia-ml-py is not: pip install 'unisono[gpu]'"
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
    return Gpu(
        index, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), int(memory.total),
        int(memory.free), (int(major), int(minor)),
    )  # fmt: skip


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def read_machine(probe: DeviceProbe = probe_nvidia) -> Machine:
    """Looks at this machine once."""
    gpus, note = probe()
    name, bfloat16 = _cpu()
    return Machine(
        host=re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()) or "localhost",
        cores=_cores(),
        memory_available_bytes=_memory_available(),
        cpu_name=name,
        cpu_bfloat16=bfloat16,
        gpus=gpus,
        gpu_note=note,
    )


def _cores() -> int:
    """Cores this process may use: affinity, and the cgroup's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores  # no such cgroup: affinity is all there is to know
    return cores


def _memory_available() -> int:
    """Bytes that a new process can have: what the system has free, within the cgroup's limit."""
    available = 8 * 10**9
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        return available
    return available


def _cpu() -> tuple[str, bool]:
    """The processor's name, and whether it multiplies bfloat16 matrices itself."""
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
