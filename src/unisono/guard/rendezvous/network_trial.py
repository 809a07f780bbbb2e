"""A test of the network between the nodes before ranks start: every node connects to the others,
then runs one small collective with the real backend.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from pydantic import ValidationError

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.files import objects_of
from unisono.base.messages import Message
from unisono.base.text import one_line
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.dial_matrix import compare_network
from unisono.guard.agree.reports import DialReport, NodeReport, name_node
from unisono.guard.control.reachability import EchoListener, Peer, choose_peers, dial_all, reach_key
from unisono.guard.facts import read_environment
from unisono.guard.rendezvous.party import HeadSide, NodeSide
from unisono.guard.supervise.child_process import (
    INTERFACE_VARIABLES,
    Programs,
    child_environment,
    interface_name,
    misleading_variables,
)
from unisono.guard.supervise.codec import encode
from unisono.guard.supervise.task_process import TaskProcess
from unisono.guard.supervise.task_requests import CollectiveRequest

_DIALLING_S = 45.0
"""Three attempts on each of three ports, and a margin for a busy machine."""


def listen(address: str, token: bytes, run_nonce: str) -> EchoListener:
    """A listener that answers the other nodes' test connections on this address until it is
    closed.
    """
    return EchoListener(address, reach_key(token, run_nonce))


def head_dials(meeting: HeadSide) -> Agreement:
    """The agreement on which nodes reach each other: every node, the head included, connects to its
    peers.

    Raises:
        Disagreed: if a node does not answer.
    """
    peers = [
        Peer(report.node_rank, report.host, report.address, tuple(report.probe_ports))
        for report in meeting.reports
    ]
    for peer in peers[1:]:
        chosen = choose_peers(peers, peer.node_rank)
        request = {
            "kind": "dial",
            "peers": [other.to_json() for other in chosen],
            "present": [one.node_rank for one in peers],
        }
        meeting.server.send(peer.node_rank, request)
    key = reach_key(meeting.party.token, meeting.run_nonce)
    dials = meeting.run_in_background(lambda _show: dial_all(choose_peers(peers, 0), key, source=0))
    answers = meeting.gather(
        "reached", timeout_s=_DIALLING_S, what="its test of the connections to the other nodes"
    )
    reports = [DialReport.model_validate(asdict(one)) for one in dials]
    for node_rank, message in sorted(answers.items()):
        reports += _dial_reports(node_rank, message)
    return compare_network(reports, meeting.reports)


def node_dials(member_side: NodeSide, request: Mapping[str, object]) -> None:
    """Connects to the nodes in the head's `dial`, and sends it the results.

    Raises:
        Disagreed: with the head's verdict, if it ends the job first.
    """
    peers = _peers(request)
    key = reach_key(member_side.party.token, str(member_side.welcome["run_nonce"]))
    source = member_side.party.topology.node_rank
    dials = member_side.run_in_background(lambda _show: dial_all(peers, key, source=source))
    member_side.send({"kind": "reached", "reached": [asdict(one) for one in dials]})


def nodes_present(request: Mapping[str, object], *, node_rank: int) -> list[int]:
    """The ranks of the nodes that take part, from the head's `dial`.

    Raises:
        Disagreed: if this node is not one of them.
    """
    present = request.get("present")
    if (
        not isinstance(present, list)
        or node_rank not in present
        or not all(isinstance(rank, int) for rank in present)
    ):
        raise Disagreed.of(
            f"node {node_rank} is missing from the head's list of participating nodes",
            why="the head runs a different version of unisono",
            fix="install the same unisono on all nodes",
        )
    return present


def _peers(message: Mapping[str, object]) -> list[Peer]:
    peers, values = [], message.get("peers")
    for value in values if isinstance(values, list) else []:
        try:
            peers.append(Peer.from_json(value))
        except (
            ValueError
        ):  # from a head of a different version; a pair it gets no answer about is unknown to it
            continue
    return peers


def _dial_reports(node_rank: int, message: Mapping[str, object]) -> list[DialReport]:
    """The results in a node's message, limited to its own connections."""
    reports = []
    for value in objects_of(message.get("reached")):
        try:
            one = DialReport.model_validate(value)
        except ValidationError:  # an unreadable result counts as untested: the pair is unknown
            continue
        reports += [one] if one.source == node_rank else []
    return reports


DEADLINE_S = 15.0
_STARTING_S = 120.0  # for a loaded machine to import torch; the deadline starts after that
_ENDING_S = 10.0


@contextmanager
def collective_task(report: NodeReport, present: Sequence[int], programs: Programs) -> Iterator[TaskProcess]:
    """This node's process for the collective.

    It imports torch in the background, then waits for the store's address.

    Args:
        present: the ranks of the nodes that take part, one process each.
    """
    request = CollectiveRequest(
        rank=sorted(present).index(report.node_rank),
        world_size=len(present),
        backend="nccl" if report.device_kind == "cuda" else "gloo",
        device_index=0 if report.device_kind == "cuda" else None,
        store_host=report.address or "127.0.0.1",
        deadline_s=DEADLINE_S,
        names=tuple(f"node {rank}" for rank in sorted(present)),
    )
    with TaskProcess(
        "collective", encode(request), has_input=True, programs=programs, environment=_environment(report)
    ) as task:
        yield task


def head_collective(meeting: HeadSide, task: TaskProcess) -> Agreement:
    """The agreement on one collective with a process on every node.

    Raises:
        Disagreed: if a node does not answer.
    """
    reports = meeting.reports
    messages = task.messages()
    head_result = meeting.run_in_background(lambda _show: _until_ready(messages))
    answers = meeting.gather("collective_ready", timeout_s=_STARTING_S, what="a process with torch")
    results: dict[int, Mapping[str, object]] = {0: head_result, **answers}
    if all(result.get("ok") is True for result in results.values()):
        store = [meeting.server.address[0], head_result["port"]]
        meeting.broadcast({"kind": "collective", "store": store})
        task.send({"kind": "collective", "store": store})
        head_result = meeting.run_in_background(lambda _show: _outcome(messages))
        answers = meeting.gather("collective", timeout_s=DEADLINE_S + _ENDING_S, what="the collective")
        results = {0: head_result, **answers}
    return _judge(results, reports)


def node_collective(member_side: NodeSide, task: TaskProcess) -> None:
    """Takes part in the collective on the head's request, and sends it the result.

    Raises:
        Disagreed: with the head's verdict, if it ends the job in the meantime.
    """
    messages = task.messages()
    member_side.send(
        {"kind": "collective_ready", **member_side.run_in_background(lambda _show: _until_ready(messages))}
    )
    request = member_side.wait_for("collective")
    task.send({"kind": "collective", "store": request.get("store")})
    member_side.send(
        {"kind": "collective", **member_side.run_in_background(lambda _show: _outcome(messages))}
    )


def _environment(report: NodeReport) -> dict[str, str]:
    """The ranks' environment: the user's communication settings, and the interface on which the
    nodes reach each other.
    """
    leftovers = misleading_variables(read_environment().leftovers, world_size=2)
    device = report.places[0] if report.places else None
    environment = child_environment(threads=1, without=leftovers, device=device)
    interface = interface_name(report.interfaces, report.address)
    for name in INTERFACE_VARIABLES if interface else ():
        environment.setdefault(name, str(interface))
    return environment


def _until_ready(messages: Iterator[Message]) -> dict[str, object]:
    """`ok`, and rank 0's `port`, once torch is imported and the process waits for the store;
    otherwise `text` with the reason.
    """
    port = None
    try:
        for message in messages:
            if message["kind"] == "store":
                port = int(message["port"])
            if message["kind"] == "phase" and message.get("phase") == "collective.store":
                return {"ok": True, "port": port}
    except UnisonoError as error:
        return {"ok": False, "text": _error_text(error)}
    return {"ok": False, "text": "it exited before it could take part"}


def _outcome(messages: Iterator[Message]) -> dict[str, object]:
    try:
        for message in messages:
            if message["kind"] == "result":
                return {name: message.get(name) for name in ("ok", "text", "seconds", "missing")}
    except UnisonoError as error:
        return {"ok": False, "text": _error_text(error)}
    return {"ok": False, "text": "it exited without a result"}


def _error_text(error: UnisonoError) -> str:
    return one_line("; ".join(f"{p.what} {p.why}" for p in error.problems), limit=400)


def _judge(results: Mapping[int, Mapping[str, object]], reports: list[NodeReport]) -> Agreement:
    bad = {rank: message for rank, message in results.items() if message.get("ok") is not True}
    if not bad:
        seconds = (message.get("seconds") for message in results.values())
        slowest = max(one if isinstance(one, float) else 0.0 for one in seconds)
        return Agreement.noted(
            "network.collective",
            "pass",
            f"an all-reduce with one process on each of {len(reports)} nodes took {slowest:.1f} s",
        )
    hosts = {report.node_rank: report.host for report in reports}
    evidence = tuple(
        Evidence(
            where=name_node(rank, hosts[rank]), text=one_line(str(message.get("text") or "?"), limit=300)
        )
        for rank, message in sorted(bad.items())[:8]
    )
    culprits = sorted(bad) if len(bad) < len(reports) - len(bad) else []
    entry = find_cause("address_unreachable")
    who = ", ".join(name_node(rank, hosts[rank]) for rank in sorted(bad)[:8])
    verdict = Verdict(
        cause="address_unreachable",
        when="before",
        hosts=tuple(hosts[rank] for rank in culprits),
        phase="agree.network",
        summary=f"an all-reduce with one process on each node failed on {who}: {evidence[0].text}",
        evidence=evidence,
        fix=entry.remedy if entry else (),
    )
    return Agreement.found("network.collective", verdict)
