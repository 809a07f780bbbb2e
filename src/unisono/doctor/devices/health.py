"""Whether devices are well: memory errors, the driver's Xid errors, clocks that are held down, the fabric of NVSwitches. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unisono.facts.accelerators import DeviceDetails, DevicesDetails, Xid
from unisono.text import one_line
from unisono.units import show_seconds

Gravity = Literal["grave", "doubtful"]

_RECENT_S = 24 * 3600.0
_RESET = "nvidia-smi --gpu-reset -i {index} (nobody may use it then), or restart the machine"
_RETURN = "take device {index} out of use; have the hardware checked"
_PROGRAM = "an error of a program most of the time: look at what ran then; if it comes with every program, `dcgmi diag -r 3`"

XIDS: dict[int, tuple[str, Gravity, str]] = {
    13: ("a kernel failed (out of bounds, illegal instruction)", "doubtful", _PROGRAM),
    31: ("a program used memory that is not its own", "doubtful", _PROGRAM),
    43: ("a program's work was stopped after an error", "doubtful", _PROGRAM),
    48: ("a memory error that could not be corrected", "grave", _RESET),
    61: ("the device's own controller stopped", "grave", _RESET),
    62: ("the device's own controller halted", "grave", _RESET),
    63: ("a memory row or page will be replaced", "doubtful", _RESET),
    64: ("a memory row or page could not be replaced", "grave", _RETURN),
    74: ("an NVLink failed", "grave", _RETURN),
    79: ("the device has fallen off the bus", "grave", "restart the machine; if it comes again: " + _RETURN),
    92: ("many memory errors that were corrected", "doubtful", _RETURN),
    94: ("a memory error that hit one program only", "doubtful", _RESET),
    95: ("a memory error that may have hit all programs", "grave", _RESET),
    119: ("the device's system processor does not answer", "grave", _RESET),
    120: ("the device's system processor failed", "grave", _RESET),
    140: ("a memory error that could not be corrected", "grave", _RESET),
    149: ("an NVLink failed", "grave", _RETURN),
}  # fmt: skip
"""Of NVIDIA's list (docs.nvidia.com/deploy/xid-errors), those that matter to training: meaning, gravity, remedy."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with one device."""

    index: int
    gravity: Gravity
    text: str
    fix: str


def complaints(details: DevicesDetails) -> list[Complaint]:
    """Everything that is wrong, grave things first."""
    found = [complaint for device in details.devices for complaint in _of_device(device)]
    found += _of_log(details)
    return sorted(found, key=lambda one: (one.gravity != "grave", one.index))


def ill_devices(found: Sequence[Complaint]) -> tuple[int, ...]:
    """The devices that are not to be used."""
    return tuple(sorted({one.index for one in found if one.gravity == "grave"}))


def _of_device(device: DeviceDetails) -> list[Complaint]:
    if device.trouble:
        return [
            _grave(
                device,
                f"does not answer: {one_line(device.trouble)}",
                "restart the machine; if it comes again: " + _RETURN,
            )
        ]
    health = device.health
    found = []
    if health.rows_failed:
        found.append(_grave(device, "a memory row could not be replaced", _RETURN))
    if health.uncorrected:
        found.append(
            _grave(
                device,
                f"{health.uncorrected} memory errors since the driver was loaded could not be corrected",
                _RESET,
            )
        )
    if health.fabric and health.fabric != "completed":
        text = f"the NVSwitch fabric is not ready: {health.fabric}; CUDA will say `system not yet initialized` (802)"
        found.append(
            _grave(device, text, "sudo systemctl start nvidia-fabricmanager (of the driver's own version)")
        )
    if device.compute_mode == "prohibited":
        found.append(
            _grave(device, "its compute mode forbids every program", "sudo nvidia-smi -c 0 -i {index}")
        )
    if health.rows_pending or health.pages_pending:
        found.append(_doubtful(device, "bad memory will be taken out of use with the next reset", _RESET))
    if health.slowed:
        text = f"its clock is held down by {', '.join(health.slowed)}"
        found.append(
            _doubtful(
                device,
                text,
                "look at power and cooling: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {index}`",
            )
        )
    if device.nvlinks_down and device.nvlinks:
        total = device.nvlinks_down + len(device.nvlinks)
        found.append(
            _doubtful(
                device,
                f"{device.nvlinks_down} of {total} NVLinks are down",
                "nvidia-smi nvlink -s -i {index}",
            )
        )
    return found


def _of_log(details: DevicesDetails) -> list[Complaint]:
    """Errors of the last day; the newest of each kind and device."""
    latest: dict[tuple[str, int], tuple[Xid, int]] = {}
    for xid in details.xids or ():
        if xid.number in XIDS and (xid.age_s is None or xid.age_s < _RECENT_S):
            times = latest.get((xid.bus_id, xid.number), (xid, 0))[1]
            latest[xid.bus_id, xid.number] = (xid, times + 1)
    indices = {device.bus_id: device.index for device in details.devices}
    return [_of_xid(xid, times, indices.get(xid.bus_id, -1)) for xid, times in latest.values()]


def _of_xid(xid: Xid, times: int, index: int) -> Complaint:
    meaning, gravity, fix = XIDS[xid.number]
    when = "" if xid.age_s is None else f", {show_seconds(xid.age_s)} ago"
    often = "" if times == 1 else f", {times} times"
    detail = f" ({one_line(xid.text, limit=100)})" if xid.text else ""
    name = str(index) if index >= 0 else xid.bus_id
    return Complaint(
        index,
        gravity,
        f"device {name}: Xid {xid.number}, {meaning}{when}{often}{detail}",
        fix.replace("{index}", name),
    )


def _grave(device: DeviceDetails, text: str, fix: str) -> Complaint:
    return Complaint(
        device.index, "grave", f"device {device.index}: {text}", fix.replace("{index}", str(device.index))
    )


def _doubtful(device: DeviceDetails, text: str, fix: str) -> Complaint:
    return Complaint(
        device.index, "doubtful", f"device {device.index}: {text}", fix.replace("{index}", str(device.index))
    )
