"""The head's preparation before ranks start: the contents of data and model, the placement of ranks, and the plan."""

import time
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.causes import Verdict
from unisono.config import LoadedConfig
from unisono.events import Message, Show
from unisono.launch.head_nodes import HeadNodes
from unisono.launch.meeting_entry import look_alone, refusal_alone
from unisono.launch.planning import LocalNode, make_plan, offer_of, prepare
from unisono.launch.run_claim import Claim, find_resume_point, with_changes
from unisono.launch.run_records import Table
from unisono.launch.train_request import TrainRequest
from unisono.plan import RunPlan
from unisono.plan.placement import Layout, lay_out
from unisono.remote_checkpoint.storage import storage_tried
from unisono.remote_checkpoint.transfers import download_newest
from unisono.remote_checkpoint.verification import with_rehearsal
from unisono.rundir import RunDir
from unisono.rundir.start_decision import StartDecision, refuse_if_shrunk
from unisono.text import Duration


def restore_from_storage(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    others: HeadNodes | None,
    *,
    node: str,
    show: Show,
) -> bool:
    """Brings the newest checkpoint back from checkpoint.storage where nothing is left here; gives whether it did.

    This may take long: the other nodes are connected already, and wait. `node` is this node's label among others, empty for a job of one node.
    """

    def work(show: Show) -> bool:
        return download_newest(
            loaded.config,
            local_node.environment,
            who=node,
            programs=request.programs,
            trust=request.trust,
            show=show,
        )

    return others.bring_back(work) if others is not None else work(show)


def prepare_all(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    claimed: Claim,
    others: HeadNodes | None,
    *,
    table: Table,
    show: Show,
) -> tuple[dict[str, Any], Layout]:
    """The facts of data and model, the same on all nodes, and which rank runs where. Meanwhile checkpoint.storage is tried.

    Raises:
        UnfitError, UsageError: this node alone is not fit for its ranks.
    """

    def work(show: Show) -> dict[str, Any]:
        with storage_tried(
            loaded.config,
            claimed.run,
            claimed.decision.run_id,
            programs=request.programs,
            leftovers=local_node.leftovers,
            show=show,
        ):
            return prepare(request, loaded, local_node.environment, ledger=True, show=show)

    if others is not None:
        prepared = others.prepare(work)
        return prepared, lay_out([offer_of(report) for report in others.meeting.reports])
    layout = lay_out([local_node.offer])
    if layout.world_size > 1:
        report, agreement = look_alone(request, loaded, local_node)
        table.set_nodes([report], agreement)
        _refuse_failed(agreement, show)
    return work(show), layout


def plan_start(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    *,
    run: RunDir,
    decision: StartDecision,
    prepared: dict[str, Any],
    show: Show,
    layout: Layout,
    rehearse: bool = False,
) -> RunPlan:
    """Finds the checkpoint to resume from, and resolves the plan; with `rehearse` the first checkpoint is read back while training continues."""
    resume, reason = find_resume_point(run, decision, local_node.environment, show, trust=request.trust)
    plan = make_plan(
        request,
        loaded,
        local_node,
        layout=layout,
        prepared=prepared,
        run_id=decision.run_id,
        resume=resume,
        resume_reason=reason,
        earlier_batch=decision.earlier_batch,
    )
    plan = _with_step_difference(plan, loaded)
    plan = with_changes(plan, run, decision, request)
    refuse_if_shrunk(decision, done_steps=resume.step if resume else 0, total_steps=plan.total_steps)
    return with_rehearsal(plan, run, wanted=rehearse)


def _with_step_difference(plan: RunPlan, loaded: LoadedConfig) -> RunPlan:
    """The plan with a warning if LLaMA-Factory makes another number of steps from the same file; its packed sequences are others."""
    duration = Duration.parse(plan.config.duration)
    if loaded.translation is None or duration.unit != "epochs" or plan.config.data.packing:
        return plan
    note = loaded.translation.fewer_steps(
        duration.amount, sequences=plan.data.train.sequences, global_batch=plan.global_batch
    )
    return plan.model_copy(update={"warnings": [*plan.warnings, note]}) if note else plan


def as_warning(verdict: Verdict) -> Message:
    """The message of a verdict that does not end the run."""
    return {
        "kind": "warning",
        "time": time.time(),
        "code": verdict.cause,
        "text": verdict.summary,
        "fix": "; ".join(verdict.fix),
    }


def _refuse_failed(agreement: Agreement, show: Show) -> None:
    """Raises UnfitError or UsageError with the first fatal verdict; the others are shown as warnings."""
    if agreement.fatal:
        raise refusal_alone(agreement.fatal[0])
    for verdict in agreement.warnings:
        show(as_warning(verdict))
