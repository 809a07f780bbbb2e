"""Facts that launchers and ranks of a guarded program send, collected until all have sent theirs, then compared. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.compare import compare_launchers, compare_rank_facts
from unisono.agree.reports import NodeReport, name_node
from unisono.causes import Verdict, find_cause
from unisono.events import Message
from unisono.integrations.border import LAUNCHER, Answer
from unisono.plan import NodePlace, RankPlace

_FIRST_LINE_S, _NEXT_LINES_S = 5.0, 10.0

_Group = dict[int, tuple[int, Message, float]]
"""By node of a launcher, or by rank: its node, its message, and the time of arrival."""


@dataclass(frozen=True)
class Compared:
    """The result of a complete comparison.

    Attributes:
        answers: pairs of a node and the message for it.
        complete_at: when the last facts arrived, in monotonic seconds.
    """

    name: str
    agreement: Agreement
    answers: Sequence[tuple[int, Message]]
    complete_at: float


@dataclass(frozen=True)
class Waiting:
    """An incomplete comparison.

    Attributes:
        since_s: seconds since the first facts arrived.
        missing: the missing nodes or ranks, for messages.
        is_due: whether it is time for a message.
    """

    name: str
    since_s: float
    missing: str
    hosts: tuple[str, ...]
    is_due: bool

    @property
    def line(self) -> str:
        """The message during the wait."""
        who = (
            "the program's launchers wait"
            if self.name == LAUNCHER
            else f"ranks wait, to compare {self.name},"
        )
        return f"{who} for {self.missing} ({self.since_s:.0f} s)"

    @property
    def verdict(self) -> Verdict:
        """The verdict after the wait has timed out."""
        known = find_cause("node_missing")
        return Verdict(
            cause="node_missing",
            when="before",
            hosts=self.hosts,
            fix=known.remedy if known else (),
            summary=f"{self.missing} has not started its launcher within {self.since_s:.0f} s, and the other nodes wait for it",
            named_after_s=round(self.since_s, 3),
        )


@dataclass
class LauncherFacts:
    """All incomplete comparisons.

    Attributes:
        reports: of all nodes; empty for one node.
        uneven: whether nodes may have unequal numbers of ranks.
        store_host: the address of node 0.
    """

    nodes: Sequence[NodePlace]
    reports: Sequence[NodeReport]
    uneven: bool
    store_host: str
    _groups: dict[str, _Group] = field(default_factory=dict)
    _shown_at: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def take(self, node_rank: int, message: Message, *, now: float) -> Compared | None:
        """Takes the facts of a launcher or rank; gives the result of the comparison if they were the last."""
        name = str(message["name"])
        who = node_rank if name == LAUNCHER else int(message["rank"])
        group = self._groups.setdefault(name, {})
        group[who] = (node_rank, message, now)
        if len(group) < (len(self.nodes) if name == LAUNCHER else int(message["world_size"])):
            return None
        del self._groups[name]
        found = self._compare(name, group)
        return Compared(
            name, found, list(self._answers(name, group, found)), max(at for _, _, at in group.values())
        )

    def waiting(self, places: Mapping[int, RankPlace], *, now: float) -> list[Waiting]:
        """The incomplete comparisons, for ranks at these places."""
        found = []
        for name, group in self._groups.items():
            since_s = now - min(at for _, _, at in group.values())
            is_due = since_s >= _FIRST_LINE_S and now - self._shown_at.get(name, 0.0) >= _NEXT_LINES_S
            if is_due:
                self._shown_at[name] = now
            absent = [node for node in self.nodes if node.node_rank not in group]
            if name == LAUNCHER:
                missing = ", ".join(name_node(node.node_rank, node.host) for node in absent)
            else:
                ranks = [place.label for rank, place in sorted(places.items()) if rank not in group]
                missing = "; ".join(ranks[:4]) or "others"
            hosts = tuple(node.host for node in absent) if name == LAUNCHER else ()
            found.append(Waiting(name, since_s, missing, hosts, is_due))
        return found

    def _compare(self, name: str, group: _Group) -> Agreement:
        if name == LAUNCHER:
            nproc = {node: int(message["facts"].get("nproc") or 0) for node, (_, message, _) in group.items()}
            started = {node: count for node, count in nproc.items() if count}
            return (
                compare_launchers(self.reports, started, uneven=self.uneven) if self.reports else Agreement()
            )
        hosts = {node.node_rank: node.host for node in self.nodes}
        facts = {
            rank: (node, hosts[node], dict(message["facts"])) for rank, (node, message, _) in group.items()
        }
        return compare_rank_facts(name, facts)

    def _answers(self, name: str, group: _Group, found: Agreement) -> Iterator[tuple[int, Message]]:
        text = found.fatal[0].summary if found.fatal else ""
        facts = self._store(group) if name == LAUNCHER else {}
        for node, message, _ in group.values():
            answer = Answer(found.agreed, text, 3, {**facts, "node_rank": node} if facts else {})
            value = {
                "agreed": answer.agreed,
                "text": answer.text,
                "exit_code": answer.exit_code,
                "facts": answer.facts,
            }
            yield node, {"kind": "answer", "key": message["key"], "answer": value}

    def _store(self, group: _Group) -> dict[str, Any]:
        """The address of torch's store. Node 0's launcher has already bound its port, so no other program can take it."""
        port = group[0][1]["own"].get("store_port")
        host = f"[{self.store_host}]" if ":" in self.store_host else self.store_host
        return {"nodes": len(self.nodes), "store": f"{host}:{port}"}
