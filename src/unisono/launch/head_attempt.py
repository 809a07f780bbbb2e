"""One start of the ranks, as the head runs it: their environment, the work beside them, and what their messages change in the run's directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.agree.agreement import Agreement
from unisono.agree.reports import RankReport
from unisono.checkpoint.manifest import user_key
from unisono.launch.head_nodes import HeadNodes
from unisono.launch.head_preparation import as_warning
from unisono.launch.output_watch import OutputWatch
from unisono.launch.planning import LocalNode
from unisono.launch.replica_drift import ReplicaDrift
from unisono.launch.run_records import Recorder, Table, write_agreement
from unisono.launch.train_request import TrainRequest
from unisono.plan import RunPlan
from unisono.remote_checkpoint.first_checkpoint import FirstCheckpoint
from unisono.remote_checkpoint.storage_trial import storage_companions
from unisono.remote_checkpoint.upload import Uploads
from unisono.remote_checkpoint.verifier import Verifier
from unisono.rundir import RunDir
from unisono.supervise.bounded_io import RunsDisk
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
    here: LocalNode
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
            plan, programs=self.request.programs, leftovers=self.here.leftovers, show=self.recorder.show
        )
        self.log_events = LogEvents(plan.ranks)
        key = user_key(self.here.environment.settings_dir)
        shards = None
        if server is not None:  # one node alone needs no channel
            from unisono.remote_checkpoint.shard_transfer import receiving_shards

            shards = receiving_shards(plan, server, self.run.checkpoints)
        return run_attempt(
            plan,
            local=self._local_ranks(plan, kept),
            server=server,
            interrupts=self.interrupts,
            show=first.pass_on,
            on_agreement=self._keep_agreement,
            shards=shards,
            companions=[
                watch,
                first,
                ReplicaDrift(plan, self.recorder.show),
                self.log_events,
                Verifier(self.run.checkpoints, key, self.recorder.show, self.request.rhythm),
                *storage_companions(
                    plan,
                    self.uploading,
                    programs=self.request.programs,
                    leftovers=self.here.leftovers,
                    show=self.recorder.show,
                ),
            ],
        )

    def _local_ranks(self, plan: RunPlan, kept: SharedMemory) -> LocalRanks:
        interface = interface_name(self.request.probes.network.interfaces(), plan.nodes[0].address)
        environments = rank_environments(
            plan, 0, variables=self.here.leftovers, interface=interface, debug_comm=self.request.debug_comm
        )
        return LocalRanks(
            plan.on_node(0),
            self.run,
            self.run.plan,
            self.request.programs,
            environments,
            from_step=plan.resume.step if plan.resume else 0,
            talks=plan.world_size > 1,
            kept=kept,
        )

    def _keep_agreement(self, reports: Mapping[int, RankReport], agreement: Agreement) -> None:
        self.table.add_ranks(reports, agreement)
        self.disk.write("agreement.json", lambda: write_agreement(self.run, self.table))
        for verdict in agreement.warnings:
            self.recorder.show(as_warning(verdict))
