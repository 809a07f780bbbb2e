"""Both sides of the meeting.

Node 0 waits for the other nodes, compares them, tests the network, and sends everybody the outcome;
the members connect, report, and receive it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.messages import Show, notify
from unisono.base.text import one_line
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.compare import compare_again, compare_nodes
from unisono.guard.agree.reports import NodeReport
from unisono.guard.control.channel_ends import NodeLink
from unisono.guard.control.connection import Left, NodeMessage
from unisono.guard.rendezvous import meeting_rules
from unisono.guard.rendezvous.head_address import refuse_unusable_head, report_refusal
from unisono.guard.rendezvous.meeting import Meeting, RecordAgreement
from unisono.guard.rendezvous.meeting_rules import node_left
from unisono.guard.rendezvous.network_trial import (
    collective_task,
    head_collective,
    head_dials,
    listen,
    node_collective,
    node_dials,
    nodes_present,
)
from unisono.guard.rendezvous.party import (
    BackgroundWork,
    ChannelFacts,
    MakeReport,
    MakeRestartReport,
    Party,
    restart_report_kind,
)
from unisono.guard.rendezvous.remote_fronts import SshFronts
from unisono.guard.supervise.interrupts import Stopped
from unisono.guard.supervise.node_messages import (
    Again,
    CheckpointIdentity,
    HeadRequest,
    JobEnded,
    Note,
    PlanDecided,
    Warned,
    decode_request,
    encode,
)
from unisono.guard.supervise.supervision import show_warning

Result = TypeVar("Result")

_POLL_S = 0.2
_BUSY_POLL_S = 0.02
_HEAD_ANSWERS_S = 5.0
_FIRST_LINE_S = 2.0
_NEXT_LINES_S = 10.0
_HANDLED_AT_ONCE = ("note", "warning", "ended")
_LEFT_OUT = "is too late: the job has started without it"


def hold_meeting(
    party: Party,
    make_report: MakeReport,
    *,
    welcome: dict[str, object] | None = None,
    record: RecordAgreement | None = None,
    start_others: Callable[[tuple[str, int]], SshFronts] | None = None,
    compare: Callable[[Sequence[NodeReport]], Agreement] = compare_nodes,
    tries_collective: bool = True,
    trial: Callable[[Meeting], None] | None = None,
) -> Meeting:
    """The meeting of all nodes, agreed, so that each can prepare its data.

    Called by node 0's front.

    Use the result as a context manager: an exception that leaves it is reported to all nodes.

    Args:
        make_report: makes its report, in a background thread.
        welcome: sent to every node that joins; `nonce_file` is the name of the file from
            `facts.storage.leave_nonce`.
        record: called with the reports and the agreement after each comparison, including the one
            that ends the meeting.
        start_others: with --hosts: starts the other fronts, which connect to the given address
            (`ssh.start_others`).
        tries_collective: whether one process of each node takes part in a collective; all nodes
            must pass the same value.
        trial: a network test that replaces dials and collective; the members must run their part of
            it.

    Raises:
        Disagreed: with the verdict that was sent to all nodes.
    """
    try:
        meeting = Meeting(party, welcome=welcome, record=record)
    except Disagreed as error:
        # The others connect to an address on which this machine can still answer.
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
        try_network_at_head(meeting)
    else:
        meeting.judge(head_dials(meeting))


def try_network_at_head(meeting: Meeting) -> None:
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
    work = BackgroundWork(lambda show: make_report(channel, show))
    roll = meeting.roll
    next_line = meeting.began + _FIRST_LINE_S
    while not roll.complete:
        meeting.listen(_POLL_S if 0 in roll.reports else _BUSY_POLL_S)
        meeting.show_output(work)
        if work.done and 0 not in roll.reports:
            roll.reports[0] = work.result()
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
#     head → member   again: round, checkpoint     what to resume from, which each node must see
#     member → head   here_again_ROUND: report     made again, without a second digest of files
#     head → member   dial, as before the first start
#     member → head   reached
#     head → member   plan; or again, if a node was lost and enough are left; or ended
#
# A new round begins when the set of nodes changes. A member answers in order: after its report of a
# round, nothing of an earlier round follows.

_ANSWER_S = 20.0
"""For a report. Most of it is the storage check, with 5 s of its own and 5 s for the caches of a
network file system.
"""


def rejoin_at_head(
    meeting: Meeting, make_report: MakeRestartReport, checkpoint: CheckpointIdentity | None, *, round_: int
) -> Agreement:
    """The agreement of one round before a restart, at the head; nothing in it is fatal.

    Args:
        meeting: with the nodes that take part; their ranks have ended.
        checkpoint: to resume from; None if there is none.
        round_: a number not used before in this job.

    Raises:
        Disagreed, Objection: as `Meeting.refuse`.
    """
    _refuse_lost_nodes(meeting)
    with listen(meeting.server.address[0], meeting.party.token, meeting.run_nonce) as listener:
        meeting.broadcast(encode(Again(round_, checkpoint)))
        channel = ChannelFacts(meeting.server.address[0], meeting.welcome, 0.0, listener.ports)
        report = meeting.run_in_background(lambda _show: make_report(channel, checkpoint))
        answers = meeting.gather(
            restart_report_kind(round_), timeout_s=_ANSWER_S, what="its report before the restart"
        )
        meeting.forget("reached")  # of an earlier round
        meeting.roll.reports = {0: report}
        for node_rank, message in sorted(answers.items()):
            verdict = meeting.roll.record_report(node_rank, message.get("report"))
            if verdict is not None:
                meeting.refuse([verdict], nodes=[node_rank])
        agreement = compare_again(meeting.reports)
        if agreement.agreed and len(meeting.reports) > 1:
            agreement = agreement.merged(head_dials(meeting))
    if agreement.fatal:
        meeting.refuse(agreement.fatal)
    return agreement


def _refuse_lost_nodes(meeting: Meeting) -> None:
    """Refuses if a node left after its ranks had ended, while nobody was listening."""
    connected = meeting.server.connected()
    left = [rank for rank in meeting.roll.others if rank not in connected]
    if left:
        why = "its connection is closed"
        lost = [node_left(rank, meeting.roll.hosts[rank], why, moment="the restart") for rank in left]
        meeting.refuse(lost, nodes=left)


class MemberSide:
    """This node's connection to the meeting.

    As a context manager it reports to the head how this front ended.

    An error that leaves it is sent to the head, and the head's verdict on it is raised in its
    place, so that all nodes exit with the same message and exit code 3.

    Attributes:
        link: the connection to the head; once the ranks start, the caller reads it
            (`link.receive`).
        welcome: the head's welcome message: run_nonce, epoch, wall, head_host, and what its caller
            added.
        head_left: the end of the connection to the head; None while it is connected.
    """

    def __init__(self, party: Party) -> None:
        """Connects to the head, retrying until it answers.

        Raises:
            Disagreed: if it does not answer in time, or rejects this node.
        """
        refuse_unusable_head(party)
        self.party = party
        topology = party.topology
        self.link = NodeLink.connect(
            host=topology.head_host,
            port=topology.head_port,
            token=party.token,
            node_rank=topology.node_rank,
            node_host=party.host,
            timeout_s=party.join_timeout_s,
            on_wait=_ConnectProgress(party).show,
            nodes=topology.nodes,
        )
        self.welcome = self.link.welcome
        self.head_left: Left | None = None
        self._over = False
        self._unread: list[NodeMessage | Left] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._over:
                self.fail(error)
        finally:
            self.link.close()

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message to the head."""
        self.link.send(message)

    def receive(self, timeout_s: float) -> list[NodeMessage | Left]:
        """Messages that arrived earlier and were not read yet, then those of `link.receive`."""
        unread, self._unread = self._unread, []
        return [*unread, *self.link.receive(0 if unread else timeout_s)]

    def fileno(self) -> int:
        """The descriptor of `link`, readable while messages wait."""
        return self.link.fileno()

    def wait_for(self, *kinds: str) -> Mapping[str, object]:
        """The next message of one of these kinds. Notes and warnings before it are shown.

        There is no timeout here: the head's silence ends the wait, and the head limits everything
        it waits for. Messages after this one are unread for `receive`.

        Raises:
            Disagreed: with the head's verdict if it ends the job before training, or if the head is
                lost.
        """
        while True:
            events = self.receive(_POLL_S)
            for index, event in enumerate(events):
                if (
                    isinstance(event, NodeMessage)
                    and event.message.get("kind") in kinds
                    and not _is_refusal(event)
                ):
                    self._unread = events[index + 1 :]
                    return event.message
                self._handle(event)

    def run_in_background(self, work: Callable[[Show], Result]) -> Result:
        """The result of long work, done in a thread while this front listens to the head.

        Raises:
            Disagreed: if the head ends the job in the meantime, or is lost.
        """
        work_thread = BackgroundWork(work)
        while not work_thread.done:
            self._listen(_BUSY_POLL_S)
            self._show_output(work_thread)
        self._show_output(work_thread)
        return work_thread.result()

    def fail(self, error: BaseException) -> None:
        """Reports an error of this node to the head.

        Raises:
            Disagreed: the head's verdict on it, in place of a UnisonoError.
        """
        if isinstance(error, Stopped):
            self.send({"kind": "stop", "signal": error.number.name})
            return
        self.send({"kind": "refused", **meeting_rules.refusal_of(error)})
        limit = time.monotonic() + _HEAD_ANSWERS_S
        while time.monotonic() < limit:  # raises once the head has sent its verdict
            try:
                self._listen(_POLL_S)
            except Disagreed as verdict:
                if isinstance(error, UnisonoError):
                    raise verdict from error
                return

    def _listen(self, timeout_s: float) -> None:
        """Handles notes and the end of the job; other messages are unread for later."""
        for event in self.link.receive(timeout_s):
            if isinstance(event, Left) or event.message.get("kind") in _HANDLED_AT_ONCE:
                self._handle(event)
            else:
                self._unread.append(event)

    def _handle(self, event: NodeMessage | Left) -> None:
        if isinstance(event, Left):
            self._over = True
            self.head_left = event
            if event.gave_up:  # this process was suspended: the same verdict as the head's
                loss = meeting_rules.node_left(self.party.topology.node_rank, self.party.host, event.why)
                raise meeting_rules.disagreement([loss.model_copy(update={"named_after_s": event.silent_s})])
            lost = meeting_rules.head_lost(self.party.label, self.party.head, event.why)
            raise meeting_rules.disagreement([lost.model_copy(update={"named_after_s": event.silent_s})])
        match decode_request(event.message):
            case Note(text):
                notify(self.party.show, one_line(text, limit=1_000))
            case Warned() as warned:
                show_warning(self.party.show, warned)
            case JobEnded() as ended:
                self._ended(ended)
            case _:
                return  # from a head of a different version

    def _ended(self, ended: JobEnded) -> NoReturn:
        self._over = True
        if ended.stopped is not None:
            raise meeting_rules.parse_stop(ended.stopped.signal, ended.stopped.where)
        verdicts = ended.verdicts or [
            meeting_rules.head_lost(self.party.label, self.party.head, "it ended the job without a reason")
        ]
        raise meeting_rules.disagreement(verdicts)

    def _show_output(self, work_thread: BackgroundWork[Any]) -> None:
        for message in work_thread.shown():
            self.party.show(message)


def join_meeting(
    party: Party,
    make_report: MakeReport,
    *,
    tries_collective: bool = True,
    trial: Callable[[MemberSide, NodeReport], None] | None = None,
) -> MemberSide:
    """This node's connection to the meeting, agreed, so that each node can prepare its data.

    Called by the fronts of all nodes but 0.

    Use the result as a context manager: an exception that leaves it is reported to the head.

    Args:
        make_report: makes its report, in a background thread.
        tries_collective: the same value as at the head.
        trial: this node's part of the head's trial.

    Raises:
        Disagreed: with the verdict that was sent to all nodes.
    """
    member_side = MemberSide(party)
    try:
        link, welcome = member_side.link, member_side.welcome
        with listen(link.local_address, party.token, str(welcome["run_nonce"])) as listener:
            channel = ChannelFacts(link.local_address, welcome, link.clock_offset_s, listener.ports)
            report = member_side.run_in_background(lambda show: make_report(channel, show))
            member_side.send({"kind": "report", "report": report.to_json()})
            if trial is not None:
                trial(member_side, report)
            else:
                try_network_as_member(member_side, report, tries_collective=tries_collective)
            member_side.wait_for("agreed")
    except BaseException as error:  # reported to the head, and raised again
        member_side.__exit__(type(error), error, error.__traceback__)
        raise
    return member_side


def try_network_as_member(
    member_side: MemberSide, report: NodeReport, *, tries_collective: bool = True
) -> None:
    """Connects to the nodes in the head's request, and takes part in a small collective.

    Raises:
        Disagreed: with the head's verdict.
    """
    request = member_side.wait_for("dial")
    present = nodes_present(request, node_rank=member_side.party.topology.node_rank)
    if not tries_collective:
        node_dials(member_side, request)
        return
    with collective_task(report, present, member_side.party.programs) as task:
        node_dials(member_side, request)
        node_collective(member_side, task)


def _is_refusal(event: NodeMessage) -> bool:
    """Whether the head ends the job without a result: nothing was trained."""
    return event.message.get("kind") == "ended" and event.message.get("result") is None


class _ConnectProgress:
    """Shows which address does not answer: after two seconds, then every ten."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._next_s = _FIRST_LINE_S

    def show(self, target_and_reason: str, waited_s: float) -> None:
        if waited_s < self._next_s:
            return
        self._next_s = waited_s + _NEXT_LINES_S
        text = (
            f"{one_line(target_and_reason, limit=300)} ({waited_s:.0f} s; retrying until"
            f" {self._party.join_timeout_s:.0f} s)"
        )
        self._party.show({"kind": "note", "time": time.time(), "text": text})


# ---- Before a restart


def rejoin_as_member(
    member_side: MemberSide, again: Again, make_report: MakeRestartReport
) -> PlanDecided | JobEnded:
    """The message that ends the rounds before a restart, on a member: a plan, or the last message
    with a result.

    Args:
        again: the first one.

    Raises:
        Disagreed: with the head's verdict if it ends the job, or if the head is lost: then
            `head_left` has the reason.
    """
    answer: HeadRequest | None = again
    while isinstance(answer, Again):
        answer = decode_request(_rejoin_round(member_side, answer, make_report))
    assert isinstance(answer, PlanDecided | JobEnded)
    return answer


def _rejoin_round(
    member_side: MemberSide, again: Again, make_report: MakeRestartReport
) -> Mapping[str, object]:
    link, welcome = member_side.link, member_side.welcome
    with listen(link.local_address, member_side.party.token, str(welcome["run_nonce"])) as listener:
        channel = ChannelFacts(link.local_address, welcome, link.clock_offset_s, listener.ports)
        report = member_side.run_in_background(lambda _show: make_report(channel, again.checkpoint))
        member_side.send({"kind": restart_report_kind(again.round), "report": report.to_json()})
        answer = member_side.wait_for("dial", "again", "plan", "ended")
        if answer["kind"] != "dial":
            return answer
        node_dials(member_side, answer)
        return member_side.wait_for("again", "plan", "ended")
