"""Node 0's side of the meeting: waits for the other nodes, compares them, tests the network, and sends everybody the outcome."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.compare import compare_again, compare_nodes
from unisono.agree.reports import NodeReport
from unisono.errors import Disagreed
from unisono.rendezvous.head_address import report_refusal
from unisono.rendezvous.meeting import Meeting, RecordAgreement
from unisono.rendezvous.meeting_rules import node_left
from unisono.rendezvous.network_trial import collective_task, head_collective, head_dials, listen
from unisono.rendezvous.party import (
    BackgroundWork,
    ChannelFacts,
    MakeReport,
    MakeRestartReport,
    Party,
    RestartQuestion,
    restart_report_kind,
)
from unisono.rendezvous.remote_fronts import SshFronts

_POLL_S = 0.2
_BUSY_POLL_S = 0.02
_FIRST_LINE_S = 2.0
_NEXT_LINES_S = 10.0
_LEFT_OUT = "is too late: the job has started without it"


def hold_meeting(
    party: Party,
    make_report: MakeReport,
    *,
    welcome: dict[str, Any] | None = None,
    run_nonce: str = "",
    epoch: int = 0,
    record: RecordAgreement | None = None,
    start_others: Callable[[tuple[str, int]], SshFronts] | None = None,
    compare: Callable[[Sequence[NodeReport]], Agreement] = compare_nodes,
    tries_collective: bool = True,
    trial: Callable[[Meeting], None] | None = None,
) -> Meeting:
    """The meeting of all nodes, agreed, so that each can prepare its data. Called by node 0's front.

    Use the result as a context manager: an exception that leaves it is reported to all nodes.

    Args:
        make_report: makes its report, in a background thread.
        welcome: sent to every node that joins; `nonce_file` is the name of the file from `facts.storage.leave_nonce`.
        run_nonce: of this start; generated if empty.
        epoch: which attempt of the run this is.
        record: called with the reports and the agreement after each comparison, including the one that ends the meeting.
        start_others: with --hosts: starts the other fronts, which connect to the given address (`ssh.start_others`).
        tries_collective: whether one process of each node takes part in a collective; all nodes must pass the same value.
        trial: a network test that replaces dials and collective; the members must run their part of it.

    Raises:
        Disagreed: with the verdict that was sent to all nodes.
    """
    try:
        meeting = Meeting(party, welcome=welcome, run_nonce=run_nonce, epoch=epoch, record=record)
    except Disagreed as error:  # the others connect to an address on which this machine can still answer
        if error.verdict is not None and error.verdict.cause == "hostname_loopback":
            report_refusal(party, error)
        raise
    try:
        others = _start_others(meeting, start_others)
        with listen(meeting.server.address[0], party.token, meeting.run_nonce) as listener:
            _wait_for_nodes(meeting, make_report, listener.ports, others)
            meeting.judge(compare(meeting.reports))
            if len(meeting.reports) > 1:
                _run_trial(meeting, trial, tries_collective=tries_collective)
        meeting.broadcast({"kind": "agreed"})
    except BaseException as error:  # reported to all nodes, and raised again
        meeting.__exit__(type(error), error, error.__traceback__)
        raise
    return meeting


def _run_trial(meeting: Meeting, trial: Callable[[Meeting], None] | None, *, tries_collective: bool) -> None:
    if trial is not None:
        trial(meeting)
    elif tries_collective:
        try_network(meeting)
    else:
        meeting.judge(head_dials(meeting))


def try_network(meeting: Meeting) -> None:
    """Every node connects to the others, and one process on each takes part in a small collective.

    Raises:
        Disagreed: if a result is fatal.
    """
    present = [report.node_rank for report in meeting.reports]
    with collective_task(meeting.reports[0], present, meeting.party.programs) as task:
        meeting.judge(head_dials(meeting))
        meeting.judge(head_collective(meeting, task))


def _start_others(meeting: Meeting, start: Callable[[tuple[str, int]], SshFronts] | None) -> SshFronts | None:
    """Starts the other fronts; they end with the meeting."""
    if start is None:
        return None
    others = start(meeting.server.address)
    meeting.on_close.append(others.close)
    meeting.note(
        "started over SSH: " + ", ".join(f"node {one.node_rank} on {one.host}" for one in others.fronts)
    )
    return others


def _wait_for_nodes(
    meeting: Meeting, make_report: MakeReport, probe_ports: list[int], others: SshFronts | None
) -> None:
    """Waits until all nodes have joined and reported, this one included.

    Args:
        probe_ports: on which this node answers the dial matrix.
        others: the fronts that this node has started.

    Raises:
        Disagreed: if nodes are missing, one refuses, or one has a different token.
    """
    channel = ChannelFacts(meeting.server.address[0], meeting.welcome, 0.0, probe_ports)
    own = BackgroundWork(lambda show: make_report(channel, show))
    roll = meeting.roll
    next_line = meeting.began + _FIRST_LINE_S
    while not roll.complete:
        meeting.listen(_POLL_S if 0 in roll.reports else _BUSY_POLL_S)
        meeting.show_output(own)
        if own.done and 0 not in roll.reports:
            roll.reports[0] = own.result()
        now = time.monotonic()
        if now >= next_line and not roll.complete:
            meeting.note(roll.waiting_line(now - meeting.began), everywhere=True)
            next_line = now + _NEXT_LINES_S
        _handle_absent_nodes(meeting, now - meeting.began, others)
    meeting.close_joining()


def _handle_absent_nodes(meeting: Meeting, waited_s: float, others: SshFronts | None) -> None:
    """Refuses, or leaves nodes out, if a node cannot join any more or has not joined in time."""
    roll, topology = meeting.roll, meeting.party.topology
    missing = roll.missing
    failures = others.failures() if others and missing else {}
    lost = {rank: failures[rank] for rank in missing if rank in failures}
    if lost and roll.nodes - len(roll.left_out) - len(lost) < topology.enough:
        meeting.refuse(list(lost.values()))
    for rank, verdict in lost.items():
        meeting.leave_out(rank, _LEFT_OUT)
        meeting.note(f"the job runs without node {rank}: {verdict.summary}", everywhere=True)
    missing = roll.missing
    if not missing or waited_s <= meeting.party.join_timeout_s:
        return
    if len(roll.hosts) < topology.enough:
        names = {front.node_rank: front.name for front in others.fronts} if others else None
        meeting.refuse(roll.absence_verdicts(waited_s, names=names))
    why = "; ".join(verdict.summary for verdict in roll.absence_verdicts(waited_s))
    for rank in missing:
        meeting.leave_out(rank, _LEFT_OUT)
    meeting.note(f"starting with {len(roll.hosts)} of {roll.nodes} nodes: {why}", everywhere=True)


# ---- Before a restart: a short form of the agreement
#
#     head → member   again: round, question       (launch.node_report describes the question)
#     member → head   here_again_ROUND: report     made again; file contents are not digested a second time
#     head → member   dial, as before the first start
#     member → head   reached
#     head → member   plan; or again, if a node was lost and enough are left; or ended
#
# A new round begins when the set of nodes changes. A member answers in order: after its report of a round, nothing of an
# earlier round follows.

_ANSWER_S = 20.0
"""For a report. Most of it is the storage check, with 5 s of its own and 5 s for the caches of a network file system."""


def rejoin_at_head(
    meeting: Meeting, make_report: MakeRestartReport, question: RestartQuestion, *, round_: int
) -> Agreement:
    """The agreement of one round before a restart, at the head; nothing in it is fatal.

    Args:
        meeting: with the nodes that take part; their ranks have ended.
        question: sent to all nodes.
        round_: a number not used before in this job.

    Raises:
        Disagreed, Objection: as `Meeting.refuse`.
    """
    _refuse_lost_nodes(meeting)
    with listen(meeting.server.address[0], meeting.party.token, meeting.run_nonce) as listener:
        meeting.broadcast({"kind": "again", "round": round_, "question": question})
        channel = ChannelFacts(meeting.server.address[0], meeting.welcome, 0.0, listener.ports)
        own = meeting.run_in_background(lambda _show: make_report(channel, question))
        answers = meeting.gather(
            restart_report_kind(round_), timeout_s=_ANSWER_S, what="its report before the restart"
        )
        meeting.forget("reached")  # of an earlier round
        meeting.roll.reports = {0: own}
        for node_rank, message in sorted(answers.items()):
            verdict = meeting.roll.record_report(node_rank, message.get("report"))
            if verdict is not None:
                meeting.refuse([verdict], nodes=[node_rank])
        found = compare_again(meeting.reports)
        if found.agreed and len(meeting.reports) > 1:
            found = found.merged(head_dials(meeting))
    if found.fatal:
        meeting.refuse(found.fatal)
    return found


def _refuse_lost_nodes(meeting: Meeting) -> None:
    """Refuses if a node left after its ranks had ended, while nobody was listening."""
    connected = meeting.server.connected()
    left = [rank for rank in meeting.roll.others if rank not in connected]
    if left:
        why = "its connection is closed"
        lost = [node_left(rank, meeting.roll.hosts[rank], why, moment="the restart") for rank in left]
        meeting.refuse(lost, nodes=left)
