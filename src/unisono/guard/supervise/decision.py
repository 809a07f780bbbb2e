"""Who failed first, and whether the ranks are ended for it: one decision for `train` and for `run`.

No clock, no I/O.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from unisono.base.causes import Verdict
from unisono.base.errors import UnisonoError
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import RankReport
from unisono.guard.agree.training import compare_ranks
from unisono.guard.control.connection import Left
from unisono.guard.supervise.local_ranks import RankEnd, TrainingJob


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """A node that is no longer connected to the head.

    Attributes:
        why: one line for people.
        silent_s: seconds from the last sign of life to the end of the connection, where that is
            long; else 0.
        is_cut: whether the line, or either end of it, may be cut; see control.connection.Left.
        lost_head: whether the node stopped hearing the head, rather than the head the node.
    """

    node_rank: int
    host: str
    why: str
    silent_s: float = 0.0
    is_cut: bool = False
    lost_head: bool = False

    @classmethod
    def at_head(cls, left: Left) -> "NodeLoss":
        """The head's view of the end of a connection."""
        return cls(left.node_rank, left.host, left.why, left.silent_s, left.is_cut, lost_head=left.gave_up)

    @classmethod
    def at_node(cls, left: Left, *, node_rank: int, host: str) -> "NodeLoss":
        """That node's view of the end of its connection to the head."""
        return cls(node_rank, host, left.why, left.silent_s, left.is_cut, lost_head=not left.gave_up)


@dataclass(frozen=True)
class Decision:
    """Why the ranks are ended.

    Attributes:
        culprit: the rank whose end caused the others'; None if no rank is known to have failed by
            itself.
        loss: the node that was lost, if that is the cause.
        agreement: what the ranks disagree about, if that is the cause.
        error: what a companion found that the run cannot continue with.
        verdict: what was found while all ranks lived.
        after_s: seconds from the first news of the failure to the decision.
    """

    culprit: RankEnd | None = None
    loss: NodeLoss | None = None
    agreement: Agreement | None = None
    error: UnisonoError | None = None
    verdict: Verdict | None = None
    after_s: float = 0.0


def ended_well(end: RankEnd) -> bool:
    """Whether a rank handed over its result."""
    return end.last is not None and end.last["kind"] == "result"


def is_victim(end: RankEnd) -> bool:
    """Whether a rank ended only because a peer was gone: it reports that itself, or its front ended
    it.
    """
    if end.end_reason:
        return True
    return end.last is not None and end.last["kind"] == "crashed" and bool(end.last.get("peer_lost"))


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank whose end caused those of the others; None if all of them only lost a peer.

    Args:
        ends: in the order in which they became known.
    """
    bad = [end for end in ends if not ended_well(end)]
    causes = [end for end in bad if not is_victim(end)]
    if causes:
        return next((end for end in causes if _was_killed(end)), causes[0])
    # They left with a result while others still counted on them.
    early = [end for end in ends if ended_well(end)]
    return early[0] if early and bad else None


def _was_killed(end: RankEnd) -> bool:
    """Whether a signal ended it that no other rank causes.

    Torch sends SIGABRT to a rank whose peer is gone.
    """
    return end.returncode < 0 and end.returncode != -signal.SIGABRT


@dataclass(frozen=True)
class Waits:
    """How long more news may come before a failure is decided on, in seconds from the first news of
    it.

    Attributes:
        settle_s: with a culprit whose end another rank's may have caused: that news may be on its
            way.
        only_victims_s: while every known end is that of a rank that lost a peer: news of the peer
            arrive within this time, or never.
    """

    settle_s: float = 0.3
    only_victims_s: float = 2.0


WAITS: Final = Waits()


@dataclass
class Failures:
    """Ends of ranks and losses of nodes during one start of the ranks, and which of them came
    first.

    Attributes:
        waits: before a decision.
        world_size: if the end of every rank is sure to be reported; None: it is not, and the waits
            always run out.
        first_at: when the first failure became known; None: there is none.
    """

    waits: Waits = WAITS
    world_size: int | None = None
    ends: dict[int, RankEnd] = field(default_factory=dict)
    lost: dict[int, NodeLoss] = field(default_factory=dict)
    first_at: float | None = None
    _ended_at: dict[int, float] = field(default_factory=dict)
    _lost_at: dict[int, float] = field(default_factory=dict)
    _decision: Decision | None = None

    def rank_ended(self, end: RankEnd, *, now: float) -> None:
        """Takes the end of a rank. Only the first news of a rank counts."""
        if end.rank in self.ends:
            return
        self.ends[end.rank], self._ended_at[end.rank] = end, now
        if not ended_well(end):
            self._note_failure(now)

    def node_lost(self, loss: NodeLoss, *, now: float) -> None:
        """Takes the loss of a node, and of its ranks with it.

        Only the first news of a node counts.
        """
        if loss.node_rank in self.lost:
            return
        self.lost[loss.node_rank], self._lost_at[loss.node_rank] = loss, now
        self._note_failure(now)

    def restart(self) -> None:
        """Forgets the ranks, since others are started. A lost node stays lost."""
        self.ends.clear()
        self._ended_at.clear()
        self.first_at = self._decision = None

    def _note_failure(self, now: float) -> None:
        self.first_at = now if self.first_at is None else self.first_at

    def first_cause(self) -> RankEnd | None:
        """The rank whose end caused the others', as far as is known.

        Of the same moment the lowest rank comes first.
        """
        order = sorted(self.ends, key=lambda rank: (self._ended_at[rank], rank))
        return first_cause([self.ends[rank] for rank in order])

    def decide(self, *, now: float) -> Decision | None:
        """Which rank or node failed first; None without a failure, or while more news may come.

        If neither a rank nor a node is named, all known ends are those of victims. Once one is
        named, the decision stays.
        """
        if self._decision is None or (self._decision.culprit is None and self._decision.loss is None):
            self._decision = self._decide(now)
        return self._decision

    def _decide(self, now: float) -> Decision | None:
        if self.first_at is None:
            return None
        since_s = now - self.first_at
        if self.lost and all(ended_well(end) or is_victim(end) for end in self.ends.values()):
            first_lost = min(self.lost, key=lambda node: (self._lost_at[node], node))
            return Decision(loss=self.lost[first_lost], after_s=since_s)
        culprit = self.first_cause()
        return Decision(culprit=culprit, after_s=since_s) if since_s >= self._wait_s(culprit) else None

    def _wait_s(self, culprit: RankEnd | None) -> float:
        """How long after the first failure this culprit, or none, is decided on."""
        if len(self.ends) == self.world_size:
            return 0.0
        if culprit is None:
            return self.waits.only_victims_s
        return 0.0 if _was_killed(culprit) or self.world_size == 1 else self.waits.settle_s


@dataclass
class Decider:
    """The state of one start of the ranks of `train`, as the head knows it.

    Attributes:
        agreement: the result of comparing them, once all have reported.
        refusal: of a node that does not carry out the plan.
        verdict: of the stall monitor, or of a companion.
    """

    job: TrainingJob
    reports: dict[int, RankReport] = field(default_factory=dict)
    agreement: Agreement | None = None
    failures: Failures = field(init=False)
    refusal: Agreement | None = None
    error: UnisonoError | None = None
    verdict: Verdict | None = None
    _decision: Decision | None = None

    def __post_init__(self) -> None:
        self.failures = Failures(world_size=self.job.world_size)

    @property
    def ends(self) -> dict[int, RankEnd]:
        """The ends of ranks, by rank."""
        return self.failures.ends

    def rank_reported(self, report: RankReport) -> tuple[str, int] | None:
        """Takes a rank's report; gives the store's address once all have reported and agree."""
        self.reports[report.rank] = report
        if len(self.reports) < self.job.world_size or self.agreement is not None:
            return None
        ordered = [self.reports[rank] for rank in sorted(self.reports)]
        self.agreement = compare_ranks(ordered, world_size=self.job.world_size)
        port = self.reports[0].store_port if 0 in self.reports else None
        if not self.agreement.agreed or port is None:
            return None
        return self.job.store_host, port

    def node_refused(self, verdict: Verdict) -> None:
        """Takes the news that a node does not start its ranks on the plan."""
        self.refusal = Agreement.found("plan", verdict)

    def refused_by_us(self, error: UnisonoError) -> None:
        """Takes what the head itself found that the run cannot continue with.

        The first one counts.
        """
        self.error = self.error or error

    def judged(self, verdict: Verdict) -> None:
        """Takes a verdict on ranks that live. The first one counts."""
        self.verdict = self.verdict or verdict

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended well."""
        return len(self.ends) == self.job.world_size and all(ended_well(end) for end in self.ends.values())

    @property
    def has_result(self) -> bool:
        """Whether rank 0 has handed over the result: from then on nothing can be lost."""
        end = self.ends.get(0)
        return end is not None and ended_well(end)

    def decide(self, *, now: float) -> Decision | None:
        """Why all ranks are ended now; None while they may continue, or while more news may come.

        The first decision stays.
        """
        self._decision = self._decision or self._decide(now)
        return self._decision

    def _decide(self, now: float) -> Decision | None:
        for agreement in (self.refusal, self.agreement):
            if agreement is not None and not agreement.agreed:
                return Decision(agreement=agreement)
        if self.failures.first_at is None and self.error is not None:
            return Decision(error=self.error)
        if self.failures.first_at is None and self.verdict is not None:
            return Decision(verdict=self.verdict)
        return self.failures.decide(now=now)
