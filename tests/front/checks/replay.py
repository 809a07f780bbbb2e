"""Answers for pynvml from a file: what `facts.nvidia` asks, a machine that is not here answers; and
the way to record a machine that is.

`python -m tests.front.checks.replay > tests/front/checks/recorded/NAME.json` on a machine with GPUs records it.
"""

# ruff: noqa: N802, N815 - NVML's own names

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unisono.guard.facts.machine import DeviceHolder, DevicesDetails, numa_node_of, pci_address
from unisono.guard.facts.nvidia import (
    KernelLine,
    OtherSources,
    nvidia_devices,
    read_kernel_log,
    read_nvml,
    redirecting_bridges,
)
from unisono.guard.facts.processes import holder_of

FOLDER = Path(__file__).parent / "recorded"
_NOT_SUPPORTED, _UNINITIALIZED = 3, 1
_OF_SYSTEM = ("nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion")
_OF_DEVICE = (
    "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo", "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetEccMode", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetComputeMode", "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount",
)  # fmt: skip
_OF_LINK = (
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo",
)
_LINKS = 36


class NVMLError(Exception):
    """As pynvml's: `value` is the number of the error."""

    def __init__(self, value: int, text: str = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


class FabricInfo(ctypes.Structure):
    """The parts of c_nvmlGpuFabricInfo_t that are read."""

    _fields_ = [("state", ctypes.c_ubyte), ("status", ctypes.c_uint)]


class Replayed:
    """Stands where the module pynvml does.

    What the file does not know is not supported, as NVML says it.
    """

    NVMLError = NVMLError
    c_nvmlGpuFabricInfo_t = FabricInfo

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def nvmlInit(self) -> None:
        if "refuses" in self._body:
            raise NVMLError(_UNINITIALIZED, self._body["refuses"])

    def nvmlShutdown(self) -> None:
        return

    def nvmlDeviceGetCount(self) -> int:
        return len(self._body["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if "lost" in self._body["devices"][index]:
            raise NVMLError(15, self._body["devices"][index]["lost"])
        return index

    def nvmlDeviceGetGpuFabricInfo(self, handle: int, info: Any) -> int:
        state, status = self._answer(handle, "nvmlDeviceGetGpuFabricInfo")
        info._obj.state, info._obj.status = state, status
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return int(self._body["pairs"]["nvmlDeviceGetTopologyCommonAncestor"][one][other])

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, ability: int) -> int:
        return int(self._body["pairs"]["nvmlDeviceGetP2PStatus"][str(ability)][one][other])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> tuple[int, int]:
        if index >= len(self._answer(handle, "mig")):
            raise NVMLError(6, "Not Found")
        return handle, index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        if isinstance(handle, tuple):
            return str(self._answer(handle[0], "mig")[handle[1]])
        return str(self._answer(handle, "nvmlDeviceGetUUID"))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return int(self._answer(handle, "nvmlDeviceGetTotalEccErrors")[f"{kind},{counter}"])

    def __getattr__(self, name: str) -> Any:
        if name in _OF_SYSTEM:
            return lambda: self._body["system"][name]
        if name in _OF_LINK:
            return lambda handle, link: _object(self._of_link(handle, name, link))
        if name in _OF_DEVICE:
            return lambda handle: _object(self._answer(handle, name))
        raise AttributeError(name)

    def _answer(self, handle: int, name: str) -> Any:
        device = self._body["devices"][handle]
        if name not in device:
            raise NVMLError(_NOT_SUPPORTED)
        return device[name]

    def _of_link(self, handle: int, name: str, link: int) -> Any:
        answers = self._answer(handle, name)
        if link >= len(answers) or answers[link] is None:
            raise NVMLError(_NOT_SUPPORTED)
        return answers[link]


def _object(value: Any) -> Any:
    """Structures are objects with fields."""
    if isinstance(value, dict):
        return SimpleNamespace(**value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [SimpleNamespace(**one) for one in value]
    return value


def recorded(name: str) -> dict[str, Any]:
    """A recorded machine, to be changed and given to `details_from`."""
    body: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return body


def details_from(body: dict[str, Any]) -> DevicesDetails:
    """What `facts.nvidia` reads from a machine with these answers."""
    return read_nvml(Replayed(body), beside_of(body))


def details_of(name: str) -> DevicesDetails:
    """The same of a recorded machine as it is."""
    return details_from(recorded(name))


def beside_of(body: dict[str, Any]) -> OtherSources:
    """What NVML does not tell."""
    beside = body["beside"]
    processes = beside.get("processes", {})
    log = beside.get("kernel_log")
    return OtherSources(
        numa_node=beside["numa_node"].get,
        on_bus=lambda: tuple(beside["on_bus"]),
        kernel_log=lambda: None if log is None else [KernelLine(text, age) for text, age in log],
        holder=lambda pid, size: DeviceHolder(pid, size, *processes.get(str(pid), ())),
        redirecting=lambda _addresses: beside.get("redirecting"),
    )


def record(nvml: Any) -> dict[str, Any]:
    """The answers of a machine that is here, in the form of the files.

    UUIDs, users and programs are in it: look before you share it.
    """
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [_record_device(nvml, handle) for handle in handles]
    buses = [pci_address(device["nvmlDeviceGetPciInfo"]["busId"]) for device in devices]
    pids = {
        one["pid"]: one
        for device in devices
        for one in device.get("nvmlDeviceGetComputeRunningProcesses", [])
    }
    log = read_kernel_log()
    return {
        "composed": False,
        "system": {name: _plain(getattr(nvml, name)()) for name in _OF_SYSTEM},
        "devices": devices,
        "pairs": {
            "nvmlDeviceGetTopologyCommonAncestor": [[0 if a is b else int(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)) for b in handles] for a in handles],
            "nvmlDeviceGetP2PStatus": {
                str(ability): [[0 if a is b else int(nvml.nvmlDeviceGetP2PStatus(a, b, ability)) for b in handles] for a in handles]
                for ability in (0, 1)
            },
        },
        "beside": {
            "numa_node": {bus: numa_node_of(bus) for bus in buses},
            "on_bus": list(nvidia_devices()),
            "kernel_log": None if log is None else [[line.text, line.age_s] for line in log if "NVRM" in line.text],
            "redirecting": redirecting_bridges(buses),
            "processes": {str(pid): [holder_of(pid).user, holder_of(pid).command] for pid in pids},
        },
    }  # fmt: skip


def _record_device(nvml: Any, handle: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def keep(name: str, key: str, *arguments: Any) -> None:
        try:
            found[key] = _plain(getattr(nvml, name)(handle, *arguments))
        except (nvml.NVMLError, AttributeError):
            return

    for name in _OF_DEVICE:
        keep(name, name)
    for name in _OF_LINK:
        answers = []
        for link in range(_LINKS):
            found.pop("one", None)
            keep(name, "one", link)
            if "one" not in found:
                break
            answers.append(found.pop("one"))
        found[name] = answers
    keep("nvmlDeviceGetTotalEccErrors", "ecc", 1, 0)
    if "ecc" in found:
        found["nvmlDeviceGetTotalEccErrors"] = {"1,0": found.pop("ecc")}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "busId"):
        return {"busId": _plain(value.busId)}
    if hasattr(value, "usedGpuMemory"):
        return {"pid": value.pid, "usedGpuMemory": value.usedGpuMemory}
    if hasattr(value, "total"):
        return {name: int(getattr(value, name)) for name in ("total", "free", "used")}
    return value


if __name__ == "__main__":
    import pynvml

    json.dump(record(pynvml), sys.stdout, indent=1)
