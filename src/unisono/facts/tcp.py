"""TCP on this machine: connections that retransmit, the owner of a port, and the packet filter (Linux)."""

import errno
import ipaddress
import json
import os
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.text import one_line

_RETRANSMIT_TIMER = "01"  # which timer runs: the one after which is sent again
_MAX_CONNECTIONS = 16
_IPV4_DIGITS = 8


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
    """Retransmitting connections of processes in one network namespace, most retransmissions first, at most 16."""
    own = list(pids)
    sockets = {inode for pid in own for inode in _socket_inodes(proc / str(pid) / "fd")}
    for pid in own:
        tables = [_rows(proc / str(pid) / "net" / name) for name in ("tcp", "tcp6")]
        if any(tables):  # else the process has ended meanwhile
            found = [
                link for table in tables for line in table if (link := _connection(line, sockets)) is not None
            ]
            return sorted(found, key=lambda link: -link.retransmissions)[:_MAX_CONNECTIONS]
    return []


def _connection(line: str, sockets: set[str]) -> RetransmittingConnection | None:
    fields = line.split()
    if len(fields) < 10 or fields[9] not in sockets:
        return None
    timer, retransmissions = fields[5].partition(":")[0], int(fields[6], 16)
    if timer != _RETRANSMIT_TIMER or not retransmissions:
        return None
    return RetransmittingConnection(_address(fields[2]), retransmissions)


def _address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080: each 32 bits stand in the machine's own order, the port does not."""
    digits, _, port = text.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(digits) == _IPV4_DIGITS:
        return f"{ipaddress.IPv4Address(packed)}:{int(port, 16)}"
    address = ipaddress.IPv6Address(packed)
    return f"{address.ipv4_mapped or f'[{address}]'}:{int(port, 16)}"


def _socket_inodes(folder: Path) -> set[str]:
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


def _rows(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:  # no such process, or a kernel without IPv6
        return []


_LISTEN_STATE = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A process that listens: its id, and how it was started."""

    pid: int
    command: str


def find_listener(port: int, proc: Path = Path("/proc")) -> Listener | None:
    """The process that listens on a TCP port; None if there is none or it is not visible (a different user's)."""
    inodes = _listening_inodes(port, proc)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.iterdir():
        if folder.name.isdigit() and _holds(folder / "fd", wanted):
            return Listener(int(folder.name), _command(folder))
    return None


def bind_listener(host: str, port: int | None) -> socket.socket:
    """A socket that is bound to an address of this machine, for a server; it does not accept connections yet.

    Args:
        host: a name or an address.
        port: None: a free one.

    Raises:
        UsageError: if the port is taken, with its holder if that is visible, or the address is not one of this machine.
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
    """Of the sockets that listen on it."""
    found = set()
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
                found.add(fields[9])
    return found


def _holds(folder: Path, wanted: set[str]) -> bool:
    try:
        return any(_target(entry) in wanted for entry in folder.iterdir())
    except OSError:
        return False  # it has ended meanwhile, or belongs to somebody else


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


_LIMIT_S = 2.0


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
    """Firewall rules for incoming packets; None if they cannot be listed: this needs root, and iptables or nft."""
    found = [one for one in (_iptables(), _nft()) if one is not None]
    if not found:
        return None
    refusals = dict.fromkeys(rule for one in found for rule in one.refusals)
    return Firewall(any(one.drops_rest for one in found), tuple(refusals))


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
    """Of chains that see what comes in. iptables-nft's tables are left to iptables, whose words people know."""
    listed = _output_of("nft", "-j", "list", "ruleset")
    if listed is None:
        return None
    try:
        parts = json.loads(listed or "{}").get("nftables", [])
    except ValueError:
        return None
    chains = [part["chain"] for part in parts if part.get("chain", {}).get("hook") == "input"]
    own = [chain for chain in chains if chain.get("table") != "filter"]
    names = {(chain["family"], chain["table"], chain["name"]) for chain in own}
    refusals = [
        _rule_text(part["rule"]) for part in parts if "rule" in part and _refuses(part["rule"], names)
    ]
    return Firewall(any(chain.get("policy") == "drop" for chain in own), tuple(refusals))


def _refuses(rule: dict[str, Any], chains: set[tuple[str, str, str]]) -> bool:
    is_reached = (rule.get("family"), rule.get("table"), rule.get("chain")) in chains
    return is_reached and any("drop" in part or "reject" in part for part in rule.get("expr", []))


def _rule_text(rule: dict[str, Any]) -> str:
    return f"nft {rule['family']} {rule['table']} {rule['chain']} handle {rule.get('handle', '?')}: {json.dumps(rule.get('expr'))[:120]}"


def _output_of(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
