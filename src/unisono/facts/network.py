"""This machine's network: interfaces (rtnetlink), InfiniBand ports, name resolution. Protocols, so that tests can supply answers."""

import contextlib
import ipaddress
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from unisono.text import one_line

_GET_LINKS, _GET_ADDRESSES = 18, 22  # RTM_GETLINK, RTM_GETADDR
_ERROR, _DONE = 2, 3
_DUMP = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_NAME, _MTU, _OPERSTATE, _INFO, _INFO_KIND = 3, 4, 16, 18, 1  # IFLA_*
_PEER_ADDRESS, _LOCAL_ADDRESS = 1, 2  # IFA_*: where both are, the local one is ours
_NESTED = 0x3FFF
_LIMIT_S = 2.0
_UP, _LOOPBACK = 0x1, 0x8
_DOWN_STATES = (2, 3)  # IF_OPER_DOWN, IF_OPER_LOWERLAYERDOWN: enabled, but the cable is out


@dataclass
class KernelInterface:
    """An interface as the kernel reports it. `kind` is set for virtual ones (veth, bridge, …), else empty."""

    name: str
    mtu: int | None
    up: bool
    loopback: bool
    hardware: int
    """ARPHRD_*: 1 ethernet, 32 infiniband, 772 loopback."""
    kind: str
    addresses: list[str] = field(default_factory=list)


def read_kernel_interfaces() -> list[KernelInterface]:
    """All interfaces of this network namespace, in the kernel's order.

    Raises:
        OSError: if the kernel does not reply, e.g. in some sandboxes.
    """
    links = {index: link for index, link in map(_kernel_interface, _dump(_GET_LINKS)) if link.name}
    for index, address in map(_address, _dump(_GET_ADDRESSES)):
        if index in links and address:
            links[index].addresses.append(address)
    return list(links.values())


def _dump(kind: int) -> list[bytes]:
    """Bodies of all reply messages to one request."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("netlink needs Linux")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as channel:
        channel.settimeout(_LIMIT_S)
        channel.bind((0, 0))
        request = struct.pack("=IHHIIB15x", 32, kind, _DUMP, 1, 0, socket.AF_UNSPEC)
        channel.send(request)
        bodies: list[bytes] = []
        while True:
            data = channel.recv(1 << 20)
            while len(data) >= 16:
                length, what = struct.unpack_from("=IH", data)
                if what == _DONE or length < 16:
                    return bodies
                if what == _ERROR:
                    raise OSError(-struct.unpack_from("=i", data, 16)[0], "the kernel refused the request")
                bodies.append(data[16:length])
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind & _NESTED, data[4:length]
        data = data[(length + 3) & ~3 :]


def _kernel_interface(body: bytes) -> tuple[int, KernelInterface]:
    _, hardware, index, flags = struct.unpack_from("=BxHiI", body)
    found = dict(_attributes(body[16:]))
    inner = dict(_attributes(found.get(_INFO, b"")))
    state = found.get(_OPERSTATE, b"\0")[0]
    mtu = found.get(_MTU, b"")
    return index, KernelInterface(
        name=_name_text(found.get(_NAME, b"")),
        mtu=struct.unpack("=I", mtu)[0] if len(mtu) == 4 else None,
        up=bool(flags & _UP) and state not in _DOWN_STATES,
        loopback=bool(flags & _LOOPBACK),
        hardware=hardware,
        kind=_name_text(inner.get(_INFO_KIND, b"")),
    )


def _address(body: bytes) -> tuple[int, str]:
    index = struct.unpack_from("=I", body, 4)[0]
    found = dict(_attributes(body[8:]))
    raw = found.get(_LOCAL_ADDRESS) or found.get(_PEER_ADDRESS) or b""
    with contextlib.suppress(ValueError):
        return index, str(ipaddress.ip_address(raw))
    return index, ""


def _name_text(raw: bytes) -> str:
    return os.fsdecode(raw.rstrip(b"\0"))


InterfaceKind = Literal["ethernet", "infiniband", "loopback", "virtual", "unknown"]

_INFINIBAND = 32  # ARPHRD_INFINIBAND
_ETHERNET = 1
# Virtual by make, yet the way out of the machine or of the container.
_ROUTABLE_KINDS = ("", "bond", "team", "vlan", "macvlan", "ipvlan")
_CONTAINER_NAMES = re.compile(
    r"^(docker|br-|virbr|lxcbr|lxdbr|cni|flannel|cali|veth|podman|nerdctl|tun|tap|wg)"
)


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface. `virtual`: a bridge, tunnel, or one end of a container's cable, as docker0 and veth….

    Addresses are literal, IPv4 and IPv6, without prefix length.
    """

    name: str
    addresses: list[str]
    mtu: int | None
    up: bool
    loopback: bool
    speed_mbit: int | None = None
    kind: InterfaceKind = "unknown"


class NetworkProbe(Protocol):
    """Reads this machine's network."""

    def interfaces(self) -> list[NetworkInterface]:
        """All interfaces; empty if they cannot be listed."""
        ...

    def resolve(self, name: str) -> list[str]:
        """Addresses of a host name, without duplicates; empty if unresolved in time."""
        ...


class SystemNetwork:
    """The system's implementation."""

    def interfaces(self) -> list[NetworkInterface]:
        """All of them, as the kernel lists them."""
        try:
            return [_interface(link) for link in read_kernel_interfaces()]
        except OSError:
            return []  # nobody to ask: the report then has none, and what needs them is UNKNOWN

    def resolve(self, name: str) -> list[str]:
        """The answer of the system's resolver within three seconds."""
        return resolve(name)


def resolve(name: str, *, limit_s: float = 3.0) -> list[str]:
    """Addresses of a name, without duplicates, in the resolver's order; empty if there are none or it takes too long.

    getaddrinfo has no timeout, and blocks for half a minute if a name server is down.
    """
    literal = _literal(name)
    if literal:
        return [literal]
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # the second: a label that is not a valid host name
            return
        found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(limit_s)
    return list(found)


def is_loopback(address: str) -> bool:
    """Whether an address is loopback: 127.0.0.0/8, ::1, or IPv4-mapped."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return parsed.is_loopback or (mapped is not None and mapped.is_loopback)


def _literal(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return ""


def _interface(link: KernelInterface) -> NetworkInterface:
    return NetworkInterface(
        name=one_line(link.name),
        addresses=link.addresses,
        mtu=link.mtu,
        up=link.up,
        loopback=link.loopback,
        speed_mbit=_speed(link.name),
        kind=_kind(link),
    )


def _kind(link: KernelInterface) -> InterfaceKind:
    if link.loopback:
        return "loopback"
    if link.hardware == _INFINIBAND:
        return "infiniband"
    if _CONTAINER_NAMES.match(link.name):
        return "virtual"
    if link.hardware != _ETHERNET:
        return "virtual" if link.kind else "unknown"
    if link.kind in _ROUTABLE_KINDS or (
        link.kind == "veth" and link.addresses
    ):  # a container's eth0 is a veth
        return "ethernet"
    return "virtual"


def _speed(name: str, folder: Path = Path("/sys/class/net")) -> int | None:
    """Speed in Mbit/s from the driver; None for virtual interfaces and unplugged cables."""
    try:
        speed = int((folder / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


@dataclass(frozen=True, slots=True)
class InfinibandPort:
    """One port.

    Attributes:
        device: of its adapter: `mlx5_0`.
        port: counted from 1.
        state: `ACTIVE`, `INIT` (no subnet manager), `DOWN` …
        physical: `LinkUp`, `Polling` (no cable, or the other end is off), `Disabled` …
        gbit: Gbit/s; None: unknown.
        layer: `InfiniBand`, or `Ethernet` for RoCE.
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
        """Whether the port is active."""
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        speed = f", {self.gbit:g} Gbit/s" if self.gbit else ""
        return f"{self.device}:{self.port} {self.state} ({self.physical}){speed}, {self.layer}"


def read_infiniband(folder: Path = Path("/sys/class/infiniband")) -> tuple[InfinibandPort, ...]:
    """All ports by name; empty without adapters."""
    try:
        devices = sorted(folder.iterdir())
    except OSError:
        return ()
    return tuple(_port(device, port) for device in devices for port in _port_folders(device))


def _port_folders(device: Path) -> list[Path]:
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
