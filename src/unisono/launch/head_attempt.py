"""One start of the ranks, as the head runs it: their environment, the work beside them, and what their messages change in the run's directory."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.agree.agreement import Agreement, majority, odd_first, partition
from unisono.agree.reports import Member, RankReport, culprit_hosts, culprit_ranks, name_all
from unisono.causes import Evidence, Verdict, find_cause
from unisono.checkpoint.manifest import user_key
from unisono.events import Message, Show
from unisono.facts.storage import RunsDisk
from unisono.launch.head_nodes import HeadNodes
from unisono.launch.output_watch import OutputWatch
from unisono.launch.planning import LocalNode
from unisono.launch.run_records import Recorder, Table, as_warning, write_agreement
from unisono.launch.train_request import TrainRequest
from unisono.plan import RankPlace, RunPlan
from unisono.remote_checkpoint.storage import Uploads, storage_observers
from unisono.remote_checkpoint.verification import FirstCheckpoint, Verifier
from unisono.rundir import RunDir
from unisono.supervise.child_process import interface_name, rank_environments
from unisono.supervise.interrupts import Interrupts
from unisono.supervise.local_ranks import LocalRanks, SharedMemory
from unisono.supervise.rank_logs import LogEvents
from unisono.supervise.rank_supervisor import Attempt, run_attempt


@dataclass
class HeadAttempts:
    """Starts the ranks of this node, supervises those of all nodes, and gives back how that went; once per start.

    Attributes:
        others: the other nodes; None where there are none.
        uploading: beside the ranks, over all their starts; None without checkpoint.storage.
        log_events: what the logs of the latest start's ranks report.
    """

    request: TrainRequest
    local_node: LocalNode
    run: RunDir
    disk: RunsDisk
    interrupts: Interrupts
    recorder: Recorder
    table: Table
    others: HeadNodes | None
    uploading: Uploads | None
    log_events: LogEvents = field(default_factory=lambda: LogEvents([]))

    def start(self, plan: RunPlan, kept: SharedMemory, watch: OutputWatch) -> Attempt:
        """Runs the ranks to their end.

        Args:
            plan: written to plan.json on every node already.
            kept: the memory in which the ranks of this node keep their newest step.
            watch: notices that the run's directory is removed or replaced.
        """
        server = self.others.hand_over(plan) if self.others is not None else None
        first = FirstCheckpoint(
            plan, programs=self.request.programs, leftovers=self.local_node.leftovers, show=self.recorder.show
        )
        self.log_events = LogEvents(plan.ranks)
        key = user_key(self.local_node.environment.settings_dir)
        shards = None
        if server is not None:  # one node alone needs no channel
            from unisono.remote_checkpoint.transfers import receiving_shards

            shards = receiving_shards(plan, server, self.run.checkpoints)
        return run_attempt(
            plan,
            local=self._local_ranks(plan, kept),
            server=server,
            interrupts=self.interrupts,
            show=first.pass_on,
            on_agreement=self._keep_agreement,
            shards=shards,
            observers=[
                watch,
                first,
                ReplicaDrift(plan, self.recorder.show),
                self.log_events,
                Verifier(self.run.checkpoints, key, self.recorder.show, self.request.rhythm),
                *storage_observers(
                    plan,
                    self.uploading,
                    programs=self.request.programs,
                    leftovers=self.local_node.leftovers,
                    show=self.recorder.show,
                ),
            ],
        )

    def _local_ranks(self, plan: RunPlan, kept: SharedMemory) -> LocalRanks:
        interface = interface_name(self.request.probes.network.interfaces(), plan.nodes[0].address)
        environments = rank_environments(
            plan,
            0,
            variables=self.local_node.leftovers,
            interface=interface,
            debug_comm=self.request.debug_comm,
        )
        return LocalRanks(
            plan.on_node(0),
            self.run,
            self.run.plan,
            self.request.programs,
            environments,
            from_step=plan.resume.step if plan.resume else 0,
            has_input=plan.world_size > 1,
            shared_memory=kept,
        )

    def _keep_agreement(self, reports: Mapping[int, RankReport], agreement: Agreement) -> None:
        self.table.add_ranks(reports, agreement)
        self.disk.write("agreement.json", lambda: write_agreement(self.run, self.table))
        for verdict in agreement.warnings:
            self.recorder.show(as_warning(verdict))


_KEPT_STEPS = 16
"""Steps for which only some ranks have reported; ranks of one group are never that far apart."""
_SHOWN_GROUPS = 6


@dataclass(frozen=True)
class DriftReport:
    """A rank's report after a step: the digest of its weights, and what determines its rounding."""

    digest: str
    arithmetic: str


class ReplicaDrift:
    """A companion for one start of the ranks."""

    def __init__(self, plan: RunPlan, show: Show) -> None:
        """Has heard nothing yet.

        Args:
            show: receives a warning if a difference is not an error.
        """
        self._plan = plan
        self._show = show
        self._drift_reports: dict[int, dict[int, DriftReport]] = defaultdict(dict)
        self._equal_at: int | None = None
        self._verdict: Verdict | None = None
        self._warned = False

    def on_message(self, rank: int, message: Message) -> None:
        """Takes a digest; compares when all ranks have reported a step."""
        if message["kind"] != "digest" or self._verdict is not None:
            return
        step = int(message["step"])
        by_rank = self._drift_reports[step]
        by_rank[rank] = DriftReport(str(message["digest"]), str(message["arithmetic"]))
        if len(by_rank) == self._plan.world_size:
            self._compare(step, self._drift_reports.pop(step))
        while len(self._drift_reports) > _KEPT_STEPS:
            self._drift_reports.pop(min(self._drift_reports))

    def look(self) -> Verdict | None:
        """The verdict, once there is one."""
        return self._verdict

    def finish(self) -> None:
        """Nothing is held."""

    def _compare(self, step: int, found: dict[int, DriftReport]) -> None:
        if len({report.digest for report in found.values()}) == 1:
            self._equal_at = step
        elif len({report.arithmetic for report in found.values()}) == 1:
            self._verdict = name_drift(self._plan.ranks, found, step=step, equal_at=self._equal_at)
        elif not self._warned:
            self._warned = True
            self._show(_rounding(found, step))


def name_drift(
    places: Sequence[RankPlace], found: Mapping[int, DriftReport], *, step: int, equal_at: int | None
) -> Verdict:
    """The replica whose weights differ from the rest. Without a majority no replica is blamed.

    Args:
        found: each rank's report; at least two of them differ.
        step: after which they reported it.
        equal_at: the last step after which all were equal, if there was one in this start.
    """
    who = [Member(place.node_rank, rank, place.host) for rank, place in enumerate(places)]
    groups = partition((who[rank], report.digest) for rank, report in sorted(found.items()))
    most = majority(groups)
    odd = [one for group in groups if most is not None and group is not most for one in group.members]
    since = f"they were equal after step {equal_at}" if equal_at is not None else "it is the first comparison"
    if odd:
        verb = "holds" if len(odd) == 1 else "hold"
        summary = f"{name_all(odd)} {verb} different weights than the other ranks after step {step}; {since}"
    else:
        summary = (
            f"ranks hold different weights after step {step}, and most of them do not agree on any; {since}"
        )
    evidence = [
        Evidence(where=name_all(group.members), text=f"digest of the trained weights: {group.value}")
        for group in odd_first(groups, odd)[:_SHOWN_GROUPS]
    ]
    return Verdict(
        cause="replicas_diverged",
        when="during",
        summary=summary,
        ranks=culprit_ranks(odd),
        hosts=culprit_hosts(odd),
        phase="update",
        step=step,
        evidence=tuple(evidence),
        fix=_fix(culprit_ranks(odd), equal_at),
        confidence=1.0 if odd else 0.5,
    )


def _fix(ranks: tuple[int, ...], equal_at: int | None) -> tuple[str, ...]:
    """The catalogue's, after what is known of the checkpoints here: rank 0 writes them."""
    known = find_cause("replicas_diverged")
    general = known.remedy if known is not None else ()
    if ranks and 0 not in ranks:
        return ("checkpoints are of rank 0, which is with the majority: they are good", *general[1:])
    if equal_at is not None:
        return (
            f"go back to a checkpoint of step {equal_at} or before: move the later folders out of checkpoints/, since they may hold weights that"
            " have drifted, and run the same command",
            *general[1:],
        )
    return general


def _rounding(found: Mapping[int, DriftReport], step: int) -> Message:
    kinds = " and ".join(sorted({report.arithmetic for report in found.values()}))
    return {
        "kind": "warning",
        "time": time.time(),
        "code": "replicas_round_differently",
        "text": f"the weights of the ranks are not bit-equal after step {step}: {kinds} round differently. Drift of a rank cannot be detected here",
        "fix": "train on devices of one kind",
    }
