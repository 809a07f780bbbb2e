"""The members' side of the meeting: connect to the head, report, test the network on request, and receive the outcome."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from unisono.agree.reports import NodeReport
from unisono.control.channel_ends import NodeLink
from unisono.control.connection import Left, NodeMessage
from unisono.errors import Disagreed, UnisonoError
from unisono.events import Message, Show
from unisono.rendezvous import meeting_rules
from unisono.rendezvous.head_address import refuse_unusable_head
from unisono.rendezvous.network_trial import (
    collective_task,
    listen,
    node_collective,
    node_dials,
    nodes_present,
)
from unisono.rendezvous.party import (
    BackgroundWork,
    ChannelFacts,
    MakeReport,
    MakeRestartReport,
    Party,
    restart_report_kind,
)
from unisono.supervise.interrupts import Stopped
from unisono.supervise.postmortem import verdicts_in
from unisono.text import one_line

Result = TypeVar("Result")

_POLL_S = 0.2
_BUSY_POLL_S = 0.02
_HEAD_ANSWERS_S = 5.0
_FIRST_LINE_S = 2.0
_NEXT_LINES_S = 10.0
_HANDLED_AT_ONCE = ("note", "warning", "ended")


class MemberSide:
    """This node's connection to the meeting. As a context manager it reports to the head how this front ended.

    An error that leaves it is sent to the head, and the head's verdict on it is raised in its place, so that all nodes
    exit with the same message and exit code 3.

    Attributes:
        link: the connection to the head; once the ranks start, the caller reads it (`link.receive`).
        welcome: the head's welcome message: run_nonce, epoch, wall, head_host, and what its caller added.
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

    def send(self, message: Message) -> None:
        """Sends a message to the head."""
        self.link.send(message)

    def receive(self, timeout_s: float) -> list[NodeMessage | Left]:
        """As `link.receive`, preceded by messages that arrived earlier and were not read yet."""
        unread, self._unread = self._unread, []
        return [*unread, *self.link.receive(0 if unread else timeout_s)]

    def fileno(self) -> int:
        """As `link.fileno`: readable while messages wait."""
        return self.link.fileno()

    def wait_for(self, *kinds: str) -> Message:
        """The next message of one of these kinds. Notes and warnings before it are shown.

        There is no timeout here: the head's silence ends the wait, and the head limits everything it waits for. Messages
        after this one are unread for `receive`.

        Raises:
            Disagreed: with the head's verdict if it ends the job before training, or if the head is lost.
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
                own = meeting_rules.node_left(self.party.topology.node_rank, self.party.host, event.why)
                raise meeting_rules.disagreement([own.model_copy(update={"named_after_s": event.silent_s})])
            lost = meeting_rules.head_lost(self.party.label, self.party.head, event.why)
            raise meeting_rules.disagreement([lost.model_copy(update={"named_after_s": event.silent_s})])
        message = event.message
        match message.get("kind"):
            case "note":
                text = one_line(str(message.get("text", "")), limit=1_000)
                self.party.show({"kind": "note", "time": time.time(), "text": text})
            case "warning":
                fields = {
                    name: one_line(str(message.get(name, "")), limit=1_000)
                    for name in ("code", "text", "fix")
                }
                self.party.show({"kind": "warning", "time": time.time(), **fields})
            case "ended":
                self._ended(message)
            case _:
                return  # from a head of a different version

    def _ended(self, message: Message) -> NoReturn:
        self._over = True
        stopped = meeting_rules.stop_of_message(message)
        if stopped is not None:
            raise stopped
        verdicts = verdicts_in(message)
        if not verdicts:
            verdicts = [
                meeting_rules.head_lost(
                    self.party.label, self.party.head, "it ended the job without a reason"
                )
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
    """This node's connection to the meeting, agreed, so that each node can prepare its data. Called by the fronts of all nodes but 0.

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
                try_network(member_side, report, tries_collective=tries_collective)
            member_side.wait_for("agreed")
    except BaseException as error:  # reported to the head, and raised again
        member_side.__exit__(type(error), error, error.__traceback__)
        raise
    return member_side


def try_network(member_side: MemberSide, report: NodeReport, *, tries_collective: bool = True) -> None:
    """Connects to the nodes in the head's request, and takes part in a small collective.

    Raises:
        Disagreed: with the head's verdict.
    """
    request = member_side.wait_for("dial")
    present = nodes_present(request, own=member_side.party.topology.node_rank)
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
        text = f"{one_line(target_and_reason, limit=300)} ({waited_s:.0f} s; retrying until {self._party.join_timeout_s:.0f} s)"
        self._party.show({"kind": "note", "time": time.time(), "text": text})


# ---- Before a restart


def rejoin_as_member(member_side: MemberSide, request: Message, make_report: MakeRestartReport) -> Message:
    """The message that ends the rounds before a restart, on a member: `plan`, or `ended` with a result.

    Args:
        request: the first `again`.

    Raises:
        Disagreed: with the head's verdict if it ends the job, or if the head is lost: then `attendance.head_gone` has the reason.
    """
    while request["kind"] == "again":
        request = _rejoin_round(member_side, request, make_report)
    return request


def _rejoin_round(member_side: MemberSide, request: Message, make_report: MakeRestartReport) -> Message:
    link, welcome = member_side.link, member_side.welcome
    question = dict(request.get("question") or {})
    with listen(link.local_address, member_side.party.token, str(welcome["run_nonce"])) as listener:
        channel = ChannelFacts(link.local_address, welcome, link.clock_offset_s, listener.ports)
        report = member_side.run_in_background(lambda _show: make_report(channel, question))
        member_side.send({"kind": restart_report_kind(request.get("round")), "report": report.to_json()})
        answer = member_side.wait_for("dial", "again", "plan", "ended")
        if answer["kind"] != "dial":
            return answer
        node_dials(member_side, answer)
        return member_side.wait_for("again", "plan", "ended")
