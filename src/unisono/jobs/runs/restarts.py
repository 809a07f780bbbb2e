"""Between two starts of the ranks: whether the run restarts, on which nodes, from which checkpoint,
and the time it cost.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from unisono.base.causes import Verdict, find_cause
from unisono.base.errors import Disagreed
from unisono.base.messages import Show, notify
from unisono.base.user_key import user_key
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.compare import compare_again
from unisono.guard.agree.reports import name_node
from unisono.guard.places.placement import lay_out
from unisono.guard.rendezvous.party import ChannelFacts
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import Progress, Restart, set_verdict
from unisono.guard.supervise.node_messages import CheckpointIdentity
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.jobs.remote_checkpoint.verification import still_due
from unisono.jobs.runs.head_nodes import HeadNodes
from unisono.jobs.runs.node_report import checkpoint_identity, look_again, refuse_old_ranks
from unisono.jobs.runs.planning import LocalNode, PreparedInputs, make_plan, offer_of, refusal_alone
from unisono.jobs.runs.preparation import find_resume_point, with_changes
from unisono.jobs.runs.run_records import AgreementReports
from unisono.jobs.runs.start_decision import StartDecision
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.config import LoadedConfig
from unisono.trainer.config.training_sections import ParallelSection
from unisono.trainer.plan import ResumePoint, RunPlan


@dataclass(frozen=True, slots=True)
class Death:
    """How an earlier attempt ended, and how far it had come."""

    cause: str
    step: int


OF_ITS_NODE = frozenset({"gpu_fell_off", "ecc_error", "storage_unfit", "disk_full", "host_oom_killed"})
"""Causes that lie in one machine: without it the run can continue."""


def may_restart(
    verdict: Verdict, *, step: int, earlier: Sequence[Death], allowed: int, without_culprit: bool = False
) -> tuple[bool, str]:
    """Whether to start again, and why (not), in a few words.

    The same finding twice without progress is deterministic: it would come a third time, too.
    Progress is a step that no earlier attempt had reached; the steps from the last checkpoint up to
    the place of the fault are none.

    Args:
        step: the last step that it finished.
        earlier: the deaths before this one.
        allowed: the config's `restarts`.
        without_culprit: whether the node that it was about takes part no more. Then it helps
            whatever the cause is, and its earlier steps prove nothing about the others.
    """
    cause = find_cause(verdict.cause)
    if not without_culprit and (cause is None or not cause.retry_helps):
        return False, "a restart would not help"
    again = not without_culprit and bool(earlier) and earlier[-1].cause == verdict.cause
    if again and step <= max(death.step for death in earlier):
        return False, f"the same finding twice without progress beyond step {step}: it is deterministic"
    if len(earlier) >= allowed:
        return False, f"restarts: {allowed} have been used" if allowed else "restarts: 0"
    return True, f"restart {len(earlier) + 1} of {allowed}"


@dataclass
class Restarts:
    """The restarts of one run.

    Attributes:
        loaded: the config, its paths absolute.
        prepared: what data and model are.
        others: the other nodes, or None.
        show: receives the messages.
    """

    request: TrainRequest
    loaded: LoadedConfig
    local_node: LocalNode
    run: RunDir
    prepared: PreparedInputs
    others: HeadNodes | None
    table: AgreementReports
    show: Show
    restarts: list[Restart] = field(default_factory=list)
    _deaths: list[Death] = field(default_factory=list)
    _since: float | None = None

    def decide(self, plan: RunPlan, attempt: Attempt, verdict: Verdict) -> bool:
        """Whether to start the ranks again; reports why or why not."""
        lost = self._lost(plan, attempt)
        if lost and not self._can_do_without(lost):
            hint = (
                ""
                if self._has_least
                else f"; with --nodes MIN:{len(plan.nodes)} it could continue without that node"
            )
            notify(
                self.show,
                f"a node is lost: the run ends, and resumes when it is started again on all nodes{hint}",
            )
            return False
        again, why = may_restart(
            verdict,
            step=attempt.step,
            earlier=self._deaths,
            allowed=plan.config.restarts,
            without_culprit=bool(self._unusable_nodes(plan, attempt, verdict)),
        )
        notify(self.show, why)
        return again

    def next_plan(self, plan: RunPlan, attempt: Attempt, verdict: Verdict) -> RunPlan:
        """The plan of the next start, once all nodes that take part have agreed to it again.

        Raises:
            IntegrityError: if there are checkpoints and none is intact.
            Disagreed: if a required node is lost or unfit; all nodes have received the verdict.
            UnfitError: if the only node is not fit any more.
            Stopped: if a signal asks to stop meanwhile.
        """
        self._since = attempt.decided_at or time.monotonic()
        self._deaths.append(Death(verdict.cause, attempt.step))
        unusable = self._unusable_nodes(plan, attempt, verdict)
        if unusable:
            assert self.others is not None
            done = Progress(attempt.step, attempt.tokens, attempt.loss, checkpoint=attempt.checkpoint)
            self.others.leave_out(unusable, verdict, done=done)
        CheckpointStore(self.run.checkpoints, key=user_key(self.local_node.environment.settings_dir)).sweep()
        set_verdict(
            self.run, None
        )  # what the dead ranks were writing is gone, and their verdict among the earlier ones
        resume, _ = find_resume_point(
            self.run, self._decision(plan), self.local_node.environment, self.show, trust=self.request.trust
        )
        self._agree(resume)
        self.restarts.append(
            Restart(
                verdict=verdict.to_json(), from_step=resume.step if resume else 0, seconds=attempt.seconds
            )
        )
        again = {
            "resume": resume,
            "resume_reason": _reason(verdict.cause, resume),
            "epoch": plan.epoch + 1,
            "rehearse": still_due(plan, resume),
        }
        if self._is_smaller(plan):
            plan = self._with_fewer(plan, resume)
        return plan.model_copy(update=again)

    def stepped(self) -> None:
        """A step is done; the first one after a restart gives the cost of the restart."""
        if self._since is not None:
            cost_s = round(time.monotonic() - self._since, 3)
            self.restarts[-1] = self.restarts[-1].model_copy(update={"cost_s": cost_s})
            self._since = None

    @property
    def _has_least(self) -> bool:
        return self.others is not None and self.others.meeting.party.topology.least_nodes > 0

    def _can_do_without(self, nodes: Collection[int]) -> bool:
        return self.others is not None and self.others.can_do_without(nodes)

    def _lost(self, plan: RunPlan, attempt: Attempt) -> set[int]:
        return {loss.node_rank for loss in attempt.lost} & {node.node_rank for node in plan.nodes}

    def _unusable_nodes(self, plan: RunPlan, attempt: Attempt, verdict: Verdict) -> set[int]:
        """Nodes that take part no more: those that are gone, and the one whose machine is the
        cause, where it can be done without.
        """
        unusable = self._lost(plan, attempt)
        blamed = {plan.ranks[rank].node_rank for rank in verdict.ranks if rank < plan.world_size}
        if verdict.cause in OF_ITS_NODE and self._can_do_without(unusable | blamed):
            unusable |= blamed
        return unusable

    def _agree(self, resume: ResumePoint | None) -> None:
        """The short agreement, on all nodes or on this one alone."""
        checkpoint = checkpoint_identity(Path(resume.path) if resume else None)
        if self.others is not None:
            first = self.others.meeting.roll.reports[0]
            make = partial(look_again, self.request, self.loaded, self.local_node, first)
            self.others.agree_again(make, checkpoint)
            return
        try:
            self._agree_alone(checkpoint)
        except Disagreed as error:
            raise (
                refusal_alone(error.verdict, again=True) if error.verdict is not None else error
            ) from error

    def _agree_alone(self, checkpoint: CheckpointIdentity | None) -> None:
        """On the only node of the job."""
        if not self.table.nodes:  # a single rank has made no report
            refuse_old_ranks(name_node(0, self.local_node.machine.host), self.local_node.machine.host)
            return
        first = self.table.nodes[0]
        report = look_again(
            self.request,
            self.loaded,
            self.local_node,
            first,
            ChannelFacts(first.address, {}, 0.0, []),
            checkpoint,
        )
        agreement = compare_again([report])
        if agreement.fatal:
            self.table.of_nodes = (self.table.of_nodes or Agreement()).merged(agreement)
            raise refusal_alone(agreement.fatal[0], again=True)

    def _is_smaller(self, plan: RunPlan) -> bool:
        return self.others is not None and len(self.others.meeting.reports) < len(plan.nodes)

    def _with_fewer(self, plan: RunPlan, resume: ResumePoint | None) -> RunPlan:
        """A new plan for the remaining nodes; everything that affects what is trained stays as in
        the first start.

        Nodes keep their numbers, so that a node has the same name throughout; ranks are renumbered
        without gaps.
        """
        assert self.others is not None
        meeting = self.others.meeting
        layout = lay_out([offer_of(report) for report in meeting.reports])
        lost = [node for node in plan.nodes if node.node_rank not in meeting.roll.hosts]
        names = ", ".join(name_node(node.node_rank, node.host) for node in lost)
        line = (
            f"continues with {len(layout.nodes)} of {meeting.roll.nodes} nodes, without {names}:"
            f" {layout.world_size} ranks instead of {plan.world_size}, the same {plan.global_batch} sequences"
            " per step"
        )
        meeting.note(line, everywhere=True)
        config = plan.config
        pinned = config.model_copy(
            update={
                "model": config.model.model_copy(update={"dtype": plan.dtype}),
                "parallel": ParallelSection(strategy=plan.strategy if layout.world_size > 1 else "auto"),
            }
        )
        made = make_plan(
            self.request,
            replace(self.loaded, config=pinned),
            self.local_node,
            layout=layout,
            prepared=self.prepared,
            run_id=plan.run_id,
            resume=resume,
            resume_reason="",
            earlier_batch=(plan.global_batch, plan.batch_of_ranks),
        )
        made = made.model_copy(update={"config": config, "allowed": plan.allowed})
        return with_changes(made, self.run, self._decision(plan), self.request)

    def _decision(self, plan: RunPlan) -> StartDecision:
        return StartDecision("resume", plan.run_id, "restarted")


def _reason(cause: str, resume: ResumePoint | None) -> str:
    return f"restarted after {cause}, from " + (f"step {resume.step}" if resume else "the beginning")
