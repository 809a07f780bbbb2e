"""The ranks of a node that is not the head: started by the head's plan, reported to the head, ended
at the head's request, or when the head is lost.
"""

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.base.causes import Verdict, find_cause
from unisono.base.errors import Disagreed
from unisono.base.files import make_private_dir
from unisono.base.messages import Message, Show, VerdictMessage, message_of
from unisono.base.text import plain
from unisono.guard.control.connection import Left
from unisono.guard.control.file_transfer import FileSender, TransferOutcome
from unisono.guard.facts.storage import RunsDisk
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import Holder, RunLock
from unisono.guard.rundir.records import Progress, RunResult, outcome_of, set_verdict, write_result
from unisono.guard.supervise.decision import NodeLoss
from unisono.guard.supervise.interrupts import Interrupts, exit_code_of
from unisono.guard.supervise.local_ranks import LocalRanks, RankUpdate
from unisono.guard.supervise.lost_head import writing_for_head
from unisono.guard.supervise.node_messages import (
    Again,
    AllEnded,
    End,
    HeadRequest,
    JobEnded,
    RankEnded,
    RankReported,
    RankSaid,
    SnapshotsRequested,
    Stop,
)
from unisono.guard.supervise.postmortem import name_loss
from unisono.guard.supervise.rank_monitor import MonitorReports
from unisono.guard.supervise.rank_supervisor import carry_out_on_ranks, news_of
from unisono.guard.supervise.supervision import NodeSupervision
from unisono.guard.supervise.timeline import Timeline
from unisono.jobs.remote_checkpoint.rescue import MemorySender
from unisono.jobs.remote_checkpoint.transfers import ShardSender
from unisono.jobs.runs.run_records import Ending, read_progress, result_of
from unisono.trainer.plan import RunPlan

if TYPE_CHECKING:
    from unisono.guard.rendezvous.meeting_sides import MemberSide


_POLL_S = 0.2
_HEAD_ANSWERS_S = 3.0
_PASSED_ON = ("warning", "ready", "shard_written", "shard_moves", "asked", "digest")
"""The messages of a rank that are forwarded to the head, besides its report and its end."""


@dataclass(frozen=True)
class LostHead:
    """The connection to the head is over without a last word; this node has ended its ranks.

    Attributes:
        head: node 0's host.
        loss: what is known of the end of the connection.
        step: the last step that this node's ranks are known to have finished.
    """

    head: str
    loss: NodeLoss
    step: int
    plan: RunPlan

    @property
    def verdict(self) -> Verdict:
        """The verdict on the lost node; the head has the same words if it lives."""
        return name_loss(self.loss, head=self.head)


@dataclass
class Serving(NodeSupervision):
    """Runs this node's ranks for the head, until its last message.

    Attributes:
        local: the ranks; started and ended here.
        interrupts: signals that ask to stop; they are passed to the head.
        show: sees what is worth a line here.
        lock: of a directory of this node's own, held; None if the directory is the head's, which
            then sees the ranks' parts of checkpoints.
    """

    link: "MemberSide"
    local: LocalRanks
    interrupts: Interrupts
    show: Show
    plan: RunPlan
    disk: RunsDisk
    lock: RunLock | None = None
    reports: MonitorReports = field(init=False)
    _shards: ShardSender | None = field(default=None, init=False)
    _kept: MemorySender | None = field(default=None, init=False)
    _timeline: Timeline = field(init=False)
    _stop_forwarded: bool = field(default=False, init=False)
    _second_stop_at: float | None = field(default=None, init=False)
    _ended_reported: bool = field(default=False, init=False)

    def run(self) -> Again | JobEnded | LostHead:
        """Until the end; the ranks are gone then."""
        try:
            return self._serve()
        finally:
            if self.lock is not None and self.disk.write("run.lock", self.lock.is_held) is False:
                self.disk.is_lost = True  # nothing is written at the path from here on

    def _serve(self) -> Again | JobEnded | LostHead:
        self.reports = MonitorReports(self.local, self._node_rank, self.send)
        self._timeline = timeline = Timeline(
            self.local.run, self._node_rank, lambda: self.local.beats, is_sent=self.lock is not None
        )
        reports = contextlib.closing(self.reports)
        with self.local, timeline, reports, FileSender(self.link.link) as transfers:
            self._make_senders(transfers)
            self.interrupts.collect()
            while True:
                for update in self.local.poll(_POLL_S, also=[self.link.fileno(), transfers.fileno()]):
                    self._pass_on(update)
                for outcome in transfers.outcomes():
                    self._take_outcome(outcome)
                match self.receive_from_head():
                    case Left() as left:
                        loss = NodeLoss.at_node(left, node_rank=self._node_rank, host=self._host)
                        return self._lost(loss, "the head is gone")
                    case Again() | JobEnded() as word:
                        self.local.end("the run is over")
                        return word
                    case _:
                        pass
                self.reports.send()
                self._send_time()
                self._forward_stop()
                if self._head_is_late():
                    why = f"it did not answer a second signal within {_HEAD_ANSWERS_S:g} s"
                    loss = NodeLoss(self._node_rank, self._host, why, _HEAD_ANSWERS_S, lost_head=True)
                    return self._lost(loss, "a second signal")

    @property
    def _head(self) -> str:
        return self.plan.nodes[0].host

    @property
    def _node_rank(self) -> int:
        return self.local.places[0].node_rank

    @property
    def _host(self) -> str:
        return self.local.places[0].host

    def _lost(self, loss: NodeLoss, why: str) -> LostHead:
        """Ends the ranks, after a look at how far they are."""
        step = max(self.local.from_step, *self.local.finished_steps())
        self.local.end(why)
        return LostHead(self._head, loss, step, self.plan)

    def _take_outcome(self, outcome: TransferOutcome) -> None:
        for sender in (self._shards, self._kept):
            if sender is not None:
                sender.transfer_ended(outcome)

    def _make_senders(self, transfers: FileSender) -> None:
        if self.lock is not None:
            self._shards = ShardSender(transfers, self._forward, self.disk.later)
        if self.local.shared_memory is not None:
            self._kept = MemorySender(transfers, self.local.shared_memory, self.send)

    def _pass_on(self, update: RankUpdate) -> None:
        match news_of(update):
            case RankEnded(end) as news:
                self.reports.send_views()
                if end.returncode == 0:  # the news of a failure does not wait for a disk
                    self._end_timeline()
                self.send(news)
            case RankReported() as news:
                self.send(news)
            case RankSaid(rank, message):
                if message["kind"] == "shard_written" and self._shards is not None:
                    self._shards.written(rank, message)
                elif message["kind"] in _PASSED_ON or "of_rank" in message:
                    self._forward(rank, message)
        self._report_ended()

    def _forward(self, rank: int, message: Message) -> None:
        """Passes a rank's message to the head."""
        self.send(RankSaid(rank, message))

    def carry_out(self, request: HeadRequest) -> None:
        """Carries out a request for the ranks."""
        match request:
            case Stop():
                number = signal.Signals[request.signal]
                self.interrupts.request_stop(number, where=f"node 0 ({self._head})")
                self._stop_forwarded = True
            case SnapshotsRequested() if self._kept is not None:
                self._kept.send_all()
            case _:
                pass
        carry_out_on_ranks(self.local, request)
        if isinstance(request, End):
            for update in self.local.poll(0):
                self._pass_on(update)  # the last of them reports, once, that all have ended
            self._report_ended()

    def _report_ended(self) -> None:
        """Once: a second message would reach the head during the next start of the ranks and count
        for those.
        """
        if self.local.all_ended and not self._ended_reported:
            self._ended_reported = True
            self._end_timeline()
            self.send(AllEnded())

    def _end_timeline(self) -> None:
        """Sends the last lines before the head counts this node as ended."""
        if self.local.all_ended:
            self._timeline.close()
            self._send_time()

    def _send_time(self) -> None:
        """Sends where the time of the ranks went to a head that does not see this node's file."""
        news = self._timeline.take_news()
        if news is not None:
            self.send(news)

    def _forward_stop(self) -> None:
        """A signal here stops the whole job: the head informs all nodes, and the ranks agree on the
        step.
        """
        first = self.interrupts.first
        if first is None:
            return
        if not self._stop_forwarded:
            self._stop_forwarded = True
            self.send(Stop(first.name))
        if self.interrupts.twice and self._second_stop_at is None:
            self._second_stop_at = time.monotonic()
            self.send(Stop(first.name, again=True))

    def _head_is_late(self) -> bool:
        """Whether a second signal was passed on without effect."""
        at = self._second_stop_at
        return at is not None and time.monotonic() - at > _HEAD_ANSWERS_S


@dataclass
class HeadlessEnd:
    """This node after it lost the connection to a head that sent no last message.

    Attributes:
        heads: the head, as its lock named it while it lived; None where its directory is not seen
            here.
        shared: whether the directory is the head's.
        show: receives the messages.
        began: when this front began, in monotonic seconds.
    """

    run: RunDir
    last: LostHead
    heads: Holder | None
    shared: bool
    show: Show
    disk: RunsDisk
    began: float

    def end(self, *, stop: signal.Signals | None) -> RunResult:
        """Reports the lost head, writes verdict and result where this node may, and returns the
        result.

        Args:
            stop: the signal that asked the job to stop. In that case a head that exits first is the
                normal end.
        """
        verdict = self.last.verdict
        known = find_cause(verdict.cause)
        progress = Progress(self.last.step)
        if self.shared:
            progress = self.disk.write("how far the run is", partial(read_progress, self.run)) or progress
        if stop is None:
            self.show(message_of(VerdictMessage, verdict.to_json()))
            ending = Ending(known.exit_code if known else 4, progress, verdict)
        else:
            text = f"{verdict.summary}; the run was stopped, and its checkpoints are in its output_dir"
            self.show({"kind": "note", "time": time.time(), "text": text})
            ending = Ending(exit_code_of(stop), progress)
        result = result_of(
            ending,
            run_id=self.last.plan.run_id,
            output_dir=str(self.run.root),
            restarts=[],
            seconds=time.monotonic() - self.began,
        )
        self.disk.write("how the run ended", partial(self._write, ending, result))
        return result if self.shared else _held_by(result, self.last.head)

    def _write(self, ending: Ending, result: RunResult) -> None:
        """The head writes its own files as long as it lives; after its death this node does."""
        verdicts = [ending.verdict] if ending.verdict is not None else []
        if not self.shared:
            _write_end(self.run, verdicts, result)
            return
        with writing_for_head(self.run.lock, self.heads, self.last.loss) as is_ours:
            if is_ours:
                _write_end(self.run, verdicts, result)


def _write_end(run: RunDir, verdicts: Sequence[Verdict], result: RunResult) -> None:
    for verdict in verdicts:
        set_verdict(run, verdict)
    write_result(run, result)


def _cited_from(verdict: Verdict, *, head: str) -> Verdict:
    """The verdict as it is kept on another disk than the head's: the files that it cites are there,
    and not here.
    """
    folder = RunDir(Path()).evidence.name + "/"
    evidence = [
        one.model_copy(update={"where": f"{one.where}, on node 0 ({plain(head)})"})
        if one.where.startswith(folder)
        else one
        for one in verdict.evidence
    ]
    return verdict.model_copy(update={"evidence": tuple(evidence)})


def keep_end(
    run: RunDir, ended: JobEnded, *, head: str, shared: bool, show: Show, disk: RunsDisk
) -> RunResult:
    """Keeps how the run ended, where the head's directory is not seen here.

    A verdict on the ranks has been shown already.
    """
    body = ended.result or {"outcome": outcome_of(ended.exit_code)}
    result = RunResult.from_json({**body, "exit_code": ended.exit_code})
    verdicts = [_cited_from(verdict, head=head) for verdict in ended.verdicts]
    if ended.problems:
        show({"kind": "refused", "time": time.time(), "problems": list(ended.problems)})
    if not shared:
        disk.write("how the run ended", partial(_write_end, run, verdicts, result))
    return result if shared else _held_by(result, head)


def _held_by(result: RunResult, head: str) -> RunResult:
    """The result of a run whose directory is not seen here."""
    return result.model_copy(update={"held_by": f"node 0 ({plain(head)})"})


def keep_refusal(run: RunDir, error: Disagreed) -> None:
    """Copies of verdict.json and result.json for a node that does not see the head's; a run of this
    node's own stays as it is.
    """
    if error.verdict is None or run.plan.exists():
        return
    with contextlib.suppress(OSError):  # a disk that is full or read-only may be what the verdict is about
        make_private_dir(run.root)
        set_verdict(run, error.verdict)
        verdict = error.verdict.to_json()
        write_result(
            run,
            RunResult(
                outcome="disagreed", exit_code=error.exit_code, output_dir=str(run.root), verdict=verdict
            ),
        )
