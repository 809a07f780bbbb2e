"""The start of a run on the head: lock, the other nodes, data, plan, ranks, restarts, result."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.agree.agreement import Agreement
from unisono.agree.report import RankReport
from unisono.causes import Verdict
from unisono.checkpoint.signing import user_key
from unisono.checkpoint.store import CheckpointStore
from unisono.config import LoadedConfig
from unisono.errors import Disagreed, IntegrityError
from unisono.events import Message
from unisono.facts.storage import leave_nonce, remove_nonce
from unisono.launch.asked import TrainRequest
from unisono.launch.attempt import Attempt, Show, run_attempt, say
from unisono.launch.bounded import RunsDisk, leave
from unisono.launch.claim import Claim, claim
from unisono.launch.first_checkpoint import FirstCheckpoint, still_due, with_rehearsal
from unisono.launch.gathering import look_alone
from unisono.launch.interrupts import Interrupts, Stopped, exit_code_of
from unisono.launch.kept import KeptMemory, keeping_ranks
from unisono.launch.layout import Layout, lay_out, offer_of
from unisono.launch.node_report import NONCE_FILE
from unisono.launch.nodes.party import Party
from unisono.launch.nodes.refusal import refusals_told
from unisono.launch.outcome import Ending, ending_of, result_of
from unisono.launch.planning import Here, make_plan, prepare
from unisono.launch.rank_environment import interface_name, rank_environments
from unisono.launch.ranks import LocalRanks
from unisono.launch.record import Table, draw, keep_refusal, keep_tail, write_agreement, write_decision
from unisono.launch.rescue import Found, is_elsewhere, rescue
from unisono.launch.restart import Death, may_restart
from unisono.launch.resuming import find_resume_point, with_changes
from unisono.launch.stored import bring_back
from unisono.launch.together import Together, together
from unisono.launch.uploading import Uploading
from unisono.launch.verifier import Verifier
from unisono.plan import ResumePoint, RunPlan
from unisono.rundir import RunDir
from unisono.rundir.result import RunResult, set_verdict, write_result
from unisono.rundir.start import StartDecision, refuse_if_shrunk


@dataclass
class Start:
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
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.disk = RunsDisk(self.show)

    def run(self, loaded: LoadedConfig, here: Here) -> dict[str, Any]:
        """To its end; gives the object of result.json."""
        with self.stack as stack:
            with refusals_told(self.party) if self.party is not None else contextlib.nullcontext():
                if self.request.resume:
                    bring_back(
                        loaded.config, here.environment, host=here.machine.host, programs=self.request.programs,
                        trust=self.request.trust, show=self.show,
                    )  # fmt: skip
                claimed = stack.enter_context(
                    claim(
                        loaded.config, host=here.machine.host, resume=self.request.resume, fresh=self.request.fresh,
                        say=lambda text: say(self.show, text), allow=self.request.allowed,
                    )
                )  # fmt: skip
            try:
                with self._others(loaded, here, claimed.run) as others:
                    result = self._train(loaded, here, claimed, others)
            except Disagreed as error:
                keep_refusal(claimed.run, loaded.config, self.table, error, command=self.request.command)
                claimed.worth_keeping = True
                raise
            if self.uploading is not None:  # the other nodes have ended: they need not wait for it
                self.uploading.wait()
            return result

    @contextlib.contextmanager
    def _others(self, loaded: LoadedConfig, here: Here, run: RunDir) -> Iterator[Together | None]:
        """The other nodes, once all of them are here and agree; None where there are none."""
        if self.party is None:
            yield None
            return
        nonce = leave_nonce(run.root)
        try:
            with together(
                self.request, loaded, here, self.party, welcome={NONCE_FILE: nonce}, table=self.table
            ) as others:  # fmt: skip
                yield others
        finally:
            with contextlib.suppress(OSError):  # an empty file in a folder that is gone or full is no matter
                remove_nonce(run.root, nonce)

    def _train(
        self, loaded: LoadedConfig, here: Here, claimed: Claim, others: Together | None
    ) -> dict[str, Any]:
        CheckpointStore(claimed.run.checkpoints, key=user_key(here.environment.settings_dir)).sweep()
        prepared, layout = self._prepare(loaded, here, others)
        plan = plan_start(
            self.request, loaded, here, run=claimed.run, decision=claimed.decision, prepared=prepared, show=self.show,
            layout=layout,
        )  # fmt: skip
        plan = with_rehearsal(plan, claimed.run, wanted=self.request.rehearse)
        recorder = _Recorder(claimed, plan, self.show)
        if plan.config.checkpoint.storage is not None:
            self.uploading = self.stack.enter_context(
                Uploading(plan, claimed.run, programs=self.request.programs, leftovers=here.leftovers, interrupts=self.interrupts,
                          show=self.show)
            )  # fmt: skip
        deaths: list[Death] = []
        restarts: list[dict[str, Any]] = []
        while True:
            write_decision(claimed.run, plan)
            if plan.world_size > 1:
                write_agreement(claimed.run, self.table)
            self.show({"kind": "plan", "time": time.time(), **plan.to_json()})
            with KeptMemory(keeping_ranks(plan, 0)) as kept:
                attempt = self._attempt(plan, here, claimed.run, recorder, others, kept)
                ending = self._told(claimed.run, plan, attempt, ending_of(attempt, plan), others)
                store = CheckpointStore(claimed.run.checkpoints, key=user_key(here.environment.settings_dir))
                found = Found.here(kept)
                if others is not None and is_elsewhere(plan, attempt):
                    others.collect(
                        plan, attempt, found, checkpoints=claimed.run.checkpoints, interrupts=self.interrupts
                    )
                if self._rescued(claimed.run, plan, attempt, found, store):
                    ending = replace(ending, fields=ending_of(attempt, plan).fields)
            verdict = ending.verdict
            if verdict is None or not self._goes_on(plan, attempt, verdict, deaths):
                return self._finish(claimed, plan, attempt, ending, restarts, others)
            deaths.append(Death(verdict.cause, attempt.step))
            store.sweep()  # what the dead ranks were writing
            set_verdict(claimed.run, None)
            try:
                decision = StartDecision("resume", plan.run_id, "restarted")
                with self.interrupts.raising():  # reading a large checkpoint through may take minutes
                    resume, _ = find_resume_point(
                        claimed.run, decision, here.environment, self.show, trust=self.request.trust
                    )
            except Stopped as stopped:
                ending = Ending(exit_code_of(stopped.number), ending.fields)
                return self._finish(claimed, plan, attempt, ending, restarts, others)
            except (
                IntegrityError
            ) as error:  # the disk that killed the rank may have taken the checkpoints, too
                ending = Ending(error.exit_code, ending.fields, verdict, error)
                return self._finish(claimed, plan, attempt, ending, restarts, others)
            restarts.append(
                {"verdict": verdict.to_json(), "from_step": resume.step if resume else 0, "seconds": attempt.seconds}
            )  # fmt: skip
            again = {
                "resume": resume,
                "resume_reason": _again(verdict.cause, resume),
                "epoch": plan.epoch + 1,
                "rehearse": still_due(plan, resume),
            }
            plan = plan.model_copy(update=again)

    def _prepare(
        self, loaded: LoadedConfig, here: Here, others: Together | None
    ) -> tuple[dict[str, Any], Layout]:
        """What is in data and model, on all nodes alike, and which rank runs where."""
        if others is not None:
            prepared = others.prepare(
                lambda show: prepare(self.request, loaded, here.environment, ledger=True, show=show)
            )
            return prepared, lay_out([offer_of(report) for report in others.meeting.reports])
        layout = lay_out([here.offer])
        if layout.world_size > 1:
            report, agreement = look_alone(self.request, loaded, here)
            self.table.nodes, self.table.of_nodes = [report], agreement
            _judge(agreement, self.show)
        return prepare(self.request, loaded, here.environment, ledger=True, show=self.show), layout

    def _attempt(
        self, plan: RunPlan, here: Here, run: RunDir, recorder: "_Recorder", others: Together | None, kept: KeptMemory
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
            write_agreement(run, self.table)
            for verdict in agreement.warnings:
                recorder.show(_as_warning(verdict))

        return run_attempt(
            plan, local=local, server=server, interrupts=self.interrupts, show=recorder.show, on_agreement=keep,
            companions=[
                FirstCheckpoint(plan, programs=self.request.programs, leftovers=here.leftovers, show=recorder.show),
                Verifier(run.checkpoints, user_key(here.environment.settings_dir), recorder.show, self.request.rhythm),
                *([self.uploading] if self.uploading else []),
            ],
        )  # fmt: skip

    def _told(
        self, run: RunDir, plan: RunPlan, attempt: Attempt, ending: Ending, others: Together | None
    ) -> Ending:
        """Keeps the evidence of a verdict, and says it on all nodes."""
        if ending.verdict is None:
            return ending
        if others is not None:
            others.tell_verdict(ending.verdict)
        self.disk.write("the verdict", lambda: self._keep_evidence(run, plan, attempt, ending))
        self.show({"kind": "verdict", "time": time.time(), **ending.verdict.to_json()})
        return ending

    def _keep_evidence(self, run: RunDir, plan: RunPlan, attempt: Attempt, ending: Ending) -> None:
        end = attempt.decision.culprit if attempt.decision else None
        if end is not None and end.tail and ending.error is None:
            path = keep_tail(run, plan.ranks[end.rank], end.tail)
            say(self.show, f"the end of the log of rank {end.rank} is kept in {path}")
        set_verdict(run, ending.verdict)

    def _rescued(
        self, run: RunDir, plan: RunPlan, attempt: Attempt, found: Found, store: CheckpointStore
    ) -> bool:
        work = partial(rescue, run, plan, attempt, found, store=store, show=self.show)
        return self.disk.write("what the ranks kept in memory", work) is True

    def _goes_on(self, plan: RunPlan, attempt: Attempt, verdict: Verdict, deaths: list[Death]) -> bool:
        if self.interrupts.first is not None or self.disk.hung is not None:
            return False
        if attempt.lost:
            say(self.show, "a node is gone: the run ends, and goes on when it is started again on all nodes")
            return False
        again, why = may_restart(verdict, step=attempt.step, earlier=deaths, allowed=plan.config.restarts)
        say(self.show, why)
        return again

    def _finish(
        self, claimed: Claim, plan: RunPlan, attempt: Attempt, ending: Ending, restarts: list[dict[str, Any]],
        others: Together | None,
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

    def _keep_result(
        self, run: RunDir, plan: RunPlan, attempt: Attempt, ending: Ending, result: dict[str, Any]
    ) -> None:
        stopped_before_training = ending.exit_code in (75, 130) and not attempt.ready
        if not (stopped_before_training and run.result.exists()):  # leave what was
            write_result(run, RunResult.from_json(result))
        draw(run, title=_title(plan))


class _Recorder:
    """Passes messages on, and does what a first step and an evaluation are occasions for."""

    def __init__(self, claimed: Claim, plan: RunPlan, show: Show) -> None:
        self._run = claimed.run
        self._title = _title(plan)
        self._show = show
        self._stepped = False

    def show(self, message: Message) -> None:
        if message["kind"] == "step" and not self._stepped:
            self._stepped = True  # from here on the earlier start's end is history
            self._run.result.unlink(missing_ok=True)
            set_verdict(self._run, None)
        if message["kind"] == "eval":
            draw(self._run, title=self._title)
        self._show(message)


def _judge(agreement: Agreement, show: Show) -> None:
    """Refuses what the node itself is not fit for, and says the rest.

    Raises:
        Disagreed: with the first fatal verdict.
    """
    if agreement.fatal:
        raise Disagreed.of(agreement.fatal[0].summary, verdict=agreement.fatal[0])
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
    here: Here,
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


def _again(cause: str, resume: ResumePoint | None) -> str:
    return f"restarted after {cause}, from " + (f"step {resume.step}" if resume else "the beginning")


def _title(plan: RunPlan) -> str:
    return f"{Path(plan.output_dir).name}: {plan.config.model.path}"
