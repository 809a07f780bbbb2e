"""The meeting at the head: the connected nodes, their messages, what is sent to them, and how the
meeting ends.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from unisono.base.causes import Verdict
from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.messages import Show, WarningMessage, message_of
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.membership import wrong_token
from unisono.guard.agree.reports import NodeReport, name_node, plain_host
from unisono.guard.control.channel_ends import HeadServer
from unisono.guard.control.connection import ChannelEvent, FileReceived, Joined, Left, NodeMessage, Rejected
from unisono.guard.rendezvous import meeting_rules
from unisono.guard.rendezvous.head_address import listening_address
from unisono.guard.rendezvous.meeting_rules import RollCall, disagreement, end_message
from unisono.guard.rendezvous.party import BackgroundWork, Party
from unisono.guard.supervise.interrupts import Stopped
from unisono.guard.supervise.node_messages import JobEnded, Note, Warned, encode
from unisono.guard.supervise.postmortem import node_refused

Result = TypeVar("Result")
RecordAgreement = Callable[[Sequence[NodeReport], Agreement], None]
"""Called with the reports and the agreement after each comparison, including the one that ends the
meeting; for agreement.json.
"""

_POLL_S = 0.2
_BUSY_POLL_S = 0.02
_LINGER_S = 3.0
_ACKNOWLEDGE_S = 3.0


class Objection(Exception):  # noqa: N818 - named for what happened
    """The job cannot continue with all of these nodes; raised instead of ending the job inside
    `Meeting.tentatively`.

    Attributes:
        verdicts: what would be sent to all nodes.
        nodes: the ranks of the nodes it is about; empty: no particular node.
    """

    def __init__(self, verdicts: Sequence[Verdict], nodes: Sequence[int]) -> None:
        super().__init__(verdicts[0].summary)
        self.verdicts = list(verdicts)
        self.nodes = sorted(set(nodes))


class Meeting:
    """The nodes of a job, connected to the head.

    As a context manager it sends every node the outcome.

    An error that leaves it is sent to all nodes and becomes Disagreed (exit code 3) here as well,
    unless `end` was called before. A signal that stops one node stops all of them: Stopped is
    raised on every node. Until `close_joining` is called, nodes may leave and join again.

    Attributes:
        server: the connections; once the ranks start, the caller reads them (`server.receive`).
        roll: which nodes have joined, with their reports.
        agreement: checks and verdicts so far, for agreement.json.
        began: when the port was opened, in monotonic seconds.
        on_close: called once the channel is closed.
    """

    def __init__(
        self,
        party: Party,
        *,
        welcome: dict[str, object] | None = None,
        record: RecordAgreement | None = None,
    ) -> None:
        """Opens the port.

        Args:
            welcome: sent to every node that joins, beside `head_host`.
            record: see RecordAgreement.

        Raises:
            Disagreed: if the head's name or port cannot be used here.
        """
        self.party = party
        self.run_nonce = secrets.token_hex(16)
        self.agreement = Agreement()
        self.roll = RollCall(party.topology.nodes)
        self.began = self._last_change = time.monotonic()
        self._joining = True
        self._ended = False
        self._tentative = False
        self.on_close: list[Callable[[], None]] = []
        self._inbox: dict[str, dict[int, Mapping[str, object]]] = {}
        self._record = record
        self.welcome = {"head_host": party.host, **(welcome or {})}
        self.server = HeadServer(
            host=listening_address(party),
            port=party.topology.head_port,
            token=party.token,
            nodes=party.topology.nodes,
            welcome=self.welcome,
            run_nonce=self.run_nonce,
        )
        self.roll.record_joined(Joined(0, party.host, self.server.address[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._ended:
            self.close()
        else:
            self.fail(error)

    @property
    def is_over(self) -> bool:
        """Whether the outcome has been sent."""
        return self._ended

    @property
    def reports(self) -> list[NodeReport]:
        """The reports of all nodes that take part, by node rank."""
        return [self.roll.reports[rank] for rank in sorted(self.roll.reports)]

    def broadcast(self, message: Mapping[str, object]) -> None:
        """Sends a message to all other nodes."""
        self.server.broadcast(message)

    def note(self, text: str, *, everywhere: bool = False) -> None:
        """Shows a note here, or on all nodes."""
        self.party.show({"kind": "note", "time": time.time(), "text": text})
        if everywhere:
            self.broadcast(encode(Note(text)))

    def run_in_background(self, work: Callable[[Show], Result], *, everywhere: bool = False) -> Result:
        """The result of long work (a task, digests), done in a thread while this front listens to
        the nodes.

        Args:
            work: called with a function that shows messages.
            everywhere: whether its notes and warnings are shown on the waiting nodes, too.

        Raises:
            Disagreed: if a node refuses or is lost in the meantime.
        """
        work_thread = BackgroundWork(work)
        while not work_thread.done:
            self.listen(_BUSY_POLL_S)
            self.show_output(work_thread, everywhere=everywhere)
        self.show_output(work_thread, everywhere=everywhere)
        return work_thread.result()

    def gather(self, kind: str, *, timeout_s: float, what: str = "") -> dict[int, Mapping[str, object]]:
        """One message of a kind from every other node, by node rank.

        Args:
            what: a description of it, for messages.

        Raises:
            Disagreed: if a node refuses, is lost, or is silent for too long.
        """
        limit = time.monotonic() + timeout_s
        expected = set(self.roll.others)
        while not expected <= set(self._inbox.get(kind, {})):
            if time.monotonic() > limit:
                late = sorted(expected - set(self._inbox.get(kind, {})))
                why = f"no answer within {timeout_s:.0f} s: {what or kind}"
                left_verdicts = [
                    self._left_verdict(rank, self.roll.hosts.get(rank, "?"), why) for rank in late
                ]
                after = {"named_after_s": round(timeout_s, 3)}
                self.refuse([verdict.model_copy(update=after) for verdict in left_verdicts], nodes=late)
            self.listen(min(_POLL_S, max(0.0, limit - time.monotonic())))
        return self._inbox.pop(kind, {})  # the head may be the only one left

    def judge(self, agreement: Agreement) -> None:
        """Adds an agreement. Its warnings are shown on every node.

        Raises:
            Disagreed: if a verdict in it is fatal.
        """
        self.agreement = self.agreement.merged(agreement)
        self._record_agreement()
        if agreement.fatal:
            self.refuse(agreement.fatal)
        for verdict in agreement.warnings:
            self._warn(verdict)

    @contextlib.contextmanager
    def tentatively(self) -> Iterator[None]:
        """Inside this context a fatal verdict raises Objection instead of ending the job: fewer
        nodes may be able to continue.
        """
        self._tentative = True
        try:
            yield
        finally:
            self._tentative = False

    def leave_out(self, node_rank: int, why: str) -> None:
        """Continues without a node, which cannot join again.

        `why` completes the sentence `node R (HOST) …`.
        """
        self.roll.leave_out(node_rank)
        self.server.leave_out(node_rank, why)
        for answers in self._inbox.values():
            answers.pop(node_rank, None)

    def forget(self, kind: str) -> None:
        """Drops the messages of a kind that have arrived so far."""
        self._inbox.pop(kind, None)

    def refuse(
        self,
        verdicts: Sequence[Verdict],
        *,
        nodes: Sequence[int] | None = None,
    ) -> NoReturn:
        """Sends all nodes, including late ones, the reason why nothing starts, and raises it here.

        Args:
            verdicts: the decisive one first.
            nodes: the nodes it is about; None: those on the hosts in the verdicts.

        Raises:
            Disagreed: always, except inside `tentatively`.
            Objection: inside `tentatively`.
        """
        if self._tentative:
            raise Objection(verdicts, self._nodes_of(verdicts) if nodes is None else nodes)
        after_s = time.monotonic() - self._last_change  # since the last join or leave
        timed = [
            verdict
            if verdict.named_after_s is not None
            else verdict.model_copy(update={"named_after_s": round(after_s, 3)})
            for verdict in verdicts
        ]
        reported = {verdict.summary for verdict in self.agreement.verdicts}
        new = [verdict for verdict in timed if verdict.summary not in reported]
        self.agreement = self.agreement.merged(*(Agreement.found("joining", verdict) for verdict in new))
        self._record_agreement()
        meeting_rules.show_verdicts(self.party.show, timed[0], [verdict.summary for verdict in timed[1:]])
        self.end(end_message(timed))
        error = disagreement(timed)
        error.already_shown = True
        raise error

    def fail(self, error: BaseException) -> None:
        """Sends all nodes an error of this node, and ends the meeting.

        Raises:
            Disagreed: in place of a UnisonoError, so that all nodes end with the same verdict.
        """
        host = self.party.host
        if isinstance(error, Stopped):
            where = error.where or name_node(0, host)
            self.end(meeting_rules.stop_message(Stopped(error.number, where)))
            return
        verdict = node_refused(0, host, meeting_rules.refusal_of(error))
        if isinstance(error, Disagreed) and error.verdict is not None:
            verdict = error.verdict
        self.end(end_message([verdict]))
        if isinstance(error, UnisonoError) and not isinstance(error, Disagreed):
            raise disagreement([verdict]) from error

    def end(self, ended: JobEnded) -> None:
        """Sends the last message, waits a bounded time until all joined nodes have it,
        and closes.

        Missing nodes get a few seconds to connect and receive it.
        """
        self._ended = True
        self.server.send_last(encode(ended))
        absent = set(self.roll.missing)
        limit = time.monotonic() + _LINGER_S
        while absent and time.monotonic() < limit:
            for event in self.server.receive(_POLL_S):
                if isinstance(event, Rejected) and event.claims is not None:
                    absent.discard(event.claims)
        self.close()

    def close(self) -> None:
        """Closes the connections, once all joined nodes have had a bounded time to receive the last
        message.
        """
        self.server.close(patience_s=_ACKNOWLEDGE_S if self._ended else 0.0)
        for clean_up in self.on_close:
            clean_up()
        self.on_close = []

    def listen(self, timeout_s: float) -> None:
        """Handles the nodes' messages, after waiting at most `timeout_s` for the first one.

        Raises:
            Disagreed: if a node refuses, is lost, or belongs to a different job.
        """
        for event in self.server.receive(timeout_s):
            self._handle_event(event)

    def close_joining(self) -> None:
        """Marks all nodes as present: from now on a node that leaves ends the meeting."""
        self._joining = False

    def _nodes_of(self, verdicts: Sequence[Verdict]) -> list[int]:
        """The nodes on the hosts in the verdicts; empty if a host runs several nodes, since then
        they are ambiguous.
        """
        named = {host for verdict in verdicts for host in verdict.hosts}
        ranks = [rank for rank, host in self.roll.hosts.items() if plain_host(host) in named]
        return ranks if len(ranks) == len(named) else []

    def _record_agreement(self) -> None:
        if self._record is not None:
            self._record(self.reports, self.agreement)

    def _handle_event(self, event: ChannelEvent) -> None:
        if not isinstance(event, NodeMessage) or event.message.get("kind") in ("refused", "stop"):
            # Counted from the last join or leave, not from the last report: files may be large. For
            # a silent node, from its last sign of life.
            silent_s = event.silent_s if isinstance(event, Left) else 0.0
            self._last_change = time.monotonic() - silent_s
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
                pass  # no files are sent before there are ranks

    def _handle_left(self, event: Left) -> None:
        if event.node_rank in self.roll.left_out:
            return
        line = self.roll.record_left(event)
        if not self._joining:
            label = name_node(event.node_rank, event.host)
            lost = (
                meeting_rules.head_lost(label, self.party.head, event.why)
                if event.gave_up
                else self._left_verdict(event.node_rank, event.host, event.why)
            )
            self.refuse([lost], nodes=[event.node_rank])
        self.note(line)

    def _left_verdict(self, node_rank: int, host: str, why: str) -> Verdict:
        return meeting_rules.node_left(
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
            self.refuse([meeting_rules.node_count_mismatch(event.why)])

    def _handle_message(self, node_rank: int, message: Mapping[str, object]) -> None:
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
                raise meeting_rules.parse_stop(message.get("signal"), name_node(node_rank, host))
            case kind:
                self._inbox.setdefault(str(kind), {})[node_rank] = message

    def _warn(self, verdict: Verdict) -> None:
        message = encode(Warned(verdict.cause, verdict.summary, "; ".join(verdict.fix)))
        self.party.show(message_of(WarningMessage, message))
        self.broadcast(message)

    def show_output(self, work_thread: BackgroundWork[Any], *, everywhere: bool = False) -> None:
        """Shows the messages of background work, here or on all nodes."""
        for message in work_thread.shown():
            self.party.show(message)
            if everywhere and message["kind"] in ("note", "warning"):
                self.broadcast({name: value for name, value in message.items() if name != "time"})
