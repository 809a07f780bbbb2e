"""Who of the nodes is here, who has reported, and who was turned away. No clock, no socket."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from unisono.agree.display import count, name_node, number_list
from unisono.agree.membership import missing_nodes
from unisono.agree.reports import NodeReport
from unisono.causes import Verdict
from unisono.control.events import Joined, Left, Rejected
from unisono.rendezvous import meeting_end
from unisono.text import one_line, validation_words

_KEPT = 20
_LISTED = 6


@dataclass
class RollCall:
    """The list of nodes that the head keeps.

    Attributes:
        nodes: how many there are at the most.
        hosts: of those that are here, by node rank.
        addresses: from which they call.
        reports: of those that have reported.
        left: for a node that was here and is not any more: its host, and why.
        rejected: who was turned away, the last ones.
        left_out: nodes that the job does without.
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
        """Nodes that are not here and waited for."""
        return [rank for rank in range(self.nodes) if rank not in self.hosts and rank not in self.left_out]

    @property
    def others(self) -> list[int]:
        """Nodes that are here, without the head."""
        return sorted(rank for rank in self.hosts if rank != 0)

    @property
    def unreported(self) -> list[int]:
        """Nodes that are here and still look at their files."""
        return [rank for rank in sorted(self.hosts) if rank not in self.reports]

    @property
    def complete(self) -> bool:
        """Whether all are here and have reported."""
        return len(self.reports) == self.nodes - len(self.left_out)

    def leave_out(self, node_rank: int) -> None:
        """The job does without a node from now on."""
        self.left_out.add(node_rank)
        for kept in (self.hosts, self.addresses, self.reports):
            kept.pop(node_rank, None)

    def record_joined(self, event: Joined) -> None:
        """A node is here."""
        self.hosts[event.node_rank] = event.host
        self.addresses[event.node_rank] = event.address
        self.left.pop(event.node_rank, None)

    def record_left(self, event: Left) -> str:
        """A node is gone again, before all were here; it may come back. Gives a line for people."""
        self.hosts.pop(event.node_rank, None)
        self.addresses.pop(event.node_rank, None)
        self.reports.pop(event.node_rank, None)
        why = f"it has given up on the head, which was {event.why}" if event.gave_up else event.why
        self.left[event.node_rank] = event.host, one_line(why, limit=200)
        return self._has_left(event.node_rank)

    def record_report(self, node_rank: int, value: object) -> Verdict | None:
        """Takes a node's report; a verdict where it cannot be read, or is another node's."""
        host = self.hosts.get(node_rank, "?")
        try:
            report = NodeReport.model_validate(value)
        except ValidationError as error:
            return meeting_end.bad_report(node_rank, host, validation_words(error))
        if report.node_rank != node_rank:
            return meeting_end.bad_report(node_rank, host, f"it reports for node {report.node_rank}")
        self.reports[node_rank] = report
        return None

    def record_rejected(self, event: Rejected) -> str:
        """Somebody was not let in. Gives a line for people."""
        self.rejected = [*self.rejected, event][-_KEPT:]
        text = one_line(event.why, limit=300)
        return f"refused a call from {event.address}: {text}"

    def waiting_line(self, waited_s: float) -> str:
        """`2 of 3 nodes are here (4.0 s); node 2 has never connected`."""
        here = f"{len(self.hosts)} of {count(self.nodes, 'node')} {'is' if len(self.hosts) == 1 else 'are'} here ({waited_s:.1f} s)"
        parts = [here]
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
            parts.append(f"{names}{more} still looking at files and devices")
        return "; ".join(parts)

    def absence_verdicts(self, waited_s: float, *, names: Mapping[int, str] | None = None) -> list[Verdict]:
        """Verdicts on the nodes that are not here, once one does not wait for them any more.

        Args:
            waited_s: for how long one has waited.
            names: the hosts that nodes should be on, as by --hosts.
        """
        after = {"named_after_s": round(waited_s, 1)}
        gone = [meeting_end.node_left(rank, *self.left[rank]) for rank in self.missing if rank in self.left]
        known = self.hosts | {rank: host for rank, (host, _) in self.left.items()}
        if len(known) < self.nodes:
            gone.append(missing_nodes(self.nodes, known, self.rejected, waited_s, hosts=names))
        return [verdict.model_copy(update=after) for verdict in gone]

    def _has_left(self, node_rank: int) -> str:
        host, why = self.left[node_rank]
        return f"{name_node(node_rank, host)} was here and has left: {why}"

    def is_missing_node(self, event: Rejected) -> bool:
        """Whether a caller with another token says that it is a node that is still missing."""
        return event.kind == "token" and event.claims in self.missing
