"""The nodes of a job, as the head has them together: what they say, what is told to them, and how it ends."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from unisono.agree.agreement import Agreement
from unisono.agree.display import name_node, plain_host
from unisono.agree.membership import wrong_token
from unisono.agree.reports import NodeReport
from unisono.causes import Verdict
from unisono.control.events import Event, FileReceived, Joined, Left, NodeMessage, Rejected
from unisono.control.server import HeadServer
from unisono.errors import Disagreed, UnisonoError
from unisono.events import Message, Show
from unisono.rendezvous import meeting_end
from unisono.rendezvous.head_address import listening_address
from unisono.rendezvous.meeting_end import disagreement, end_message
from unisono.rendezvous.party import BackgroundWork, Party
from unisono.rendezvous.roll_call import RollCall
from unisono.supervise.interrupts import Stopped
from unisono.supervise.postmortem import node_refused

Result = TypeVar("Result")
RecordAgreement = Callable[[Sequence[NodeReport], Agreement], None]
"""Told what is known of the nodes after each judgement, also of the one that ends the meeting; for agreement.json."""

_POLL_S = 0.2
_BUSY_POLL_S = 0.02
_LINGER_S = 3.0
_ACKNOWLEDGE_S = 3.0


class Objection(Exception):  # noqa: N818 - named for what happened
    """Something forbids to go on with all of these nodes; raised in place of the end of the job by `Meeting.tentatively`.

    Attributes:
        verdicts: what would be said to all nodes.
        nodes: the numbers of those that it is about; empty: of none in particular.
    """

    def __init__(self, verdicts: Sequence[Verdict], nodes: Sequence[int]) -> None:
        super().__init__(verdicts[0].summary)
        self.verdicts = list(verdicts)
        self.nodes = sorted(set(nodes))


class Meeting:
    """The nodes of a job, as the head has them together. As a context manager it tells every node how it ended.

    An error that leaves it is told to all nodes and becomes Disagreed (exit code 3) here, too, unless `end` has been said.
    A signal that stops one node stops all of them: Stopped leaves it everywhere.
    Until `close_joining` is called, nodes may leave and come again.

    Attributes:
        party: this node.
        server: the connections; from the start of the ranks on they are the caller's to read (`server.receive`).
        run_nonce: of this start.
        roll: who is here, with all reports.
        agreement: checks and verdicts so far, for agreement.json.
        began: when the port was opened, in monotonic seconds.
        on_close: called once the channel is closed.
    """

    def __init__(
        self,
        party: Party,
        *,
        welcome: dict[str, Any] | None = None,
        run_nonce: str = "",
        epoch: int = 0,
        record: RecordAgreement | None = None,
    ) -> None:
        """Opens the port.

        Args:
            party: this node.
            welcome: for everybody who comes in, beside `head_host`.
            run_nonce: of this start; made where it is empty.
            epoch: which attempt of the run this is.
            record: see RecordAgreement.

        Raises:
            Disagreed: if the head's name or port cannot be used here.
        """
        self.party = party
        self.run_nonce = run_nonce or secrets.token_hex(16)
        self.agreement = Agreement()
        self.roll = RollCall(party.topology.nodes)
        self.began = self._last_news = time.monotonic()
        self._joining = True
        self._settled = False
        self._tentative = False
        self.on_close: list[Callable[[], None]] = []
        self._inbox: dict[str, dict[int, Message]] = {}
        self._record = record
        self.welcome = {"head_host": party.host, **(welcome or {})}
        self.server = HeadServer(
            host=listening_address(party),
            port=party.topology.head_port,
            token=party.token,
            nodes=party.topology.nodes,
            welcome=self.welcome,
            run_nonce=self.run_nonce,
            epoch=epoch,
        )
        self.roll.record_joined(Joined(0, party.host, self.server.address[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._settled:
            self.close()
        else:
            self.fail(error)

    @property
    def is_over(self) -> bool:
        """Whether the last word has been said."""
        return self._settled

    @property
    def reports(self) -> list[NodeReport]:
        """Of all nodes that take part, by node rank."""
        return [self.roll.reports[rank] for rank in sorted(self.roll.reports)]

    def broadcast(self, message: Message) -> None:
        """Sends a message to all other nodes."""
        self.server.tell_all(message)

    def note(self, text: str, *, everywhere: bool = False) -> None:
        """A line for people, here or on all nodes."""
        self.party.show({"kind": "note", "time": time.time(), "text": text})
        if everywhere:
            self.broadcast({"kind": "note", "text": text})

    def run_in_background(self, work: Callable[[Show], Result], *, everywhere: bool = False) -> Result:
        """Does something that takes long (a task, digests) and listens to the nodes meanwhile; gives what came of it.

        Args:
            work: it shows what it does.
            everywhere: whether the other nodes, which wait for it, are told its notes and warnings, too.

        Raises:
            Disagreed: if a node refuses or is lost meanwhile.
        """
        work_thread = BackgroundWork(work)
        while not work_thread.done:
            self.listen(_BUSY_POLL_S)
            self.show_output(work_thread, everywhere=everywhere)
        self.show_output(work_thread, everywhere=everywhere)
        return work_thread.result()

    def gather(self, kind: str, *, timeout_s: float, what: str = "") -> dict[int, Message]:
        """One message of a kind from every other node, by node rank.

        Args:
            kind: of message.
            timeout_s: from now.
            what: it is, for people.

        Raises:
            Disagreed: if a node refuses, is lost, or is silent for too long.
        """
        limit = time.monotonic() + timeout_s
        wanted = set(self.roll.others)
        while not wanted <= set(self._inbox.get(kind, {})):
            if time.monotonic() > limit:
                late = sorted(wanted - set(self._inbox.get(kind, {})))
                why = f"nothing came within {timeout_s:.0f} s: {what or kind}"
                gone = [self._left_verdict(rank, self.roll.hosts.get(rank, "?"), why) for rank in late]
                after = {"named_after_s": round(timeout_s, 3)}
                self.refuse([verdict.model_copy(update=after) for verdict in gone], nodes=late)
            self.listen(min(_POLL_S, max(0.0, limit - time.monotonic())))
        return self._inbox.pop(kind, {})  # the head may be the only one left

    def judge(self, agreement: Agreement) -> None:
        """Adds what was found. Warnings are said on every node.

        Raises:
            Disagreed: if something of it forbids the start.
        """
        self.agreement = self.agreement.merged(agreement)
        self._record_agreement()
        if agreement.fatal:
            self.refuse(agreement.fatal)
        for verdict in agreement.warnings:
            self._warn(verdict)

    @contextlib.contextmanager
    def tentatively(self) -> Iterator[None]:
        """While it is entered, what forbids to go on raises Objection and ends nothing: perhaps fewer nodes can go on."""
        self._tentative = True
        try:
            yield
        finally:
            self._tentative = False

    def leave_out(self, node_rank: int, why: str) -> None:
        """The job does without a node from now on; it is not let in again. `why` goes on from `node R (HOST) `."""
        self.roll.leave_out(node_rank)
        self.server.leave_out(node_rank, why)
        for answers in self._inbox.values():
            answers.pop(node_rank, None)

    def forget(self, kind: str) -> None:
        """What has come of a kind does not count any more."""
        self._inbox.pop(kind, None)

    def refuse(
        self,
        verdicts: Sequence[Verdict],
        *,
        exit_code: int = Disagreed.exit_code,
        nodes: Sequence[int] | None = None,
    ) -> NoReturn:
        """Tells all nodes why nothing is started, those that come late included, and raises the same here.

        Args:
            verdicts: the decisive one first.
            exit_code: of all nodes.
            nodes: which it is about; None: those on the hosts that the verdicts name.

        Raises:
            Disagreed: always, but `tentatively`.
            Objection: then.
        """
        if self._tentative:
            raise Objection(verdicts, self._nodes_of(verdicts) if nodes is None else nodes)
        after_s = time.monotonic() - self._last_news  # from the last arrival, or from what ended it
        said = [
            verdict
            if verdict.named_after_s is not None
            else verdict.model_copy(update={"named_after_s": round(after_s, 3)})
            for verdict in verdicts
        ]
        known = {verdict.summary for verdict in self.agreement.verdicts}
        new = [verdict for verdict in said if verdict.summary not in known]
        self.agreement = self.agreement.merged(*(Agreement.found("joining", verdict) for verdict in new))
        self._record_agreement()
        meeting_end.show_verdicts(self.party.show, said[0], [verdict.summary for verdict in said[1:]])
        self.end(end_message(said, exit_code=exit_code))
        error = disagreement(said)
        error.said = True
        raise error

    def fail(self, error: BaseException) -> None:
        """Tells all nodes of an error here, and ends the meeting.

        Raises:
            Disagreed: in place of an error with words of its own, so that all nodes end alike.
        """
        host = self.party.host
        if isinstance(error, Stopped):
            where = error.where or name_node(0, host)
            self.end(meeting_end.stop_message(Stopped(error.number, where)))
            return
        verdict = node_refused(0, host, meeting_end.refusal_of(error))
        if isinstance(error, Disagreed) and error.verdict is not None:
            verdict = error.verdict
        self.end(end_message([verdict]))
        if isinstance(error, UnisonoError) and not isinstance(error, Disagreed):
            raise disagreement([verdict]) from error

    def end(self, message: Message) -> None:
        """Says the last word (`ended`), waits a bounded time until all who are here have it, and closes.

        Nodes that never came get a few seconds to call and hear it.
        """
        self._settled = True
        self.server.settle(message)
        absent = set(self.roll.missing)
        limit = time.monotonic() + _LINGER_S
        while absent and time.monotonic() < limit:
            for event in self.server.receive(_POLL_S):
                if isinstance(event, Rejected) and event.claims is not None:
                    absent.discard(event.claims)
        self.close()

    def close(self) -> None:
        """Hangs up, once all who are here have had a bounded time to hear the last word."""
        self.server.close(patience_s=_ACKNOWLEDGE_S if self._settled else 0.0)
        for clean_up in self.on_close:
            clean_up()
        self.on_close = []

    def listen(self, timeout_s: float) -> None:
        """Hears what the nodes say, after waiting for the first word at most `timeout_s`.

        Raises:
            Disagreed: if one refuses, is lost, or proves to be another job's.
        """
        for event in self.server.receive(timeout_s):
            self._take(event)

    def close_joining(self) -> None:
        """Says that all are here: from now on nobody may leave."""
        self._joining = False

    def _nodes_of(self, verdicts: Sequence[Verdict]) -> list[int]:
        """The nodes on the hosts that verdicts name; none where a host has several, since then it is not sure."""
        named = {host for verdict in verdicts for host in verdict.hosts}
        found = [rank for rank, host in self.roll.hosts.items() if plain_host(host) in named]
        return found if len(found) == len(named) else []

    def _record_agreement(self) -> None:
        if self._record is not None:
            self._record(self.reports, self.agreement)

    def _take(self, event: Event) -> None:
        if not isinstance(event, NodeMessage) or event.message.get("kind") in ("refused", "stop"):
            # The last arrival counts, not the last report: files may be large. Of a node that fell silent, its last sign of life.
            silent_s = event.silent_s if isinstance(event, Left) else 0.0
            self._last_news = time.monotonic() - silent_s
        match event:
            case Joined():
                self.roll.record_joined(event)
            case Left():
                self._handle_left(event)
            case Rejected():
                self._handle_rejected(event)
            case NodeMessage():
                self._handle_message(event.node_rank, event.message)
            case FileReceived():
                pass  # before there are ranks nothing is sent

    def _handle_left(self, event: Left) -> None:
        if event.node_rank in self.roll.left_out:
            return
        line = self.roll.record_left(event)
        if not self._joining:
            label = name_node(event.node_rank, event.host)
            lost = (
                meeting_end.head_lost(label, self.party.head, event.why)
                if event.gave_up
                else self._left_verdict(event.node_rank, event.host, event.why)
            )
            self.refuse([lost], nodes=[event.node_rank])
        self.note(line)

    def _left_verdict(self, node_rank: int, host: str, why: str) -> Verdict:
        return meeting_end.node_left(
            node_rank, host, why, moment="the restart" if self._tentative else "the start"
        )

    def _handle_rejected(self, event: Rejected) -> None:
        line = self.roll.record_rejected(event)
        self.note(line)
        if not self._joining:
            return
        if self.roll.is_missing_node(event):
            self.refuse([wrong_token(event)])
        if event.kind == "misfit":
            self.refuse([meeting_end.node_count_mismatch(event.why)])

    def _handle_message(self, node_rank: int, message: Message) -> None:
        if node_rank in self.roll.left_out:
            return
        host = self.roll.hosts.get(node_rank, "?")
        match message.get("kind"):
            case "report":
                verdict = self.roll.record_report(node_rank, message.get("report"))
                if verdict is not None:
                    self.refuse([verdict])
            case "refused":
                self.refuse([node_refused(node_rank, host, message)], nodes=[node_rank])
            case "stop":
                raise meeting_end.parse_stop(message.get("signal"), name_node(node_rank, host))
            case kind:
                self._inbox.setdefault(str(kind), {})[node_rank] = message

    def _warn(self, verdict: Verdict) -> None:
        message = {
            "kind": "warning",
            "code": verdict.cause,
            "text": verdict.summary,
            "fix": "; ".join(verdict.fix),
        }
        self.party.show({**message, "time": time.time()})
        self.broadcast(message)

    def show_output(self, work_thread: BackgroundWork[Any], *, everywhere: bool = False) -> None:
        """Shows what some work has shown, here or on all nodes."""
        for message in work_thread.shown():
            self.party.show(message)
            if everywhere and message["kind"] in ("note", "warning"):
                self.broadcast({name: message[name] for name in message if name != "time"})
