"""The head's monitor of all ranks while they run: combines what is known of them, and reports a suspicion or a verdict."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.causes import Verdict
from unisono.events import Message
from unisono.supervise.evidence import RawEvidence
from unisono.supervise.local_ranks import Job
from unisono.watch import Look, NodeView, RankView, RunView, Suspicion
from unisono.watch.judge import judge
from unisono.watch.verdicts import Pace, Patience

if TYPE_CHECKING:
    from unisono.control.channel_ends import HeadServer


_EVERY_S = 0.2  # as often as its callers poll
_QUIET_EVERY_S = 0.4  # if every rank has moved since the last look
_SILENT_S = 3.0
_REQUEST_AGAIN_S = 5.0
_LATE_S = 2.0  # possible age of a view of a rank on a different node
_MOST_RAW = 64  # ranks; of each up to 1 MiB

Show = Callable[[Message], None]


class LocalMonitor(Protocol):
    """A monitor of this node's own ranks, e.g. a RankMonitor."""

    def views(self, now: float) -> list[RankView]:
        """All ranks as they are now."""

    def look(self, ranks: Sequence[int]) -> None:
        """Starts to collect stacks and the flight recorder of some ranks."""

    def looks(self) -> list[Look]:
        """Collections completed since the last call."""

    def links(self) -> list[str]:
        """Connections of this node's ranks with unacknowledged data."""

    def forget(self) -> None:
        """Forgets what was collected."""

    def raw(self, rank: int) -> RawEvidence:
        """The unparsed result of a rank's collection, and the end of its log."""


class StallMonitor:
    """Watches the ranks of one start. Nothing in it blocks.

    Attributes:
        run_view: of all ranks, as last seen.
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
        self._warned: dict[
            tuple[str, tuple[int, ...]], float
        ] = {}  # seconds until the warning, by cause and ranks
        self._reported_silent: set[int] = set()
        self._next = 0.0
        self._found: Verdict | None = None
        self.run_view = RunView(self._places, {}, total_steps=plan.total_steps)

    def on_message(self, node_rank: int, message: Message) -> None:
        """Takes a node's report on its ranks: `beats`, or `looked` after a request.

        Raises:
            KeyError, TypeError, ValueError: if it cannot be read, or is about ranks of a different node.
        """
        own = {place.rank for place in self._plan.on_node(node_rank)}
        if message["kind"] == "beats":
            views = [RankView.from_json(value) for value in message["views"]]
            if not own.issuperset(view.rank for view in views):
                raise ValueError("reports ranks that are not its own")
            self._views |= {view.rank: view for view in views}
            self._links[node_rank] = tuple(str(link) for link in message.get("links", ())[:16])
        else:
            looks = [Look.from_json(value) for value in message["looks"]]
            if not own.issuperset(look.rank for look in looks):
                raise ValueError("reports ranks that are not its own")
            raw = {int(name): RawEvidence.from_json(value) for name, value in message["raw"].items()}
            if self._suspicion is not None:  # else the ranks move again, and the request is obsolete
                self._looks |= {look.rank: look for look in looks}
                self._raw |= {
                    rank: raw[rank]
                    for rank in own & raw.keys()
                    if len(self._raw) < _MOST_RAW or rank in self._raw
                }

    def raw(self) -> dict[int, RawEvidence]:
        """Evidence for a verdict, by rank: of all ranks of this node, and of ranks collected on other nodes."""
        return {**self._raw, **{place.rank: self._monitor.raw(place.rank) for place in self._plan.on_node(0)}}

    def look(self) -> Verdict | None:
        """The current verdict, which ends the ranks; None without one.

        May be called at any rate: it looks five times a second, half as often while all ranks move, and repeats its last result in between.
        """
        now = self._clock()
        if now < self._next:
            return self._found
        self._next = now + _EVERY_S
        self._take(now)
        found = judge(self.run_view, self._patience)
        if isinstance(found, Verdict):
            self._found = self._with_first_detection(found)
            return self._found
        self._found = None
        if found is None:
            self._note_recovery()
        else:
            self._suspect(found, now)
        self._pace.note(self._views, now)
        slow = self._pace.straggler(self.run_view)
        if slow is not None:
            self._warn(slow)
        if self._suspicion is None and not any(view.idle_s for view in self._views.values()):
            self._next = now + _QUIET_EVERY_S
        return None

    def see(self) -> None:
        """Updates the picture once more before the ranks are ended, with the last signs of life of those that have failed."""
        self._take(self._clock())

    def _take(self, now: float) -> None:
        """Updates the picture. Nothing is known of a silent node, and no rank on it is blamed for that."""
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
        responding = {
            rank: view for rank, view in self._views.items() if silences.get(view.node_rank, 0.0) < _SILENT_S
        }
        for rank in self._looks.keys() & responding.keys():
            if responding[rank].idle_s + _LATE_S < now - self._requested_at.get(rank, now):
                del self._looks[rank]  # it has moved since
        self.run_view = RunView(self._places, responding, nodes, dict(self._looks), self._plan.total_steps)

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
            self._notify(f"investigating: {found.verdict.summary}")
        who = (found.verdict.cause, found.verdict.ranks)
        if found.is_named and who not in self._warned:
            self._warned[who] = found.since_s
            self._warn(found.verdict, ends_in_s=found.ends_in_s)
        elif before is not None and before.is_named:
            found = before if not found.is_named else found
        self._suspicion = found

    def _request_stacks(self, ranks: Sequence[int], now: float) -> None:
        """Requests stacks and flight recorder of some ranks, each from its node."""
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
            self._notify(
                f"the ranks move again after {self._suspicion.since_s:.0f} s: {self._suspicion.verdict.summary}"
            )
        self._suspicion = None
        for gathered in (self._looks, self._requested_at, self._raw, self._warned):
            gathered.clear()
        self._monitor.forget()

    def _with_first_detection(self, found: Verdict) -> Verdict:
        """The verdict with the time of its warning, which comes long before the run is ended."""
        since_s = self._warned.get((found.cause, found.ranks))
        return found if since_s is None else found.model_copy(update={"named_after_s": since_s})

    def _warn(self, found: Verdict, *, ends_in_s: float | None = None) -> None:
        """Warns of a cause while the run continues."""
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
            self._server.broadcast({"kind": "note", "text": text})

    def _report_silences(self, silences: Mapping[int, float]) -> None:
        for node in self._plan.nodes:  # a node that was left out may still be connected
            seconds = silences.get(node.node_rank)
            if seconds is not None and node.node_rank not in self._reported_silent:
                self._reported_silent.add(node.node_rank)
                who = f"node {node.node_rank} ({node.host})"
                self._notify(f"{who} has been silent for {seconds:.0f} s; after 8 s it counts as lost")
        for node_rank in self._reported_silent - set(silences):
            self._reported_silent.discard(node_rank)

    def _notify(self, text: str) -> None:
        message: dict[str, Any] = {"kind": "note", "time": time.time(), "text": text}
        self._show(message)
        if self._server is not None:
            self._server.broadcast({"kind": "note", "text": text})
