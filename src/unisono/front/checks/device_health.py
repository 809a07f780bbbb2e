"""Health of devices, and whether driver, CUDA, torch, devices and processors fit together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unisono.base.text import one_line, show_seconds
from unisono.front.checks.check import Status
from unisono.guard.facts.machine import DeviceDetails, DevicesDetails, Processors, Xid

Gravity = Literal["grave", "doubtful"]

_RECENT_S = 24 * 3600.0
_RESET = "nvidia-smi --gpu-reset -i {index} (while it is unused), or reboot"
_RETURN = "stop using device {index}, and have the hardware checked"
_PROGRAM = (
    "usually a program error: check what ran then; if it occurs with every program, run `dcgmi diag -r 3`"
)

XIDS: dict[int, tuple[str, Gravity, str]] = {
    13: ("a kernel failed (out of bounds, illegal instruction)", "doubtful", _PROGRAM),
    31: ("a program accessed invalid memory", "doubtful", _PROGRAM),
    43: ("a program was stopped after an error", "doubtful", _PROGRAM),
    48: ("an uncorrectable memory error", "grave", _RESET),
    61: ("the device's internal micro-controller stopped", "grave", _RESET),
    62: ("the device's internal micro-controller halted", "grave", _RESET),
    63: ("a memory page retirement or row remap is recorded", "doubtful", _RESET),
    64: ("a memory page retirement or row remap failed", "grave", _RETURN),
    74: ("an NVLink failed", "grave", _RETURN),
    79: ("the device has fallen off the bus", "grave", "reboot; if it occurs again: " + _RETURN),
    92: ("a high rate of corrected memory errors", "doubtful", _RETURN),
    94: ("a contained memory error, which affects one program", "doubtful", _RESET),
    95: ("an uncontained memory error, which may affect all programs", "grave", _RESET),
    119: ("the GPU system processor (GSP) does not respond", "grave", _RESET),
    120: ("the GPU system processor (GSP) failed", "grave", _RESET),
    140: ("an uncorrectable memory error", "grave", _RESET),
    149: ("an NVLink failed", "grave", _RETURN),
}
"""Xid errors of NVIDIA's list (docs.nvidia.com/deploy/xid-errors) that matter to training: meaning,
gravity, fix.
"""


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """A problem of one device."""

    index: int
    gravity: Gravity
    text: str
    fix: str


def device_problems(details: DevicesDetails) -> list[DeviceProblem]:
    """All problems, the serious ones first."""
    problems = [problem for device in details.devices for problem in _device_faults(device)]
    problems += _log_faults(details)
    return sorted(problems, key=lambda one: (one.gravity != "grave", one.index))


def faulty_devices(problems: Sequence[DeviceProblem]) -> tuple[int, ...]:
    """Devices that must not be used."""
    return tuple(sorted({one.index for one in problems if one.gravity == "grave"}))


def _device_faults(device: DeviceDetails) -> list[DeviceProblem]:
    if device.trouble:
        return [
            _grave(
                device,
                f"does not respond: {one_line(device.trouble)}",
                "reboot; if it occurs again: " + _RETURN,
            )
        ]
    health = device.health
    problems = []
    if health.rows_failed:
        problems.append(_grave(device, "row remapping failed", _RETURN))
    if health.uncorrected:
        problems.append(
            _grave(
                device,
                f"{health.uncorrected} uncorrectable ECC errors since the driver was loaded",
                _RESET,
            )
        )
    if health.fabric and health.fabric != "completed":
        text = (
            f"the NVSwitch fabric is not ready: {health.fabric}; CUDA fails with `system not yet initialized`"
            " (802)"
        )
        problems.append(
            _grave(device, text, "sudo systemctl start nvidia-fabricmanager (same version as the driver)")
        )
    if device.compute_mode == "prohibited":
        problems.append(
            _grave(device, "its compute mode forbids every program", "sudo nvidia-smi -c 0 -i {index}")
        )
    if health.rows_pending or health.pages_pending:
        problems.append(_doubtful(device, "page retirement or row remap pending until reset", _RESET))
    if health.slowed:
        text = f"its clock is throttled by {', '.join(health.slowed)}"
        problems.append(
            _doubtful(
                device,
                text,
                "check power and cooling: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {index}`",
            )
        )
    if device.nvlinks_down and device.nvlinks:
        total = device.nvlinks_down + len(device.nvlinks)
        problems.append(
            _doubtful(
                device,
                f"{device.nvlinks_down} of {total} NVLinks are down",
                "nvidia-smi nvlink -s -i {index}",
            )
        )
    return problems


def _log_faults(details: DevicesDetails) -> list[DeviceProblem]:
    """Xid errors of the last day; the newest of each kind and device."""
    latest: dict[tuple[str, int], tuple[Xid, int]] = {}
    for xid in details.xids or ():
        if xid.number in XIDS and (xid.age_s is None or xid.age_s < _RECENT_S):
            times = latest.get((xid.bus_id, xid.number), (xid, 0))[1]
            latest[xid.bus_id, xid.number] = (xid, times + 1)
    indices = {device.bus_id: device.index for device in details.devices}
    return [_xid_problem(xid, times, indices.get(xid.bus_id, -1)) for xid, times in latest.values()]


def _xid_problem(xid: Xid, times: int, index: int) -> DeviceProblem:
    meaning, gravity, fix = XIDS[xid.number]
    when = "" if xid.age_s is None else f", {show_seconds(xid.age_s)} ago"
    often = "" if times == 1 else f", {times} times"
    detail = f" ({one_line(xid.text, limit=100)})" if xid.text else ""
    name = str(index) if index >= 0 else xid.bus_id
    return DeviceProblem(
        index,
        gravity,
        f"device {name}: Xid {xid.number}, {meaning}{when}{often}{detail}",
        fix.replace("{index}", name),
    )


def _grave(device: DeviceDetails, text: str, fix: str) -> DeviceProblem:
    return DeviceProblem(
        device.index, "grave", f"device {device.index}: {text}", fix.replace("{index}", str(device.index))
    )


def _doubtful(device: DeviceDetails, text: str, fix: str) -> DeviceProblem:
    return DeviceProblem(
        device.index, "doubtful", f"device {device.index}: {text}", fix.replace("{index}", str(device.index))
    )


Version = tuple[int, int]

_MIN_DRIVER: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Minimum driver of each CUDA for Linux (CUDA release notes, minor version compatibility)."""
_MIN_CUDA: tuple[tuple[Version, Version], ...] = (
    ((10, 0), (12, 8)),
    ((9, 0), (11, 8)),
    ((8, 9), (11, 8)),
    ((8, 0), (11, 0)),
)
"""Devices from this capability on need at least this CUDA in torch; the newest first."""
_DROPPED_CAPABILITY: tuple[tuple[int, Version], ...] = ((13, (7, 5)), (12, (5, 0)))
"""From this CUDA on, devices below that capability are not supported; the newest first."""


def judge_driver(
    details: DevicesDetails, chosen: Sequence[DeviceDetails], *, torch: str, torch_cuda: str | None
) -> tuple[Status, str, list[str]]:
    """Status, evidence and fixes for driver, CUDA and torch.

    Args:
        torch: its version; empty: it is not installed.
        torch_cuda: the CUDA that torch was built for: `12.6`; None: it has none.
    """
    driver = f"driver {details.driver or 'unknown'}" + (
        f" (CUDA up to {_shown(details.driver_cuda)})" if details.driver_cuda else ""
    )
    if not torch:
        return "unknown", f"{driver}; torch is not installed here", ["pip install torch"]
    built = f"torch {torch} for CUDA {torch_cuda}" if torch_cuda else f"torch {torch}, built without CUDA"
    text = f"{driver}; {built}"
    if torch_cuda is None:
        return (
            "warn",
            f"{text}: the devices cannot be used",
            [f"pip install torch --index-url https://download.pytorch.org/whl/{_wheel(details.driver_cuda)}"],
        )
    needed = _version(torch_cuda)
    unsupported = _unsupported_device(chosen, needed)
    if unsupported:
        return (
            "fail",
            f"{text}: {unsupported}",
            ["install a torch build for this GPU generation: https://pytorch.org/get-started/locally"],
        )
    if details.driver_cuda is None:
        return "unknown", f"{text}: the driver does not report its CUDA version", []
    if needed[0] > details.driver_cuda[0]:
        least = _MIN_DRIVER.get(needed[0], f"one for CUDA {torch_cuda}")
        fixes = [f"update the driver to at least {least}"]
        if details.driver_cuda >= (12, 0):  # for older ones there is no torch that we work with
            fixes.append(
                "or pip install torch --index-url"
                f" https://download.pytorch.org/whl/{_wheel(details.driver_cuda)}"
            )
        return "fail", f"{text}: the driver is too old", fixes
    if needed > details.driver_cuda:
        return (
            "pass",
            f"{text}: works, since the major version is equal; kernels compiled at run time (PTX) may not",
            [],
        )
    return "pass", text, []


def _unsupported_device(chosen: Sequence[DeviceDetails], cuda: Version) -> str:
    for device in chosen:
        name = (
            f"device {device.index} ({one_line(device.name, limit=40)}, capability"
            f" {_shown(device.capability)})"
        )
        newer = next((least for since, least in _MIN_CUDA if device.capability >= since), None)
        if newer is not None and cuda < newer:
            return f"{name} needs CUDA {_shown(newer)} or newer"
        dropped = next((below for since, below in _DROPPED_CAPABILITY if cuda[0] >= since), None)
        if dropped is not None and (0, 0) < device.capability < dropped:
            return f"{name} is too old for CUDA {_shown(cuda)}"
    return ""


def _wheel(driver_cuda: Version | None) -> str:
    """Name of the newest package index of torch that the driver supports."""
    if driver_cuda is None or driver_cuda >= (13, 0):
        return "cu130" if driver_cuda else "cu126"
    return "cu128" if driver_cuda >= (12, 8) else "cu126"


def _version(text: str) -> Version:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _shown(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


_BFLOAT16 = {"amx": "AMX", "avx512": "AVX-512", "neon": "processor instructions"}


def processor_text(processors: Processors) -> str:
    """The processors in one line."""
    nodes = len(processors.numa_nodes) or 1
    parts = [
        one_line(processors.name, limit=60) or "unknown processor",
        (
            f"{_count(processors.sockets, 'socket')}, {_count(processors.cores, 'core')},"
            f" {_count(processors.threads, 'thread')}, {_count(nodes, 'NUMA node')}"
        ),
        f"{processors.usable} usable by this process",
    ]
    return "; ".join(parts)


def judge_threads(
    processors: Processors, *, ranks: int, threads: int, origin: str
) -> tuple[Status, str, list[str]]:
    """Whether the ranks' threads use all cores, and no rank spans NUMA nodes; `system.cores` checks
    for too many threads.

    Args:
        ranks: of this node, on the CPU.
        threads: per rank.
    """
    text = f"{_count(ranks, 'rank')} × {_count(threads, 'thread')} ({origin}) on {processors.usable} usable"
    if 2 * ranks * threads <= processors.usable:
        idle = processors.usable - ranks * threads
        return "warn", f"{text}: {idle} idle", [f"export OMP_NUM_THREADS={processors.usable // ranks}"]
    nodes = len(processors.usable_nodes)
    if nodes > 1 and ranks % nodes:
        return (
            "warn",
            (
                f"{text}: {ranks} ranks do not divide evenly over {nodes} NUMA nodes, and a rank that spans"
                " two has slow memory access"
            ),
            [f"--nproc {nodes}"],
        )
    return "pass", text, []


def judge_bfloat16(processors: Processors, *, dtype: str) -> tuple[Status, str, list[str]]:
    """Whether bfloat16 is fast on this processor.

    Args:
        dtype: of the config: `bfloat16`, `float32`, `auto` …
    """
    how = _BFLOAT16.get(processors.bfloat16)
    if how:
        return "pass", f"hardware bfloat16: {how}", []
    text = "bfloat16 is emulated on this processor, slower than float32"
    if dtype in ("bfloat16", "bf16"):
        return "warn", f"{text}; model.dtype is {dtype}", ["model.dtype=float32"]
    return "pass", f"{text}; the config does not use it", []


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
