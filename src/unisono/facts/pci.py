"""NVIDIA's accelerators on the PCI bus, as the kernel lists them: also those for which no driver answers; and the bridges above them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_NVIDIA = "0x10de"
_BUS = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_EXTENDED = 0x100  # where extended capabilities begin; who is not root is shown less
_ACS, _CONTROL, _REDIRECTS = 0x000D, 6, 0x0004  # PCI Express, Access Control Services: P2P Request Redirect
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
    """The bridges above each device that send what two devices exchange through the host, where an IOMMU may stop it (ACS).

    Args:
        addresses: of devices; those that have no such bridge are left out.
        folder: of the kernel's list.

    Returns:
        None where it cannot be read: only root sees the whole of a bridge's registers.
    """
    found: dict[str, tuple[str, ...]] = {}
    for address in addresses:
        above = [_redirects(folder / bridge / "config") for bridge in _bridges(folder / address)]
        if None in above:
            return None
        names = tuple(
            name for name, redirects in zip(_bridges(folder / address), above, strict=True) if redirects
        )
        if names:
            found[address] = names
    return found


def _bridges(device: Path) -> list[str]:
    """Those between a device and its host bridge, the nearest first: /sys has them as the folders around it."""
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
    if len(registers) <= _EXTENDED:
        return None
    return any(
        int.from_bytes(registers[place + _CONTROL : place + _CONTROL + 2], "little") & _REDIRECTS
        for place, kind in _capabilities(registers)
        if kind == _ACS
    )


def _capabilities(registers: bytes) -> Iterator[tuple[int, int]]:
    """Place and kind of each extended capability; a list that leads back ends there."""
    place, seen = _EXTENDED, set[int]()
    while _EXTENDED <= place <= len(registers) - 4 and place not in seen:
        seen.add(place)
        header = int.from_bytes(registers[place : place + 4], "little")
        yield place, header & 0xFFFF
        place = header >> 20
