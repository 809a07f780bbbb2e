"""The pure part of a meeting: which nodes have joined, and the verdicts and messages that end it.

No clock, no socket.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, Problem, UnisonoError
from unisono.base.messages import Message, VerdictMessage, message_of
from unisono.base.text import one_line, validation_words
from unisono.guard.agree.membership import lost_node, missing_nodes
from unisono.guard.agree.reports import NodeReport, count, name_node, number_list
from unisono.guard.control.connection import Joined, Left, Rejected
from unisono.guard.supervise.interrupts import Stopped, exit_code_of
from unisono.guard.supervise.node_messages import JobEnded, StoppedBy

_MOST_REJECTED = 20
_LISTED = 6


@dataclass
class RollCall:
    """The head's list of nodes.

    Attributes:
        nodes: the largest number of nodes.
        hosts: of the joined nodes, by node rank.
        addresses: from which they connected.
        left: for a node that joined and left: its host, and why.
        rejected: the most recent rejected callers.
        left_out: nodes without which the job runs.
    """

    nodes: int
    hosts: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    reports: dict[int, NodeReport] = field(default_factory=dict)
    left: dict[int, tuple[str, str]] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined and are expected."""
        return [rank for rank in range(self.nodes) if rank not in self.hosts and rank not in self.left_out]

    @property
    def others(self) -> list[int]:
        """Nodes that have joined, without the head."""
        return sorted(rank for rank in self.hosts if rank != 0)

    @property
    def unreported(self) -> list[int]:
        """Nodes that have joined and not reported yet."""
        return [rank for rank in sorted(self.hosts) if rank not in self.reports]

    @property
    def complete(self) -> bool:
        """Whether all nodes have joined and reported."""
        return len(self.reports) == self.nodes - len(self.left_out)

    def leave_out(self, node_rank: int) -> None:
        """Continues the job without a node."""
        self.left_out.add(node_rank)
        for table in (self.hosts, self.addresses, self.reports):
            table.pop(node_rank, None)

    def record_joined(self, event: Joined) -> None:
        """Records that a node has joined."""
        self.hosts[event.node_rank] = event.host
        self.addresses[event.node_rank] = event.address
        self.left.pop(event.node_rank, None)

    def record_left(self, event: Left) -> str:
        """Records that a node left before all had joined; it may come back.

        Gives a line for the screen.
        """
        self.hosts.pop(event.node_rank, None)
        self.addresses.pop(event.node_rank, None)
        self.reports.pop(event.node_rank, None)
        why = f"it gave up on the head, which was {event.why}" if event.gave_up else event.why
        self.left[event.node_rank] = event.host, one_line(why, limit=200)
        return self._has_left(event.node_rank)

    def record_report(self, node_rank: int, value: object) -> Verdict | None:
        """Records a node's report; gives a verdict if it cannot be read or belongs to a different
        node.
        """
        host = self.hosts.get(node_rank, "?")
        try:
            report = NodeReport.model_validate(value)
        except ValidationError as error:
            return bad_report(node_rank, host, validation_words(error))
        if report.node_rank != node_rank:
            return bad_report(node_rank, host, f"it reports for node {report.node_rank}")
        self.reports[node_rank] = report
        return None

    def record_rejected(self, event: Rejected) -> str:
        """Records a rejected caller. Gives a line for the screen."""
        self.rejected = [*self.rejected, event][-_MOST_REJECTED:]
        text = one_line(event.why, limit=300)
        return f"refused a call from {event.address}: {text}"

    def waiting_line(self, waited_s: float) -> str:
        """`2 of 3 nodes are here (4.0 s); node 2 has never connected`."""
        present = (
            f"{len(self.hosts)} of {count(self.nodes, 'node')} {'is' if len(self.hosts) == 1 else 'are'} here"
            f" ({waited_s:.1f} s)"
        )
        parts = [present]
        never = [rank for rank in self.missing if rank not in self.left]
        if never:
            parts.append(
                f"{number_list('node', never)} {'has' if len(never) == 1 else 'have'} never connected"
            )
        lost = [rank for rank in self.missing if rank in self.left]
        parts += [self._has_left(rank) for rank in lost[:_LISTED]]
        busy = self.unreported
        if busy and not self.missing:
            names = ", ".join(name_node(rank, self.hosts[rank]) for rank in busy[:_LISTED])
            more = f" and {len(busy) - _LISTED} more" if len(busy) > _LISTED else ""
            parts.append(f"{names}{more} still checking files and devices")
        return "; ".join(parts)

    def absence_verdicts(self, waited_s: float, *, names: Mapping[int, str] | None = None) -> list[Verdict]:
        """Verdicts on the missing nodes, once the wait is over.

        Args:
            names: the hosts on which the nodes should be, from --hosts.
        """
        after = {"named_after_s": round(waited_s, 1)}
        left_verdicts = [node_left(rank, *self.left[rank]) for rank in self.missing if rank in self.left]
        seen = self.hosts | {rank: host for rank, (host, _) in self.left.items()}
        if len(seen) < self.nodes:
            left_verdicts.append(missing_nodes(self.nodes, seen, self.rejected, waited_s, hosts=names))
        return [verdict.model_copy(update=after) for verdict in left_verdicts]

    def _has_left(self, node_rank: int) -> str:
        host, why = self.left[node_rank]
        return f"{name_node(node_rank, host)} was here and has left: {why}"

    def is_missing_node(self, event: Rejected) -> bool:
        """Whether a caller with a wrong token claims to be a node that is still missing."""
        return event.kind == "token" and event.claims in self.missing


_MOST_PROBLEMS = 8


def disagreement(verdicts: Sequence[Verdict]) -> Disagreed:
    """The error with which a front ends: exit code 3, the first verdict, and a problem for each
    verdict.
    """
    return Disagreed(*(_as_problem(verdict) for verdict in verdicts), verdict=verdicts[0])


def show_verdicts(show: Callable[[Message], None], verdict: Verdict, others: Sequence[str]) -> None:
    """Shows why nothing starts: the decisive verdict in full, one line for each of the others."""
    show(message_of(VerdictMessage, verdict.to_json()))
    for summary in others:
        show({"kind": "note", "time": time.time(), "text": f"also: {summary}"})


def end_message(
    verdicts: Sequence[Verdict],
    *,
    exit_code: int = Disagreed.exit_code,
    result: Mapping[str, object] | None = None,
) -> JobEnded:
    """The last message of a job, with a result only if something was run."""
    return JobEnded(exit_code, tuple(verdicts), result=dict(result) if result is not None else None)


def stop_message(stopped: Stopped) -> JobEnded:
    """The last message of a job that was stopped before ranks started: without a verdict, since
    nothing failed.
    """
    return JobEnded(exit_code_of(stopped.number), stopped=StoppedBy(stopped.number.name, stopped.where))


def parse_stop(name: Any, where: str) -> Stopped:
    """The signal with a name that a different node sent; an unknown name counts as SIGTERM."""
    number = signal.Signals.__members__.get(str(name), signal.SIGTERM)
    return Stopped(number, one_line(where, limit=200))


def node_left(node_rank: int, host: str, why: str, *, moment: str = "the start") -> Verdict:
    """The verdict on a node that left before the ranks started, or before they were restarted."""
    return lost_node(node_rank, host, why, silent=why.startswith("silent"), moment=moment)


def bad_report(node_rank: int, host: str, why: str) -> Verdict:
    """The verdict on a node whose report cannot be read: it runs a different version."""
    who = name_node(node_rank, host)
    return Verdict(
        cause="code_mismatch",
        when="before",
        hosts=(host,),
        phase="agree.nodes",
        summary=f"{who} sent a report that the head cannot read: it runs a different version of unisono",
        evidence=(Evidence(where=who, text=one_line(why, limit=300)),),
        fix=_remedy("code_mismatch"),
    )


def node_count_mismatch(why: str) -> Verdict:
    """The verdict on a node that has the token but a different number of nodes."""
    return Verdict(
        cause="world_mismatch",
        when="before",
        phase="agree.call",
        summary=why,
        fix=("set the same --nodes on all nodes, and a different --node-rank on each, from 0",),
    )


def head_lost(me: str, head: str, why: str) -> Verdict:
    """The verdict on a head that was lost before the ranks started."""
    why = one_line(why, limit=200)
    return Verdict(
        cause="head_unreachable",
        when="before",
        phase="agree.call",
        summary=f"{me} lost the head at {head} before anything was started: {why}",
        evidence=(Evidence(where=me, text=f"the connection to the head is closed: {why}"),),
        fix=(
            "see node 0's terminal or log for its error",
            "then run the command again on every node",
        ),
    )


def refusal_of(error: BaseException) -> dict[str, object]:
    """The message to other nodes about an error of this node."""
    if isinstance(error, UnisonoError):
        return error.to_json()
    what = f"a bug in unisono: {one_line(repr(error), limit=300)}"
    return {
        "exit_code": 1,
        "problems": [{"what": what, "fix": "see the traceback on that node"}],
        "verdict": None,
    }


def _as_problem(verdict: Verdict) -> Problem:
    evidence = "; ".join(f"{item.where}: {item.text}" for item in verdict.evidence[:_MOST_PROBLEMS])
    return Problem(verdict.summary, where=evidence, fix="; ".join(verdict.fix))


def _remedy(cause: str) -> tuple[str, ...]:
    entry = find_cause(cause)
    return entry.remedy if entry else ()
