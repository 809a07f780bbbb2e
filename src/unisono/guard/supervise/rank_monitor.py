"""Monitors of ranks: what a node's front sees of its own (heartbeats, processes, stacks on request)
and reports to the head; and the head's monitor of all ranks, which reports a suspicion or a
verdict.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from unisono.base.causes import Verdict
from unisono.base.causes.entries import all_entries
from unisono.base.files import BackgroundThread
from unisono.base.messages import Show, notify
from unisono.guard.facts.machine import gpu_utilization
from unisono.guard.facts.network import retransmitting_connections
from unisono.guard.facts.processes import (
    ThreadCounters,
    child_states,
    io_bytes,
    read_stat,
    read_thread,
    reads_input,
    wait_channel,
)
from unisono.guard.places.ranks import RankPlace
from unisono.guard.supervise.evidence import RawEvidence, end_of_log
from unisono.guard.supervise.local_ranks import Job, NodeRanks
from unisono.guard.supervise.node_messages import (
    CollectStacks,
    NodeNews,
    Note,
    RankViews,
    StacksCollected,
    encode,
)
from unisono.guard.supervise.stack_collection import StackCollection
from unisono.guard.watch import PHASES, phase_named
from unisono.guard.watch.judge import judge
from unisono.guard.watch.verdicts import Pace, Patience
from unisono.guard.watch.views import Beat, Episode, Look, NodeView, ProcessView, RankView, RunView, Suspicion

if TYPE_CHECKING:
    from unisono.guard.control.channel_ends import HeadServer


_GAP_S = 2.0  # a front that did not look for this long was itself stopped, suspended or starved
_IDLE_S = 1.0  # the process of a rank that moves need not be read
_MOVING_EVERY_S = 5.0
_PULSE_S = 1.0  # pulses come at least twice a second, later on an overloaded machine
_GONE_STATES = ("Z", "X")
_LINKS_EVERY_S = 1.0  # the kernel's tables are long where there are many connections
_LOG_S = 1.0
_LARGE_IO_BYTES = 16 << 20  # reads and writes other than of a large file are smaller
_JUDGE_EVERY_S = 0.2  # as often as its callers poll
_QUIET_EVERY_S = 0.4  # if every rank has moved since the last look
_SILENT_S = 3.0
_REQUEST_AGAIN_S = 5.0
_REQUEST_QUIETLY_S = 30.0
_LATE_S = 2.0  # possible age of a view of a rank on a different node
_MOST_LINKS = 16  # of a node
_MOST_RAW = 64  # ranks; of each up to 1 MiB


@dataclass
class _Seen:
    """The last observation of one rank, and for how long it has not changed."""

    beat: Beat | None = None
    idle_s: float = 0.0
    pulse_idle_s: float = 0.0
    process: ProcessView = field(default_factory=ProcessView)
    process_at: float | None = None
    read_and_written: int = 0
    moves: ThreadCounters | None = None


class RankMonitor:
    """Monitor of this node's ranks.

    It reads shared memory and files of the kernel, and neither needs the ranks to do anything nor
    waits for them.
    """

    def __init__(self, local: NodeRanks, node_rank: int) -> None:
        """Starts without any view.

        Args:
            local: the ranks; they need not have been started yet.
        """
        self._local = local
        self._node_rank = node_rank
        self._use = gpu_utilization()
        self._seen: dict[int, _Seen] = {}
        self._last: float | None = None
        self._collections: dict[int, StackCollection] = {}
        self._raw: dict[int, RawEvidence] = {}
        self._links: list[str] = []
        self._links_at: float | None = None
        self._reading = BackgroundThread("ends of logs")
        self._logs: dict[int, str] = {}
        self._log_s = _LOG_S

    def close(self) -> None:
        """Ends running stack collections. The ranks are not affected."""
        for collection in self._collections.values():
            collection.close()
        self._collections.clear()

    def views(self, now: float) -> list[RankView]:
        """Every rank as it is now; called a few times a second.

        Idle time counts from the last change that was seen, by the caller's clock: no rank's clock
        is trusted. If more than 2 s have passed since the last call, the front itself was not
        running, and that time does not count as idle.

        Args:
            now: monotonic seconds.
        """
        passed = now - self._last if self._last is not None else 0.0
        self._last = now
        counted = passed if passed <= _GAP_S else 0.0
        return [self._view(place, now=now, passed=counted) for place in self._local.places]

    def look(self, ranks: Iterable[int]) -> None:
        """Starts to collect stacks and the flight recorder of some ranks; does not wait.

        Skips ranks of other nodes, and those being collected.
        """
        for rank in ranks:
            memory = self._local.beats.get(rank)
            if memory is not None and rank not in self._collections:
                workers = self._local.workers(rank)
                self._collections[rank] = StackCollection(
                    rank, self._local.pid(rank), memory, workers, now=time.monotonic()
                )

    def looks(self) -> list[Look]:
        """Collections completed since the last call; each takes at most 1.5 s."""
        looks = []
        for rank, collection in list(self._collections.items()):
            if rank not in self._local.beats:  # the ranks are gone, and their memory too
                self._drop(rank)
                continue
            seen = self._seen.get(rank)
            has_pulse = seen is None or seen.pulse_idle_s < _PULSE_S
            look = collection.result(time.monotonic(), has_pulse=has_pulse)
            if look is not None:
                self._raw[rank] = collection.raw
                self._drop(rank)
                looks.append(look)
        return looks

    def raw(self, rank: int) -> RawEvidence:
        """The unparsed result of the last collection of a rank, and the end of its log; in bounded
        sizes, safe to show.

        Waits for a log whose storage does not answer only once, for a second.
        """
        place = next(place for place in self._local.places if place.rank == rank)
        path = self._local.run.log(place.host, rank)
        self._reading.do(lambda: self._logs.update({rank: end_of_log(path)}))
        if not self._reading.finish(self._log_s):
            self._log_s = 0.0
        return replace(self._raw.get(rank, RawEvidence()), log=self._logs.get(rank, "")).bounded()

    def forget(self) -> None:
        """Forgets what was collected: the ranks move again."""
        self._raw.clear()

    def links(self) -> list[str]:
        """Connections of the ranks with unacknowledged data.

        Reads a line for every connection of the machine.
        """
        now = time.monotonic()
        if self._links_at is None or now - self._links_at >= _LINKS_EVERY_S:
            self._links_at = now
            pids = [pid for place in self._local.places if (pid := self._local.pid(place.rank)) is not None]
            self._links = [str(link) for link in retransmitting_connections(pids)]
        return self._links

    def _drop(self, rank: int) -> None:
        self._collections.pop(rank).close()

    def _view(self, place: RankPlace, *, now: float, passed: float) -> RankView:
        seen = self._seen.setdefault(place.rank, _Seen())
        memory = self._local.beats.get(place.rank)
        self._note(seen, memory.read() if memory is not None else None, passed=passed)
        pid = self._local.pid(place.rank)
        if pid is not None and seen.idle_s > _IDLE_S and _may_last(seen.beat) and _handles_files(seen, pid):
            seen.idle_s = 0.0
        if pid is None:
            seen.process = ProcessView(cpu_s=seen.process.cpu_s)
        elif seen.idle_s > _IDLE_S or seen.process_at is None or now - seen.process_at >= _MOVING_EVERY_S:
            seen.process = self._process(pid, place, is_idle=seen.idle_s > _IDLE_S)
            seen.process_at = now
        last = self._local.final_message(place.rank)
        kind = last["kind"] if last is not None else ""
        # A rank that has refused or crashed is the cause itself and about to exit, which takes long
        # if storage hangs.
        return RankView(
            rank=place.rank,
            node_rank=self._node_rank,
            beat=seen.beat,
            idle_s=seen.idle_s,
            pulse_idle_s=seen.pulse_idle_s,
            process=seen.process,
            has_ended=pid is None or seen.process.state in _GONE_STATES or kind in ("refused", "crashed"),
            reported_result=kind == "result",
        )

    @staticmethod
    def _note(seen: _Seen, beat: Beat | None, *, passed: float) -> None:
        before = seen.beat
        if beat is None and before is not None:
            beats = pulses = True  # written so fast that no two reads agreed
        else:
            beats = beat is not None and (before is None or beat.version != before.version)
            pulses = beat is not None and beat.pulse_ns != (before.pulse_ns if before is not None else 0)
        seen.idle_s = 0.0 if beats else seen.idle_s + passed
        seen.pulse_idle_s = 0.0 if pulses else seen.pulse_idle_s + passed
        seen.beat = beat or before

    def _process(self, pid: int, place: RankPlace, *, is_idle: bool) -> ProcessView:
        stat = read_stat(pid)
        if stat is None:
            return ProcessView()
        if not is_idle:
            return ProcessView(state=stat.state, cpu_s=stat.cpu_s)
        uuid = place.device.uuid
        return ProcessView(
            state=stat.state,
            waits_in=wait_channel(pid),
            cpu_s=stat.cpu_s,
            children=child_states(pid),
            gpu_percent=self._use.percent(uuid) if uuid else None,
            reads_input=reads_input(pid),
        )


def _may_last(beat: Beat | None) -> bool:
    """Whether the duration of the rank's phase depends on the size of files: it loads, resumes,
    saves, or writes the result.
    """
    if beat is None:
        return False
    phase = PHASES[phase_named(beat.phase)]
    return not phase.in_step and not phase.waits


def _handles_files(seen: _Seen, pid: int) -> bool:
    """Whether a rank has read or written much since the last call, or waits for the disk, e.g. in a
    sync.
    """
    now, look = io_bytes(pid), read_thread(pid, pid)
    moves = look.moves if look is not None and look.is_uninterruptible else None
    much = now - seen.read_and_written >= _LARGE_IO_BYTES
    disk = moves is not None and seen.moves is not None and moves != seen.moves
    if much or not seen.read_and_written:
        seen.read_and_written = now
    seen.moves = moves
    return much or disk


_EVERY_S = 0.5
_LINKS_FOR_S = 15.0  # while the head suspects something, it repeats its request


class MonitorReports:
    """Reports of a node other than the head's about its ranks. Nothing here waits."""

    def __init__(self, local: NodeRanks, node_rank: int, send: Callable[[NodeNews], None]) -> None:
        """Starts without reports."""
        self._local = local
        self._send = send
        self._monitor = RankMonitor(local, node_rank)
        self._next = 0.0
        self._links_until = 0.0

    def look(self, request: CollectStacks) -> None:
        """Starts a collection that the head requested; skips ranks of other nodes."""
        self._links_until = time.monotonic() + _LINKS_FOR_S
        self._monitor.look(request.ranks)

    def send(self) -> None:
        """Sends what is due; may be called at any rate.

        Sends nothing once all ranks have ended: the head may have begun the next start.
        """
        if self._local.all_ended:
            return
        now = time.monotonic()
        if now >= self._next:
            self.send_views()
        for look in self._monitor.looks():
            self._send(StacksCollected((look,), {look.rank: self._monitor.raw(look.rank)}))

    def send_views(self) -> None:
        """Sends all views at once.

        For a rank that has ended they hold the last sign of life, and precede the message of its
        end.
        """
        now = time.monotonic()
        self._next = now + _EVERY_S
        links = self._monitor.links() if now < self._links_until else []
        self._send(RankViews(tuple(self._monitor.views(now)), tuple(links)))

    def close(self) -> None:
        """Ends running collections."""
        self._monitor.close()


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
        idle_limit_s: float | None = None,
        mark: Callable[[Sequence[int], str, str], None] = lambda _ranks, _text, _cause: None,
    ) -> None:
        """Sees nothing yet.

        Args:
            plan: with all ranks.
            monitor: of this node's ranks.
            server: the other nodes; None for one node.
            show: gets notes and warnings.
            clock: monotonic seconds.
            stall_after: of the config.
            idle_limit_s: after which a foreign program whose ranks are all idle is ended; None:
                never.
            mark: gets the ranks of the present suspicion, its text and its cause, for the board;
                both are empty when the ranks move again.
        """
        all_entries()  # read the catalogue now: its storage may be what hangs later
        self._mark = mark
        self._clock = clock
        self._plan = plan
        self._monitor = monitor
        self._server = server
        self._show = show
        self._patience = Patience.of(stall_after, idle_limit_s=idle_limit_s)
        self._pace = Pace()
        self._places = {place.rank: place for place in plan.ranks}
        self._views: dict[int, RankView] = {}
        self._links: dict[int, tuple[str, ...]] = {}
        self._looks: dict[int, Look] = {}
        self._raw: dict[int, RawEvidence] = {}
        self._requested_at: dict[int, float] = {}
        self._episode: Episode | None = None
        self._warned: dict[
            tuple[str, tuple[int, ...]], float
        ] = {}  # seconds until the warning, by cause and ranks
        self._reported_silent: set[int] = set()
        self._next = 0.0
        self._found: Verdict | None = None
        self.run_view = RunView(self._places, {}, total_steps=plan.total_steps)

    def on_message(self, node_rank: int, message: RankViews | StacksCollected) -> None:
        """Takes a node's report on its ranks.

        Raises:
            ValueError: if it is about ranks of a different node.
        """
        node_ranks = {place.rank for place in self._plan.on_node(node_rank)}
        reported: Sequence[RankView | Look] = (
            message.views if isinstance(message, RankViews) else message.looks
        )
        if not node_ranks.issuperset(one.rank for one in reported):
            raise ValueError("reports ranks that are not its own")
        if isinstance(message, RankViews):
            self._views |= {view.rank: view for view in message.views}
            self._links[node_rank] = message.links[:_MOST_LINKS]
        elif self._episode is not None:  # else the ranks move again, and the request is obsolete
            self._add(message.looks)
            self._raw |= {
                rank: message.raw[rank]
                for rank in node_ranks & message.raw.keys()
                if len(self._raw) < _MOST_RAW or rank in self._raw
            }

    def raw(self) -> dict[int, RawEvidence]:
        """Evidence for a verdict, by rank: of all ranks of this node, and of ranks collected on
        other nodes.
        """
        return {**self._raw, **{place.rank: self._monitor.raw(place.rank) for place in self._plan.on_node(0)}}

    def look(self) -> Verdict | None:
        """The current verdict, which ends the ranks; None without one.

        May be called at any rate: it looks five times a second, half as often while all ranks move,
        and repeats its last result in between.
        """
        now = self._clock()
        if now < self._next:
            return self._found
        self._next = now + _JUDGE_EVERY_S
        self._take(now)
        result = judge(self.run_view, self._patience)
        if isinstance(result, Verdict):
            self._found = self._with_first_detection(result)
            return self._found
        self._found = None
        self._note_recovery(now)
        if result is not None:
            self._suspect(result, now)
        self._pace.note(self._views, now)
        slow = self._pace.straggler(self.run_view)
        if slow is not None:
            self._warn(slow)
        if self._episode is None and not any(view.idle_s for view in self._views.values()):
            self._next = now + _QUIET_EVERY_S
        return None

    def see(self) -> None:
        """Updates the picture once more before the ranks are ended, with the last signs of life of
        those that have failed.
        """
        self._take(self._clock())

    def _take(self, now: float) -> None:
        """Updates the picture.

        Nothing is known of a silent node, and no rank on it is blamed for that.
        """
        self._views |= {view.rank: view for view in self._monitor.views(now)}
        looks = self._monitor.looks()
        if self._episode is not None:
            self._add(looks)
        silences = self._server.silences() if self._server is not None else {}
        self._report_silences(silences)
        if self._episode is not None:
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

    def _add(self, looks: Iterable[Look]) -> None:
        self._looks |= {look.rank: look.after(self._looks.get(look.rank)) for look in looks}

    def _suspect(self, suspicion: Suspicion, now: float) -> None:
        again_s = _REQUEST_QUIETLY_S if suspicion.is_quiet else _REQUEST_AGAIN_S
        self._request_stacks(
            [
                rank
                for rank in suspicion.to_inspect
                if now - self._requested_at.get(rank, -again_s) >= again_s
            ],
            now,
        )
        if self._episode is None:
            self._episode = Episode(suspicion)
        if not suspicion.is_quiet and not self._episode.is_announced:
            self._episode.is_announced = True
            self._notify(f"investigating: {suspicion.verdict.summary}")
            self._mark(
                suspicion.verdict.ranks or suspicion.to_inspect,
                f"investigating: {suspicion.verdict.summary}",
                suspicion.verdict.cause,
            )
        self._episode.take(suspicion)
        who = (suspicion.verdict.cause, suspicion.verdict.ranks)
        if suspicion.is_named and (who not in self._warned or self._episode.is_due):
            self._episode.reported_s = suspicion.since_s
            self._warned.setdefault(who, suspicion.since_s)
            self._warn(suspicion.verdict, ends_in_s=suspicion.ends_in_s)
            self._mark(
                suspicion.verdict.ranks,
                with_deadline(suspicion.verdict.summary, suspicion.ends_in_s),
                suspicion.verdict.cause,
            )

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
                self._server.send(node_rank, encode(CollectStacks(tuple(of_node))))

    def _note_recovery(self, now: float) -> None:
        """Ends the episode if one of its ranks makes progress, which is reported, or has ended,
        which has its own message.
        """
        episode = self._episode
        if episode is None:
            return
        has_moved, has_ended = episode.has_moved(self._views, now), episode.has_ended(self._views)
        if not has_moved and not has_ended:
            return
        self._mark(episode.ranks, "", "")
        if episode.reported_s is not None and not has_ended:
            suspicion = episode.suspicion
            self._notify(f"the ranks move again after {suspicion.since_s:.0f} s: {suspicion.verdict.summary}")
        self._episode = None
        for gathered in (self._looks, self._requested_at, self._raw, self._warned):
            gathered.clear()
        self._monitor.forget()

    def _with_first_detection(self, verdict: Verdict) -> Verdict:
        """The verdict with the time of its warning, which comes long before the run is ended."""
        since_s = self._warned.get((verdict.cause, verdict.ranks))
        return verdict if since_s is None else verdict.model_copy(update={"named_after_s": since_s})

    def _warn(self, verdict: Verdict, *, ends_in_s: float | None = None) -> None:
        """Warns of a cause while the run continues."""
        text = with_deadline(verdict.summary, ends_in_s)
        fix = verdict.fix[0] if verdict.fix else ""
        self._show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": verdict.cause,
                "text": text,
                "fix": fix,
                "verdict": verdict.to_json(),
            }
        )
        if self._server is not None:
            self._server.broadcast(encode(Note(text)))

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
        notify(self._show, text)
        if self._server is not None:
            self._server.broadcast(encode(Note(text)))


def with_deadline(summary: str, ends_in_s: float | None) -> str:
    """The text of a warning."""
    if ends_in_s is None:
        return summary
    return f"{summary}; the run is ended if nothing moves for {ends_in_s:.0f} s more"
