"""The network between the nodes is tried before anything is started: every node dials the others."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from unisono.agree.agreement import Agreement
from unisono.agree.dial_matrix import compare_network
from unisono.agree.reports import DialReport
from unisono.control.echo import EchoListener, reach_key
from unisono.control.reach import Peer, choose_peers, dial_all
from unisono.errors import Disagreed
from unisono.events import Message
from unisono.launch.nodes.sides import HeadSide, NodeSide

_DIALLING_S = 45.0
"""Three patient trials on each of three ports, and room for a machine that is busy."""


def listen(address: str, token: bytes, run_nonce: str) -> EchoListener:
    """Answers the other nodes' dialling on this address until it is closed."""
    return EchoListener(address, reach_key(token, run_nonce))


def head_dials(meeting: HeadSide) -> Agreement:
    """Lets every node dial its peers, the head too, and judges what they saw.

    Raises:
        Disagreed: if a node does not answer.
    """
    peers = [
        Peer(report.node_rank, report.host, report.address, tuple(report.probe_ports))
        for report in meeting.reports
    ]
    for peer in peers[1:]:
        chosen = choose_peers(peers, peer.node_rank)
        asked = {
            "kind": "dial",
            "peers": [other.to_json() for other in chosen],
            "present": [one.node_rank for one in peers],
        }
        meeting.server.send(peer.node_rank, asked)
    key = reach_key(meeting.party.token, meeting.run_nonce)
    own = meeting.aside(lambda _show: dial_all(choose_peers(peers, 0), key, source=0))
    said = meeting.gather("reached", timeout_s=_DIALLING_S, what="its dialling of the other nodes")
    found = [DialReport.model_validate(asdict(one)) for one in own]
    for node_rank, message in sorted(said.items()):
        found += _reached(node_rank, message)
    return compare_network(found, meeting.reports)


def node_dials(attendance: NodeSide, asked: Message) -> None:
    """Dials whom the head names in `dial`, and tells it what was seen.

    Raises:
        Disagreed: with the head's words, if it ends the job first.
    """
    peers = _peers(asked)
    key = reach_key(attendance.party.token, str(attendance.welcome["run_nonce"]))
    source = attendance.party.topology.node_rank
    found = attendance.aside(lambda _show: dial_all(peers, key, source=source))
    attendance.send({"kind": "reached", "reached": [asdict(one) for one in found]})


def present_in(asked: Message, *, own: int) -> list[int]:
    """The numbers of the nodes that take part, as the head's `dial` names them.

    Raises:
        Disagreed: if this node is none of them.
    """
    found = asked.get("present")
    if not isinstance(found, list) or own not in found or not all(isinstance(rank, int) for rank in found):
        raise Disagreed.of(
            f"the head names the nodes that take part, and node {own} is none of them", why="its unisono is another one",
            fix="install the same unisono on all nodes",
        )  # fmt: skip
    return found


def _peers(message: Message) -> list[Peer]:
    found = []
    for value in message.get("peers") or []:
        try:
            found.append(Peer.from_json(value))
        except ValueError:  # of a head of another version; what it does not hear of is unknown to it
            continue
    return found


def _reached(node_rank: int, message: Mapping[str, Any]) -> list[DialReport]:
    """What a node says it saw; nobody speaks for another node."""
    found = []
    for value in message.get("reached") or []:
        try:
            one = DialReport.model_validate(value)
        except ValidationError:  # what cannot be read is as if it had not been tried: the pair is unknown
            continue
        found += [one] if one.source == node_rank else []
    return found
