"""Supervises a guarded program on the head, from the news of all nodes: disagreements, failures,
stalls, its end.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.base.causes import Verdict
from unisono.base.messages import (
    Message,
    NoteMessage,
    Show,
    VerdictMessage,
    WarningMessage,
    fields_of,
    message_of,
)
from unisono.base.text import one_line
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import NodeReport
from unisono.guard.control.channel_ends import HeadServer
from unisono.guard.integrations.border import LAUNCHER
from unisono.guard.places.ranks import DeviceChoice, NodePlace, RankPlace
from unisono.guard.programs.launcher_facts import LauncherFacts
from unisono.guard.programs.local_program import JOB_STOP_SIGNALS, LocalProgram
from unisono.guard.programs.program_end import (
    ProgramEnd,
    StopDeadline,
    for_program,
    is_failure,
    may_be_port_taken,
)
from unisono.guard.programs.program_ranks import UNKNOWN_END
from unisono.guard.supervise.decision import Failures, ended_well
from unisono.guard.supervise.evidence import RawEvidence
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.node_messages import (
    End,
    FactsReported,
    HeadRequest,
    LauncherUnwatched,
    NodeNews,
    ProgramEnded,
    RankEnded,
    RankSaid,
    RanksRegistered,
    SignalReceived,
    Stop,
    TimelineLines,
    VerdictReached,
)
from unisono.guard.supervise.postmortem import name_death, name_failure
from unisono.guard.supervise.rank_monitor import RankMonitor, StallMonitor
from unisono.guard.supervise.supervision import HeadSupervision
from unisono.guard.watch.views import Look


@dataclass(frozen=True)
class ProgramJob:
    """The job as far as it is known; ranks that have not registered have a placeholder."""

    nodes: Sequence[NodePlace]
    ranks: Sequence[RankPlace]
    total_steps: int = 0
    own_code: None = None

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def on_node(self, node_rank: int) -> Sequence[RankPlace]:
        """The ranks of one node."""
        return [place for place in self.ranks if place.node_rank == node_rank]


_POLL_S = 0.1
_PROGRAM_ENDS_S = 8.0  # for the program to report and handle the loss of a rank by itself
_OTHER_NODES_S = 10.0  # for the program on other nodes, after it failed on one
_ENDING_S = 30.0
_LEFT_EARLY_S = 3.0
_RESTART_S = 120.0  # for a launcher to restart its ranks; torchrun alone gives the old ones 30 s
# A rank registers after it has loaded torch, which is slow over a network file system.
_UNSEEN_S = 60.0
_UNKNOWN_DEVICE = DeviceChoice(kind="cpu", name="unknown", memory_bytes=0, bfloat16=False)
NO_RANK_SEEN = f"no rank has registered within {_UNSEEN_S:.0f} s: until one does, only deaths are detected"


@dataclass
class ProgramSupervisor(HeadSupervision):
    """The head of a guarded program, from its start on every node to its end.

    Attributes:
        reports: of all nodes; empty for one node.
        server: connections of the other nodes; None for one node.
        show: gets notes, warnings and the verdict.
        uneven: whether nodes may have unequal numbers of ranks.
        restarts: how often the program's launcher restarts its ranks by itself.
        store_host: the address of node 0.
        join_timeout_s: how long launchers wait for each other.
        idle_limit_s: after which the program is ended if none of its ranks does anything; None:
            never.
        only_launchers: whether supervision ends with the comparison of the launchers.
        verdict: None as long as there is none.
        programs: return codes of the program, by node.
        failure: the first bad end of the program on a node; None: there is none.
        framework: that the program trains with, known after its first step; empty: unknown.
        stop_signal: the first signal that a front got.
        agreements: results of all comparisons.
        raw: unparsed evidence of the ranks, once there is a verdict.
        looks: parsed evidence of the ranks, once there is a verdict.
        last_death: the verdict on a rank after whose end the launcher may restart the ranks.
        stopping: the deadline for the program's end after a signal.
        may_try_again: whether a program that finds its port taken may be started again with a
            different one; its verdict is not shown then.
        each_poll: called a few times a second while the program runs.
    """

    local: LocalProgram
    nodes: Sequence[NodePlace]
    reports: Sequence[NodeReport]
    server: HeadServer | None
    show: Show
    uneven: bool = False
    restarts: int = 0
    store_host: str = ""
    join_timeout_s: float = 300.0
    idle_limit_s: float | None = None
    only_launchers: bool = False
    verdict: Verdict | None = None
    programs: dict[int, int] = field(default_factory=dict)
    failure: ProgramEnd | None = None
    framework: str = ""
    stop_signal: signal.Signals | None = None
    agreements: Agreement = field(default_factory=Agreement)
    raw: dict[int, RawEvidence] = field(default_factory=dict)
    looks: dict[int, Look] = field(default_factory=dict)
    last_death: Verdict | None = None
    stopping: StopDeadline = field(default_factory=StopDeadline)
    may_try_again: bool = False
    each_poll: Callable[[], object] = lambda: None
    _places: dict[int, RankPlace] = field(default_factory=dict)
    _world: int = 0
    _is_seen: bool = False
    _early_since: float | None = None
    _launchers_agree: bool = False
    _attempt: int = 0
    failures: Failures = field(default_factory=Failures)
    stall_monitor: StallMonitor | None = None
    _monitor: RankMonitor | None = None
    _facts: LauncherFacts = field(init=False)
    _end_by: float | None = None
    _failed_at: float | None = None
    _ended_all: bool = False
    _began: float = field(default_factory=time.monotonic)
    _shown_once: set[str] = field(default_factory=set)
    _shown: Verdict | None = None

    def __post_init__(self) -> None:
        self._facts = LauncherFacts(self.nodes, self.reports, self.uneven, self.store_host)

    def run(self) -> None:
        """Runs until the program has ended on every connected node."""
        try:
            while not self._is_over():
                self._receive(_POLL_S)
                self._look()
                self.each_poll()
                self._decide(time.monotonic())
            self._decide_at_the_end()
        finally:
            if self._monitor is not None:
                self._monitor.close()

    def _is_over(self) -> bool:
        if self.only_launchers and (self._launchers_agree or self.verdict is not None):
            return True
        connected = {node.node_rank for node in self.nodes} - set(self.failures.lost)
        if connected <= set(self.programs):
            return True
        return self._end_by is not None and time.monotonic() > self._end_by + _ENDING_S

    # --- news of the nodes

    def _receive(self, timeout_s: float) -> None:
        also = [self.server.fileno()] if self.server is not None else []
        for message in self.local.new_messages(timeout_s, also=also):
            self.take(0, message)
        self.receive_from_nodes()

    def needs(self, node_rank: int) -> bool:
        """Whether the program has not ended there."""
        return node_rank not in self.programs

    def take_news(self, node_rank: int, news: NodeNews) -> None:
        """Takes news of the program and its ranks."""
        match news:
            case RanksRegistered():
                self._take_ranks(node_rank, news)
            case RankSaid():
                self._take_rank_message(news.rank, news.message)
            case RankEnded() if news.attempt == self._attempt:
                self._take_end(news.end)
            case LauncherUnwatched():
                self._warn("unguarded", one_line(news.text, limit=1_000))
            case FactsReported():
                self._take_facts(node_rank, news)
            case ProgramEnded():
                self._take_program(node_rank, news)
            case SignalReceived():
                self._take_signal(node_rank, signal.Signals[news.signal])
            case _:
                pass

    def take_refusal(self, node_rank: int, verdict: Verdict) -> None:
        """The node could not start the program."""
        if self.verdict is None:
            self._name(verdict, end_in_s=0.0)

    def keep_time(self, node_rank: int, news: TimelineLines, ranks: set[int]) -> None:
        """Writes it to the run's timeline, if there is one."""
        self.local.keep_time(node_rank, news, ranks)

    def carry_out(self, request: HeadRequest) -> None:
        """Carries out a request for the program."""
        self.local.handle(request)

    def _take_ranks(self, node_rank: int, news: RanksRegistered) -> None:
        if news.attempt < self._attempt:
            return
        if news.attempt > self._attempt:
            self._restart_ranks(news.attempt)
        # A launcher that the program starts by itself has its own number.
        self.restarts = max(self.restarts, news.restarts)
        self._world = max(self._world, min(news.world_size, 1 << 16))
        for place in news.places:
            if place.node_rank == node_rank and 0 <= place.rank < self._world:
                self._places[place.rank] = place
        self._is_seen = self._is_seen or len(news.unseen) < len(news.places)
        if len(self._places) == self._world and self.stall_monitor is None:
            self._monitor = self._monitor or RankMonitor(self.local.ranks, 0)
            self.stall_monitor = StallMonitor(
                self.job,
                self._monitor,
                self.server,
                self.show,
                idle_limit_s=self.idle_limit_s,
                mark=self.local.mark_time,
            )

    def _restart_ranks(self, attempt: int) -> None:
        """Forgets the previous ranks, after the launcher has restarted them or the program has
        started its next launcher.
        """
        if self._attempt or self._places:
            self.notify(f"the program has restarted its ranks (start {attempt + 1})")
        self._attempt = attempt
        self._places.clear()
        self.failures.restart()
        self._world, self.stall_monitor, self._end_by, self.verdict = 0, None, None, None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _take_rank_message(self, rank: int, message: Message) -> None:
        if message["kind"] == "framework":
            self.framework = one_line(str(message.get("name", "")), limit=100)
        elif message["kind"] in ("note", "warning", "unguarded"):
            text = f"rank {rank}: {one_line(str(message.get('text', '')), limit=1_000)}"
            more = {"time": message.get("time") or time.time(), "text": text}
            fields = {"code": "unguarded", "fix": "", **fields_of(message), **more}
            is_note = message["kind"] == "note"
            self.show(message_of(NoteMessage, fields) if is_note else message_of(WarningMessage, fields))
        elif (
            message["kind"] == "refused" and isinstance(message.get("verdict"), dict) and self.verdict is None
        ):
            # A callback has compared the ranks by itself: all of them have this verdict, and end
            # with it.
            self._name(Verdict.from_json(message["verdict"] or {}), end_in_s=_PROGRAM_ENDS_S)

    def _take_end(self, end: RankEnd) -> None:
        if end.end_reason == UNKNOWN_END:  # neither a success nor a failure
            return
        if not self._ended_all:  # else we ended it
            self.failures.rank_ended(end, now=time.monotonic())

    def _take_program(self, node_rank: int, news: ProgramEnded) -> None:
        self.programs[node_rank] = news.returncode
        if is_failure(news.returncode) and self.failure is None:
            self.failure = ProgramEnd(
                node_rank,
                self.nodes[node_rank].host,
                news.returncode,
                news.oom_killed,
                subreaper_lost=news.subreaper_lost,
            )
            self._failed_at = time.monotonic()

    def _take_signal(self, node_rank: int, number: signal.Signals) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            return
        self.stop_signal = self.stop_signal or number
        text = self.stopping.take(number, node_rank, time.monotonic()) if not self.only_launchers else None
        if text is not None:
            self.notify(text)
        if number in JOB_STOP_SIGNALS:
            for node in self.nodes:
                if node.node_rank != node_rank:
                    self.request_from(node.node_rank, Stop(number.name))

    # --- comparisons

    def _take_facts(self, node_rank: int, news: FactsReported) -> None:
        # A launcher that the program starts has its own --max-restarts.
        restarts = news.reported.details.get("max_restarts")
        if news.reported.name == LAUNCHER and isinstance(restarts, int):
            self.restarts = max(self.restarts, restarts)
        compared = self._facts.take(node_rank, news, now=time.monotonic())
        if compared is None:
            return
        agreement = compared.agreement
        self.agreements = self.agreements.merged(agreement)
        for node, answer in compared.answers:
            self.request_from(node, answer)
        self._launchers_agree = self._launchers_agree or (compared.name == LAUNCHER and agreement.agreed)
        if agreement.fatal:
            after_s = round(time.monotonic() - compared.complete_at, 3)
            self._name(agreement.fatal[0].model_copy(update={"named_after_s": after_s}), end_in_s=0.5)

    def _report_missing(self, now: float) -> None:
        for waiting in self._facts.waiting(self._places, now=now):
            if waiting.is_due:
                self.notify(waiting.line)
            if waiting.name == LAUNCHER and waiting.since_s > self.join_timeout_s and self.verdict is None:
                self._name(waiting.verdict, end_in_s=0.0)

    # --- verdicts

    @property
    def job(self) -> ProgramJob:
        """The job as far as it is known."""
        host = self.nodes[0].host
        ranks = [
            self._places.get(rank)
            or RankPlace(rank=rank, node_rank=0, local_rank=0, host=host, device=_UNKNOWN_DEVICE)
            for rank in range(self._world)
        ]
        return ProgramJob(self.nodes, ranks)

    @property
    def _is_undecided(self) -> bool:
        """Whether there is neither a verdict nor a signal that explains the end."""
        return self.verdict is None and self.stop_signal is None

    def _look(self) -> None:
        now = time.monotonic()
        self._report_missing(now)
        if not self._is_seen and self.verdict is None and now - self._began > _UNSEEN_S and not self._facts:
            self._notify_once(NO_RANK_SEEN)
        # A program that has been asked to stop is not judged: it ends, one rank after the other, or
        # is ended.
        if self.stall_monitor is None or self._ended_all or self.stop_signal is not None:
            return
        verdict = self._if_lasting(self.stall_monitor.look(), now)
        if verdict is not None and self._is_undecided and self.failures.first_at is None:
            self._gather()
            self._name(verdict, end_in_s=0.0)

    def _if_lasting(self, verdict: Verdict | None, now: float) -> Verdict | None:
        """The verdict, unless it is about ranks that left early and is new: ranks of a guarded
        program may exit one by one.
        """
        if verdict is None or not self._has_left(verdict):
            self._early_since = None
            return verdict
        self._early_since = self._early_since or now
        return verdict if now - self._early_since >= _LEFT_EARLY_S else None

    def _has_left(self, verdict: Verdict) -> bool:
        """Whether the verdict's ranks have left with a result, instead of waiting in a different
        collective.
        """
        views = self.stall_monitor.run_view.views if self.stall_monitor is not None else {}
        return verdict.cause == "unequal_steps" and any(
            rank in views and views[rank].reported_result for rank in verdict.ranks
        )

    def _gather(self) -> None:
        """Keeps the evidence for a verdict, as long as it exists."""
        if self.stall_monitor is not None:
            self.raw = self.stall_monitor.raw()
            self.looks = dict(self.stall_monitor.run_view.looks)

    def _decide(self, now: float) -> None:
        if self.failures.first_at is not None and self._is_undecided:
            verdict = self._first_failure(now)
            if verdict is not None:
                if self._may_restart(now):
                    self._warn_once(verdict)
                else:
                    self._gather()
                    self._name(verdict, end_in_s=_PROGRAM_ENDS_S)
        if self._failed_at is not None and now - self._failed_at > _OTHER_NODES_S:
            self._end_by = self._end_by or now
        if self.stopping.end_by is not None and now >= self.stopping.end_by and not self._ended_all:
            self.notify(self.stopping.late)
            self._end_by = now
        if self._end_by is not None and now >= self._end_by and not self._ended_all:
            self._ended_all = True
            self.request(End())

    def _decide_at_the_end(self) -> None:
        """Gives the verdict on a rank that left while others needed it, if the program ended before
        one was due: its output does not show that.
        """
        failures = self.failures
        if failures.first_at is None or failures.lost or not self._is_undecided:
            return
        culprit = failures.first_cause()
        if culprit is not None and ended_well(culprit) and culprit.rank < self._world:
            after_s = round(time.monotonic() - failures.first_at, 3)
            self._name(name_death(culprit, self.job, after_s=after_s), end_in_s=0.0)

    def _may_restart(self, now: float) -> bool:
        """Whether the program's launchers all run, and still have time to restart the ranks by
        themselves.
        """
        assert self.failures.first_at is not None
        return (
            self.restarts > 0
            and not self.failures.lost
            and self._failed_at is None
            and now - self.failures.first_at < _RESTART_S
        )

    def _first_failure(self, now: float) -> Verdict | None:
        """The verdict on the rank or node that failed first; None while more news may come, or if
        neither is known.
        """
        assert self.failures.first_at is not None
        if self.stall_monitor is not None:
            self.stall_monitor.see()
        decision = self.failures.decide(now=now)
        if decision is None:
            return None
        run_view = self.stall_monitor.run_view if self.stall_monitor is not None else None
        after_s = round(now - self.failures.first_at, 3)
        # Without a culprit, the program's output is read at the end, and may show more.
        return name_failure(decision, self.job, after_s=after_s, seen=run_view)

    def _name(self, verdict: Verdict, *, end_in_s: float) -> None:
        self.verdict = verdict = for_program(verdict, self.framework)
        if self.may_try_again and may_be_port_taken(verdict, self.framework):
            end_in_s = 0.0
        else:
            self._shown = verdict
            self.show(message_of(VerdictMessage, verdict.to_json()))
            self.broadcast(VerdictReached(verdict))
        self._end_by = min(self._end_by or float("inf"), time.monotonic() + end_in_s)

    def has_shown(self, verdict: Verdict) -> bool:
        """Whether a verdict was shown when it was made."""
        return self._shown is verdict

    def _warn_once(self, verdict: Verdict) -> None:
        """Warns of a failure after which the launcher may restart the ranks."""
        if verdict.summary in self._shown_once:
            return
        self._shown_once.add(verdict.summary)
        text = f"{verdict.summary}; its launcher may restart the ranks (--max-restarts)"
        self._warn(verdict.cause, text)
        self.last_death = verdict

    def _warn(self, code: str, text: str) -> None:
        self.show({"kind": "warning", "time": time.time(), "code": code, "text": text, "fix": ""})

    def _notify_once(self, text: str) -> None:
        if text not in self._shown_once:
            self._shown_once.add(text)
            self.notify(text)
