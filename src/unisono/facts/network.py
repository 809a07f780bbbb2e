"""This machine's network: its interfaces, and what names resolve to. A protocol, so that tests can hand in answers."""

import ipaddress
import re
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from unisono.facts.netlink import Link, read_links
from unisono.text import one_line

InterfaceKind = Literal["ethernet", "infiniband", "loopback", "virtual", "unknown"]

_INFINIBAND = 32  # ARPHRD_INFINIBAND
_ETHERNET = 1
# Virtual by make, yet the way out of the machine or of the container.
_CARRIES = ("", "bond", "team", "vlan", "macvlan", "ipvlan")
_MADE_BY_RUNTIMES = re.compile(
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
    """Says what this machine's network is."""

    def interfaces(self) -> list[NetworkInterface]:
        """All of them; none where they cannot be listed."""
        ...

    def resolve(self, name: str) -> list[str]:
        """The addresses of a host name, each once; none where nobody knows it in time."""
        ...


class SystemNetwork:
    """The real one."""

    def interfaces(self) -> list[NetworkInterface]:
        """All of them, as the kernel lists them."""
        try:
            return [_interface(link) for link in read_links()]
        except OSError:
            return []  # nobody to ask: the report then has none, and what needs them is UNKNOWN

    def resolve(self, name: str) -> list[str]:
        """What the system's resolver says within three seconds."""
        return resolve(name)


def resolve(name: str, *, limit_s: float = 3.0) -> list[str]:
    """The addresses of a name, each once, in the resolver's order; none if there are none or it takes too long.

    getaddrinfo has no time-out of its own, and a name server that is down holds it for half a minute.
    """
    literal = _literal(name)
    if literal:
        return [literal]
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # the second: a label that is no host name
            return
        found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(limit_s)
    return list(found)


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the machine itself: 127.0.0.0/8, ::1, or these written as the other."""
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


def _interface(link: Link) -> NetworkInterface:
    return NetworkInterface(
        name=one_line(link.name), addresses=link.addresses, mtu=link.mtu, up=link.up, loopback=link.loopback,
        speed_mbit=_speed(link.name), kind=_kind(link),
    )  # fmt: skip


def _kind(link: Link) -> InterfaceKind:
    if link.loopback:
        return "loopback"
    if link.hardware == _INFINIBAND:
        return "infiniband"
    if _MADE_BY_RUNTIMES.match(link.name):
        return "virtual"
    if link.hardware != _ETHERNET:
        return "virtual" if link.kind else "unknown"
    if link.kind in _CARRIES or (link.kind == "veth" and link.addresses):  # a container's eth0 is a veth
        return "ethernet"
    return "virtual"


def _speed(name: str, folder: Path = Path("/sys/class/net")) -> int | None:
    """Megabits a second as the driver tells; virtual ones and cables that are out tell none, or -1."""
    try:
        speed = int((folder / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None
