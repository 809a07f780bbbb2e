"""The run on the head, from lock to result: the other nodes, data, plan, starts of the ranks,
restarts.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from unisono.base.errors import UnfitError, UnisonoError, as_usage_error
from unisono.base.messages import PlanMessage, RefusedMessage, ResultMessage, Show, message_of, notify
from unisono.base.user_key import user_key
from unisono.guard.facts.storage import RunsDisk, leave
from unisono.guard.rendezvous.head_address import refusals_reported
from unisono.guard.rendezvous.party import Party
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import Restart, RunResult
from unisono.guard.supervise.child_process import interface_name
from unisono.guard.supervise.interrupts import Interrupts, Stopped, exit_code_of
from unisono.guard.supervise.local_ranks import LocalRanks, SharedMemory
from unisono.guard.supervise.rank_logs import LogEvents
from unisono.guard.supervise.rank_supervisor import Attempt, run_attempt
from unisono.jobs.remote_checkpoint.rescue import snapshot_ranks
from unisono.jobs.remote_checkpoint.storage import Uploads, storage_observers
from unisono.jobs.remote_checkpoint.verification import FirstCheckpoint, Verifier
from unisono.jobs.runs.attempt_end import AttemptEnd, ReplicaDrift, checkpoints_of, keep_result
from unisono.jobs.runs.head_nodes import HeadNodes, together
from unisono.jobs.runs.planning import LocalNode
from unisono.jobs.runs.preparation import Claim, claim, plan_start, prepare_all, restore_from_storage
from unisono.jobs.runs.rank_environment import rank_environments
from unisono.jobs.runs.restarts import Restarts
from unisono.jobs.runs.run_records import (
    AgreementReports,
    Ending,
    RunRecorder,
    is_about_nodes,
    keep_refusal,
    result_of,
    result_without_run,
    write_plan,
)
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import LoadedConfig
from unisono.trainer.plan import RunPlan


@dataclass
class HeadRun:
    """A run on this node, which is the head, with or without others.

    Attributes:
        began: `time.monotonic()` when the command was typed.
        party: this node among others; None for a job of one node.
        uploading: beside the ranks, over all their starts; None without checkpoint.storage.
        disk: the run's directory, once it is claimed.
    """

    request: TrainRequest
    show: Show
    interrupts: Interrupts
    began: float
    party: Party | None
    table: AgreementReports = field(default_factory=AgreementReports)
    uploading: Uploads | None = None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    disk: RunsDisk = field(init=False)

    def run(self, loaded: LoadedConfig, local_node: LocalNode) -> RunResult:
        """Runs to the end; gives its result."""
        with self.stack:
            claimed = self._claim(loaded, local_node)
            self.disk = RunsDisk(claimed.run.root, self.show)
            try:
                with self._others(loaded, local_node, claimed.run) as others:
                    self._restore(loaded, local_node, claimed, others)
                    result = self._train(loaded, local_node, claimed, others)
            except UnisonoError as error:
                self._keep_refusal(loaded, claimed, error)
                raise
            if self.uploading is not None:  # the other nodes have ended: they need not wait for it
                self.uploading.wait()
            return result

    def _train(
        self, loaded: LoadedConfig, local_node: LocalNode, claimed: Claim, others: HeadNodes | None
    ) -> RunResult:
        run = claimed.run
        self.disk.need("what is left of unfinished checkpoints", checkpoints_of(run, local_node).sweep)
        prepared, layout = prepare_all(
            self.request, loaded, local_node, claimed, others, table=self.table, show=self.show
        )
        plan = plan_start(
            self.request,
            loaded,
            local_node,
            run=run,
            decision=claimed.decision,
            prepared=prepared,
            show=self.show,
            layout=layout,
            rehearse=self.request.rehearse,
        )
        recorder = RunRecorder(run, plan, self.disk, self.show)
        self._begin_uploading(plan, local_node, run)
        attempts = HeadAttempts(
            self.request,
            local_node,
            run,
            self.disk,
            self.interrupts,
            recorder,
            self.table,
            others,
            self.uploading,
        )
        end = AttemptEnd(
            self.request,
            local_node,
            run,
            claimed.lock,
            self.disk,
            self.interrupts,
            self.table,
            others,
            self.show,
        )
        restarts = Restarts(self.request, loaded, local_node, run, prepared, others, self.table, self.show)
        recorder.on_step = restarts.stepped
        while True:
            self.disk.need("the plan", partial(write_plan, run, claimed.lock, plan, self.table))
            self.show(message_of(PlanMessage, plan.to_json()))
            with SharedMemory(snapshot_ranks(plan, 0)) as kept:
                attempt = attempts.start(plan, kept)
                ending = end.settle(plan, attempt, log_events=attempts.log_events, kept=kept)
            verdict = ending.verdict
            if verdict is None or self._is_blocked() or not restarts.decide(plan, attempt, verdict):
                break
            try:
                with self.interrupts.raising():  # reading a large checkpoint through may take minutes
                    plan = restarts.next_plan(plan, attempt, verdict)
            except Stopped as stopped:
                ending = Ending(exit_code_of(stopped.number), ending.progress)
                break
            except UnisonoError as error:
                ending = end.cannot_continue(plan, ending, error)
                break
        if not self._is_blocked():
            ending = end.read_back(plan, ending)
        return self._finish(claimed, plan, attempt, ending, restarts.restarts, others, recorder)

    def _claim(self, loaded: LoadedConfig, local_node: LocalNode) -> Claim:
        """The run's directory, locked for this start; nodes that call meanwhile hear of a
        refusal.
        """
        refusals = refusals_reported(self.party) if self.party is not None else contextlib.nullcontext()
        with refusals, as_usage_error():
            return self.stack.enter_context(
                claim(
                    loaded.config,
                    host=local_node.machine.host,
                    port=self.party.topology.head_port if self.party is not None else 0,
                    resume=self.request.resume,
                    fresh=self.request.fresh,
                    notify=lambda text: notify(self.show, text),
                    allow=self.request.allowed,
                    origins=loaded.origins,
                )
            )

    @contextlib.contextmanager
    def _others(self, loaded: LoadedConfig, local_node: LocalNode, run: RunDir) -> Iterator[HeadNodes | None]:
        """The other nodes, once all of them are here and agree; None where there are none."""
        if self.party is None:
            yield None
            return
        with together(
            self.request, loaded, local_node, self.party, run=run, disk=self.disk, table=self.table
        ) as others:
            yield others

    def _restore(
        self, loaded: LoadedConfig, local_node: LocalNode, claimed: Claim, others: HeadNodes | None
    ) -> None:
        """With --resume and nothing left here: the newest checkpoint comes back from
        checkpoint.storage.
        """
        if not self.request.resume:
            return
        node = self.party.label if self.party is not None else ""
        if restore_from_storage(self.request, loaded, local_node, others, node=node, show=self.show):
            claimed.decide_again(loaded.config, allow=self.request.allowed, origins=loaded.origins)

    def _begin_uploading(self, plan: RunPlan, local_node: LocalNode, run: RunDir) -> None:
        if plan.config.checkpoint.storage is not None:
            self.uploading = self.stack.enter_context(
                Uploads(
                    plan,
                    run,
                    programs=self.request.programs,
                    leftovers=local_node.leftovers,
                    interrupts=self.interrupts,
                    show=self.show,
                )
            )

    def _is_blocked(self) -> bool:
        """Whether no restart is possible: somebody stopped the run, or its disk hangs or is
        gone.
        """
        return self.interrupts.first is not None or self.disk.hung is not None or self.disk.is_lost

    def _keep_refusal(self, loaded: LoadedConfig, claimed: Claim, error: UnisonoError) -> None:
        """Keeps the reason why the nodes did not agree, in the run's directory."""
        if isinstance(error, UnfitError) and self.disk.hung is not None:
            self._leave(error)
        if is_about_nodes(error):
            keep = partial(
                keep_refusal, claimed.run, loaded.config, self.table, error, command=self.request.command
            )
            self.disk.write("why the ranks did not agree", keep)
            claimed.worth_keeping = True

    def _finish(
        self,
        claimed: Claim,
        plan: RunPlan,
        attempt: Attempt,
        ending: Ending,
        restarts: Sequence[Restart],
        others: HeadNodes | None,
        recorder: RunRecorder,
    ) -> RunResult:
        result = result_of(
            ending,
            run_id=plan.run_id,
            output_dir=plan.output_dir,
            restarts=restarts,
            seconds=time.monotonic() - self.began,
        )
        if ending.error is not None:
            self.show(message_of(RefusedMessage, ending.error.to_json()))
        claimed.trained = attempt.ready or bool(restarts)
        claimed.worth_keeping = attempt.ready or ending.exit_code not in (2, 75, 130) or bool(restarts)
        keep = partial(keep_result, claimed.run, attempt, ending, result, drawing=recorder.drawing)
        self.disk.write("how the run ended", keep)
        if others is not None:
            others.end(result, ending)
        if self.disk.hung is not None:  # to give the lock back would hang, too
            self.show(message_of(ResultMessage, result.to_json()))
            leave(ending.exit_code)
        return result

    def _leave(self, error: UnfitError) -> NoReturn:
        """Ends where the run's directory does not answer: to give the lock back would hang, too."""
        self.show(message_of(RefusedMessage, error.to_json()))
        seconds = time.monotonic() - self.began
        result = result_without_run(
            Ending(error.exit_code, error=error), seconds=seconds, output_dir=str(self.disk.root)
        )
        self.show(message_of(ResultMessage, result.to_json()))
        leave(error.exit_code)


@dataclass
class HeadAttempts:
    """Starts the ranks of this node, supervises those of all nodes, and gives back how that went;
    once per start.

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
    recorder: RunRecorder
    table: AgreementReports
    others: HeadNodes | None
    uploading: Uploads | None
    log_events: LogEvents = field(default_factory=lambda: LogEvents([]))

    def start(self, plan: RunPlan, kept: SharedMemory) -> Attempt:
        """Runs the ranks to their end.

        Args:
            plan: written to plan.json on every node already.
            kept: the memory in which the ranks of this node keep their newest step.
        """
        server = self.others.hand_over(plan) if self.others is not None else None
        first = FirstCheckpoint(
            plan, programs=self.request.programs, leftovers=self.local_node.leftovers, show=self.recorder.show
        )
        self.log_events = LogEvents(plan.ranks)
        key = user_key(self.local_node.environment.settings_dir)
        shards = None
        if server is not None:  # one node alone needs no channel
            from unisono.jobs.remote_checkpoint.transfers import receiving_shards

            shards = receiving_shards(plan, server, self.run.checkpoints)
        return run_attempt(
            plan,
            local=self._local_ranks(plan, kept),
            server=server,
            interrupts=self.interrupts,
            show=first.pass_on,
            on_agreement=partial(self.recorder.keep_agreement, self.table),
            shards=shards,
            observers=[
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
