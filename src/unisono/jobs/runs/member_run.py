"""A run on a node that is not the head: it joins the meeting, runs its ranks by the head's plan,
and ends with the head's result.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from unisono.base.errors import Disagreed, UnfitError, UsageError, storage_reason, storage_remedy
from unisono.base.files import make_private_dir, read_object, write_json
from unisono.base.messages import PlanMessage, Show, message_of
from unisono.guard.agree.reports import NodeReport
from unisono.guard.facts.storage import RunsDisk, refuse_if_silent
from unisono.guard.rendezvous.meeting_sides import MemberSide, join_meeting, rejoin_as_member
from unisono.guard.rendezvous.party import ChannelFacts, MakeReport, Party
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock, recorded_holder
from unisono.guard.rundir.records import RunResult
from unisono.guard.supervise.child_process import interface_name
from unisono.guard.supervise.decision import NodeLoss
from unisono.guard.supervise.interrupts import Interrupts
from unisono.guard.supervise.local_ranks import LocalRanks, SharedMemory
from unisono.guard.supervise.node_messages import (
    Again,
    CheckpointIdentity,
    JobEnded,
    NodePrepared,
    PlanDecided,
    Prepare,
    decode_request,
    encode,
)
from unisono.jobs.remote_checkpoint.rescue import snapshot_ranks
from unisono.jobs.remote_checkpoint.transfers import clear_parts
from unisono.jobs.runs.member_supervisor import (
    HeadlessEnd,
    LostHead,
    Serving,
    keep_end,
    keep_refusal,
)
from unisono.jobs.runs.node_report import look_again, report_maker
from unisono.jobs.runs.planning import LocalNode, accept_plan, prepare, prepared_facts
from unisono.jobs.runs.rank_environment import rank_environments
from unisono.jobs.runs.start_decision import set_aside
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import LoadedConfig
from unisono.trainer.plan import RunPlan


def take_part(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    party: Party,
    *,
    interrupts: Interrupts,
) -> RunResult:
    """Carries this node's part to its end; gives the head's result, with this node's output_dir.

    Raises:
        Disagreed: with the verdict that all nodes have received.
        EndedByVerdict: if the head is lost while ranks ran.
    """
    show, began = party.show, time.monotonic()
    disk = RunsDisk(Path(loaded.config.output_dir), show)
    seen = _ReportMaker(report_maker(request, loaded, local_node))
    try:
        with join_meeting(party, seen.make) as member_side:
            member_side.wait_for(Prepare.kind)
            shared = seen.shares_output
            with _own_directory(request, loaded, local_node, shared=shared, show=show) as (run, lock):
                heads = (
                    disk.write("who holds the run", partial(recorded_holder, run.lock)) if shared else None
                )
                member = _Member(
                    request, loaded, local_node, member_side, interrupts, show, run, lock, seen.report, disk
                )
                last = member.run()
                if isinstance(last, LostHead):
                    member_side.link.close()  # it is over; what follows may take a while
                    end = HeadlessEnd(run, last, heads, shared, show, disk, began)
                    return end.end(stop=interrupts.first)
    except Disagreed as error:
        if seen.has_own_output:
            disk.write(
                "why the job was refused",
                partial(keep_refusal, RunDir(Path(loaded.config.output_dir)), error),
            )
        raise
    head = str(member_side.welcome.get("head_host", ""))
    return keep_end(run, last, head=head, shared=shared, show=show, disk=disk)


@dataclass
class _ReportMaker:
    """Makes this node's report, and remembers whether its output_dir is the head's."""

    maker: MakeReport
    shares_output: bool = False
    has_own_output: bool = False
    """The head's mark was looked for in it, and is not there."""
    report: NodeReport = field(init=False)

    def make(self, channel: ChannelFacts, show: Show) -> NodeReport:
        report = self.report = self.maker(channel, show)
        self.shares_output = report.output.shared is True
        self.has_own_output = report.output.shared is False
        return report


@dataclass
class _Member:
    request: TrainRequest
    loaded: LoadedConfig
    local_node: LocalNode
    member_side: MemberSide
    interrupts: Interrupts
    show: Show
    run_dir: RunDir
    lock: RunLock | None  # of this node's own output_dir; None where it is the head's
    first: NodeReport
    disk: RunsDisk

    def run(self) -> JobEnded | LostHead:
        """Prepares, and then serves one plan after the other until the last word."""
        prepared = self.member_side.run_in_background(
            lambda show: prepare(
                self.request,
                self.loaded,
                self.local_node.environment,
                ledger=self.lock is not None,
                show=show,
            )
        )
        self.member_side.send(encode(NodePrepared(prepared_facts(prepared))))
        message = decode_request(self.member_side.wait_for(PlanDecided.kind))
        while isinstance(message, PlanDecided):
            plan = accept_plan(
                message.plan,
                config=self.loaded.config,
                node_rank=self.local_node.topology.node_rank,
                host=self.local_node.machine.host,
                devices=self.local_node.devices,
                prepared=prepared,
            )
            last = self._serve(plan)
            if not isinstance(last, Again):
                return last
            try:
                message = rejoin_as_member(self.member_side, last, self._look_again)
            except Disagreed:
                if self.member_side.head_left is None:
                    raise
                loss = NodeLoss.at_node(
                    self.member_side.head_left,
                    node_rank=self.local_node.topology.node_rank,
                    host=self.local_node.machine.host,
                )
                return LostHead(plan.nodes[0].host, loss, plan.resume.step if plan.resume else 0, plan)
        assert isinstance(message, JobEnded)
        return message

    def _look_again(self, channel: ChannelFacts, checkpoint: CheckpointIdentity | None) -> NodeReport:
        return look_again(self.request, self.loaded, self.local_node, self.first, channel, checkpoint)

    def _serve(self, plan: RunPlan) -> Again | JobEnded | LostHead:
        node_rank = self.local_node.topology.node_rank
        plan_file = self.run_dir.node_plan(node_rank)

        def write_plan() -> None:
            for folder in (plan_file.parent, self.run_dir.events(0).parent, self.run_dir.log("", 0).parent):
                make_private_dir(folder)
            write_json(plan_file, plan.to_json(), mode=0o600)

        try:
            self.disk.need("this node's copy of the plan", write_plan)
        except OSError as error:
            raise UnfitError.of(
                f"this node's copy of the plan cannot be written: {error.strerror or error}",
                where=str(error.filename or plan_file),
                why=storage_reason(error),
                fix=storage_remedy(
                    error, else_="restore its owner and permissions, or set a different output_dir"
                ),
            ) from error
        self.show(message_of(PlanMessage, plan.to_json()))
        ranks = ", ".join(str(place.rank) for place in plan.on_node(node_rank))
        text = (
            f"node {node_rank} ({self.local_node.machine.host}): starting rank {ranks} of {plan.world_size};"
            " steps are shown by node 0"
        )
        self.show({"kind": "note", "time": time.time(), "text": text})
        interface = interface_name(self.request.probes.network.interfaces(), plan.node(node_rank).address)
        environments = rank_environments(
            plan,
            node_rank,
            variables=self.local_node.leftovers,
            interface=interface,
            debug_comm=self.request.debug_comm,
        )
        kept = SharedMemory(snapshot_ranks(plan, node_rank))
        local = LocalRanks(
            plan.on_node(node_rank),
            self.run_dir,
            plan_file,
            self.request.programs,
            environments,
            from_step=plan.resume.step if plan.resume else 0,
            has_input=True,
            shared_memory=kept,
        )
        parts = None if plan.node(node_rank).shares_output else self.run_dir.checkpoints
        try:
            if parts is not None:  # of a front that was killed
                self.disk.need("what is left of unfinished checkpoints", partial(clear_parts, parts))
            with kept:
                serving = Serving(
                    self.member_side,
                    local,
                    self.interrupts,
                    self.show,
                    plan=plan,
                    disk=self.disk,
                    lock=self.lock,
                )
                return serving.run()
        finally:
            self.disk.write("this node's copy of the plan", partial(_remove_plan, plan_file))
            if parts is not None:
                self.disk.write("what is left of unfinished checkpoints", partial(clear_parts, parts))


def _remove_plan(path: Path) -> None:
    """A copy for this node's ranks; plan.json on the head is the one that stays."""
    with contextlib.suppress(OSError):  # another node's copy is beside it, or the disk is gone: no matter now
        path.unlink()
        path.parent.rmdir()


@contextlib.contextmanager
def _own_directory(
    request: TrainRequest, loaded: LoadedConfig, local_node: LocalNode, *, shared: bool, show: Show
) -> Iterator[tuple[RunDir, RunLock | None]]:
    """This node's output_dir: the head's; or one of its own, with its lock, which is held here.

    Raises:
        UsageError: if it is a run of its own that has nothing to do with the head's.
        UnfitError: if its storage does not answer.
    """
    run = RunDir(Path(loaded.config.output_dir))
    refuse_if_silent(run.root)
    if shared:
        yield run, None
        return
    _refuse_another_run(run, fresh=request.fresh, show=show)
    make_private_dir(run.root)
    lock = RunLock(run.lock)
    note = lock.acquire(local_node.machine.host, os.getpid())
    if note:
        show({"kind": "note", "time": time.time(), "text": note})
    try:
        yield run, lock
    finally:
        lock.release()


def _refuse_another_run(run: RunDir, *, fresh: bool, show: Show) -> None:
    """A directory in which this node was the head itself holds checkpoints, and is not to be mixed
    with another run's logs.
    """
    plan = read_object(run.plan)
    if not plan:
        return
    if fresh:
        text = f"the earlier run is now {set_aside(run)}"
        show({"kind": "note", "time": time.time(), "text": text})
        return
    raise UsageError.of(
        f"{run.root} holds a separate run of this node",
        where="output_dir",
        why="the head's output_dir is not seen from here, and this node's would be mixed with that run",
        fix="set a different output_dir, or pass --fresh on every node",
    )
