"""This machine's network: interfaces (rtnetlink), InfiniBand ports, name resolution; and TCP:
connections that retransmit, the owner of a port, the packet filter.

What tests replace is behind protocols, so that they can supply answers. TCP is read on Linux.
"""

import contextlib
import errno
import ipaddress
import json
import os
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from unisono.base.errors import UsageError
from unisono.base.text import one_line

_GET_LINKS, _GET_ADDRESSES = 18, 22  # RTM_GETLINK, RTM_GETADDR
_ERROR, _DONE = 2, 3
_DUMP = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_NAME, _MTU, _OPERSTATE, _INFO, _INFO_KIND = 3, 4, 16, 18, 1  # IFLA_*
_PEER_ADDRESS, _LOCAL_ADDRESS = 1, 2  # IFA_*: where both are, the local one is ours
_NESTED = 0x3FFF
_LIMIT_S = 2.0
_UP, _LOOPBACK = 0x1, 0x8
_DOWN_STATES = (2, 3)  # IF_OPER_DOWN, IF_OPER_LOWERLAYERDOWN: enabled, but the cable is out
_RETRANSMIT_TIMER = "01"  # which timer runs: the one after which is sent again
_MAX_CONNECTIONS = 16
_IPV4_DIGITS = 8


@dataclass
class KernelInterface:
    """An interface as the kernel reports it.

    `kind` is set for virtual ones (veth, bridge, …), else empty.
    """

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
    attributes = dict(_attributes(body[16:]))
    inner = dict(_attributes(attributes.get(_INFO, b"")))
    state = attributes.get(_OPERSTATE, b"\0")[0]
    mtu = attributes.get(_MTU, b"")
    return index, KernelInterface(
        name=_name_text(attributes.get(_NAME, b"")),
        mtu=struct.unpack("=I", mtu)[0] if len(mtu) == 4 else None,
        up=bool(flags & _UP) and state not in _DOWN_STATES,
        loopback=bool(flags & _LOOPBACK),
        hardware=hardware,
        kind=_name_text(inner.get(_INFO_KIND, b"")),
    )


def _address(body: bytes) -> tuple[int, str]:
    index = struct.unpack_from("=I", body, 4)[0]
    attributes = dict(_attributes(body[8:]))
    raw = attributes.get(_LOCAL_ADDRESS) or attributes.get(_PEER_ADDRESS) or b""
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
    """A network interface.

    `virtual`: a bridge, tunnel, or one end of a container's cable, as docker0 and veth….

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
    """Addresses of a name, without duplicates, in the resolver's order; empty if there are none or
    it takes too long.

    getaddrinfo has no timeout, and blocks for half a minute if a name server is down.
    """
    literal = _literal(name)
    if literal:
        return [literal]
    addresses: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # the second: a label that is not a valid host name
            return
        addresses.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(limit_s)
    return list(addresses)


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


@dataclass(frozen=True, slots=True)
class RetransmittingConnection:
    """A connection whose peer does not acknowledge.

    Attributes:
        retransmissions: of the data, or the greeting, that is not acknowledged.
    """

    peer: str
    retransmissions: int

    def __str__(self) -> str:
        word = "retransmission" if self.retransmissions == 1 else "retransmissions"
        return f"→ {self.peer}: {self.retransmissions} {word}"


def retransmitting_connections(
    pids: Iterable[int], *, proc: Path = Path("/proc")
) -> list[RetransmittingConnection]:
    """Retransmitting connections of processes in one network namespace, most retransmissions first,
    at most 16.
    """
    processes = list(pids)
    sockets = {inode for pid in processes for inode in _socket_inodes(proc / str(pid) / "fd")}
    for pid in processes:
        tables = [_rows(proc / str(pid) / "net" / name) for name in ("tcp", "tcp6")]
        if any(tables):  # else the process has ended meanwhile
            connections = [
                link for table in tables for line in table if (link := _connection(line, sockets)) is not None
            ]
            return sorted(connections, key=lambda link: -link.retransmissions)[:_MAX_CONNECTIONS]
    return []


def _connection(line: str, sockets: set[str]) -> RetransmittingConnection | None:
    fields = line.split()
    if len(fields) < 10 or fields[9] not in sockets:
        return None
    timer, retransmissions = fields[5].partition(":")[0], int(fields[6], 16)
    if timer != _RETRANSMIT_TIMER or not retransmissions:
        return None
    return RetransmittingConnection(_socket_address(fields[2]), retransmissions)


def _socket_address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080: each 32 bits stand in the machine's own order, the port
    does not.
    """
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(digits) == _IPV4_DIGITS:
        return f"{ipaddress.IPv4Address(packed)}:{int(port, 16)}"
    address = ipaddress.IPv6Address(packed)
    return f"{address.ipv4_mapped or f'[{address}]'}:{int(port, 16)}"


def _socket_inodes(folder: Path) -> set[str]:
    """The inodes of a process's sockets."""
    inodes = set()
    try:
        for entry in folder.iterdir():
            target = _target(entry)
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    except OSError:
        return inodes  # it has ended meanwhile
    return inodes


def _target(link: Path) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a Path would read `socket:[1]` as a relative path
    except OSError:
        return ""


def _rows(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:  # no such process, or a kernel without IPv6
        return []


_LISTEN_STATE = "0A"


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """A process that listens: its id, and how it was started."""

    pid: int
    command: str


_BACKLOG = 1024  # connections that wait to be accepted


def find_listener(port: int, proc: Path = Path("/proc")) -> ListeningProcess | None:
    """The process that listens on a TCP port; None if there is none or it is not visible (a
    different user's).
    """
    inodes = _listening_inodes(port, proc)
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir():
        if folder.name.isdigit() and _holds(folder / "fd", targets):
            return ListeningProcess(int(folder.name), _command(folder))
    return None


def bind_listener(host: str, port: int | None) -> socket.socket:
    """A socket that listens on an address of this machine, for a server.

    From here on no other program can have the port.

    A socket that is only bound with SO_REUSEADDR, which a restart needs, shares its port with every
    other one that is; the first to listen gets it.

    Args:
        host: a name or an address.
        port: None: a free one.

    Raises:
        UsageError: if the port is taken, with its holder if that is visible, or the address is not
            one of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _unusable(host, error) from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if port is not None and error.errno == errno.EADDRINUSE:
            raise _taken(port) from error
        raise _unusable(host, error) from error
    return bound


def _unusable(host: str, error: OSError) -> UsageError:
    return UsageError.of(
        f"{one_line(host)} cannot be used as address: {error.strerror or error}",
        where="--host",
        fix="give an address of this machine, e.g. --host 127.0.0.1",
    )


def _taken(port: int) -> UsageError:
    holder = find_listener(port)
    who = f"process {holder.pid} ({one_line(holder.command, limit=100)})" if holder else "a different process"
    return UsageError.of(
        f"port {port} is taken by {who}",
        where="--port",
        fix="give a different one; without --port a free one is used",
    )


def _listening_inodes(port: int, proc: Path) -> set[str]:
    """The inodes of the sockets that listen on the port."""
    inodes = set()
    for table in (proc / "net" / "tcp", proc / "net" / "tcp6"):
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if (
                len(fields) > 9
                and fields[3] == _LISTEN_STATE
                and int(fields[1].rpartition(":")[2], 16) == port
            ):
                inodes.add(fields[9])
    return inodes


def _holds(folder: Path, targets: set[str]) -> bool:
    try:
        return any(_target(entry) in targets for entry in folder.iterdir())
    except OSError:
        return False  # it has ended meanwhile, or belongs to somebody else


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Firewall:
    """The rules for packets that come in.

    Attributes:
        drops_rest: incoming packets are dropped by default.
        refusals: rules that drop or reject, as listed.
    """

    drops_rest: bool = False
    refusals: tuple[str, ...] = ()


def read_firewall() -> Firewall | None:
    """Firewall rules for incoming packets; None if they cannot be listed: this needs root, and
    iptables or nft.
    """
    backends = [one for one in (_iptables(), _nft()) if one is not None]
    if not backends:
        return None
    refusals = dict.fromkeys(rule for one in backends for rule in one.refusals)
    return Firewall(any(one.drops_rest for one in backends), tuple(refusals))


def _iptables() -> Firewall | None:
    listed = _output_of("iptables", "-w", "1", "-S", "INPUT")
    if listed is None:
        return None
    lines = listed.splitlines()
    refusals = tuple(
        line for line in lines if line.startswith("-A") and ("-j DROP" in line or "-j REJECT" in line)
    )
    return Firewall("-P INPUT DROP" in lines or "-P INPUT REJECT" in lines, refusals)


def _nft() -> Firewall | None:
    """Rules of nftables chains that see incoming packets. iptables-nft's tables are left to
    iptables, whose words people know.
    """
    listed = _output_of("nft", "-j", "list", "ruleset")
    if listed is None:
        return None
    try:
        parts = json.loads(listed or "{}").get("nftables", [])
    except ValueError:
        return None
    chains = [part["chain"] for part in parts if part.get("chain", {}).get("hook") == "input"]
    others = [chain for chain in chains if chain.get("table") != "filter"]
    names = {(chain["family"], chain["table"], chain["name"]) for chain in others}
    refusals = [
        _rule_text(part["rule"]) for part in parts if "rule" in part and _refuses(part["rule"], names)
    ]
    return Firewall(any(chain.get("policy") == "drop" for chain in others), tuple(refusals))


def _refuses(rule: dict[str, Any], chains: set[tuple[str, str, str]]) -> bool:
    is_reached = (rule.get("family"), rule.get("table"), rule.get("chain")) in chains
    return is_reached and any("drop" in part or "reject" in part for part in rule.get("expr", []))


def _rule_text(rule: dict[str, object]) -> str:
    return (
        f"nft {rule['family']} {rule['table']} {rule['chain']} handle {rule.get('handle', '?')}:"
        f" {json.dumps(rule.get('expr'))[:120]}"
    )


def _output_of(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
