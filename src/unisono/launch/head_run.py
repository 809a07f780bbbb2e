"""The start of a run on the head: lock, the other nodes, data, plan, ranks, restarts, result."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unisono.agree.agreement import Agreement
from unisono.agree.reports import RankReport
from unisono.causes import Verdict
from unisono.checkpoint.manifest import user_key
from unisono.checkpoint.store import CheckpointStore
from unisono.config import LoadedConfig
from unisono.errors import Disagreed, UnfitError, UnisonoError, as_usage_error
from unisono.events import Message, Show, say
from unisono.facts.storage import leave_nonce, remove_nonce
from unisono.files import make_private_dir
from unisono.launch.curve_drawing import Drawing
from unisono.launch.head_nodes import HeadNodes, together, with_witness
from unisono.launch.meeting_entry import is_about_nodes, look_alone, refusal_alone
from unisono.launch.node_report import NONCE_FILE
from unisono.launch.outcome import NOTHING_DONE, Ending, ending_of, result_of
from unisono.launch.output_watch import OutputWatch
from unisono.launch.planning import LocalNode, make_plan, prepare
from unisono.launch.rank_layout import Layout, lay_out, offer_of
from unisono.launch.replica_drift import ReplicaDrift
from unisono.launch.restarts import Restarts
from unisono.launch.run_claim import Claim, claim, find_resume_point, with_changes
from unisono.launch.run_records import Table, keep_refusal, note_in_plan, write_agreement, write_decision
from unisono.launch.srun_front import with_step
from unisono.launch.train_request import TrainRequest
from unisono.plan import RunPlan
from unisono.remote_checkpoint.download import bring_back
from unisono.remote_checkpoint.first_checkpoint import FirstCheckpoint, with_rehearsal
from unisono.remote_checkpoint.rescue import RescuedStep, is_elsewhere, rescue
from unisono.remote_checkpoint.storage_trial import copying, storage_tried
from unisono.remote_checkpoint.upload import Uploading
from unisono.remote_checkpoint.verifier import Verifier
from unisono.rendezvous.head_address import refusals_told
from unisono.rendezvous.party import Party
from unisono.rundir import RunDir
from unisono.rundir.records import RunResult, complete_verdict, set_verdict, write_result
from unisono.rundir.start_decision import StartDecision, refuse_if_shrunk
from unisono.supervise.bounded_io import RunsDisk, leave
from unisono.supervise.child_process import interface_name, rank_environments
from unisono.supervise.evidence import keep_evidence
from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of
from unisono.supervise.local_ranks import LocalRanks, SharedMemory, keeping_ranks
from unisono.supervise.rank_logs import LogEvents
from unisono.supervise.rank_supervisor import Attempt, run_attempt


@dataclass
class HeadRun:
    """The start of a run on this node, which is the head, with or without others."""

    request: TrainRequest
    show: Show
    interrupts: Interrupts
    began: float
    party: Party | None
    """This node among others; None for a job of one node."""
    table: Table = field(default_factory=Table)
    uploading: Uploading | None = None
    """Beside the ranks, over all their starts; None without checkpoint.storage."""
    log_events: LogEvents = field(default_factory=lambda: LogEvents([]))
    """What the logs of this start's ranks say of themselves."""
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    disk: RunsDisk = field(init=False)
    drawing: Drawing = field(init=False)
    """Once the run's directory is claimed."""

    def run(self, loaded: LoadedConfig, here: LocalNode) -> dict[str, Any]:
        """To its end; gives the object of result.json."""
        with self.stack as stack:
            telling = refusals_told(self.party) if self.party is not None else contextlib.nullcontext()
            with telling, as_usage_error():
                claimed = stack.enter_context(
                    claim(
                        loaded.config, host=here.machine.host, port=self.party.topology.head_port if self.party is not None else 0,
                        resume=self.request.resume, fresh=self.request.fresh, say=lambda text: say(self.show, text),
                        allow=self.request.allowed,
                    )
                )  # fmt: skip
            self.disk = RunsDisk(claimed.run.root, self.show)
            try:
                with self._others(loaded, here, claimed.run) as others:
                    if self.request.resume:
                        self._bring_back(loaded, here, claimed, others)
                    result = self._train(loaded, here, claimed, others)
            except UnisonoError as error:
                if isinstance(error, UnfitError) and self.disk.hung is not None:
                    self._leave(error)
                if not is_about_nodes(error):
                    raise
                keep = partial(
                    keep_refusal, claimed.run, loaded.config, self.table, error, command=self.request.command
                )
                self.disk.write("why the ranks did not agree", keep)
                claimed.worth_keeping = True
                raise
            if self.uploading is not None:  # the other nodes have ended: they need not wait for it
                self.uploading.wait()
            return result

    @contextlib.contextmanager
    def _others(self, loaded: LoadedConfig, here: LocalNode, run: RunDir) -> Iterator[HeadNodes | None]:
        """The other nodes, once all of them are here and agree; None where there are none."""
        if self.party is None:
            yield None
            return
        nonce = self.disk.need("the mark for the other nodes", partial(leave_nonce, run.root))
        try:
            with together(
                self.request, loaded, here, self.party, welcome={NONCE_FILE: nonce}, table=self.table
            ) as others:  # fmt: skip
                yield others
        finally:
            self.disk.write("the mark for the other nodes", partial(remove_nonce, run.root, nonce))

    def _bring_back(
        self, loaded: LoadedConfig, here: LocalNode, claimed: Claim, others: HeadNodes | None
    ) -> None:
        """Where nothing is left here, from checkpoint.storage. It may take long: the other nodes are here already, and wait."""
        who = self.party.label if self.party is not None else ""

        def work(show: Show) -> bool:
            return bring_back(
                loaded.config, here.environment, who=who, programs=self.request.programs, trust=self.request.trust, show=show
            )  # fmt: skip

        if others.bring_back(work) if others is not None else work(self.show):
            claimed.decide_again(loaded.config, allow=self.request.allowed)

    def _train(
        self, loaded: LoadedConfig, here: LocalNode, claimed: Claim, others: HeadNodes | None
    ) -> dict[str, Any]:
        store = CheckpointStore(claimed.run.checkpoints, key=user_key(here.environment.settings_dir))
        self.disk.need("what is left of unfinished checkpoints", store.sweep)
        prepared, layout = self._prepare(loaded, here, claimed, others)
        plan = plan_start(
            self.request, loaded, here, run=claimed.run, decision=claimed.decision, prepared=prepared, show=self.show,
            layout=layout,
        )  # fmt: skip
        plan = with_rehearsal(plan, claimed.run, wanted=self.request.rehearse)
        self.drawing = Drawing(claimed.run, title=_title(plan))
        recorder = _Recorder(claimed.run, self.drawing, self.disk, self.show)
        if plan.config.checkpoint.storage is not None:
            self.uploading = self.stack.enter_context(
                Uploading(plan, claimed.run, programs=self.request.programs, leftovers=here.leftovers, interrupts=self.interrupts,
                          show=self.show)
            )  # fmt: skip
        going_on = Restarts(self.request, loaded, here, claimed.run, prepared, others, self.table, self.show)
        recorder.on_step = going_on.stepped
        while True:
            write_decision = partial(self._write_decision, claimed, plan)
            self.disk.need("the plan", write_decision)
            self.show({"kind": "plan", "time": time.time(), **plan.to_json()})
            with SharedMemory(keeping_ranks(plan, 0)) as kept:
                watch = OutputWatch(
                    plan, claimed.run, claimed.lock, self.disk, recorder.show, write_decision=write_decision
                )
                attempt = self._attempt(plan, here, claimed.run, recorder, others, kept, watch)
                watch.settle(attempt)
                ending = with_witness(ending_of(attempt, plan), attempt, plan, self.request.witness)
                ending = with_step(watch.judged(ending, attempt), here.environment.slurm_step)
                ending = self._told(claimed.run, plan, attempt, ending, others)
                store = CheckpointStore(claimed.run.checkpoints, key=user_key(here.environment.settings_dir))
                found = RescuedStep.here(kept)
                if others is not None and is_elsewhere(plan, attempt):
                    collect = partial(
                        others.collect, plan, attempt, found, checkpoints=claimed.run.checkpoints, interrupts=self.interrupts
                    )  # fmt: skip
                    self.disk.write("what the ranks of the other nodes kept in memory", collect)
                if self._rescued(claimed.run, plan, attempt, found, store):
                    ending = replace(ending, fields=ending_of(attempt, plan).fields)
            verdict = ending.verdict
            blocked = self.interrupts.first is not None or self.disk.hung is not None or self.disk.is_lost
            if verdict is None or blocked or not going_on.decide(plan, attempt, verdict):
                return self._finish(claimed, plan, attempt, ending, going_on.restarts, others)
            try:
                with self.interrupts.raising():  # reading a large checkpoint through may take minutes
                    plan = going_on.next_plan(plan, attempt, verdict)
            except Stopped as stopped:
                ending = Ending(exit_code_of(stopped.number), ending.fields)
                return self._finish(claimed, plan, attempt, ending, going_on.restarts, others)
            except UnisonoError as error:
                ending = self._cannot_go_on(claimed.run, plan, ending, error)
                return self._finish(claimed, plan, attempt, ending, going_on.restarts, others)

    def _cannot_go_on(self, run: RunDir, plan: RunPlan, ending: Ending, error: UnisonoError) -> Ending:
        """The nodes do not agree any more; or the disk that killed the rank may have taken the checkpoints, too."""
        verdict = error.verdict
        if verdict is None or not is_about_nodes(error):
            return Ending(error.exit_code, ending.fields, ending.verdict, error)
        if not (isinstance(error, Disagreed) and error.said):
            self.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})

        def keep() -> None:
            set_verdict(run, verdict)
            if plan.world_size > 1:
                write_agreement(run, self.table)

        self.disk.write("the verdict", keep)
        return Ending(error.exit_code, ending.fields, verdict)

    def _write_decision(self, claimed: Claim, plan: RunPlan) -> None:
        run = claimed.run
        make_private_dir(run.root)
        claimed.lock.keep()  # preparing the data may have taken hours, and somebody may have removed the directory
        write_decision(run, plan)
        if plan.world_size > 1:
            write_agreement(run, self.table)

    def _prepare(
        self, loaded: LoadedConfig, here: LocalNode, claimed: Claim, others: HeadNodes | None
    ) -> tuple[dict[str, Any], Layout]:
        """What is in data and model, on all nodes alike, and which rank runs where. Meanwhile checkpoint.storage is tried."""

        def work(show: Show) -> dict[str, Any]:
            with storage_tried(
                loaded.config, claimed.run, claimed.decision.run_id, programs=self.request.programs, leftovers=here.leftovers, show=show
            ):  # fmt: skip
                return prepare(self.request, loaded, here.environment, ledger=True, show=show)

        if others is not None:
            prepared = others.prepare(work)
            return prepared, lay_out([offer_of(report) for report in others.meeting.reports])
        layout = lay_out([here.offer])
        if layout.world_size > 1:
            report, agreement = look_alone(self.request, loaded, here)
            self.table.nodes, self.table.of_nodes = [report], agreement
            _judge(agreement, self.show)
        return work(self.show), layout

    def _attempt(
        self, plan: RunPlan, here: LocalNode, run: RunDir, recorder: "_Recorder", others: HeadNodes | None, kept: SharedMemory,
        watch: OutputWatch,
    ) -> Attempt:  # fmt: skip
        interface = interface_name(self.request.probes.network.interfaces(), plan.nodes[0].address)
        environments = rank_environments(
            plan, 0, variables=here.leftovers, interface=interface, debug_comm=self.request.debug_comm
        )
        local = LocalRanks(
            plan.on_node(0), run, run.plan, self.request.programs, environments,
            from_step=plan.resume.step if plan.resume else 0, talks=plan.world_size > 1, kept=kept,
        )  # fmt: skip
        server = others.hand_over(plan) if others is not None else None

        def keep(reports: Mapping[int, RankReport], agreement: Agreement) -> None:
            self.table.add_ranks(reports, agreement)
            self.disk.write("agreement.json", lambda: write_agreement(run, self.table))
            for verdict in agreement.warnings:
                recorder.show(_as_warning(verdict))

        self.log_events = LogEvents(plan.ranks)
        first = FirstCheckpoint(
            plan, programs=self.request.programs, leftovers=here.leftovers, show=recorder.show
        )
        shards = None
        if server is not None:
            from unisono.remote_checkpoint.shard_transfer import (
                taking_shards,  # one node alone needs no channel
            )

            shards = taking_shards(plan, server, run.checkpoints)
        return run_attempt(
            plan, local=local, server=server, interrupts=self.interrupts, show=first.pass_on, on_agreement=keep, shards=shards,
            companions=[
                watch,
                first,
                ReplicaDrift(plan, recorder.show),
                self.log_events,
                Verifier(run.checkpoints, user_key(here.environment.settings_dir), recorder.show, self.request.rhythm),
                *copying(plan, self.uploading, programs=self.request.programs, leftovers=here.leftovers, show=recorder.show),
            ],
        )  # fmt: skip

    def _told(
        self, run: RunDir, plan: RunPlan, attempt: Attempt, ending: Ending, others: HeadNodes | None
    ) -> Ending:
        """Says a verdict on all nodes, and keeps its evidence, which it cites from then on."""
        if ending.verdict is None:
            return ending
        verdict = self.log_events.cited(ending.verdict)
        if others is not None:
            others.tell_verdict(verdict)
        self.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
        cited = self.disk.write("the verdict", lambda: self._keep_evidence(run, plan, attempt, verdict))
        return replace(ending, verdict=cited or verdict)

    def _keep_evidence(self, run: RunDir, plan: RunPlan, attempt: Attempt, verdict: Verdict) -> Verdict:
        set_verdict(run, verdict)  # at once: what it cites takes seconds
        files = keep_evidence(
            run, verdict, table=Path(plan.data.cache_dir), raw=attempt.raw, programs=self.request.programs,
            looks=attempt.picture.looks if attempt.picture is not None else {},
        )  # fmt: skip
        cited = verdict.model_copy(update={"evidence": (*verdict.evidence, *files)})
        complete_verdict(run, cited)
        if files:
            say(self.show, f"stacks, recordings and logs that it cites: {run.evidence}")
        return cited

    def _rescued(
        self, run: RunDir, plan: RunPlan, attempt: Attempt, found: RescuedStep, store: CheckpointStore
    ) -> bool:
        judged = attempt.decision.verdict if attempt.decision is not None else None
        if judged is not None and judged.cause == "replicas_diverged":
            return False  # what is in memory may be what has drifted
        work = partial(rescue, run, plan, attempt, found, store=store, show=self.show)
        return self.disk.write("what the ranks kept in memory", work) is True

    def _finish(
        self, claimed: Claim, plan: RunPlan, attempt: Attempt, ending: Ending, restarts: list[dict[str, Any]],
        others: HeadNodes | None,
    ) -> dict[str, Any]:  # fmt: skip
        result = result_of(
            ending, run_id=plan.run_id, output_dir=plan.output_dir, restarts=restarts,
            seconds=time.monotonic() - self.began,
        )  # fmt: skip
        if ending.error is not None:
            self.show({"kind": "refused", "time": time.time(), **ending.error.to_json()})
        claimed.trained = attempt.ready or bool(restarts)
        claimed.worth_keeping = attempt.ready or ending.exit_code not in (2, 75, 130) or bool(restarts)
        self.disk.write(
            "how the run ended", lambda: self._keep_result(claimed.run, plan, attempt, ending, result)
        )
        if others is not None:
            others.end(result, ending)
        if self.disk.hung is not None:  # to give the lock back would hang, too
            self.show({"kind": "result", "time": time.time(), **result})
            leave(ending.exit_code)
        return result

    def _leave(self, error: UnfitError) -> NoReturn:
        """Ends where the run's directory does not answer: to give the lock back would hang, too."""
        self.show({"kind": "refused", "time": time.time(), **error.to_json()})
        ending, seconds = Ending(error.exit_code, NOTHING_DONE, error=error), time.monotonic() - self.began
        result = result_of(ending, run_id="", output_dir=str(self.disk.root), restarts=[], seconds=seconds)
        self.show({"kind": "result", "time": time.time(), **result})
        leave(error.exit_code)

    def _keep_result(
        self, run: RunDir, plan: RunPlan, attempt: Attempt, ending: Ending, result: dict[str, Any]
    ) -> None:
        stopped_before_training = ending.exit_code in (75, 130) and not attempt.ready
        if not (stopped_before_training and run.result.exists()):  # leave what was
            write_result(run, RunResult.from_json(result))
        self.drawing.finish()


class _Recorder:
    """Passes messages on, and does what a first step and an evaluation are occasions for."""

    def __init__(self, run: RunDir, drawing: Drawing, disk: RunsDisk, show: Show) -> None:
        self._run = run
        self._drawing = drawing
        self._disk = disk
        self._show = show
        self._stepped = False
        self.on_step: Callable[[], None] = lambda: None

    def show(self, message: Message) -> None:
        if message["kind"] == "step":
            self.on_step()
        if message["kind"] == "step" and not self._stepped:
            self._stepped = True
            self._disk.later(self._forget_earlier_end)
        if message["kind"] == "eval":
            self._drawing.again()
        self._note_kept(message)
        self._show(message)

    def _note_kept(self, message: Message) -> None:
        """How many steps a death may cost is measured by the ranks, and belongs to the plan."""
        told = (
            message.get("facts")
            if message["kind"] == "ready"
            else message
            if message["kind"] == "kept"
            else None
        )
        name = "every" if message["kind"] == "kept" else "kept_every"
        if isinstance(told, dict) and name in told and "rank" not in message:
            self._disk.later(partial(note_in_plan, self._run, kept_every=told[name]))

    def _forget_earlier_end(self) -> None:
        """From here on it is history."""
        self._run.result.unlink(missing_ok=True)
        set_verdict(self._run, None)


def _judge(agreement: Agreement, show: Show) -> None:
    """Refuses what the node itself is not fit for, and says the rest.

    Raises:
        UnfitError, UsageError: with the first fatal verdict.
    """
    if agreement.fatal:
        raise refusal_alone(agreement.fatal[0])
    for verdict in agreement.warnings:
        show(_as_warning(verdict))


def _as_warning(verdict: Verdict) -> Message:
    fix = "; ".join(verdict.fix)
    return {
        "kind": "warning",
        "time": time.time(),
        "code": verdict.cause,
        "text": verdict.summary,
        "fix": fix,
    }


def plan_start(
    request: TrainRequest,
    loaded: LoadedConfig,
    here: LocalNode,
    *,
    run: RunDir,
    decision: StartDecision,
    prepared: dict[str, Any],
    show: Show,
    layout: Layout,
) -> RunPlan:
    """Finds the checkpoint to go on from, and decides the rest."""
    resume, reason = find_resume_point(run, decision, here.environment, show, trust=request.trust)
    plan = make_plan(
        request, loaded, here, layout=layout, prepared=prepared, run_id=decision.run_id, resume=resume, resume_reason=reason
    )  # fmt: skip
    plan = with_changes(plan, run, decision, request)
    refuse_if_shrunk(decision, done_steps=resume.step if resume else 0, total_steps=plan.total_steps)
    return plan


def _title(plan: RunPlan) -> str:
    return f"{Path(plan.output_dir).name}: {plan.config.model.path}"
