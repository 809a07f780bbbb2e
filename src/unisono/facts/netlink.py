"""Asks the kernel for network interfaces and their addresses over rtnetlink (rtnetlink(7)).

Not /sys/class/net: that belongs to the network namespace that mounted it, which need not be this process's.
"""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

_LINKS, _ADDRESSES = 18, 22  # RTM_GETLINK, RTM_GETADDR
_ERROR, _DONE = 2, 3
_DUMP = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_NAME, _MTU, _OPERSTATE, _INFO, _INFO_KIND = 3, 4, 16, 18, 1  # IFLA_*
_PEER_ADDRESS, _LOCAL_ADDRESS = 1, 2  # IFA_*: where both are, the local one is ours
_NESTED = 0x3FFF
_LIMIT_S = 2.0
_UP, _LOOPBACK = 0x1, 0x8
_DOWN_STATES = (2, 3)  # IF_OPER_DOWN, IF_OPER_LOWERLAYERDOWN: enabled, but the cable is out


@dataclass
class Link:
    """One interface as the kernel tells of it. `kind` is of virtual ones (veth, bridge, …), else empty."""

    name: str
    mtu: int | None
    up: bool
    loopback: bool
    hardware: int
    """ARPHRD_*: 1 ethernet, 32 infiniband, 772 loopback."""
    kind: str
    addresses: list[str] = field(default_factory=list)


def read_links() -> list[Link]:
    """All interfaces of this network namespace, in the kernel's order.

    Raises:
        OSError: if the kernel does not answer, as under some sandboxes.
    """
    links = {index: link for index, link in map(_link, _dump(_LINKS)) if link.name}
    for index, address in map(_address, _dump(_ADDRESSES)):
        if index in links and address:
            links[index].addresses.append(address)
    return list(links.values())


def _dump(kind: int) -> list[bytes]:
    """The bodies of all messages that answer one request."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("only Linux has netlink")
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
                    raise OSError(-struct.unpack_from("=i", data, 16)[0], "the kernel refused the question")
                bodies.append(data[16:length])
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            return
        yield kind & _NESTED, data[4:length]
        data = data[(length + 3) & ~3 :]


def _link(body: bytes) -> tuple[int, Link]:
    _, hardware, index, flags = struct.unpack_from("=BxHiI", body)
    found = dict(_attributes(body[16:]))
    inner = dict(_attributes(found.get(_INFO, b"")))
    state = found.get(_OPERSTATE, b"\0")[0]
    mtu = found.get(_MTU, b"")
    return index, Link(
        name=_text(found.get(_NAME, b"")),
        mtu=struct.unpack("=I", mtu)[0] if len(mtu) == 4 else None,
        up=bool(flags & _UP) and state not in _DOWN_STATES,
        loopback=bool(flags & _LOOPBACK),
        hardware=hardware,
        kind=_text(inner.get(_INFO_KIND, b"")),
    )


def _address(body: bytes) -> tuple[int, str]:
    index = struct.unpack_from("=I", body, 4)[0]
    found = dict(_attributes(body[8:]))
    raw = found.get(_LOCAL_ADDRESS) or found.get(_PEER_ADDRESS) or b""
    with contextlib.suppress(ValueError):
        return index, str(ipaddress.ip_address(raw))
    return index, ""


def _text(raw: bytes) -> str:
    return os.fsdecode(raw.rstrip(b"\0"))
