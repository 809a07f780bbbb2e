"""What the head makes of the news of all ranks: who may go, who ended first, when it is over. No clock, no I/O."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.agree.agreement import Agreement
from unisono.agree.reports import RankReport
from unisono.agree.training import compare_ranks
from unisono.causes import Verdict
from unisono.errors import UnisonoError
from unisono.plan import RunPlan
from unisono.supervise.local_ranks import RankEnd
from unisono.supervise.postmortem import NodeLoss, first_cause, is_victim

_SETTLE_S = 0.3  # a death elsewhere may be on its way, and be the cause of this one
_ONLY_VICTIMS_S = 2.0  # all say that they lost a peer: whoever it was will be heard of, or has no voice


@dataclass(frozen=True)
class Decision:
    """Why the ranks are ended.

    Attributes:
        culprit: the rank whose end came first in the order of causes; None if it is none of them.
        loss: the node that was lost, if that is the cause.
        agreement: what the ranks disagree about, if that is it.
        error: what a companion has found that the run cannot live with.
        verdict: what was found while all ranks lived.
        after_s: seconds from the first news of it to the decision.
    """

    culprit: RankEnd | None = None
    loss: NodeLoss | None = None
    agreement: Agreement | None = None
    error: UnisonoError | None = None
    verdict: Verdict | None = None
    after_s: float = 0.0


@dataclass
class Decider:
    """The state of one start of the ranks, as the head knows it.

    Attributes:
        plan: what they were started with.
        reports: of the ranks that are ready.
        agreement: what came of comparing them, once all have reported.
        ends: of the ranks, in the order in which they were heard of.
        lost: nodes that are gone.
        refusal: of a node that does not carry out the plan.
        error: what a companion has found.
        verdict: of the watch, or of a companion.
    """

    plan: RunPlan
    reports: dict[int, RankReport] = field(default_factory=dict)
    agreement: Agreement | None = None
    ends: dict[int, RankEnd] = field(default_factory=dict)
    lost: list[NodeLoss] = field(default_factory=list)
    refusal: Agreement | None = None
    error: UnisonoError | None = None
    verdict: Verdict | None = None
    _first_trouble: float | None = None

    def rank_reported(self, report: RankReport) -> tuple[str, int] | None:
        """Takes a rank's report; gives the store's address once all have reported and agree."""
        self.reports[report.rank] = report
        if len(self.reports) < self.plan.world_size or self.agreement is not None:
            return None
        ordered = [self.reports[rank] for rank in sorted(self.reports)]
        self.agreement = compare_ranks(ordered, world_size=self.plan.world_size)
        port = self.reports[0].store_port if 0 in self.reports else None
        if not self.agreement.agreed or port is None:
            return None
        return self.plan.store_host, port

    def rank_ended(self, end: RankEnd, *, now: float) -> None:
        """Takes the end of a rank. Only the first word about a rank counts."""
        if end.rank in self.ends:
            return
        self.ends[end.rank] = end
        if not ended_well(end) and self._first_trouble is None:
            self._first_trouble = now

    def node_lost(self, loss: NodeLoss, *, now: float) -> None:
        """Takes the news that a node's front is gone, and its ranks with it."""
        self.lost.append(loss)
        if self._first_trouble is None:
            self._first_trouble = now

    def node_refused(self, verdict: Verdict) -> None:
        """Takes the news that a node does not start its ranks on the plan."""
        self.refusal = Agreement.found("plan", verdict)

    def refused_by_us(self, error: UnisonoError) -> None:
        """Takes what the head itself has found that the run cannot live with; the first word counts."""
        self.error = self.error or error

    def judged(self, verdict: Verdict) -> None:
        """Takes a verdict on ranks that live; the first one counts."""
        self.verdict = self.verdict or verdict

    @property
    def is_over(self) -> bool:
        """Whether every rank has ended well."""
        return len(self.ends) == self.plan.world_size and all(ended_well(end) for end in self.ends.values())

    @property
    def has_result(self) -> bool:
        """Whether rank 0 has handed over the result: from then on nothing can be lost."""
        end = self.ends.get(0)
        return end is not None and ended_well(end)

    def decide(self, *, now: float) -> Decision | None:
        """Why all ranks must be ended now; None while they may go on, or while more news may come."""
        for found in (self.refusal, self.agreement):
            if found is not None and not found.agreed:
                return Decision(agreement=found)
        if self.error is not None and self._first_trouble is None:
            return Decision(error=self.error)
        if self.verdict is not None and self._first_trouble is None:
            return Decision(verdict=self.verdict)
        if self._first_trouble is None:
            return None
        since = now - self._first_trouble
        if self.lost and not self._unprompted():
            return Decision(loss=self.lost[0], after_s=since)
        culprit = first_cause(list(self.ends.values()))
        if culprit is None and since < _ONLY_VICTIMS_S and len(self.ends) < self.plan.world_size:
            return None
        # By SIGABRT torch ends ranks that are in different collectives; where the others are is known a moment later.
        killed = culprit is not None and culprit.returncode < 0 and culprit.returncode != -signal.SIGABRT
        certain = killed or (culprit is not None and self.plan.world_size == 1)
        if not certain and since < _SETTLE_S and len(self.ends) < self.plan.world_size:
            return None
        return Decision(culprit=culprit, after_s=since)

    def _unprompted(self) -> Sequence[RankEnd]:
        """Ranks that ended by themselves before the node was lost."""
        return [end for end in self.ends.values() if not ended_well(end) and not is_victim(end)]


def ended_well(end: RankEnd) -> bool:
    """Whether a rank handed over its result."""
    return end.last is not None and end.last["kind"] == "result"
