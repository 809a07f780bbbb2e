"""NVIDIA accelerators: the driver's answers through NVML, the PCI bus, and the kernel log with its
Xid errors.
"""

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from unisono.guard.facts.machine import (
    DeviceDetails,
    DeviceHolder,
    DevicesDetails,
    Health,
    Level,
    NvLink,
    Pair,
    Peer,
    Xid,
    driver_text,
    numa_node_of,
    pci_address,
)
from unisono.guard.facts.processes import holder_of_driver

_NVIDIA = "0x10de"
_BUS = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_EXTENDED_CAPABILITIES = 0x100  # where extended capabilities begin; who is not root is shown less
_ACS, _CONTROL, _REQUEST_REDIRECT = (
    0x000D,
    6,
    0x0004,
)  # PCI Express, Access Control Services: P2P Request Redirect
_DISPLAYS = ("0x0300", "0x0302")  # a graphics card, and an accelerator without a screen


def nvidia_devices(folder: Path = _BUS) -> tuple[str, ...]:
    """Their addresses, sorted: `0000:07:00.0`."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(entry.name for entry in entries if _is_accelerator(entry))


def _is_accelerator(entry: Path) -> bool:
    try:
        vendor, kind = (entry / "vendor").read_text().strip(), (entry / "class").read_text().strip()
    except OSError:
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAYS)


def redirecting_bridges(
    addresses: Sequence[str], folder: Path = _BUS
) -> Mapping[str, tuple[str, ...]] | None:
    """Bridges above each device that redirect peer traffic through the host, where an IOMMU may
    block it (ACS).

    Args:
        addresses: of devices; the result omits those without such a bridge.

    Returns:
        None if unreadable: only root can read all registers of a bridge.
    """
    bridges: dict[str, tuple[str, ...]] = {}
    for address in addresses:
        above = [_redirects(folder / bridge / "config") for bridge in _bridges_above(folder / address)]
        if None in above:
            return None
        names = tuple(
            name for name, redirects in zip(_bridges_above(folder / address), above, strict=True) if redirects
        )
        if names:
            bridges[address] = names
    return bridges


def _bridges_above(device: Path) -> list[str]:
    """The bridges between a device and its host bridge, the nearest first: their folders in /sys
    enclose the device's.
    """
    try:
        parents = device.resolve(strict=True).parents
    except OSError:
        return []
    return [parent.name for parent in parents if _ADDRESS.fullmatch(parent.name)]


def _redirects(config: Path) -> bool | None:
    """Whether a bridge redirects; None where its registers cannot be read to the end."""
    try:
        registers = config.read_bytes()
    except OSError:
        return None
    if len(registers) <= _EXTENDED_CAPABILITIES:
        return None
    return any(
        int.from_bytes(registers[offset + _CONTROL : offset + _CONTROL + 2], "little") & _REQUEST_REDIRECT
        for offset, kind in _capabilities(registers)
        if kind == _ACS
    )


def _capabilities(registers: bytes) -> Iterator[tuple[int, int]]:
    """Place and kind of each extended capability; a list that leads back ends there."""
    offset, seen = _EXTENDED_CAPABILITIES, set[int]()
    while _EXTENDED_CAPABILITIES <= offset <= len(registers) - 4 and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(registers[offset : offset + 4], "little")
        yield offset, header & 0xFFFF
        offset = header >> 20


_MAX_LOG_BYTES = 8 << 20
_RECORD_BYTES = 8192
_LOG_RECORD = re.compile(r"^\d+,\d+,(?P<us>\d+),[^;]*;(?P<text>[^\n]*)")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One line, and how many seconds ago it was written."""

    text: str
    age_s: float | None = None


def read_kernel_log(path: Path = Path("/dev/kmsg")) -> list[KernelLine] | None:
    """All lines in the kernel's buffer, the oldest first; None if not readable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return list(_lines(_records(fd)))
    except PermissionError:
        return None
    finally:
        os.close(fd)


def _records(fd: int) -> list[str]:
    """Each read gives one record; one that was overwritten meanwhile is EPIPE, and the end is
    EAGAIN.
    """
    texts: list[str] = []
    size = 0
    while size < _MAX_LOG_BYTES:
        try:
            data = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue
        if not data:
            break
        size += len(data)
        texts.append(data.decode("utf-8", "replace"))
    return texts


def _lines(records: list[str]) -> list[KernelLine]:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None
    matches = []
    for record in records:
        matched = _LOG_RECORD.match(record)
        if matched:
            age_s = None if now_s is None else max(0.0, now_s - int(matched["us"]) / 1e6)
            matches.append(KernelLine(matched["text"], age_s))
    return matches


INSTALL = "pip install nvidia-ml-py"
# Without its persistence daemon the driver initializes each device again, some seconds for
# each.
_LIMIT_S = 30.0
NO_ANSWER = "the driver did not answer for"
_LEVELS: dict[int, Level] = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}
_READ, _WRITE = 0, 1  # nvmlGpuP2PCapsIndex_t
_PEER_ACCESS = {
    0: "",
    1: "the chipset does not support it",
    2: "the device does not support it",
    3: "the link between them does not support it",
    4: "it is disabled in the driver's settings",
    5: "not supported",
}
_THROTTLE_REASONS = {
    0x4: "its power limit",
    0x8: "the hardware (power or heat)",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply (power brake)",
}
"""Idle (0x1), clocks set by a user (0x2, 0x100) and sync boost (0x10) are not problems."""
_PEERS: dict[int, Peer] = {0: "gpu", 2: "switch"}
_MAX_LINKS = 36
_COMPUTE_MODES = {0: "default", 1: "exclusive", 2: "prohibited", 3: "exclusive"}
_FABRIC_STATES = {0: "", 1: "not started", 2: "in progress", 3: "completed"}
_UNCORRECTED, _SINCE_THE_DRIVER = 1, 0
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+)(?:, )?(?P<text>.*)")


class DetailsProbe(Protocol):
    """Reads this machine's accelerators and their connections."""

    def __call__(self) -> DevicesDetails:
        """All of it, read again."""
        ...


@dataclass(frozen=True)
class OtherSources:
    """Sources besides the driver; tests supply recorded ones.

    Attributes:
        kernel_log: its lines, or None.
        redirecting: see `redirecting_bridges`.
    """

    numa_node: Callable[[str], int | None] = numa_node_of
    on_bus: Callable[[], tuple[str, ...]] = nvidia_devices
    kernel_log: Callable[[], Sequence[KernelLine] | None] = read_kernel_log
    holder: Callable[[int, int | None], DeviceHolder] = holder_of_driver
    redirecting: Callable[[Sequence[str]], Mapping[str, tuple[str, ...]] | None] = redirecting_bridges


def probe_details(*, limit_s: float = _LIMIT_S) -> DevicesDetails:
    """Reads all details from this machine's driver within `limit_s`; if it fails, `note` says
    why.
    """
    beside = OtherSources()
    on_bus = beside.on_bus()
    try:
        import pynvml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        note = f"{len(on_bus)} NVIDIA devices on the bus, but nvidia-ml-py is not installed" if on_bus else ""
        return DevicesDetails(on_bus=on_bus, note=note)
    answers: list[DevicesDetails] = []
    thread = threading.Thread(
        target=lambda: answers.append(read_nvml(pynvml, beside)), name="nvml", daemon=True
    )
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else DevicesDetails(on_bus=on_bus, note=f"{NO_ANSWER} {limit_s:g} s")


def read_nvml(nvml: Any, beside: OtherSources) -> DevicesDetails:
    """All details from the driver.

    Args:
        nvml: the module pynvml, or a stand-in.
    """
    on_bus = beside.on_bus()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        note = f"the NVIDIA driver cannot be used: {error}" if on_bus else ""
        return DevicesDetails(on_bus=on_bus, note=note)
    try:
        return _NvmlReader(nvml, beside).read(on_bus)
    finally:
        nvml.nvmlShutdown()


def xids_in(lines: Sequence[KernelLine]) -> tuple[Xid, ...]:
    """Xid errors in lines of the kernel log."""
    matches = ((line, _XID.search(line.text)) for line in lines)
    return tuple(
        Xid(_full_address(matched["bus"]), int(matched["number"]), matched["text"].strip(), line.age_s)
        for line, matched in matches
        if matched is not None
    )


def _full_address(text: str) -> str:
    """The log leaves out the function of a device: `0000:3b:00`."""
    address = pci_address(text)
    return address if "." in address else f"{address}.0"


class _NvmlReader:
    """Queries to NVML. A query that a device does not support returns None."""

    def __init__(self, nvml: Any, beside: OtherSources) -> None:
        self._nvml = nvml
        self._beside = beside

    def read(self, on_bus: tuple[str, ...]) -> DevicesDetails:
        handles: dict[int, Any] = {}
        devices = []
        for index in range(self._ask("nvmlDeviceGetCount") or 0):
            try:
                handles[index] = self._nvml.nvmlDeviceGetHandleByIndex(index)
            except self._nvml.NVMLError as error:
                devices.append(DeviceDetails(index, trouble=str(error)))
                continue
            devices.append(self._device(index, handles[index]))
        log = self._beside.kernel_log()
        cuda = self._ask("nvmlSystemGetCudaDriverVersion")
        return DevicesDetails(
            devices=tuple(devices),
            pairs=self._pairs(handles),
            driver=driver_text(self._ask("nvmlSystemGetDriverVersion")),
            driver_cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            on_bus=on_bus,
            xids=None if log is None else xids_in(log),
            redirecting=self._beside.redirecting([one.bus_id for one in devices if one.bus_id]),
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """The driver's answer; None if the driver or nvidia-ml-py does not support the query."""
        question = getattr(self._nvml, name, None)
        if question is None:
            return None
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None

    def _device(self, index: int, handle: Any) -> DeviceDetails:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except self._nvml.NVMLError as error:  # a device that is lost answers nothing else either
            return DeviceDetails(
                index, uuid=driver_text(self._ask("nvmlDeviceGetUUID", handle)), trouble=str(error)
            )
        pci = self._ask("nvmlDeviceGetPciInfo", handle)
        bus_id = "" if pci is None else pci_address(driver_text(pci.busId))
        links = list(self._links(handle))
        major, minor = self._ask("nvmlDeviceGetCudaComputeCapability", handle) or (0, 0)
        return DeviceDetails(
            index=index,
            uuid=driver_text(self._ask("nvmlDeviceGetUUID", handle)),
            bus_id=bus_id,
            name=driver_text(self._ask("nvmlDeviceGetName", handle)),
            memory_bytes=int(memory.total),
            memory_used_bytes=int(memory.used),
            numa_node=self._beside.numa_node(bus_id) if bus_id else None,
            capability=(int(major), int(minor)),
            nvlinks=tuple(link for link in links if link is not None),
            nvlinks_down=links.count(None),
            holders=self._holders(handle),
            health=self._health(handle),
            mig=self._mig(handle),
            compute_mode=_COMPUTE_MODES.get(self._ask("nvmlDeviceGetComputeMode", handle), "default"),
        )

    def _links(self, handle: Any) -> Iterator[NvLink | None]:
        """All NVLinks of a device; None for one that is down."""
        for link in range(_MAX_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                return
            if not state:
                yield None
                continue
            kind = self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            pci = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            yield NvLink(
                _PEERS.get(kind, "other"), "" if pci is None else pci_address(driver_text(pci.busId))
            )

    def _holders(self, handle: Any) -> tuple[DeviceHolder, ...] | None:
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is None:
            return None
        return tuple(self._beside.holder(int(one.pid), one.usedGpuMemory) for one in processes)

    def _health(self, handle: Any) -> Health:
        ecc = self._ask("nvmlDeviceGetEccMode", handle)
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        pages = self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        slowed = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        return Health(
            ecc=None if ecc is None else bool(ecc[0]),
            uncorrected=self._ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_THE_DRIVER),
            pages_pending=None if pages is None else bool(pages),
            rows_pending=None if rows is None else bool(rows[2]),
            rows_failed=None if rows is None else bool(rows[3]),
            slowed=tuple(words for bit, words in _THROTTLE_REASONS.items() if int(slowed) & bit),
            fabric=self._fabric(handle),
        )

    def _fabric(self, handle: Any) -> str:
        make = getattr(self._nvml, "c_nvmlGpuFabricInfo_t", None)
        if make is None:
            return ""
        info = make()
        if self._ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info)) is None:
            return ""
        if info.state == 3 and info.status:
            return f"failed (NVML error {info.status})"
        return _FABRIC_STATES.get(info.state, "")

    def _mig(self, handle: Any) -> tuple[str, ...] | None:
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return None
        slices = (
            self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        )
        return tuple(driver_text(self._ask("nvmlDeviceGetUUID", one)) for one in slices if one is not None)

    def _pairs(self, handles: dict[int, Any]) -> dict[tuple[int, int], Pair]:
        return {
            (one, other): Pair(
                _LEVELS.get(
                    self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other]), "unknown"
                ),
                self._peer_access(handles[one], handles[other]),
            )
            for one, other in combinations(sorted(handles), 2)
        }

    def _peer_access(self, one: Any, other: Any) -> str:
        """Why two devices cannot read or write each other's memory; empty if they can."""
        for source, target in ((one, other), (other, one)):
            for ability in (_READ, _WRITE):
                status = self._ask("nvmlDeviceGetP2PStatus", source, target, ability)
                words = "not reported" if status is None else _PEER_ACCESS.get(int(status), "not reported")
                if words:
                    return words
        return ""
