"""The other nodes' side of the meeting: call the head, report, try the network when asked, and hear what came of it."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from unisono.agree.reports import NodeReport
from unisono.control.events import Left, NodeMessage
from unisono.control.link import NodeLink
from unisono.errors import Disagreed, UnisonoError
from unisono.events import Message, Show
from unisono.rendezvous import meeting_end
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


class Attendance:
    """This node's place in the meeting. As a context manager it tells the head how this front ended.

    An error that leaves it is told to the head, and what the head makes of it is raised in its place, so that all nodes
    end with the same words and exit code 3.

    Attributes:
        party: this node.
        link: to the head; from the start of the ranks on it is the caller's to read (`link.receive`).
        welcome: what the head told everybody: run_nonce, epoch, wall, head_host, and what its caller added.
        head_gone: the end of the connection to the head; None as long as it is there.
    """

    def __init__(self, party: Party) -> None:
        """Calls the head until it answers.

        Raises:
            Disagreed: if it does not, or does not let this node in.
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
            on_wait=_ConnectProgress(party).tell,
            nodes=topology.nodes,
        )
        self.welcome = self.link.welcome
        self.head_gone: Left | None = None
        self._over = False
        self._kept: list[NodeMessage | Left] = []

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
        """As `link.receive`, with what has come already and was not asked for yet."""
        kept, self._kept = self._kept, []
        return [*kept, *self.link.receive(0 if kept else timeout_s)]

    def fileno(self) -> int:
        """As `link.fileno`: readable while something waits there."""
        return self.link.fileno()

    def wait_for(self, *kinds: str) -> Message:
        """The next message of one of these kinds. Notes and warnings that come before it are shown.

        It has no limit of its own: the head's silence ends it, and the head bounds everything that it waits for. What
        comes after the message stays for `receive`.

        Raises:
            Disagreed: with the head's words if it ends the job before anything was trained, or if it is lost.
        """
        while True:
            events = self.receive(_POLL_S)
            for index, event in enumerate(events):
                if (
                    isinstance(event, NodeMessage)
                    and event.message.get("kind") in kinds
                    and not _is_refusal(event)
                ):
                    self._kept = events[index + 1 :]
                    return event.message
                self._hear(event)

    def run_in_background(self, work: Callable[[Show], Result]) -> Result:
        """Does something that takes long and listens to the head meanwhile; gives what came of it.

        Raises:
            Disagreed: if the head ends the job meanwhile, or is lost.
        """
        work_thread = BackgroundWork(work)
        while not work_thread.done:
            self._listen(_BUSY_POLL_S)
            self._show_output(work_thread)
        self._show_output(work_thread)
        return work_thread.result()

    def fail(self, error: BaseException) -> None:
        """Tells the head of an error here.

        Raises:
            Disagreed: the head's words on it, in place of an error for people.
        """
        if isinstance(error, Stopped):
            self.send({"kind": "stop", "signal": error.number.name})
            return
        self.send({"kind": "refused", **meeting_end.refusal_of(error)})
        limit = time.monotonic() + _HEAD_ANSWERS_S
        while time.monotonic() < limit:  # raises as soon as the head has made its verdict
            try:
                self._listen(_POLL_S)
            except Disagreed as told:
                if isinstance(error, UnisonoError):
                    raise told from error
                return

    def _listen(self, timeout_s: float) -> None:
        """Hears what ends the job; what somebody will ask for later is kept."""
        for event in self.link.receive(timeout_s):
            if isinstance(event, Left) or event.message.get("kind") in _HANDLED_AT_ONCE:
                self._hear(event)
            else:
                self._kept.append(event)

    def _hear(self, event: NodeMessage | Left) -> None:
        if isinstance(event, Left):
            self._over = True
            self.head_gone = event
            if event.gave_up:  # this process was stopped: as the head says it
                own = meeting_end.node_left(self.party.topology.node_rank, self.party.host, event.why)
                raise meeting_end.disagreement([own.model_copy(update={"named_after_s": event.silent_s})])
            lost = meeting_end.head_lost(self.party.label, self.party.head, event.why)
            raise meeting_end.disagreement([lost.model_copy(update={"named_after_s": event.silent_s})])
        message = event.message
        match message.get("kind"):
            case "note":
                text = one_line(str(message.get("text", "")), limit=1_000)
                self.party.show({"kind": "note", "time": time.time(), "text": text})
            case "warning":
                said = {
                    name: one_line(str(message.get(name, "")), limit=1_000)
                    for name in ("code", "text", "fix")
                }
                self.party.show({"kind": "warning", "time": time.time(), **said})
            case "ended":
                self._ended(message)
            case _:
                return  # of a head of another version

    def _ended(self, message: Message) -> NoReturn:
        self._over = True
        stopped = meeting_end.stop_of_message(message)
        if stopped is not None:
            raise stopped
        verdicts = verdicts_in(message)
        if not verdicts:
            verdicts = [
                meeting_end.head_lost(
                    self.party.label, self.party.head, "it ended the job and gave no reason"
                )
            ]
        raise meeting_end.disagreement(verdicts)

    def _show_output(self, work_thread: BackgroundWork[Any]) -> None:
        for message in work_thread.shown():
            self.party.show(message)


def attend_meeting(
    party: Party,
    make_report: MakeReport,
    *,
    tries_collective: bool = True,
    trial: Callable[[Attendance, NodeReport], None] | None = None,
) -> Attendance:
    """Takes part up to the point where each node could prepare its data. Called by the fronts of all nodes but 0.

    Use what it gives as a context manager: whatever leaves it is told to the head.

    Args:
        party: this node.
        make_report: makes its report, in a thread of its own.
        tries_collective: as the head does.
        trial: this node's part of the head's.

    Raises:
        Disagreed: with the verdict that all nodes have been told.
    """
    attendance = Attendance(party)
    try:
        link, welcome = attendance.link, attendance.welcome
        with listen(link.local_address, party.token, str(welcome["run_nonce"])) as listener:
            standing = ChannelFacts(link.local_address, welcome, link.clock_offset_s, listener.ports)
            report = attendance.run_in_background(lambda show: make_report(standing, show))
            attendance.send({"kind": "report", "report": report.to_json()})
            if trial is not None:
                trial(attendance, report)
            else:
                try_network(attendance, report, tries_collective=tries_collective)
            attendance.wait_for("agreed")
    except BaseException as error:  # told to the head, and raised again
        attendance.__exit__(type(error), error, error.__traceback__)
        raise
    return attendance


def try_network(attendance: Attendance, report: NodeReport, *, tries_collective: bool = True) -> None:
    """Dials whom the head names, and takes part in a small collective.

    Raises:
        Disagreed: with the head's words.
    """
    asked = attendance.wait_for("dial")
    present = nodes_present(asked, own=attendance.party.topology.node_rank)
    if not tries_collective:
        node_dials(attendance, asked)
        return
    with collective_task(report, present, attendance.party.programs) as task:
        node_dials(attendance, asked)
        node_collective(attendance, task)


def _is_refusal(event: NodeMessage) -> bool:
    """Whether the head ends the job without a result: nothing was trained."""
    return event.message.get("kind") == "ended" and event.message.get("result") is None


class _ConnectProgress:
    """Says at which address nobody answers: after two seconds, then every ten."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self._next_s = _FIRST_LINE_S

    def tell(self, who_and_why: str, waited_s: float) -> None:
        if waited_s < self._next_s:
            return
        self._next_s = waited_s + _NEXT_LINES_S
        text = f"{one_line(who_and_why, limit=300)} ({waited_s:.0f} s; calling again until {self._party.join_timeout_s:.0f} s)"
        self._party.show({"kind": "note", "time": time.time(), "text": text})


# ---- Before a restart


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
        report = attendance.run_in_background(lambda _show: make_report(standing, question))
        attendance.send({"kind": restart_report_kind(asked.get("round")), "report": report.to_json()})
        told = attendance.wait_for("dial", "again", "plan", "ended")
        if told["kind"] != "dial":
            return told
        node_dials(attendance, told)
        return attendance.wait_for("again", "plan", "ended")
