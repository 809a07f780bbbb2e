"""The head's eyes on all ranks while they run: gathers what is known of them, asks the judge, says what it says."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.causes import Verdict
from unisono.events import Message
from unisono.supervise.evidence import RawEvidence
from unisono.supervise.job import Job
from unisono.watch import Look, NodeView, Picture, RankView, Suspicion
from unisono.watch.judge import judge
from unisono.watch.pace import Pace, Patience

if TYPE_CHECKING:
    from unisono.control.server import HeadServer


_EVERY_S, _CALM_EVERY_S = (
    0.2,
    0.4,
)  # whoever calls polls as often; calm: every rank has moved since the last look
_SILENT_S = 3.0
_REQUEST_AGAIN_S = 5.0
_LATE_S = 2.0  # a view of a rank on another node may be so old
_MOST_RAW = 64  # ranks; of each up to 1 MiB

Show = Callable[[Message], None]


class LocalMonitor(Protocol):
    """What sees this node's own ranks; supervise.rank_monitor."""

    def views(self, now: float) -> list[RankView]:
        """All of them, as they are."""

    def look(self, ranks: Sequence[int]) -> None:
        """Begins to gather stacks and the flight recorder of some."""

    def looks(self) -> list[Look]:
        """What has been gathered since the last call."""

    def links(self) -> list[str]:
        """Connections of this node's ranks on which nothing is acknowledged."""

    def forget(self) -> None:
        """What has been gathered is history."""

    def raw(self, rank: int) -> RawEvidence:
        """What has been gathered of one, as it was written, and the end of its log."""


class StallMonitor:
    """Watches the ranks of one start. Nothing in it blocks.

    Attributes:
        picture: what was seen last.
    """

    def __init__(
        self,
        plan: Job,
        monitor: LocalMonitor,
        server: "HeadServer | None",
        show: Show,
        clock: Callable[[], float] = time.monotonic,
        *,
        stall_after: str = "auto",
    ) -> None:
        self._clock = clock
        self._plan = plan
        self._monitor = monitor
        self._server = server
        self._show = show
        self._patience = Patience.of(stall_after)
        self._pace = Pace()
        self._places = {place.rank: place for place in plan.ranks}
        self._views: dict[int, RankView] = {}
        self._links: dict[int, tuple[str, ...]] = {}
        self._looks: dict[int, Look] = {}
        self._raw: dict[int, RawEvidence] = {}
        self._requested_at: dict[int, float] = {}
        self._suspicion: Suspicion | None = None
        self._warned: dict[tuple[str, tuple[int, ...]], float] = {}  # cause and ranks: after how many seconds
        self._reported_silent: set[int] = set()
        self._next = 0.0
        self._found: Verdict | None = None
        self.picture = Picture(self._places, {}, total_steps=plan.total_steps)

    def on_message(self, node_rank: int, message: Message) -> None:
        """A node has told of its ranks: `beats`, or `looked` after it was asked to.

        Raises:
            KeyError, TypeError, ValueError: if it cannot be read, or is of another node's ranks.
        """
        own = {place.rank for place in self._plan.on_node(node_rank)}
        if message["kind"] == "beats":
            views = [RankView.from_json(value) for value in message["views"]]
            if not own.issuperset(view.rank for view in views):
                raise ValueError("tells of ranks that are not its own")
            self._views |= {view.rank: view for view in views}
            self._links[node_rank] = tuple(str(link) for link in message.get("links", ())[:16])
        else:
            looks = [Look.from_json(value) for value in message["looks"]]
            if not own.issuperset(look.rank for look in looks):
                raise ValueError("tells of ranks that are not its own")
            raw = {int(name): RawEvidence.from_json(value) for name, value in message["raw"].items()}
            if self._suspicion is not None:  # else it goes on again, and it was asked for in vain
                self._looks |= {look.rank: look for look in looks}
                self._raw |= {
                    rank: raw[rank]
                    for rank in own & raw.keys()
                    if len(self._raw) < _MOST_RAW or rank in self._raw
                }

    def raw(self) -> dict[int, RawEvidence]:
        """What a verdict can cite, by rank: of this node's ranks all, of others those that were looked at."""
        return {**self._raw, **{place.rank: self._monitor.raw(place.rank) for place in self._plan.on_node(0)}}

    def look(self) -> Verdict | None:
        """Called as often as one likes; looks five times a second, and half as often while all ranks move. Between it gives what was found last.

        A verdict is the end of the ranks.
        """
        now = self._clock()
        if now < self._next:
            return self._found
        self._next = now + _EVERY_S
        self._take(now)
        found = judge(self.picture, self._patience)
        if isinstance(found, Verdict):
            self._found = self._with_first_detection(found)
            return self._found
        self._found = None
        if found is None:
            self._note_recovery()
        else:
            self._suspect(found, now)
        self._pace.note(self._views, now)
        slow = self._pace.straggler(self.picture)
        if slow is not None:
            self._warn(slow)
        if self._suspicion is None and not any(view.idle_s for view in self._views.values()):
            self._next = now + _CALM_EVERY_S
        return None

    def see(self) -> None:
        """Takes the picture once more, before the ranks are ended: the last signs of life of those that have died are in it."""
        self._take(self._clock())

    def _take(self, now: float) -> None:
        """What is known now. Of a node that is silent nothing is known, and nobody on it is blamed for that."""
        self._views |= {view.rank: view for view in self._monitor.views(now)}
        looks = self._monitor.looks()
        if self._suspicion is not None:
            self._looks |= {look.rank: look for look in looks}
        silences = self._server.silences() if self._server is not None else {}
        self._report_silences(silences)
        if self._suspicion is not None:
            self._links[0] = tuple(self._monitor.links())
        nodes = {
            node.node_rank: NodeView(
                node.node_rank,
                node.host,
                silences.get(node.node_rank, 0.0),
                self._links.get(node.node_rank, ()),
            )
            for node in self._plan.nodes
        }
        audible = {
            rank: view for rank, view in self._views.items() if silences.get(view.node_rank, 0.0) < _SILENT_S
        }
        for rank in self._looks.keys() & audible.keys():
            if audible[rank].idle_s + _LATE_S < now - self._requested_at.get(rank, now):
                del self._looks[rank]  # it has moved on since, and is somewhere else
        self.picture = Picture(self._places, audible, nodes, dict(self._looks), self._plan.total_steps)

    def _suspect(self, found: Suspicion, now: float) -> None:
        self._request_stacks(
            [
                rank
                for rank in found.wanted
                if now - self._requested_at.get(rank, -_REQUEST_AGAIN_S) >= _REQUEST_AGAIN_S
            ],
            now,
        )
        before = self._suspicion
        if before is None:
            self._say(f"looking at it: {found.verdict.summary}")
        who = (found.verdict.cause, found.verdict.ranks)
        if found.is_named and who not in self._warned:
            self._warned[who] = found.since_s
            self._warn(found.verdict, ends_in_s=found.ends_in_s)
        elif before is not None and before.is_named:
            found = before if not found.is_named else found
        self._suspicion = found

    def _request_stacks(self, ranks: Sequence[int], now: float) -> None:
        """Has some ranks looked at, each on its node."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            self._requested_at[rank] = now
            by_node.setdefault(self._places[rank].node_rank, []).append(rank)
        for node_rank, of_node in by_node.items():
            if node_rank == 0:
                self._monitor.look(of_node)
            elif self._server is not None:
                self._server.send(node_rank, {"kind": "look", "ranks": of_node})

    def _note_recovery(self) -> None:
        if self._suspicion is None:
            return
        if self._suspicion.is_named:
            self._say(
                f"it goes on again, after {self._suspicion.since_s:.0f} s: {self._suspicion.verdict.summary}"
            )
        self._suspicion = None
        for gathered in (self._looks, self._requested_at, self._raw, self._warned):
            gathered.clear()
        self._monitor.forget()

    def _with_first_detection(self, found: Verdict) -> Verdict:
        """Naming is fast, acting is slow: when it was named is not when the run is ended for it."""
        since_s = self._warned.get((found.cause, found.ranks))
        return found if since_s is None else found.model_copy(update={"named_after_s": since_s})

    def _warn(self, found: Verdict, *, ends_in_s: float | None = None) -> None:
        """Says who and what, while the run goes on."""
        text = found.summary
        if ends_in_s is not None:
            text += f"; the run is ended if nothing moves for {ends_in_s:.0f} s more"
        fix = found.fix[0] if found.fix else ""
        self._show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": found.cause,
                "text": text,
                "fix": fix,
                "verdict": found.to_json(),
            }
        )
        if self._server is not None:
            self._server.tell_all({"kind": "note", "text": text})

    def _report_silences(self, silences: Mapping[int, float]) -> None:
        for node in self._plan.nodes:  # one that was left out may still be connected, and is nobody's worry
            seconds = silences.get(node.node_rank)
            if seconds is not None and node.node_rank not in self._reported_silent:
                self._reported_silent.add(node.node_rank)
                who = f"node {node.node_rank} ({node.host})"
                self._say(f"{who} has been silent for {seconds:.0f} s; after 8 s it counts as lost")
        for node_rank in self._reported_silent - set(silences):
            self._reported_silent.discard(node_rank)

    def _say(self, text: str) -> None:
        message: dict[str, Any] = {"kind": "note", "time": time.time(), "text": text}
        self._show(message)
        if self._server is not None:
            self._server.tell_all({"kind": "note", "text": text})
