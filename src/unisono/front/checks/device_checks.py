"""Checks of accelerators and processors: present, healthy, joined, free, well chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.front.checks.check import CheckFunction, DoctorCheck, Finding, Status, Surroundings, found
from unisono.front.checks.device_health import (
    DeviceProblem,
    device_problems,
    faulty_devices,
    judge_bfloat16,
    judge_driver,
    judge_threads,
    processor_text,
)
from unisono.front.checks.device_selection import (
    SelectionReport,
    device_rows,
    expected_transport,
    holders_of,
    judge_selection,
    link_rows,
    transport_rows,
    visible_line,
)
from unisono.guard.agree.reports import settings_of
from unisono.guard.facts.machine import DeviceDetails, DevicesDetails, Processors, read_processors
from unisono.guard.facts.nvidia import INSTALL, NO_ANSWER

SEEN = DoctorCheck(
    "devices.seen",
    "visible and physical devices",
    "a rank without its device fails at once, and a device that fails ends the whole job",
    "NVML's list (nvidia-ml-py) is compared with the PCI bus and CUDA_VISIBLE_DEVICES. PASS: also if a device"
    " on the bus is not assigned to this container or job. FAIL: the driver cannot be used, a listed device"
    " does not respond, or one has fallen off the bus (Xid 79 in the kernel log). UNKNOWN: there is NVIDIA"
    " hardware but no nvidia-ml-py, or the driver has not responded for 30 s.",
    ("gpu_fell_off", "no_cuda_build"),
)
LINKS = DoctorCheck(
    "devices.links",
    "links between devices",
    "two devices without a direct link send every gradient through host memory, at a fraction of the speed",
    "Topology, NVLinks and peer access of each pair of devices from NVML; the transport that NCCL is expected"
    " to use follows its own rule (NCCL_P2P_LEVEL, processor vendor). FAIL: NVLink without peer access. WARN:"
    " a setting prevents a faster link, or PCIe switches redirect the traffic to the host (ACS in the"
    " bridges' registers, which only root can read): slow, and may hang with an IOMMU.",
    ("p2p_blocked",),
)
SELECTION = DoctorCheck(
    "devices.selection",
    "the selected devices",
    "with devices on different sockets, of several types or in use by others, the slowest pair slows down all"
    " ranks",
    "All selections of the same number of devices, each as large and as new as the selected ones, are"
    " compared: errors, memory in use, MIG, types, transport between each pair, NUMA nodes, gaps. In a Slurm"
    " job, only the devices of the job are considered. WARN: a different selection is better; the finding"
    " lists it.",
    ("device_mismatch", "duplicate_gpu"),
)
MEMORY = DoctorCheck(
    "devices.memory",
    "device memory in use",
    "if a forgotten process holds memory, the run fails with `out of memory` at the longest batch",
    "NVML's list of processes on each selected device. WARN: more than a tenth is in use. FAIL: more than"
    " half, or the device allows one process and already has one.",
    ("cuda_oom", "stale_process"),
)
HEALTH = DoctorCheck(
    "devices.health",
    "device errors",
    "a device with memory errors computes wrong results or ends the job after hours",
    "ECC counts, retired pages and rows, clock throttle reasons, NVLinks and the NVSwitch fabric from NVML;"
    " Xid errors of the last day from the kernel log. FAIL: a serious error on a selected device; WARN: other"
    " errors.",
    ("ecc_error", "gpu_fell_off"),
)
DRIVER = DoctorCheck(
    "devices.driver",
    "driver, CUDA and torch",
    "a torch that is too new for the driver, or too old for the device, fails at the first tensor on the"
    " device",
    "The driver's newest CUDA (NVML), the CUDA that torch was built for (from its files, without import) and"
    " the devices' compute capability.",
    ("driver_too_old", "cuda_arch_unsupported", "no_cuda_build"),
)
SLICES = DoctorCheck(
    "devices.mig",
    "MIG slices",
    "NCCL cannot communicate between two slices of one device, and a sliced device cannot be used as a whole",
    "MIG mode and slices from NVML. FAIL: several ranks, and a selected device is sliced.",
)
PROCESSOR = DoctorCheck(
    "devices.processor",
    "processors",
    "idle cores, and ranks that access memory of a different socket, cost half of the speed without a"
    " message",
    "Sockets, cores, NUMA nodes and instruction sets from /proc and /sys. Only if ranks run on the CPU. WARN:"
    " half of the cores stay idle, or ranks do not divide evenly over NUMA nodes.",
)
BFLOAT16 = DoctorCheck(
    "devices.bfloat16",
    "arithmetic in bfloat16",
    "emulated bfloat16 is slower than float32 on a CPU",
    "The flags amx_bf16, avx512_bf16 and bf16 of /proc/cpuinfo. WARN: the config uses bfloat16, and the"
    " processor has none of these flags.",
)

CATALOGUE = (SEEN, LINKS, SELECTION, MEMORY, HEALTH, DRIVER, SLICES, PROCESSOR, BFLOAT16)


_HALF = 0.5
_OFF_THE_BUS = 79  # the Xid


@dataclass(frozen=True)
class DeviceContext:
    """Input of all checks of devices.

    Attributes:
        visible: physical indices, in the order of CUDA.
        chosen: physical indices of this node's ranks, by local rank; empty: they run on the CPU.
        torch: its version; empty: not installed.
        torch_cuda: the CUDA that it was built for.
        allotted: whether a scheduler assigned the visible ones to this job.
    """

    details: DevicesDetails
    visible: tuple[int, ...]
    chosen: tuple[int, ...]
    processors: Processors
    settings: dict[str, str]
    torch: str = ""
    torch_cuda: str | None = None
    allotted: bool = False

    @cached_property
    def problems(self) -> list[DeviceProblem]:
        """Problems of all devices."""
        return device_problems(self.details)

    @cached_property
    def judged(self) -> SelectionReport:
        """Report on the selected devices."""
        return judge_selection(
            self.details,
            self.chosen,
            vendor=self.processors.vendor,
            settings=self.settings,
            faulty=faulty_devices(self.problems),
            within=self.visible if self.allotted else None,
        )

    @property
    def used(self) -> list[DeviceDetails]:
        """The selected devices."""
        return [device for index in self.chosen if (device := self.details.device(index)) is not None]


def check_devices(around: Surroundings) -> list[Finding]:
    """Findings on accelerators; one finding for a machine without NVIDIA hardware."""
    return judge_devices(read_device_context(around))


def check_processors(around: Surroundings) -> list[Finding]:
    """Findings on processors; with accelerators only their description."""
    processors = read_processors()
    text = processor_text(processors)
    if any(place.kind == "cuda" for place in around.local_node.devices):
        return [found(PROCESSOR, "pass", text)]
    threads, origin = around.local_node.threads
    status, words, fix = judge_threads(
        processors, ranks=len(around.local_node.devices), threads=threads, origin=origin
    )
    dtype = around.loaded.config.model.dtype if around.loaded is not None else "auto"
    bfloat16_status, bfloat16, bfloat16_fix = judge_bfloat16(processors, dtype=dtype)
    return [
        found(PROCESSOR, status, words, text, fix=fix),
        found(BFLOAT16, bfloat16_status, bfloat16, fix=bfloat16_fix),
    ]


def read_device_context(around: Surroundings) -> DeviceContext:
    """Reads devices once, through the request's probe."""
    report = around.report
    details = around.probes.details()
    by_uuid = {device.uuid: device.index for device in details.devices if device.uuid}
    return DeviceContext(
        details=details,
        visible=tuple(by_uuid.get(device.uuid, device.index) for device in report.visible),
        chosen=tuple(by_uuid.get(device.uuid, device.index) for device in report.chosen),
        processors=read_processors(),
        settings=settings_of(report),
        torch=report.versions.get("torch", ""),
        torch_cuda=report.versions.get("cuda"),
        allotted=around.environment.slurm_nodes is not None,
    )


def judge_devices(context: DeviceContext) -> list[Finding]:
    """Pure."""
    details = context.details
    if details.note:
        if "nvidia-ml-py" in details.note:
            return [found(SEEN, "unknown", details.note, *details.on_bus, fix=[INSTALL])]
        if NO_ANSWER in details.note:
            fix = [
                "sudo nvidia-smi -pm 1   # persistence mode: without it each query initializes the driver;"
                " then run doctor again"
            ]
            return [found(SEEN, "unknown", details.note, *details.on_bus, fix=fix)]
        fix = [
            "check with `nvidia-smi`; reboot, or load the driver that matches its libraries: sudo modprobe"
            " nvidia"
        ]
        return [found(SEEN, "fail", details.note, *details.on_bus, fix=fix)]
    if not details.devices:
        return [found(SEEN, "pass", "no NVIDIA hardware; ranks run on the CPU")]
    return [
        _seen(context),
        *_links(context),
        *_selection(context),
        *_memory(context),
        _health(context),
        _driver(context),
        _slices(context),
    ]


def _seen(context: DeviceContext) -> Finding:
    details = context.details
    known = {device.bus_id for device in details.devices if not device.trouble}
    silent = [address for address in details.on_bus if address not in known]
    lost = [f"device {device.index}: {device.trouble}" for device in details.devices if device.trouble]
    text = (
        f"{len(details.devices)} physical, {len(context.visible)} visible, {len(context.chosen)} for this"
        " node's ranks"
    )
    rows = device_rows(details, context.visible)
    fallen = [
        bus
        for bus in silent
        if any(xid.number == _OFF_THE_BUS and xid.bus_id == bus for xid in details.xids or ())
    ]
    if lost or fallen:
        why = f"{text}; no response from {', '.join(fallen or lost)}"
        return found(
            SEEN,
            "fail",
            why,
            *lost,
            *rows,
            fix=["`sudo dmesg | grep -i xid` shows why; then reboot"],
        )
    hidden = [f"on the bus, but not assigned to this container or job: {', '.join(silent)}"] if silent else []
    return found(SEEN, "pass", text, *hidden, *rows)


def _links(context: DeviceContext) -> list[Finding]:
    rows = link_rows(context.details)
    if not rows:
        return []
    vendor, settings = context.processors.vendor, context.settings
    ways = transport_rows(context.details, vendor=vendor, settings=settings)
    pairs = [
        (a, b) for position, a in enumerate(context.chosen) for b in context.chosen[position + 1 :]
    ] or list(context.details.pairs)
    now = {
        pair: expected_transport(context.details, *pair, vendor=vendor, settings=settings) for pair in pairs
    }
    free = {pair: expected_transport(context.details, *pair, vendor=vendor) for pair in pairs}
    broken = [pair for pair, way in now.items() if way.kind == "broken"]
    if broken:
        fix = [
            "check with `nvidia-smi topo -p2p rw`; reboot, and restart the fabric manager; as a workaround"
            " export NCCL_IGNORE_DISABLED_P2P=1"
        ]
        return [
            found(
                LINKS,
                "fail",
                f"NVLink without peer access between {broken[0][0]} and {broken[0][1]}",
                *ways,
                *rows,
                fix=fix,
            )
        ]
    lost = [pair for pair in pairs if now[pair].rank > free[pair].rank]
    if lost:
        first = lost[0]
        text = f"{first[0]}–{first[1]} could use {free[first].why}, but settings prevent it: {now[first].why}"
        names = [
            name for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE") if name in settings
        ]
        return [found(LINKS, "warn", text, *ways, *rows, fix=[f"unset {' '.join(names)}"])]
    longer_path = _longer_path(context.details, [pair for pair in pairs if now[pair].kind == "p2p"])
    if longer_path:
        return [_redirected_finding(*longer_path, rows=[*ways, *rows])]
    return [found(LINKS, "pass", ways[0], *ways[1:], *rows)]


def _longer_path(
    details: DevicesDetails, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], list[str]] | None:
    """The first pair of devices whose traffic PCIe switches redirect to the host, and all such
    bridges.
    """
    redirecting = details.redirecting or {}
    below = [pair for pair in pairs if details.pair(*pair).level in ("single", "multiple")]
    bridges: dict[tuple[int, int], list[str]] = {}
    for pair in below:
        devices = [device for index in pair if (device := details.device(index)) is not None]
        named = [bridge for device in devices for bridge in redirecting.get(device.bus_id, ())]
        if named:
            bridges[pair] = named
    if not bridges:
        return None
    return next(iter(bridges)), sorted({bridge for named in bridges.values() for bridge in named})


def _redirected_finding(pair: tuple[int, int], bridges: list[str], *, rows: list[str]) -> Finding:
    shown = ", ".join(bridges[:8]) + (" …" if len(bridges) > 8 else "")
    text = (
        f"traffic between {pair[0]} and {pair[1]} is redirected to the host, although they share a PCIe"
        f" switch: ACS is on in {shown}"
    )
    fix = [
        (
            "on bare metal disable ACS (and the IOMMU, or set iommu=pt) in the BIOS; for a virtual machine do"
            " it on the host"
        ),
        (
            f"until the next reboot: for b in {' '.join(bridges)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000;"
            " done"
        ),
    ]
    return found(LINKS, "warn", text, *rows, fix=fix)


def _selection(context: DeviceContext) -> list[Finding]:
    if not context.chosen:
        return []
    judged = context.judged
    mapping = ", ".join(f"rank {local} → {index}" for local, index in enumerate(context.chosen))
    if not judged.better:
        text = mapping if not judged.troubles else f"{mapping}; no better selection"
        return [found(SELECTION, "pass", text, *judged.troubles)]
    words = ",".join(map(str, judged.better))
    if not judged.matters:
        text = f"{mapping}; {words} would be a little better: {judged.why}"
        return [found(SELECTION, "pass", text, *judged.troubles)]
    better = [device for index in judged.better if (device := context.details.device(index)) is not None]
    mixed = len({device.name for device in context.details.devices}) > 1
    fix = [visible_line(better, mixed=mixed)]
    if set(judged.better) <= set(context.visible):
        fix.append(f"or --devices {words}")
    return [
        found(
            SELECTION, "warn", f"{mapping}; {words} would be better: {judged.why}", *judged.troubles, fix=fix
        )
    ]


def _memory(context: DeviceContext) -> list[Finding]:
    if not context.chosen:
        return []
    held = [(device, words) for device in context.used if (words := holders_of(device))]
    if not held:
        return [found(MEMORY, "pass", "no process holds memory of the selected devices")]
    status: Status = "warn"
    for device, _ in held:
        taken = device.compute_mode == "exclusive" and bool(device.holders)
        if taken or device.memory_used_bytes > _HALF * device.memory_bytes:
            status = "fail"
    pids = sorted({holder.pid for device, _ in held for holder in device.holders or () if holder.user})
    fix = (
        [f"ask its owner, or end it: kill {' '.join(map(str, pids))}"]
        if pids
        else ["`nvidia-smi` on the host shows the process"]
    )
    lines = [f"device {device.index}: {words}" for device, words in held]
    return [found(MEMORY, status, *lines, fix=fix)]


def _health(context: DeviceContext) -> Finding:
    if not context.problems:
        log = (
            ""
            if context.details.xids is not None
            else "; the kernel log is not readable here (sudo dmesg | grep -i xid)"
        )
        return found(HEALTH, "pass", f"no errors{log}")
    concerned = set(context.chosen or (device.index for device in context.details.devices)) | {-1}
    is_serious = any(one.gravity == "grave" and one.index in concerned for one in context.problems)
    fixes = list(dict.fromkeys(one.fix for one in context.problems))
    return found(
        HEALTH, "fail" if is_serious else "warn", *(one.text for one in context.problems), fix=fixes[:4]
    )


def _driver(context: DeviceContext) -> Finding:
    status, text, fix = judge_driver(
        context.details,
        context.used or list(context.details.devices),
        torch=context.torch,
        torch_cuda=context.torch_cuda,
    )
    return found(DRIVER, status, text, fix=fix)


def _slices(context: DeviceContext) -> Finding:
    sliced = [device for device in context.details.devices if device.mig is not None]
    if not sliced:
        return found(SLICES, "pass", "no device is sliced")
    lines = [f"device {device.index}: {', '.join(device.mig or ()) or 'no slices'}" for device in sliced]
    if len(context.chosen) > 1 and any(device.index in context.chosen for device in sliced):
        names = ",".join(str(device.index) for device in sliced)
        fix = [f"sudo nvidia-smi -mig 0 -i {names} (while it is unused), or select different devices"]
        text = f"{len(context.chosen)} ranks, and a selected device is sliced"
        return found(SLICES, "fail", text, *lines, fix=fix)
    if context.chosen and not any(device.index in context.chosen for device in sliced):
        return found(SLICES, "pass", "no selected device is sliced", *lines)
    fix = [f"export CUDA_VISIBLE_DEVICES={(sliced[0].mig or ('MIG-…',))[0]}"]
    return found(SLICES, "warn", "select a slice by its UUID", *lines, fix=fix)


CHECKS: tuple[CheckFunction, ...] = (check_devices, check_processors)
