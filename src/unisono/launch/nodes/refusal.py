"""A front that refuses before it has called still tells the others, so that all of them end within seconds."""

import contextlib
import secrets
import time
from collections.abc import Iterator

from unisono.causes import Verdict
from unisono.control.events import Rejected
from unisono.control.link import NodeLink
from unisono.control.server import HeadServer
from unisono.errors import Disagreed, UnisonoError
from unisono.facts.network import is_loopback
from unisono.launch.nodes import words
from unisono.launch.nodes.address import listening_address
from unisono.launch.nodes.party import Party
from unisono.rundir.lock import Holder, Taken

_CALL_S = 2.0
_LISTEN_S = 4.0
_POLL_S = 0.2
_ACKNOWLEDGE_S = 1.0


@contextlib.contextmanager
def refusals_told(party: Party) -> Iterator[None]:
    """Around what a front checks before the meeting: an error for people is told to the other nodes, and raised again.

    This front keeps its own exit code (mostly 2); the others end with 3 and with `node R (HOST) refused: …`.
    """
    try:
        yield
    except UnisonoError as error:
        tell_refusal(party, error)
        raise


def tell_refusal(party: Party, error: UnisonoError) -> None:
    """Tells the head, or on the head everybody who calls within a few seconds. Never raises: the error itself matters more."""
    if party.topology.nodes == 1 or party.topology.hosts:  # those of --hosts have not been started
        return
    if isinstance(error, Taken) and _meets_our_nodes(party, error.holder):
        return
    rank = party.topology.node_rank
    verdict = error.verdict if isinstance(error, Disagreed) else None
    with contextlib.suppress(UnisonoError):
        if rank == 0:
            say_to_callers(party, verdict or words.node_refused(0, party.host, error.to_json()))
        else:
            _call_the_head(party, error)


def _meets_our_nodes(party: Party, holder: Holder | None) -> bool:
    """Whether the job lives already, and this is its command typed again: then port and nodes are that head's."""
    topology = party.topology
    return (
        topology.is_head
        and holder is not None
        and holder.port != 0
        and (holder.host, holder.port) == (party.host, topology.head_port)
    )


def say_to_callers(party: Party, verdict: Verdict) -> None:
    """Opens the head's port, says the verdict as the last word to all who call, and closes when all have heard it or time is over.

    Where the head's name leads to no address that others could reach, it listens on every address of this machine, briefly.

    Raises:
        UnisonoError: if the port cannot be had at all.
    """
    party.show(
        {"kind": "note", "time": time.time(), "text": f"telling the other nodes (at most {_LISTEN_S:.0f} s)"}
    )
    servers = _open(party)
    message = words.last_word([verdict])
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


def _open(party: Party) -> list[HeadServer]:
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
                    host=address, port=party.topology.head_port, token=party.token, nodes=party.topology.nodes,
                    welcome={"head_host": party.host}, run_nonce=nonce,
                )
            )  # fmt: skip
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
        host=topology.head_host, port=topology.head_port, token=party.token, node_rank=topology.node_rank,
        node_host=party.host, timeout_s=_CALL_S,
    )  # fmt: skip
    try:
        link.send({"kind": "refused", **words.refusal_of(error)})
    finally:
        link.close()  # it waits until the head has heard all
