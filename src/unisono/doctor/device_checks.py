"""Checks of accelerators and processors: present, healthy, joined, free, well chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unisono.agree.reports import settings_of
from unisono.doctor.check import Check, CheckFunction, Finding, Status, Surroundings, found
from unisono.doctor.device_health import (
    DeviceProblem,
    device_problems,
    faulty_devices,
    judge_bfloat16,
    judge_driver,
    judge_threads,
    processor_text,
)
from unisono.doctor.device_selection import (
    SelectionReport,
    device_rows,
    expected_transport,
    holders_of,
    judge_selection,
    link_rows,
    transport_rows,
    visible_line,
)
from unisono.facts.accelerators import DeviceDetails, DevicesDetails
from unisono.facts.machine import Processors, read_processors
from unisono.facts.nvidia import INSTALL, NO_ANSWER

SEEN = Check(
    "devices.seen",
    "Visible and physical devices",
    "a rank that does not find its device fails at once, and a device that has dropped out takes its whole job with it",
    "NVML's list (nvidia-ml-py) is held against the PCI bus and CUDA_VISIBLE_DEVICES. PASS: also where a device on the bus is not given to this container or job."
    " FAIL: the driver cannot be used, a device that it lists does not answer, or one has fallen off the bus (Xid 79 in the kernel's log)."
    " UNKNOWN: NVIDIA hardware is here and nvidia-ml-py is not, or the driver has said nothing for 30 s.",
    ("gpu_fell_off", "no_cuda_build"),
)
LINKS = Check(
    "devices.links",
    "What joins the devices",
    "two devices without a direct way send every gradient through the host's memory, at a fraction of the speed",
    "Topology, NVLinks and peer access of each two devices from NVML; which transport NCCL is expected to take follows its own rule"
    " (NCCL_P2P_LEVEL, the processor's make). FAIL: NVLink without peer access. WARN: a setting keeps devices from the way that they have, or PCIe"
    " switches send what they exchange up to the host (ACS in the bridges' registers, which only root can read): slow, and with an IOMMU it may hang.",
    ("p2p_blocked",),
)
SELECTION = Check(
    "devices.selection",
    "The chosen devices",
    "if devices are across sockets, of several types or used by other jobs, the slowest pair sets the pace of all",
    "All choices of as many devices, each as large and as new as the chosen ones, are weighed: errors, memory in use, MIG, types, transport between each two, NUMA nodes, gaps."
    " In a Slurm job only those that it was given. WARN: another choice is better; it is written out.",
    ("device_mismatch", "duplicate_gpu"),
)
MEMORY = Check(
    "devices.memory",
    "Memory of the devices in use",
    "a forgotten process that holds memory makes the run fail with `out of memory` when the longest batch comes",
    "NVML's list of processes for each chosen device. WARN: more than a tenth is in use. FAIL: more than half, or the device takes one process"
    " and has it.",
    ("cuda_oom", "stale_process"),
)
HEALTH = Check(
    "devices.health",
    "Errors of the devices",
    "a device with memory errors computes wrong numbers or stops the job after hours",
    "ECC counts, retired pages and rows, reasons for a low clock, NVLinks and the NVSwitch fabric from NVML; Xid errors of the last day from the"
    " kernel's log. FAIL: a grave one on a chosen device; WARN: others.",
    ("ecc_error", "gpu_fell_off"),
)
DRIVER = Check(
    "devices.driver",
    "Driver, CUDA and torch",
    "a torch that is newer than the driver, or older than the device, fails with the first tensor on the device",
    "The driver's newest CUDA (NVML), the CUDA that torch was built for (its files, without importing it) and the devices' capability.",
    ("driver_too_old", "cuda_arch_unsupported", "no_cuda_build"),
)
SLICES = Check(
    "devices.mig",
    "MIG slices",
    "NCCL cannot talk between two slices of one device, and a sliced device cannot be used whole",
    "MIG mode and slices from NVML. FAIL: several ranks, and a chosen device is sliced.",
)
PROCESSOR = Check(
    "devices.processor",
    "Processors",
    "idle cores, and ranks that access memory across sockets, silently cost half of the speed",
    "Sockets, cores, NUMA nodes and instruction sets from /proc and /sys. Judged where ranks run on the CPU: WARN where half of the cores stay idle, or ranks do not divide over NUMA nodes.",
)
BFLOAT16 = Check(
    "devices.bfloat16",
    "bfloat16 on this processor",
    "emulated bfloat16 is slower than float32 on a CPU",
    "The flags amx_bf16, avx512_bf16 and bf16 of /proc/cpuinfo. WARN: the config asks for it and none is there.",
)

CATALOGUE = (SEEN, LINKS, SELECTION, MEMORY, HEALTH, DRIVER, SLICES, PROCESSOR, BFLOAT16)


_HALF = 0.5
_OFF_THE_BUS = 79  # the Xid


@dataclass(frozen=True)
class DeviceContext:
    """All that the judgements of devices need.

    Attributes:
        details: of this machine.
        visible: physical indices, in the order in which programs see them.
        chosen: physical indices of this node's ranks, by local rank; empty: they run on the CPU.
        processors: of this machine.
        settings: variables of NCCL and the like.
        torch: its version; empty: none.
        torch_cuda: that it was built for.
        allotted: whether a scheduler has given this job the visible ones, and the others to somebody else.
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
        """What is wrong with any device."""
        return device_problems(self.details)

    @cached_property
    def judged(self) -> SelectionReport:
        """Of the chosen ones."""
        return judge_selection(
            self.details,
            self.chosen,
            vendor=self.processors.vendor,
            settings=self.settings,
            ill=faulty_devices(self.problems),
            within=self.visible if self.allotted else None,
        )

    @property
    def used(self) -> list[DeviceDetails]:
        """The chosen devices."""
        return [device for index in self.chosen if (device := self.details.device(index)) is not None]


def check_devices(around: Surroundings) -> list[Finding]:
    """Accelerators: nothing at all is said of a machine without NVIDIA hardware, but that it has none."""
    return judge_devices(read_device_context(around))


def check_processors(around: Surroundings) -> list[Finding]:
    """What ranks on the CPU get; of machines with accelerators only what they are."""
    found_here = read_processors()
    text = processor_text(found_here)
    if any(place.kind == "cuda" for place in around.here.devices):
        return [found(PROCESSOR, "pass", text)]
    threads, origin = around.here.threads
    status, words, fix = judge_threads(
        found_here, ranks=len(around.here.devices), threads=threads, origin=origin
    )
    dtype = around.loaded.config.model.dtype if around.loaded is not None else "auto"
    second, bfloat16, mend = judge_bfloat16(found_here, dtype=dtype)
    return [found(PROCESSOR, status, words, text, fix=fix), found(BFLOAT16, second, bfloat16, fix=mend)]


def read_device_context(around: Surroundings) -> DeviceContext:
    """Asks the driver once, and puts together what was asked for."""
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


def judge_devices(scene: DeviceContext) -> list[Finding]:
    """Pure."""
    details = scene.details
    if details.note:
        if "nvidia-ml-py" in details.note:
            return [found(SEEN, "unknown", details.note, *details.on_bus, fix=[INSTALL])]
        if NO_ANSWER in details.note:
            fix = [
                "sudo nvidia-smi -pm 1   # else the driver is set up anew for each who asks; then once more"
            ]
            return [found(SEEN, "unknown", details.note, *details.on_bus, fix=fix)]
        fix = [
            "`nvidia-smi` says the same; restart the machine, or load the driver that fits its libraries: sudo modprobe nvidia"
        ]
        return [found(SEEN, "fail", details.note, *details.on_bus, fix=fix)]
    if not details.devices:
        return [found(SEEN, "pass", "no NVIDIA hardware; ranks run on the CPU")]
    return [
        _seen(scene),
        *_links(scene),
        *_selection(scene),
        *_memory(scene),
        _health(scene),
        _driver(scene),
        _slices(scene),
    ]


def _seen(scene: DeviceContext) -> Finding:
    details = scene.details
    known = {device.bus_id for device in details.devices if not device.trouble}
    silent = [address for address in details.on_bus if address not in known]
    lost = [f"device {device.index}: {device.trouble}" for device in details.devices if device.trouble]
    text = f"{len(details.devices)} physical, {len(scene.visible)} visible, {len(scene.chosen)} for this node's ranks"
    rows = device_rows(details, scene.visible)
    fallen = [
        bus
        for bus in silent
        if any(xid.number == _OFF_THE_BUS and xid.bus_id == bus for xid in details.xids or ())
    ]
    if lost or fallen:
        why = f"{text}; no answer from {', '.join(fallen or lost)}"
        return found(
            SEEN,
            "fail",
            why,
            *lost,
            *rows,
            fix=["`sudo dmesg | grep -i xid` says why; then restart the machine"],
        )
    hidden = [f"on the bus, and not given to this container or job: {', '.join(silent)}"] if silent else []
    return found(SEEN, "pass", text, *hidden, *rows)


def _links(scene: DeviceContext) -> list[Finding]:
    rows = link_rows(scene.details)
    if not rows:
        return []
    vendor, settings = scene.processors.vendor, scene.settings
    ways = transport_rows(scene.details, vendor=vendor, settings=settings)
    pairs = [(a, b) for place, a in enumerate(scene.chosen) for b in scene.chosen[place + 1 :]] or list(
        scene.details.pairs
    )
    now = {pair: expected_transport(scene.details, *pair, vendor=vendor, settings=settings) for pair in pairs}
    free = {pair: expected_transport(scene.details, *pair, vendor=vendor) for pair in pairs}
    broken = [pair for pair, way in now.items() if way.kind == "broken"]
    if broken:
        fix = [
            "`nvidia-smi topo -p2p rw` shows it; restart the machine and the fabric manager; as a first aid export NCCL_IGNORE_DISABLED_P2P=1"
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
        text = f"{first[0]}–{first[1]} could use {free[first].why}, and settings prevent it: {now[first].why}"
        names = [
            name for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE") if name in settings
        ]
        return [found(LINKS, "warn", text, *ways, *rows, fix=[f"unset {' '.join(names)}"])]
    detour = _detour(scene.details, [pair for pair in pairs if now[pair].kind == "p2p"])
    if detour:
        return [_redirected_finding(*detour, rows=[*ways, *rows])]
    return [found(LINKS, "pass", ways[0], *ways[1:], *rows)]


def _detour(
    details: DevicesDetails, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], list[str]] | None:
    """The first two devices below PCIe switches that send what they exchange up to the host, and all such bridges."""
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
    text = f"what {pair[0]} and {pair[1]} exchange goes up to the host, though they share a PCIe switch: ACS is on in {shown}"
    fix = [
        "on a machine of its own: ACS (and the IOMMU, or iommu=pt) off in the BIOS; in a virtual machine it is the host's matter",
        f"until the next restart: for b in {' '.join(bridges)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done",
    ]
    return found(LINKS, "warn", text, *rows, fix=fix)


def _selection(scene: DeviceContext) -> list[Finding]:
    if not scene.chosen:
        return []
    judged = scene.judged
    mapping = ", ".join(f"rank {local} → {index}" for local, index in enumerate(scene.chosen))
    if not judged.better:
        text = mapping if not judged.troubles else f"{mapping}; no other choice is better"
        return [found(SELECTION, "pass", text, *judged.troubles)]
    words = ",".join(map(str, judged.better))
    if not judged.matters:
        text = f"{mapping}; {words} would be a little better: {judged.why}"
        return [found(SELECTION, "pass", text, *judged.troubles)]
    better = [device for index in judged.better if (device := scene.details.device(index)) is not None]
    mixed = len({device.name for device in scene.details.devices}) > 1
    fix = [visible_line(better, mixed=mixed)]
    if set(judged.better) <= set(scene.visible):
        fix.append(f"or --devices {words}")
    return [
        found(
            SELECTION, "warn", f"{mapping}; {words} would be better: {judged.why}", *judged.troubles, fix=fix
        )
    ]


def _memory(scene: DeviceContext) -> list[Finding]:
    if not scene.chosen:
        return []
    held = [(device, words) for device in scene.used if (words := holders_of(device))]
    if not held:
        return [found(MEMORY, "pass", "nobody holds memory of the chosen devices")]
    status: Status = "warn"
    for device, _ in held:
        taken = device.compute_mode == "exclusive" and bool(device.holders)
        if taken or device.memory_used_bytes > _HALF * device.memory_bytes:
            status = "fail"
    pids = sorted({holder.pid for device, _ in held for holder in device.holders or () if holder.user})
    fix = (
        [f"ask who runs it, or end it: kill {' '.join(map(str, pids))}"]
        if pids
        else ["`nvidia-smi` on the host shows who it is"]
    )
    lines = [f"device {device.index}: {words}" for device, words in held]
    return [found(MEMORY, status, *lines, fix=fix)]


def _health(scene: DeviceContext) -> Finding:
    if not scene.problems:
        log = (
            ""
            if scene.details.xids is not None
            else "; the kernel's log cannot be read here (sudo dmesg | grep -i xid)"
        )
        return found(HEALTH, "pass", f"no errors{log}")
    concerned = set(scene.chosen or (device.index for device in scene.details.devices)) | {-1}
    grave = any(one.gravity == "grave" and one.index in concerned for one in scene.problems)
    fixes = list(dict.fromkeys(one.fix for one in scene.problems))
    return found(HEALTH, "fail" if grave else "warn", *(one.text for one in scene.problems), fix=fixes[:4])


def _driver(scene: DeviceContext) -> Finding:
    status, text, fix = judge_driver(
        scene.details,
        scene.used or list(scene.details.devices),
        torch=scene.torch,
        torch_cuda=scene.torch_cuda,
    )
    return found(DRIVER, status, text, fix=fix)


def _slices(scene: DeviceContext) -> Finding:
    sliced = [device for device in scene.details.devices if device.mig is not None]
    if not sliced:
        return found(SLICES, "pass", "no device is cut into slices")
    lines = [f"device {device.index}: {', '.join(device.mig or ()) or 'no slices'}" for device in sliced]
    if len(scene.chosen) > 1 and any(device.index in scene.chosen for device in sliced):
        names = ",".join(str(device.index) for device in sliced)
        fix = [f"sudo nvidia-smi -mig 0 -i {names} (nobody may use it then), or choose other devices"]
        text = f"{len(scene.chosen)} ranks, and a chosen device is sliced"
        return found(SLICES, "fail", text, *lines, fix=fix)
    if scene.chosen and not any(device.index in scene.chosen for device in sliced):
        return found(SLICES, "pass", "no chosen device is cut into slices", *lines)
    fix = [f"export CUDA_VISIBLE_DEVICES={(sliced[0].mig or ('MIG-…',))[0]}"]
    return found(SLICES, "warn", "a slice is named by its UUID", *lines, fix=fix)


CHECKS: tuple[CheckFunction, ...] = (check_devices, check_processors)
