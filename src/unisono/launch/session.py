"""One training start, whole: config, decision, lock, data, plan, worker, restarts, result."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.causes import Verdict
from unisono.checkpoint.resume import resume_point
from unisono.checkpoint.signing import user_key
from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.trouble import Damage
from unisono.config import LoadedConfig
from unisono.errors import IntegrityError
from unisono.events import Message
from unisono.facts import package_versions, read_environment, read_machine
from unisono.launch.asked import TrainRequest, load_asked, refuse_live_launcher
from unisono.launch.attempt import Attempt, Show, run_attempt
from unisono.launch.claim import Claim, claim
from unisono.launch.interrupts import Interrupts, Stopped, exit_code_of
from unisono.launch.layout import Layout
from unisono.launch.outcome import NOTHING_DONE, Ending, ending_of, result_of
from unisono.launch.planning import Here, look_around, make_plan, prepare
from unisono.launch.rank_environment import rank_environments
from unisono.launch.ranks import LocalRanks
from unisono.launch.record import Table, draw, keep_tail, write_agreement, write_decision
from unisono.launch.restart import Death, may_restart
from unisono.plan import ResumePoint, RunPlan
from unisono.rundir import RunDir
from unisono.rundir.continuing import check_same_run
from unisono.rundir.result import RunResult, set_verdict, write_result
from unisono.rundir.start import StartDecision, decide_start, refuse_if_shrunk

_LOOPBACK = "lo"


def train(request: TrainRequest, show: Show) -> dict[str, Any]:
    """Carries a start from its config to its end; gives the object of result.json.

    Raises:
        UnisonoError: if it is refused before anything was started.
    """
    began = time.monotonic()
    with Interrupts() as interrupts:
        try:
            result = _Start(request, show, interrupts, began).run()
        except Stopped as stopped:
            say(show, f"{stopped.number.name} before anything was started: nothing has changed")
            result = result_of(
                Ending(exit_code_of(stopped.number), NOTHING_DONE), run_id="", output_dir="", restarts=[],
                seconds=time.monotonic() - began,
            )  # fmt: skip
    show({"kind": "result", "time": time.time(), **result})
    return result


def plan_only(request: TrainRequest, show: Show) -> RunPlan:
    """The plan of a start that is not made; nothing is left in the run's directory.

    Raises:
        UnisonoError: whatever the start itself would be refused for before its worker.
    """
    loaded, here = _look(request)
    run = RunDir(Path(loaded.config.output_dir))
    decision = decide_start(run, loaded.config, resume=request.resume, fresh=request.fresh)
    prepared = prepare(request, loaded, here.environment, ledger=False, show=show)
    return _plan(request, loaded, here, run=run, decision=decision, prepared=prepared, show=show)


def _look(request: TrainRequest) -> tuple[LoadedConfig, Here]:
    """The config, and what is here for it."""
    loaded = load_asked(request)
    environment = read_environment()
    refuse_live_launcher(environment, request)
    return loaded, look_around(request, loaded, read_machine(request.probe), environment)


def say(show: Show, text: str) -> None:
    """A line for people."""
    show({"kind": "note", "time": time.time(), "text": text})


@dataclass
class _Start:
    request: TrainRequest
    show: Show
    interrupts: Interrupts
    began: float

    def run(self) -> dict[str, Any]:
        loaded, here = _look(self.request)
        with claim(
            loaded.config, host=here.machine.host, resume=self.request.resume, fresh=self.request.fresh,
            say=lambda text: say(self.show, text),
        ) as claimed:  # fmt: skip
            return self._train(loaded, here, claimed)

    def _train(self, loaded: LoadedConfig, here: Here, claimed: Claim) -> dict[str, Any]:
        CheckpointStore(claimed.run.checkpoints, key=user_key(here.environment.settings_dir)).sweep()
        prepared = prepare(self.request, loaded, here.environment, ledger=True, show=self.show)
        plan = _plan(
            self.request, loaded, here, run=claimed.run, decision=claimed.decision, prepared=prepared, show=self.show
        )  # fmt: skip
        recorder = _Recorder(claimed, plan, self.show)
        table = Table()
        deaths: list[Death] = []
        restarts: list[dict[str, Any]] = []
        while True:
            write_decision(claimed.run, plan)
            self.show({"kind": "plan", "time": time.time(), **plan.to_json()})
            attempt = self._attempt(plan, here, claimed.run, recorder)
            if plan.world_size > 1:
                table.add_ranks(attempt.reports, attempt.agreement)
                write_agreement(claimed.run, table)
            ending = ending_of(attempt, plan)
            ending = self._told(claimed.run, plan, attempt, ending)
            verdict = ending.verdict
            if verdict is None or not self._goes_on(plan, attempt, verdict, deaths):
                return self._finish(claimed, plan, attempt, ending, restarts)
            deaths.append(Death(verdict.cause, attempt.step))
            set_verdict(claimed.run, None)
            try:
                decision = StartDecision("resume", plan.run_id, "restarted")
                resume, _ = _resume_point(claimed.run, decision, here, self.show)
            except (
                IntegrityError
            ) as error:  # the disk that killed the rank may have taken the checkpoints, too
                ending = Ending(error.exit_code, ending.fields, verdict, error)
                return self._finish(claimed, plan, attempt, ending, restarts)
            restarts.append(
                {"verdict": verdict.to_json(), "from_step": resume.step if resume else 0, "seconds": attempt.seconds}
            )  # fmt: skip
            plan = plan.model_copy(
                update={
                    "resume": resume,
                    "resume_reason": _again(verdict.cause, resume),
                    "epoch": plan.epoch + 1,
                }
            )

    def _attempt(self, plan: RunPlan, here: Here, run: RunDir, recorder: "_Recorder") -> Attempt:
        places = plan.on_node(0)
        environments = rank_environments(
            plan, 0, variables=here.leftovers, interface=_LOOPBACK, debug_comm=self.request.debug_comm
        )
        local = LocalRanks(
            places, run, run.plan, self.request.programs, environments,
            from_step=plan.resume.step if plan.resume else 0, talks=plan.world_size > 1,
        )  # fmt: skip
        return run_attempt(plan, local=local, server=None, interrupts=self.interrupts, show=recorder.show)

    def _told(self, run: RunDir, plan: RunPlan, attempt: Attempt, ending: Ending) -> Ending:
        """Keeps the evidence of a verdict, and shows it."""
        if ending.verdict is None:
            return ending
        end = attempt.decision.culprit if attempt.decision else None
        if end is not None and end.tail and ending.error is None:
            path = keep_tail(run, plan.ranks[end.rank], end.tail)
            say(self.show, f"the end of the log of rank {end.rank} is kept in {path}")
        set_verdict(run, ending.verdict)
        self.show({"kind": "verdict", "time": time.time(), **ending.verdict.to_json()})
        return ending

    def _goes_on(self, plan: RunPlan, attempt: Attempt, verdict: Verdict, deaths: list[Death]) -> bool:
        if self.interrupts.first is not None:
            return False
        again, why = may_restart(verdict, step=attempt.step, earlier=deaths, allowed=plan.config.restarts)
        say(self.show, why)
        return again

    def _finish(
        self, claimed: Claim, plan: RunPlan, attempt: Attempt, ending: Ending, restarts: list[dict[str, Any]]
    ) -> dict[str, Any]:
        result = result_of(
            ending, run_id=plan.run_id, output_dir=plan.output_dir, restarts=restarts,
            seconds=time.monotonic() - self.began,
        )  # fmt: skip
        if ending.error is not None:
            self.show({"kind": "refused", "time": time.time(), **ending.error.to_json()})
        stopped_before_training = ending.exit_code in (75, 130) and not attempt.ready
        if not (stopped_before_training and claimed.run.result.exists()):  # leave what was
            write_result(claimed.run, RunResult.from_json(result))
        claimed.worth_keeping = attempt.ready or ending.exit_code not in (2, 75, 130) or bool(restarts)
        draw(claimed.run, title=_title(plan))
        return result


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


def _plan(
    request: TrainRequest,
    loaded: LoadedConfig,
    here: Here,
    *,
    run: RunDir,
    decision: StartDecision,
    prepared: dict[str, Any],
    show: Show,
    layout: Layout | None = None,
) -> RunPlan:
    """Finds the checkpoint to go on from, and decides the rest."""
    resume, reason = _resume_point(run, decision, here, show)
    plan = make_plan(
        request, loaded, here, layout=layout, prepared=prepared, run_id=decision.run_id, resume=resume, resume_reason=reason
    )  # fmt: skip
    refuse_if_shrunk(decision, done_steps=resume.step if resume else 0, total_steps=plan.total_steps)
    if resume is None:
        return plan
    changes = check_same_run(run, plan.to_json(), package_versions())
    return plan.model_copy(update={"warnings": [*plan.warnings, *changes]})


def _resume_point(
    run: RunDir, decision: StartDecision, here: Here, show: Show
) -> tuple[ResumePoint | None, str]:
    """The newest intact checkpoint, what is wrong with newer ones told; None where the run has none yet. And the reason.

    Raises:
        IntegrityError: if there are checkpoints and none can be read.
    """
    store = CheckpointStore(run.checkpoints, key=user_key(here.environment.settings_dir))

    def on_damage(path: Path, damage: Damage) -> None:
        show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": f"checkpoint_{damage.kind}",
                "text": f"{path.name}: {damage}",
                "fix": "",
            }
        )

    return resume_point(store, decision, on_damage)


def _again(cause: str, resume: ResumePoint | None) -> str:
    return f"restarted after {cause}, from " + (f"step {resume.step}" if resume else "the beginning")


def _title(plan: RunPlan) -> str:
    return f"{Path(plan.output_dir).name}: {plan.config.model.path}"
