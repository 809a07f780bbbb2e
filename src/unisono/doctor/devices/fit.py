"""Whether driver, the CUDA that torch was built for, and the devices go together. Pure."""

from collections.abc import Sequence

from unisono.doctor.check import Status
from unisono.facts.accelerators import DeviceDetails, DevicesDetails
from unisono.text import one_line

Version = tuple[int, int]

_LEAST_DRIVER: dict[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The least driver of each CUDA for Linux (CUDA's release notes, minor version compatibility)."""
_NEEDS: tuple[tuple[Version, Version], ...] = (
    ((10, 0), (12, 8)),
    ((9, 0), (11, 8)),
    ((8, 9), (11, 8)),
    ((8, 0), (11, 0)),
)
"""A device from this capability on needs torch's CUDA to be at least so new; the newest first."""
_DROPPED: tuple[tuple[int, Version], ...] = ((13, (7, 5)), (12, (5, 0)))
"""From this CUDA on, devices below that capability are not supported; the newest first."""


def judge_fit(
    details: DevicesDetails, chosen: Sequence[DeviceDetails], *, torch: str, torch_cuda: str | None
) -> tuple[Status, str, list[str]]:
    """Status, what was found, and what to type.

    Args:
        details: of the machine.
        chosen: the devices that ranks will use.
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
    unfit = _unfit_devices(chosen, needed)
    if unfit:
        return (
            "fail",
            f"{text}: {unfit}",
            ["install a torch for the devices' generation: https://pytorch.org/get-started/locally"],
        )
    if details.driver_cuda is None:
        return "unknown", f"{text}: which CUDA the driver knows is not told", []
    if needed[0] > details.driver_cuda[0]:
        least = _LEAST_DRIVER.get(needed[0], f"one for CUDA {torch_cuda}")
        fixes = [f"update the driver to at least {least}"]
        if details.driver_cuda >= (12, 0):  # for older ones there is no torch that we work with
            fixes.append(
                f"or pip install torch --index-url https://download.pytorch.org/whl/{_wheel(details.driver_cuda)}"
            )
        return "fail", f"{text}: the driver is too old", fixes
    if needed > details.driver_cuda:
        return (
            "pass",
            f"{text}: works, since the first number is equal; kernels that are compiled at run time (PTX) may not",
            [],
        )
    return "pass", text, []


def _unfit_devices(chosen: Sequence[DeviceDetails], cuda: Version) -> str:
    for device in chosen:
        name = f"device {device.index} ({one_line(device.name, limit=40)}, capability {_shown(device.capability)})"
        newer = next((least for since, least in _NEEDS if device.capability >= since), None)
        if newer is not None and cuda < newer:
            return f"{name} needs CUDA {_shown(newer)} or newer"
        dropped = next((below for since, below in _DROPPED if cuda[0] >= since), None)
        if dropped is not None and (0, 0) < device.capability < dropped:
            return f"{name} is too old for CUDA {_shown(cuda)}"
    return ""


def _wheel(driver_cuda: Version | None) -> str:
    """The name of torch's package index that the driver can use."""
    if driver_cuda is None or driver_cuda >= (13, 0):
        return "cu130" if driver_cuda else "cu126"
    return "cu128" if driver_cuda >= (12, 8) else "cu126"


def _version(text: str) -> Version:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _shown(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
