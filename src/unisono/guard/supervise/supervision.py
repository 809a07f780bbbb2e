"""Supervision of a job by the fronts of its nodes: one for ranks that unisono starts and for ranks
of a guarded program.

    every node → head    NodeNews: what its ranks say, how they look, and how they end
    head → every node    HeadRequest: what to carry out, what to show, and the last word

The head's own node takes part in both as node 0, without a connection.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from unisono.base.causes import Verdict
from unisono.base.messages import Show, VerdictMessage, WarningMessage, message_of, notify
from unisono.base.text import one_line
from unisono.guard.control.connection import FileReceived, Left, NodeMessage
from unisono.guard.supervise.decision import Failures, NodeLoss
from unisono.guard.supervise.local_ranks import Job
from unisono.guard.supervise.node_messages import (
    Again,
    CollectStacks,
    HeadRequest,
    JobEnded,
    NodeNews,
    Note,
    RankViews,
    Refused,
    StacksCollected,
    Start,
    TimelineLines,
    VerdictReached,
    Warned,
    decode_news,
    decode_request,
    encode,
)
from unisono.guard.supervise.postmortem import node_refused
from unisono.guard.supervise.rank_monitor import MonitorReports, StallMonitor

if TYPE_CHECKING:
    from unisono.guard.control.channel_ends import HeadServer

LastWord = JobEnded | Again | Start
"""With it the head ends this start of the ranks: for good, or until the next start."""


class HeadSupervision(ABC):
    """The head of a job, during one start of its ranks.

    Attributes:
        server: connections of the other nodes; None for one node.
        show: gets notes, warnings and verdicts.
        failures: ends of ranks, and losses of nodes.
        stall_monitor: None until all ranks are known.
    """

    server: "HeadServer | None"
    show: Show
    failures: Failures
    stall_monitor: StallMonitor | None

    @property
    @abstractmethod
    def job(self) -> Job:
        """The job as far as it is known."""

    @abstractmethod
    def needs(self, node_rank: int) -> bool:
        """Whether the job still needs a node, so that its leaving is a failure."""

    @abstractmethod
    def take_news(self, node_rank: int, news: NodeNews) -> None:
        """Takes news of ranks, and of their end."""

    @abstractmethod
    def take_refusal(self, node_rank: int, verdict: Verdict) -> None:
        """Takes the verdict on a node that did not start its part."""

    @abstractmethod
    def keep_time(self, node_rank: int, news: TimelineLines, ranks: set[int]) -> None:
        """Keeps where the time of a node's ranks went."""

    @abstractmethod
    def carry_out(self, request: HeadRequest) -> None:
        """Carries out a request on this node."""

    def take_file(self, event: FileReceived) -> None:
        """Takes the end of a file's transfer to this node."""
        del event

    def receive_from_nodes(self) -> None:
        """Takes the news of the other nodes that have arrived. A node whose news cannot be read
        counts as lost.
        """
        for event in self.server.receive(0) if self.server is not None else []:
            now = time.monotonic()
            if isinstance(event, Left):
                if self.needs(event.node_rank):
                    self.failures.node_lost(NodeLoss.at_head(event), now=now)
            elif isinstance(event, FileReceived):
                self.take_file(event)
            elif isinstance(event, NodeMessage) and (host := self._host(event.node_rank)) is not None:
                try:
                    if (news := decode_news(event.message)) is not None:
                        self.take(event.node_rank, news)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    why = f"sent an unreadable message: {one_line(str(error), limit=200)}"
                    self.failures.node_lost(NodeLoss(event.node_rank, host, why), now=now)

    def take(self, node_rank: int, news: NodeNews) -> None:
        """Takes the news of a node.

        Raises:
            ValueError: if it is about ranks of a different node.
        """
        match news:
            case RankViews() | StacksCollected():
                if self.stall_monitor is not None:
                    self.stall_monitor.on_message(node_rank, news)
            case TimelineLines():
                self.keep_time(node_rank, news, {place.rank for place in self.job.on_node(node_rank)})
            case Refused():
                host = self._host(node_rank) or "?"
                self.take_refusal(node_rank, node_refused(node_rank, host, news.error))
            case _:
                self.take_news(node_rank, news)

    def _host(self, node_rank: int) -> str | None:
        """The host of a node; None if it does not take part."""
        return next((node.host for node in self.job.nodes if node.node_rank == node_rank), None)

    def request(self, request: HeadRequest) -> None:
        """Sends a request to every node, this one included."""
        self.broadcast(request)
        self.carry_out(request)

    def request_from(self, node_rank: int, request: HeadRequest) -> None:
        """Sends a request to one node."""
        if node_rank == 0:
            self.carry_out(request)
        elif self.server is not None:
            self.server.send(node_rank, encode(request))

    def broadcast(self, request: HeadRequest) -> None:
        """Sends a request to every other node."""
        if self.server is not None:
            self.server.broadcast(encode(request))

    def notify(self, text: str) -> None:
        """Shows a line on every node."""
        notify(self.show, text)
        self.broadcast(Note(text))


class HeadConnection(Protocol):
    """The connection of a node to the head."""

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message to the head."""

    def receive(self, timeout_s: float) -> list[NodeMessage | Left]:
        """The head's messages, after waiting at most `timeout_s` for the first."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while messages wait."""
        ...


class NodeSupervision(ABC):
    """A node that is not the head, during one start of its ranks.

    Attributes:
        link: to the head.
        show: gets notes, warnings and verdicts.
        reports: of what this node sees of its ranks.
    """

    link: HeadConnection
    show: Show
    reports: MonitorReports

    @abstractmethod
    def carry_out(self, request: HeadRequest) -> None:
        """Carries out a request of the head."""

    def show_verdict(self, verdict: Verdict) -> None:
        """Shows a verdict of the head."""
        self.show(message_of(VerdictMessage, verdict.to_json()))

    def send(self, news: NodeNews) -> None:
        """Sends news to the head."""
        self.link.send(encode(news))

    def receive_from_head(self) -> LastWord | Left | None:
        """Carries out the head's requests that have arrived; gives its last word, or the end of the
        connection. What follows either of them is not read.

        Raises:
            ValueError: if a request cannot be read: the ranks would wait for what never comes.
        """
        for event in self.link.receive(0):
            word = event if isinstance(event, Left) else self.obey(event.message)
            if word is not None:
                return word
        return None

    def obey(self, message: Mapping[str, object]) -> LastWord | None:
        """Carries out one request, or gives the last word.

        Raises:
            ValueError: if it cannot be read.
        """
        try:
            request = decode_request(message)
        except ValueError:
            if message["kind"] != VerdictReached.kind:
                raise
            return None  # a verdict of a newer head; its last word follows
        match request:
            case JobEnded() | Again() | Start():
                return request
            case VerdictReached(verdict):
                self.show_verdict(verdict)
            case Note(text):
                notify(self.show, one_line(text, limit=1_000))
            case Warned():
                show_warning(self.show, request)
            case CollectStacks():
                self.reports.look(request)
            case None:
                pass  # a newer version sends more
            case _:
                self.carry_out(request)
        return None


def show_warning(show: Show, warned: Warned) -> None:
    """Shows a warning of the head."""
    texts = {name: one_line(getattr(warned, name), limit=1_000) for name in ("code", "text", "fix")}
    show(message_of(WarningMessage, texts))
