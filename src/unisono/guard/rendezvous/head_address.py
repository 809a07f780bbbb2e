"""The head's address, whether it belongs to this machine, and how a front that refuses early
reports that to the head.
"""

import contextlib
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterator, Sequence

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, UnisonoError
from unisono.guard.control.channel_ends import HeadServer, NodeLink
from unisono.guard.control.connection import Rejected
from unisono.guard.facts.network import NetworkProbe, is_loopback
from unisono.guard.rendezvous import meeting_rules
from unisono.guard.rendezvous.meeting_rules import disagreement
from unisono.guard.rendezvous.party import Party
from unisono.guard.rundir.lock import Holder, LockTaken
from unisono.guard.supervise.node_messages import encode
from unisono.guard.supervise.postmortem import node_refused

_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def listening_address(party: Party) -> str:
    """The address of this machine on which the head listens: HOST of --head, resolved here.

    Raises:
        Disagreed: dns_failure, hostname_loopback, or head_unreachable if the address belongs to a
            different machine.
    """
    host = party.topology.head_host
    addresses = _addresses(party)
    ours = [address for address in addresses if is_own_address(address)]
    if not ours:
        raise _refused(
            "head_unreachable",
            f"{party.label} is the head, but --head {host} resolves to {', '.join(addresses)}, which is not an"
            " address of this machine",
            party,
            addresses,
            "start node 0 on that machine, or set --head to an address of this machine (`ip -br addr`) on"
            " every node",
        )
    _refuse_loopback_name(party, ours)
    return next((address for address in ours if not is_loopback(address)), ours[0])


def refuse_unusable_head(party: Party) -> None:
    """Checks the head's name on the other nodes, before they connect.

    Raises:
        Disagreed: hostname_loopback, if the head's name resolves to this machine's loopback. A name
            without an address is left to the channel, which retries until the timeout.
    """
    addresses = party.network.resolve(party.topology.head_host)
    if addresses:
        _refuse_loopback_name(party, addresses)


def is_own_address(address: str) -> bool:
    """Whether the address belongs to an interface of this machine: a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def is_this_machine(host: str, network: NetworkProbe) -> bool:
    """Whether an entry of --hosts (`name`, `user@name`, address) is this machine.

    127.0.0.2 and similar addresses count as other machines: tests run several nodes on one machine
    that way.
    """
    name = host.rpartition("@")[2]
    if name in (*_LOOPBACK_NAMES, "127.0.0.1", "::1", socket.gethostname()):
        return True
    return any(is_own_address(address) and not is_loopback(address) for address in network.resolve(name))


def address_towards(host: str, network: NetworkProbe) -> str:
    """This machine's source address towards `host`; empty if there is no route. Nothing is sent."""
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
    addresses = party.network.resolve(host)
    if not addresses:
        raise _refused(
            "dns_failure",
            f"{party.label} is the head, but its name `{host}` does not resolve here",
            party,
            [],
            f"use an IP address on every node: --head IP:{party.topology.head_port}",
        )
    return addresses


def _refuse_loopback_name(party: Party, addresses: Sequence[str]) -> None:
    """Refuses a host name that resolves to loopback.

    A literal 127.0.0.1 or `localhost` is intended: several nodes on one machine.
    """
    host = party.topology.head_host
    if host in _LOOPBACK_NAMES or _is_literal(host) or not all(is_loopback(address) for address in addresses):
        return
    raise _refused(
        "hostname_loopback",
        f"{party.label} resolves the head's name `{host}` to {', '.join(addresses)}, its own loopback address",
        party,
        addresses,
        f"fix the line of {host} in /etc/hosts, or use an IP address on every node: "
        f"--head IP:{party.topology.head_port}",
    )


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refused(cause: str, summary: str, party: Party, addresses: Sequence[str], fix: str) -> Disagreed:
    entry = find_cause(cause)
    text = f"{party.topology.head_host} resolves to {', '.join(addresses) or 'nothing'}"
    return disagreement(
        [
            Verdict(
                cause=cause,
                when="before",
                summary=summary,
                hosts=(party.host,),
                phase="agree.call",
                evidence=(Evidence(where=party.label, text=text),),
                fix=(fix, *(entry.remedy if entry else ())[1:2]),
            )
        ]
    )


_CALL_S = 2.0
_LISTEN_S = 4.0
_POLL_S = 0.2
_ACKNOWLEDGE_S = 1.0


@contextlib.contextmanager
def refusals_reported(party: Party) -> Iterator[None]:
    """Wraps a front's checks before the meeting: a UnisonoError is reported to the other nodes and
    raised again.

    This front keeps its own exit code (usually 2); the others exit with 3 and `node R (HOST)
    refused: …`.
    """
    try:
        yield
    except UnisonoError as error:
        report_refusal(party, error)
        raise


def report_refusal(party: Party, error: UnisonoError) -> None:
    """Reports an error to the head, or on the head to every node that connects within a few
    seconds.

    Never raises: the error itself matters more.
    """
    # The fronts of --hosts are not started yet.
    if party.topology.nodes == 1 or party.topology.hosts:
        return
    if isinstance(error, LockTaken) and _is_same_job(party, error.holder):
        return
    rank = party.topology.node_rank
    verdict = error.verdict if isinstance(error, Disagreed) else None
    with contextlib.suppress(UnisonoError):
        if rank == 0:
            answer_callers(party, verdict or node_refused(0, party.host, error.to_json()))
        else:
            _call_the_head(party, error)


def _is_same_job(party: Party, holder: Holder | None) -> bool:
    """Whether the lock's holder is the head of this very job, whose command was run a second time:
    port and nodes are that head's.
    """
    topology = party.topology
    return (
        topology.is_head
        and holder is not None
        and holder.port != 0
        and (holder.host, holder.port) == (party.host, topology.head_port)
    )


def answer_callers(party: Party, verdict: Verdict) -> None:
    """Opens the head's port, sends the verdict as the last message to every caller, and closes once
    all nodes have it or the time is over.

    If the head's name has no address that others could reach, it listens briefly on every address
    of this machine.

    Raises:
        UnisonoError: if the port cannot be opened at all.
    """
    party.show(
        {
            "kind": "note",
            "time": time.time(),
            "text": f"reporting this to the other nodes (at most {_LISTEN_S:.0f} s)",
        }
    )
    servers = _open_servers(party)
    message = encode(meeting_rules.end_message([verdict]))
    absent = set(range(1, party.topology.nodes))
    try:
        for server in servers:
            server.send_last(message)
        limit = time.monotonic() + _LISTEN_S
        while absent and time.monotonic() < limit:
            for server in servers:
                for event in server.receive(_POLL_S / len(servers)):
                    if isinstance(event, Rejected) and event.kind == "late" and event.claims is not None:
                        absent.discard(event.claims)
    finally:
        for server in servers:
            server.close(patience_s=_ACKNOWLEDGE_S)


def _open_servers(party: Party) -> list[HeadServer]:
    try:
        addresses = [listening_address(party)]
    except Disagreed:
        addresses = _all_addresses(party)
    nonce = secrets.token_hex(16)
    servers: list[HeadServer] = []
    problem: UnisonoError | None = None
    for address in addresses:
        try:
            servers.append(
                HeadServer(
                    host=address,
                    port=party.topology.head_port,
                    token=party.token,
                    nodes=party.topology.nodes,
                    welcome={"head_host": party.host},
                    run_nonce=nonce,
                )
            )
        except UnisonoError as error:
            problem = error
    if not servers and problem is not None:
        raise problem
    return servers


def _all_addresses(party: Party) -> list[str]:
    """The addresses of this machine that other machines could reach."""
    addresses = [
        address
        for interface in party.network.interfaces()
        if interface.up and not interface.loopback
        for address in interface.addresses
    ]
    return [address for address in addresses if not is_loopback(address) and not address.startswith("fe80")]


def _call_the_head(party: Party, error: UnisonoError) -> None:
    topology = party.topology
    link = NodeLink.connect(
        host=topology.head_host,
        port=topology.head_port,
        token=party.token,
        node_rank=topology.node_rank,
        node_host=party.host,
        timeout_s=_CALL_S,
    )
    try:
        link.send({"kind": "refused", **meeting_rules.refusal_of(error)})
    finally:
        link.close()  # waits until the head has received everything
