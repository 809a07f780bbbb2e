"""Which address the head has, whether it is this machine's, and how a front that refuses early tells the head so."""

import contextlib
import ipaddress
import secrets
import socket
import time
from collections.abc import Iterator, Sequence

from unisono.causes import Evidence, Verdict, find_cause
from unisono.control.events import Rejected
from unisono.control.link import NodeLink
from unisono.control.server import HeadServer
from unisono.errors import Disagreed, UnisonoError
from unisono.facts.network import NetworkProbe, is_loopback
from unisono.rendezvous import meeting_end
from unisono.rendezvous.meeting_end import disagreement
from unisono.rendezvous.party import Party
from unisono.rundir.lock import Holder, LockTaken
from unisono.supervise.postmortem import node_refused

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
            party,
            found,
            "start node 0 on that machine, or give --head an address of this one (`ip -br addr`) on every node",
        )
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
            "dns_failure",
            f"{party.label} is the head, and its name `{host}` has no address here",
            party,
            [],
            f"give an IP address on every node: --head IP:{party.topology.head_port}",
        )
    return found


def _refuse_loopback_name(party: Party, found: Sequence[str]) -> None:
    """A literal 127.0.0.1 or `localhost` is meant so: several nodes on one machine."""
    host = party.topology.head_host
    if host in _LOOPBACK_NAMES or _is_literal(host) or not all(is_loopback(address) for address in found):
        return
    raise _refused(
        "hostname_loopback",
        f"{party.label} takes the head's name `{host}` for {', '.join(found)}, which leads back to itself",
        party,
        found,
        f"mend the line of {host} in /etc/hosts, or give an IP address on every node: "
        f"--head IP:{party.topology.head_port}",
    )


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
                cause=cause,
                when="before",
                summary=summary,
                hosts=(party.host,),
                phase="agree.call",
                evidence=(Evidence(where=party.label, text=text),),
                fix=(fix, *(known.remedy if known else ())[1:2]),
            )
        ]
    )


_CALL_S = 2.0
_LISTEN_S = 4.0
_POLL_S = 0.2
_ACKNOWLEDGE_S = 1.0


@contextlib.contextmanager
def refusals_reported(party: Party) -> Iterator[None]:
    """Around what a front checks before the meeting: an error for people is told to the other nodes, and raised again.

    This front keeps its own exit code (mostly 2); the others end with 3 and with `node R (HOST) refused: …`.
    """
    try:
        yield
    except UnisonoError as error:
        report_refusal(party, error)
        raise


def report_refusal(party: Party, error: UnisonoError) -> None:
    """Tells the head, or on the head everybody who calls within a few seconds. Never raises: the error itself matters more."""
    if party.topology.nodes == 1 or party.topology.hosts:  # those of --hosts have not been started
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
    """Whether the job lives already, and this is its command typed again: then port and nodes are that head's."""
    topology = party.topology
    return (
        topology.is_head
        and holder is not None
        and holder.port != 0
        and (holder.host, holder.port) == (party.host, topology.head_port)
    )


def answer_callers(party: Party, verdict: Verdict) -> None:
    """Opens the head's port, says the verdict as the last word to all who call, and closes when all have heard it or time is over.

    Where the head's name leads to no address that others could reach, it listens on every address of this machine, briefly.

    Raises:
        UnisonoError: if the port cannot be had at all.
    """
    party.show(
        {"kind": "note", "time": time.time(), "text": f"telling the other nodes (at most {_LISTEN_S:.0f} s)"}
    )
    servers = _open_servers(party)
    message = meeting_end.end_message([verdict])
    absent = set(range(1, party.topology.nodes))
    try:
        for server in servers:
            server.settle(message)
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
    """Of this machine, on which another one could call."""
    found = [
        address
        for interface in party.network.interfaces()
        if interface.up and not interface.loopback
        for address in interface.addresses
    ]
    return [address for address in found if not is_loopback(address) and not address.startswith("fe80")]


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
        link.send({"kind": "refused", **meeting_end.refusal_of(error)})
    finally:
        link.close()  # it waits until the head has heard all
