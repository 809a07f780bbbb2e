"""Which address a name of the command line leads to, and whether it is this machine's."""

import ipaddress
import socket
from collections.abc import Sequence

from unisono.causes import Evidence, Verdict, find_cause
from unisono.errors import Disagreed
from unisono.facts.network import NetworkProbe, is_loopback
from unisono.launch.nodes.party import Party
from unisono.launch.nodes.words import disagreement

_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def listening_address(party: Party) -> str:
    """The address of this machine on which the head listens: the one that HOST of --head means here.

    Raises:
        Disagreed: dns_failure, hostname_loopback, or head_unreachable where it is another machine's.
    """
    host = party.topology.head_host
    found = _addresses(party)
    ours = [address for address in found if is_own_address(address)]
    if not ours:
        raise _refused(
            "head_unreachable",
            f"{party.label} is the head, and --head {host} means {', '.join(found)}, which no interface of this machine has",
            party, found, "start node 0 on that machine, or give --head an address of this one (`ip -br addr`) on every node",
        )  # fmt: skip
    _refuse_loopback_name(party, ours)
    return next((address for address in ours if not is_loopback(address)), ours[0])


def refuse_unusable_head(party: Party) -> None:
    """For the other nodes, before they call.

    Raises:
        Disagreed: hostname_loopback, where the head's name leads back to this machine. A name without an address is
            left to the channel, which asks again until the time is over.
    """
    found = party.network.resolve(party.topology.head_host)
    if found:
        _refuse_loopback_name(party, found)


def is_own_address(address: str) -> bool:
    """Whether an interface of this machine has the address: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def is_this_machine(host: str, network: NetworkProbe) -> bool:
    """Whether an entry of --hosts (`name`, `user@name`, address) is this machine.

    127.0.0.2 and its like count as others: they are how several nodes are tried on one machine.
    """
    name = host.rpartition("@")[2]
    if name in (*_LOOPBACK_NAMES, "127.0.0.1", "::1", socket.gethostname()):
        return True
    return any(is_own_address(address) and not is_loopback(address) for address in network.resolve(name))


def address_towards(host: str, network: NetworkProbe) -> str:
    """This machine's address on the way to `host`; empty where there is none. Nothing is sent."""
    for address in network.resolve(host.rpartition("@")[2]):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((address, 9))
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return ""


def _addresses(party: Party) -> list[str]:
    host = party.topology.head_host
    found = party.network.resolve(host)
    if not found:
        raise _refused(
            "dns_failure", f"{party.label} is the head, and its name `{host}` has no address here", party, [],
            f"give an IP address on every node: --head IP:{party.topology.head_port}",
        )  # fmt: skip
    return found


def _refuse_loopback_name(party: Party, found: Sequence[str]) -> None:
    """A literal 127.0.0.1 or `localhost` is meant so: several nodes on one machine."""
    host = party.topology.head_host
    if host in _LOOPBACK_NAMES or _is_literal(host) or not all(is_loopback(address) for address in found):
        return
    raise _refused(
        "hostname_loopback",
        f"{party.label} takes the head's name `{host}` for {', '.join(found)}, which leads back to itself",
        party, found, f"mend the line of {host} in /etc/hosts, or give an IP address on every node: "
        f"--head IP:{party.topology.head_port}",
    )  # fmt: skip


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refused(cause: str, summary: str, party: Party, found: Sequence[str], fix: str) -> Disagreed:
    known = find_cause(cause)
    text = f"{party.topology.head_host} resolves to {', '.join(found) or 'nothing'}"
    return disagreement(
        [
            Verdict(
                cause=cause, when="before", summary=summary, hosts=(party.host,), phase="agree.call",
                evidence=(Evidence(where=party.label, text=text),), fix=(fix, *(known.remedy if known else ())[1:2]),
            )
        ]
    )  # fmt: skip
