"""The ports of InfiniBand and RoCE adapters, as /sys/class/infiniband tells (it belongs to the machine, not to a network namespace)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InfinibandPort:
    """One port.

    Attributes:
        device: of its adapter: `mlx5_0`.
        port: counted from 1.
        state: `ACTIVE`, `INIT` (no subnet manager), `DOWN` …
        physical: `LinkUp`, `Polling` (no cable, or the other end is off), `Disabled` …
        gbit: per second; None: not told.
        layer: `InfiniBand`, or `Ethernet` for RoCE.
        numa_node: the memory that is near it.
    """

    device: str
    port: int
    state: str
    physical: str
    gbit: float | None
    layer: str
    numa_node: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        speed = f", {self.gbit:g} Gbit/s" if self.gbit else ""
        return f"{self.device}:{self.port} {self.state} ({self.physical}){speed}, {self.layer}"


def read_infiniband(folder: Path = Path("/sys/class/infiniband")) -> tuple[InfinibandPort, ...]:
    """All ports, by name; none where there are no adapters."""
    try:
        devices = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(_port(device, port) for device in devices for port in _ports(device))


def _ports(device: Path) -> list[Path]:
    try:
        return sorted((device / "ports").iterdir(), key=lambda path: path.name.rjust(4))
    except OSError:
        return []


def _port(device: Path, port: Path) -> InfinibandPort:
    node = _word(device / "device" / "numa_node")
    return InfinibandPort(
        device=device.name,
        port=int(port.name) if port.name.isdecimal() else 0,
        state=_after_colon(_word(port / "state")),
        physical=_after_colon(_word(port / "phys_state")),
        gbit=_gbit(_word(port / "rate")),
        layer=_word(port / "link_layer") or "unknown",
        numa_node=int(node) if node.isdecimal() else None,
    )


def _after_colon(text: str) -> str:
    """`4: ACTIVE` is ACTIVE."""
    return text.partition(":")[2].strip() or text or "unknown"


def _gbit(text: str) -> float | None:
    """`100 Gb/sec (4X EDR)` is 100."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return None


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
