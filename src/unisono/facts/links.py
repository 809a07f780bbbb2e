"""TCP connections on which the kernel sends again and again, since nobody acknowledges (Linux)."""

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_RETRANSMITS = "01"  # which timer runs: the one after which is sent again
_MOST = 16
_IPV4_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Link:
    """A connection to a peer that does not acknowledge.

    Attributes:
        peer: address and port.
        retransmissions: of the data, or the greeting, that is not acknowledged.
    """

    peer: str
    retransmissions: int

    def __str__(self) -> str:
        word = "retransmission" if self.retransmissions == 1 else "retransmissions"
        return f"→ {self.peer}: {self.retransmissions} {word}"


def troubled_links(pids: Iterable[int], *, proc: Path = Path("/proc")) -> list[Link]:
    """Of some processes in one network namespace, those with the most retransmissions first, 16 at the most."""
    own = list(pids)
    sockets = {inode for pid in own for inode in _sockets(proc / str(pid) / "fd")}
    for pid in own:
        tables = [_lines(proc / str(pid) / "net" / name) for name in ("tcp", "tcp6")]
        if any(tables):  # else the process has ended meanwhile
            found = [link for table in tables for line in table if (link := _link(line, sockets)) is not None]
            return sorted(found, key=lambda link: -link.retransmissions)[:_MOST]
    return []


def _link(line: str, sockets: set[str]) -> Link | None:
    fields = line.split()
    if len(fields) < 10 or fields[9] not in sockets:
        return None
    timer, retransmissions = fields[5].partition(":")[0], int(fields[6], 16)
    if timer != _RETRANSMITS or not retransmissions:
        return None
    return Link(_address(fields[2]), retransmissions)


def _address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080: each 32 bits stand in the machine's own order, the port does not."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(digits) == _IPV4_DIGITS:
        return f"{ipaddress.IPv4Address(packed)}:{int(port, 16)}"
    address = ipaddress.IPv6Address(packed)
    return f"{address.ipv4_mapped or f'[{address}]'}:{int(port, 16)}"


def _sockets(folder: Path) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    try:
        for entry in folder.iterdir():
            target = _target(entry)
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        return found  # it has ended meanwhile
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a Path would read `socket:[1]` as a relative path
    except OSError:
        return ""


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:  # no such process, or a kernel without IPv6
        return []
