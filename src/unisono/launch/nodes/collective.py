"""One small collective with the real back-end, in a child process on every node, before any rank is started."""

from typing import TYPE_CHECKING, Any

from unisono.agree.agreement import Agreement
from unisono.agree.naming import name_node
from unisono.agree.report import NodeReport
from unisono.causes import Evidence, Verdict, find_cause
from unisono.errors import UnisonoError
from unisono.events import Message
from unisono.launch.command import Programs
from unisono.launch.nodes.party import Show
from unisono.launch.tasks import TaskProcess
from unisono.text import one_line

if TYPE_CHECKING:
    from unisono.launch.nodes.agent import Attendance
    from unisono.launch.nodes.head import Meeting

DEADLINE_S = 15.0
_STARTING_S = 90.0
"""For a machine under load to import torch; the deadline counts from there."""


def head_collective(meeting: "Meeting") -> Agreement:
    """Lets one process on every node take part in a collective, and judges what came of it.

    Raises:
        Disagreed: if a node does not answer.
    """
    reports = meeting.reports
    with _start(reports[0], len(reports), meeting.party.programs, store=None) as task:
        port = meeting.aside(lambda _show: _port(task))
        if isinstance(port, str):
            found = {"ok": False, "text": port, "seconds": 0.0}
            return _judge({0: found}, reports)
        store = [meeting.server.address[0], port]
        meeting.tell_all({"kind": "collective", "store": store, "deadline_s": DEADLINE_S})
        own = meeting.aside(lambda show: _outcome(task, show))
    said = meeting.gather("collective", timeout_s=DEADLINE_S + _STARTING_S, what="the collective")
    return _judge({0: own, **said}, reports)


def node_collective(attendance: "Attendance", asked: Message, report: NodeReport) -> None:
    """Takes part when the head says so, and tells it what came of it.

    Raises:
        Disagreed: with the head's words, if it ends the job meanwhile.
    """
    topology, programs = attendance.party.topology, attendance.party.programs
    with _start(report, topology.nodes, programs, store=asked.get("store")) as task:
        outcome = attendance.aside(lambda show: _outcome(task, show))
    attendance.send({"kind": "collective", **outcome})


def _start(report: NodeReport, nodes: int, programs: Programs, *, store: Any) -> TaskProcess:
    device = report.chosen[0].uuid if report.chosen else None
    body = {
        "rank": report.node_rank, "world_size": nodes, "backend": "nccl" if report.device_kind == "cuda" else "gloo",
        "device": device, "address": report.address, "interface": interface_of(report), "store": store,
        "deadline_s": DEADLINE_S,
    }  # fmt: skip
    return TaskProcess("collective", body, programs=programs)


def interface_of(report: NodeReport) -> str | None:
    """The interface that has the address by which the other nodes reach this one; None where it is not known."""
    return next((one.name for one in report.interfaces if report.address in one.addresses), None)


def _port(task: TaskProcess) -> int | str:
    """Where rank 0's store waits; a text where it came to nothing."""
    try:
        for message in task.messages():
            if message["kind"] == "store":
                return int(message["port"])
    except UnisonoError as error:
        return one_line(str(error), limit=300)
    return "it ended without a store"


def _outcome(task: TaskProcess, show: Show) -> dict[str, Any]:
    try:
        for message in task.messages():
            if message["kind"] == "result":
                return {name: message.get(name) for name in ("ok", "text", "seconds")}
            show(message)
    except UnisonoError as error:
        return {"ok": False, "text": one_line(str(error), limit=300), "seconds": 0.0}
    return {"ok": False, "text": "it ended without a result", "seconds": 0.0}


def _judge(said: dict[int, dict[str, Any]], reports: list[NodeReport]) -> Agreement:
    bad = {rank: message for rank, message in said.items() if message.get("ok") is not True}
    if not bad:
        slowest = max(float(message.get("seconds") or 0.0) for message in said.values())
        return Agreement.noted(
            "network.collective", "pass", f"one process on each of {len(reports)} nodes added a number in {slowest:.1f} s"
        )  # fmt: skip
    hosts = {report.node_rank: report.host for report in reports}
    evidence = tuple(
        Evidence(
            where=name_node(rank, hosts[rank]), text=one_line(str(message.get("text") or "?"), limit=300)
        )
        for rank, message in sorted(bad.items())[:8]
    )
    odd = sorted(bad) if len(bad) < len(reports) - len(bad) else []
    known = find_cause("address_unreachable")
    who = ", ".join(name_node(rank, hosts[rank]) for rank in sorted(bad)[:8])
    verdict = Verdict(
        cause="address_unreachable", when="before", hosts=tuple(hosts[rank] for rank in odd), phase="agree.network",
        summary=f"one process on each node was to add a number with the others, and it failed on {who}: {evidence[0].text}",
        evidence=evidence, fix=known.remedy if known else (),
    )  # fmt: skip
    return Agreement.found("network.collective", verdict)
