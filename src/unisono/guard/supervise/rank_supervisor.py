"""One start of the ranks on the head, from their first process to their end."""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unisono.base.causes import Verdict
from unisono.base.errors import UnisonoError
from unisono.base.messages import (
    FinalMessage,
    Message,
    NoteMessage,
    ShardMovesMessage,
    ShardWrittenMessage,
    Show,
    is_final,
    notify,
)
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import RankReport
from unisono.guard.control.connection import FileReceived
from unisono.guard.supervise.decision import Decider, Decision, NodeLoss
from unisono.guard.supervise.evidence import RawEvidence
from unisono.guard.supervise.interrupts import GracefulStop, Interrupts, NewestCheckpoint
from unisono.guard.supervise.local_ranks import LocalRanks, RankEnd, RankUpdate, TrainingJob
from unisono.guard.supervise.node_messages import (
    AllEnded,
    End,
    Go,
    HeadRequest,
    NodeNews,
    Note,
    RankEnded,
    RankReported,
    RankSaid,
    Stop,
    TimelineLines,
    encode,
)
from unisono.guard.supervise.rank_monitor import RankMonitor, StallMonitor
from unisono.guard.supervise.supervision import HeadSupervision
from unisono.guard.supervise.timeline import Timeline
from unisono.guard.watch.views import RunView

if TYPE_CHECKING:
    from unisono.guard.control.channel_ends import HeadServer


class RunObserver(Protocol):
    """Works beside the ranks during one start.

    Its methods must not block: long work belongs in a thread or a process.
    """

    def on_message(self, rank: int, message: Message) -> None:
        """Takes each message of a rank; rank 0 reports steps and checkpoints."""

    def look(self) -> UnisonoError | Verdict | None:
        """Called a few times a second.

        An error or a verdict ends the ranks, and the run ends with it.
        """

    def finish(self) -> None:
        """Called when the ranks have ended, or are about to be ended.

        Must return in bounded time.
        """


_POLL_S = 0.2
# Results are final before teardown, so a teardown that hangs is ended without loss.
_TEARDOWN_S = 20.0
_GONE_S = 10.0  # for the other nodes to report that their ranks have ended
_WAITING_EVERY_S = 10.0
_SHARD_KINDS = ("shard_written", "shard_moves", "shards_over", "moved")
_RANK_0_KINDS = ("phase", "step", "eval", "sample", "checkpoint", "ready", "note")


class ShardPort(Protocol):
    """Receives the checkpoint parts of other nodes' ranks (`remote_checkpoint.transfers`)."""

    def arrived(self, event: FileReceived, /) -> None:
        """Takes the news that a part has arrived or failed."""

    def moves(self) -> ShardMovesMessage | None:
        """A progress message for rank 0, from time to time while a part is being sent."""

    def moved(self, output_dir: Path, /) -> None:
        """Rank 0 writes into a different output_dir from here on."""

    def given_up(self, temporary: str, /) -> None:
        """Rank 0 no longer waits for parts of this checkpoint."""

    def confirmed(self, rank: int, message: ShardWrittenMessage, /) -> ShardWrittenMessage:
        """A rank's message that its part is written, for rank 0, with what has not arrived here."""
        ...


@dataclass
class Attempt:
    """State of one start of the ranks.

    Attributes:
        step: the last step that rank 0 finished.
        checkpoint: the newest checkpoint, or None.
        ready: whether rank 0 has loaded everything and trains; before that there is nothing new to
            save.
        last: rank 0's final message: `result`, `refused` or `crashed`; None if it ended without
            one.
        decision: why the ranks were ended, if they were.
        decided_at: the time of the decision, in monotonic seconds.
        stop_signal: the first signal to stop that a front got.
        seconds: duration of the start.
        ends: of the ranks, by rank.
        lost: nodes that are gone, or that did not report that their ranks are.
        run_view: of the ranks, as last seen.
        raw: unparsed evidence of the ranks, if something ended them.
        moved_to: where rank 0 writes since the run's directory was lost.
    """

    from_step: int
    step: int
    checkpoint: str | None
    saved_step: int = 0
    tokens: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    ready: bool = False
    last: FinalMessage | None = None
    decision: Decision | None = None
    decided_at: float | None = None
    stop_signal: signal.Signals | None = None
    seconds: float = 0.0
    evals: dict[str, object] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    lost: list[NodeLoss] = field(default_factory=list)
    run_view: RunView | None = None
    raw: dict[int, RawEvidence] = field(default_factory=dict)
    moved_to: Path | None = None

    def note(self, message: Message) -> None:
        """Takes a message of rank 0."""
        match message["kind"]:
            case "step":
                self.step = int(message["step"])
                self.tokens = int(message.get("tokens") or 0)
                self.loss = message.get("loss")
                self.tokens_per_second = message.get("tokens_per_second")
            case "ready":
                self.ready = True
            case "checkpoint":
                self.checkpoint, self.saved_step = str(message.get("path")), int(message["step"])
            case "eval":
                values = {k.removeprefix("eval_"): v for k, v in message.items() if k.startswith("eval_")}
                self.evals |= {name: value for name, value in values.items() if value is not None}
            case "result" | "refused" | "crashed":
                self.last = message
            case _:
                pass


def run_attempt(
    job: TrainingJob,
    *,
    local: LocalRanks,
    server: "HeadServer | None",
    interrupts: Interrupts,
    show: Show,
    on_agreement: Callable[[Mapping[int, RankReport], Agreement], None],
    observers: Sequence[RunObserver] = (),
    shards: "AbstractContextManager[ShardPort] | None" = None,
) -> Attempt:
    """Starts the ranks of this node, supervises those of all nodes, and waits for their end.

    Args:
        job: its plan is already in plan.json on every node.
        local: the ranks of this node; started and ended here.
        server: the connections of the other nodes, which start their ranks with the same plan; None
            for one node.
        interrupts: signals to stop.
        on_agreement: gets the ranks' reports and the result of their comparison, before the ranks
            continue.
        observers: get the ranks' messages, and may end the ranks.
        shards: receives the checkpoint parts of other nodes' ranks; None if every rank writes to
            this node's disk.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(local)  # may wait for imports, which a signal ends at once
        # before anything else: a single rank waits for nobody, and may soon have something to save
        interrupts.collect()
        timeline = stack.enter_context(Timeline(local.run, 0, lambda: local.beats))
        supervision = _RankSupervision(
            job, local, server, interrupts, show, on_agreement, observers, timeline
        )
        stack.callback(supervision.monitor.close)
        if shards is not None:
            supervision.shards = stack.enter_context(shards)
        try:
            supervision.run()
            supervision.attempt.run_view = supervision.stall_monitor.run_view
            if supervision.attempt.decision is not None:
                supervision.attempt.raw = supervision.stall_monitor.raw()
        finally:
            for observer in observers:
                observer.finish()
    attempt = supervision.attempt
    attempt.seconds = time.monotonic() - began
    attempt.ends = supervision.decider.ends
    attempt.lost = list(supervision.decider.failures.lost.values())
    return attempt


class _RankSupervision(HeadSupervision):
    def __init__(
        self,
        job: TrainingJob,
        local: LocalRanks,
        server: "HeadServer | None",
        interrupts: Interrupts,
        show: Show,
        on_agreement: Callable[[Mapping[int, RankReport], Agreement], None],
        observers: Sequence[RunObserver],
        timeline: Timeline,
    ) -> None:
        self._job = job
        self._timeline = timeline
        self._observers = observers
        self._on_agreement = on_agreement
        self.decider = Decider(job)
        self.failures = self.decider.failures
        step = job.from_step
        self.attempt = Attempt(step, step, job.from_checkpoint, saved_step=step)
        self.shards: ShardPort | None = None
        self._local = local
        self.server = server
        self.show = show
        self._interrupts = interrupts
        self.monitor = RankMonitor(local, 0)
        self.stall_monitor: StallMonitor = StallMonitor(
            job,
            self.monitor,
            server,
            show,
            stall_after=job.stall_after,
            mark=timeline.warn,
        )
        self._stopping = GracefulStop(interrupts, grace=job.grace, show=self._show_everywhere)
        self._away = {node.node_rank for node in job.nodes if node.node_rank != 0}
        self._final_since: float | None = None
        self._missing_reported_at = time.monotonic()

    @property
    def job(self) -> TrainingJob:
        """With its ranks, which all nodes know."""
        return self._job

    def run(self) -> None:
        """Runs until all ranks have ended, well or by a decision."""
        while not self._is_over():
            self._receive(_POLL_S)
            self.attempt.stop_signal = self._interrupts.first
            if self._local_result() and time.monotonic() - self._since_result() > _TEARDOWN_S:
                self._end_all("teardown took too long")
                return
            self._report_arrivals()
            self._poll_observers()
            decision = self.decider.decide(now=time.monotonic())
            if decision is not None and not self.decider.has_result:
                self.attempt.decision, self.attempt.decided_at = decision, time.monotonic()
                self.stall_monitor.see()
                self._end_all("another rank ended the run" if self.job.world_size > 1 else "")
                return
            self._pass_on_stop()
            self._report_missing_ranks()

    def _is_over(self) -> bool:
        ended = len(self.decider.ends) == self.job.world_size
        return self.decider.is_over or (ended and self.decider.has_result)

    def _local_result(self) -> bool:
        return self.attempt.last is not None and self.attempt.last["kind"] == "result"

    def _since_result(self) -> float:
        if self._final_since is None:
            self._final_since = time.monotonic()
        return self._final_since

    def _receive(self, timeout_s: float) -> None:
        """Takes the news of ranks and nodes, after waiting for the first."""
        server = self.server
        for update in self._local.poll(timeout_s, also=[server.fileno()] if server else []):
            self.take(0, news_of(update))
        self.receive_from_nodes()

    def _take_message(self, rank: int, message: Message) -> None:
        for observer in self._observers:
            observer.on_message(rank, message)
        if message["kind"] == "digest":
            return
        if message["kind"] in _SHARD_KINDS:
            self._take_shard_message(rank, message)
            return
        # It is a signal to the rank itself, or the echo of one that was passed on.
        if message["kind"] == "asked":
            self._interrupts.request_stop(
                signal.Signals[str(message["signal"])], where=self.job.ranks[rank].label
            )
            return
        if rank == 0:
            self.attempt.note(message)
        elif message["kind"] in _RANK_0_KINDS and "of_rank" not in message:
            return
        if not is_final(message):
            self.show(self._placed(rank, message))

    def _report_arrivals(self) -> None:
        if self.shards is not None and (moves := self.shards.moves()) is not None:
            self._local.send(moves, rank=0)

    def _placed(self, rank: int, message: Message) -> Message:
        """The message with its rank. Rank 0 speaks for all, except about its own storage."""
        if rank == 0 and (message.get("code") != "storage_blocked" or self.job.world_size == 1):
            return message
        placed = message.copy()
        placed["rank"] = rank
        if len(self.job.nodes) > 1:
            placed["place"] = self.job.ranks[rank].label
        return placed

    def _take_shard_message(self, rank: int, message: Message) -> None:
        """Takes a message about a checkpoint that the ranks write together: for rank 0, or for the
        head when rank 0 is done with it.
        """
        if message["kind"] == "moved":
            self.attempt.moved_to = Path(message["path"])
            if self.shards is not None:
                self.shards.moved(self.attempt.moved_to)
        elif message["kind"] == "shards_over":
            if rank == 0 and self.shards is not None:
                self.shards.given_up(str(message.get("temporary")))
        elif message["kind"] == "shard_written" and self.shards is not None:
            self._local.send(self.shards.confirmed(rank, message), rank=0)
        else:
            self._local.send({**message, "rank": rank}, rank=0)

    def _poll_observers(self) -> None:
        """Takes verdicts and errors of the stall monitor and the companions."""
        verdict = self.stall_monitor.look()
        if verdict is not None:
            self.decider.judged(verdict)
        for observer in self._observers:
            result = observer.look()
            if isinstance(result, Verdict):
                self.decider.judged(result)
            elif result is not None:
                self.decider.refused_by_us(result)

    def _take_report(self, report: RankReport) -> None:
        store = self.decider.rank_reported(report)
        if self.decider.agreement is not None:
            self._on_agreement(self.decider.reports, self.decider.agreement)
        if store is None:
            return
        self.request(Go(store))
        notify(self.show, f"all {self.job.world_size} ranks agree")

    def needs(self, node_rank: int) -> bool:
        """Whether the node has not reported that its ranks have ended."""
        return node_rank in self._away

    def take_file(self, event: FileReceived) -> None:
        """Takes a part of a checkpoint."""
        if self.shards is not None:
            self.shards.arrived(event)

    def take_news(self, node_rank: int, news: NodeNews) -> None:
        """Takes news of a node's ranks; what it says of other ranks is ignored."""
        node_ranks = {place.rank for place in self.job.on_node(node_rank)}
        match news:
            case RankReported(report) if report.rank in node_ranks:
                self._take_report(report)
            case RankSaid(rank, message) if rank in node_ranks:
                self._take_message(rank, message)
            case RankEnded(end) if end.rank in node_ranks:
                self.failures.rank_ended(end, now=time.monotonic())
            case AllEnded():
                self._away.discard(node_rank)
            case Stop():
                node = self.job.node(node_rank)
                where = f"node {node_rank} ({node.host})"
                self._interrupts.request_stop(signal.Signals[news.signal], where=where, again=news.again)
            case _:
                pass

    def take_refusal(self, node_rank: int, verdict: Verdict) -> None:
        """The node has not started its ranks, so there is nothing to wait for."""
        self._away.discard(node_rank)
        self.decider.node_refused(verdict)

    def keep_time(self, node_rank: int, news: TimelineLines, ranks: set[int]) -> None:
        """Writes it to the run's timeline."""
        self._timeline.take(node_rank, news, ranks)

    def carry_out(self, request: HeadRequest) -> None:
        """Passes a request to the ranks of this node."""
        carry_out_on_ranks(self._local, request)

    def _end_all(self, why: str) -> None:
        """Ends all ranks that live, on all nodes, and waits until they have ended."""
        self.request(End(why))
        limit = time.monotonic() + _GONE_S
        failures = self.failures
        while time.monotonic() < limit and (self._away - set(failures.lost) or not self._local.all_ended):
            self._receive(0.05)
        for node_rank in sorted(self._away - set(failures.lost)):
            why = f"it did not report within {_GONE_S:g} s that its ranks have ended"
            loss = NodeLoss(node_rank, self.job.node(node_rank).host, why)
            failures.node_lost(loss, now=time.monotonic())

    def _pass_on_stop(self) -> None:
        attempt = self.attempt
        in_memory = self.job.keeps_steps
        newest = NewestCheckpoint(
            attempt.checkpoint, step=attempt.saved_step, reached=attempt.step, in_memory=in_memory
        )
        action = self._stopping.next_action(ready=attempt.ready, newest=newest, finished=self._local_result())
        if action == "signal":
            assert self._interrupts.first is not None
            number = signal.SIGINT if self._interrupts.first is signal.SIGINT else signal.SIGTERM
            self.request(Stop(number.name))
        elif action == "end":
            self._end_all("it did not stop within the grace period")

    def _report_missing_ranks(self) -> None:
        """Shows which ranks are missing, while others are ready."""
        missing = [place for place in self.job.ranks if place.rank not in self.decider.reports]
        now = time.monotonic()
        if not self.decider.reports or not missing or now - self._missing_reported_at < _WAITING_EVERY_S:
            return
        self._missing_reported_at = now
        ready_count = self.job.world_size - len(missing)
        notify(
            self.show,
            f"{ready_count} of {self.job.world_size} ranks are ready; waiting for {_names(missing)}",
        )

    def _show_everywhere(self, message: NoteMessage) -> None:
        """Shows a message here and on the other nodes."""
        self.show(message)
        self.broadcast(Note(message["text"]))


def news_of(update: RankUpdate) -> RankEnded | RankReported | RankSaid:
    """News of a rank that was started on this node."""
    if isinstance(update, RankEnd):
        return RankEnded(update)
    if update.message["kind"] == "rank_report":
        return RankReported(RankReport.model_validate(update.message["report"]))
    return RankSaid(update.rank, update.message)


def carry_out_on_ranks(local: LocalRanks, request: HeadRequest) -> None:
    """Carries out a request of the head for the ranks of this node."""
    match request:
        case Go():
            local.send(encode(request))
        case Stop():
            local.signal(signal.Signals[request.signal])
        case End(why):
            local.end(why)
        case _:
            pass


def _names(places: Sequence[Any]) -> str:
    shown = ", ".join(place.label for place in places[:4])
    return shown + (f" and {len(places) - 4} more" if len(places) > 4 else "")
