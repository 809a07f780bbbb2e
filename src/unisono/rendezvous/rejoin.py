"""Agreement in its short form, before ranks are started again: who is still here, fit for it, and reached by the others.

    head → node   again: round, question              see launch.node_report for what is asked
    node → head   here_again_ROUND: report            made anew; the contents of files are not digested again
    head → node   dial, as before the first start
    node → head   reached
    head → node   plan; or again, where a node was lost meanwhile and enough are left; or ended

A round begins anew when the nodes that take part change. A node answers in turn, so that once its report of a round is here
nothing of an earlier round follows.
"""

from collections.abc import Callable
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.compare import compare_again
from unisono.agree.reports import NodeReport
from unisono.events import Message
from unisono.rendezvous.meeting import Meeting
from unisono.rendezvous.meeting_end import node_left
from unisono.rendezvous.member_side import Attendance
from unisono.rendezvous.network_trial import head_dials, listen, node_dials
from unisono.rendezvous.party import ChannelFacts

RestartQuestion = dict[str, Any]
"""What a node is to look for, from the head."""
MakeRestartReport = Callable[[ChannelFacts, RestartQuestion], NodeReport]
"""Makes a node's report anew; a UnisonoError that it raises says why the node cannot go on."""

_ANSWER_S = 20.0
"""For a report: most of it is storage, which has five seconds of its own, and as many for the caches of a network file system."""


def rejoin_at_head(
    meeting: Meeting, make_report: MakeRestartReport, question: RestartQuestion, *, round_: int
) -> Agreement:
    """One round, at the head; gives what was found, nothing of which is fatal.

    Args:
        meeting: with the nodes that take part; their ranks have ended.
        make_report: makes this node's.
        question: for all nodes.
        round_: a number that was not used before in this job.

    Raises:
        Disagreed, Objection: as `Meeting.refuse`.
    """
    _refuse_lost_nodes(meeting)
    with listen(meeting.server.address[0], meeting.party.token, meeting.run_nonce) as listener:
        meeting.tell_all({"kind": "again", "round": round_, "question": question})
        standing = ChannelFacts(meeting.server.address[0], meeting.welcome, 0.0, listener.ports)
        own = meeting.aside(lambda _show: make_report(standing, question))
        answers = meeting.gather(_answer(round_), timeout_s=_ANSWER_S, what="its account before the restart")
        meeting.forget("reached")  # of a round before
        meeting.roll.reports = {0: own}
        for node_rank, message in sorted(answers.items()):
            verdict = meeting.roll.reported(node_rank, message.get("report"))
            if verdict is not None:
                meeting.refuse([verdict], nodes=[node_rank])
        found = compare_again(meeting.reports)
        if found.agreed and len(meeting.reports) > 1:
            found = found.merged(head_dials(meeting))
    if found.fatal:
        meeting.refuse(found.fatal)
    return found


def _refuse_lost_nodes(meeting: Meeting) -> None:
    """A node may have left after its ranks had ended, when nobody listened for that."""
    here = meeting.server.here()
    gone = [rank for rank in meeting.roll.others if rank not in here]
    if gone:
        why = "its connection is over"
        lost = [node_left(rank, meeting.roll.hosts[rank], why, moment="the restart") for rank in gone]
        meeting.refuse(lost, nodes=gone)


def rejoin_as_member(attendance: Attendance, asked: Message, make_report: MakeRestartReport) -> Message:
    """All rounds, on every other node; gives what ends them: `plan`, or `ended` with a result.

    Args:
        attendance: this node's place at the head.
        asked: the first `again`.
        make_report: makes this node's report.

    Raises:
        Disagreed: with the head's words if it ends the job, or if it is lost: then `attendance.head_gone` says why.
    """
    while asked["kind"] == "again":
        asked = _rejoin_round(attendance, asked, make_report)
    return asked


def _rejoin_round(attendance: Attendance, asked: Message, make_report: MakeRestartReport) -> Message:
    link, welcome = attendance.link, attendance.welcome
    question = dict(asked.get("question") or {})
    with listen(link.local_address, attendance.party.token, str(welcome["run_nonce"])) as listener:
        standing = ChannelFacts(link.local_address, welcome, link.clock_offset_s, listener.ports)
        report = attendance.aside(lambda _show: make_report(standing, question))
        attendance.send({"kind": _answer(asked.get("round")), "report": report.to_json()})
        told = attendance.wait_for("dial", "again", "plan", "ended")
        if told["kind"] != "dial":
            return told
        node_dials(attendance, told)
        return attendance.wait_for("again", "plan", "ended")


def _answer(round_: object) -> str:
    """The kind of message that is a report of a round."""
    return f"here_again_{round_}"
