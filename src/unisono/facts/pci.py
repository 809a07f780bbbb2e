"""NVIDIA's accelerators on the PCI bus, as the kernel lists them: also those for which no driver answers."""

from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")  # a graphics card, and an accelerator without a screen


def nvidia_devices(folder: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
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
