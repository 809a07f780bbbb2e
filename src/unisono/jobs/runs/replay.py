"""Runs some steps of a run again from one of its checkpoints, and compares what they give with
metrics.jsonl, bit for bit.

All happens on this machine and in a directory that is gone afterwards; the run's own directory is
only read.
"""

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.base.errors import IntegrityError, UnfitError, UsageError
from unisono.base.files import read_json, read_object
from unisono.base.messages import Message, Show
from unisono.base.text import one_line, why_unreadable
from unisono.base.user_key import user_key
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import RankReport
from unisono.guard.facts import Probes, read_environment, read_machine
from unisono.guard.facts.environment import decisive_versions
from unisono.guard.places.placement import NodeOffer, choose_devices, lay_out
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import read_holder
from unisono.guard.rundir.records import iterate_metrics
from unisono.guard.supervise.child_process import Programs, interface_name
from unisono.guard.supervise.interrupts import Interrupts
from unisono.guard.supervise.local_ranks import LocalRanks
from unisono.guard.supervise.rank_supervisor import Attempt, run_attempt
from unisono.guard.supervise.task_process import refusal
from unisono.jobs.runs.planning import PreparedInputs, run_prepare
from unisono.jobs.runs.rank_environment import rank_environments
from unisono.jobs.runs.run_records import ending_of, write_decision
from unisono.jobs.runs.train_request import refuse_code
from unisono.trainer.checkpoint.store import CheckpointStore, IntactCheckpoint
from unisono.trainer.config.own_code import own_code_of
from unisono.trainer.plan import ResumePoint, RunPlan
from unisono.trainer.plan.task_requests import PrepareRequest

COMPARED = ("loss", "grad_norm")
_ROUNDING = 1e-2  # relative; the effect of a different order of summation on a loss within a few steps stays far below


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that differs; None: it was NaN."""

    step: int
    name: str
    logged: float | None
    again: float | None

    @property
    def is_rounding(self) -> bool:
        """Whether rounding can have made it."""
        if self.logged is None or self.again is None:
            return False
        return math.isclose(self.logged, self.again, rel_tol=_ROUNDING)


@dataclass(frozen=True)
class Replayed:
    """Steps that were run again.

    Attributes:
        differences: all that came out otherwise, in order.
        explanations: why they may; empty where the same bits had to come out.
        seconds: from the start of the ranks to their end.
    """

    checkpoint: int
    first: int
    last: int
    differences: tuple[Difference, ...] = ()
    explanations: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def steps(self) -> str:
        """`step 7` or `steps 7-9`."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"

    @property
    def is_right(self) -> bool:
        """Whether what came out is what had to: the same bits, or the same to rounding where that
        is all one can ask for.
        """
        losses = [one for one in self.differences if one.name == "loss"]
        return not self.differences or (bool(self.explanations) and all(one.is_rounding for one in losses))

    def lines(self) -> list[str]:
        """For people; the first line is the answer."""
        one = self.first == self.last
        if not self.differences:
            same = (
                "gives the same loss and gradient norm" if one else "give the same losses and gradient norms"
            )
            return [f"{self.steps} {same}, bit for bit"]
        first = self.differences[0]
        shown = f"{first.name} of step {first.step} is {first.again!r} now, and was {first.logged!r}"
        if self.is_right:
            return [
                f"{self.steps} {'gives' if one else 'give'} the same to rounding, not bit-exactly: {shown}",
                *self.explanations,
            ]
        return [f"{self.steps} {'does' if one else 'do'} not give the same: {shown}", *self.explanations]

    def error(self, where: str) -> IntegrityError:
        """The explanation if the replay differs."""
        known = "; ".join(self.explanations)
        why = (
            f"the difference is larger than rounding can explain; known changes: {known}"
            if known
            else "no known change: data, model, packages, ranks, threads and device are the same as in the run"
        )
        return IntegrityError.of(
            self.lines()[0],
            where=where,
            why=why,
            fix=(
                "run it once more: if the figures change again, this machine's arithmetic is unreliable"
                " (memory, heat); if not, the logged steps ran under different conditions, or this is a bug"
                " in unisono: please report it"
            ),
        )

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "step": self.checkpoint,
            "steps": [self.first, self.last],
            "equal": not self.differences,
            "right": self.is_right,
            "differences": [asdict(one) for one in self.differences],
            "excuses": list(self.explanations),
            "seconds": self.seconds,
        }


def compare(
    logged: Mapping[int, Mapping[str, Any]], again: Mapping[int, Mapping[str, Any]]
) -> tuple[Difference, ...]:
    """Every figure of the steps in `again` that is not bit-exactly the logged one.

    Args:
        logged: the lines of metrics.jsonl by step.
    """
    return tuple(
        Difference(step, name, logged[step].get(name), again[step].get(name))
        for step in sorted(again)
        for name in COMPARED
        if logged[step].get(name) != again[step].get(name)
    )


Lines = Mapping[int, Mapping[str, Any]]


@dataclass
class Replay:
    """A request to replay steps.

    Attributes:
        steps: how many steps are run again.
        step: of the checkpoint to begin from; None: the newest one with so many logged steps after
            it.
        show: sees phases, notes and warnings.
        trust_code: execute the objective of the user's own that the run names.
        probes: how this machine is inspected; tests replace it.
    """

    run: RunDir
    steps: int
    step: int | None
    show: Show
    trust_code: bool = False
    programs: Programs = field(default_factory=Programs)
    probes: Probes = field(default_factory=Probes)

    def carry_out(self) -> Replayed:
        """Chooses, checks, runs and compares.

        Raises:
            UsageError: if there is nothing to compare with, or data or model are not those of the
                run.
            UnfitError: if this machine cannot run it.
            IntegrityError: if the checkpoint is damaged.
            KeyboardInterrupt: if it was interrupted.
        """
        holder = read_holder(self.run.lock)
        if holder is not None:
            raise UsageError.of(
                f"the run is active: {holder}",
                where=str(self.run.lock),
                why="a replay uses the same devices",
                fix="wait until it has ended",
            )
        plan = _plan_of(self.run)
        if not self.trust_code:
            plan_file = str(self.run.plan)
            refuse_code(plan.config, {code.key: plan_file for code in own_code_of(plan.config)})
        logged = {line["step"]: line for line in iterate_metrics(self.run.metrics) if "loss" in line}
        checkpoint = self._choose(plan, logged)
        last = checkpoint.step + self.steps
        explanations = _run_explanations(plan, checkpoint, last=last)
        with tempfile.TemporaryDirectory(prefix="unisono-replay-") as folder:
            scratch = RunDir(Path(folder) / "run")
            again = self._plan_again(plan, checkpoint, scratch)
            explanations += _machine_explanations(plan, again)
            explanations += changed_versions(self.run, self.probes.packages())
            self._announce(plan, again)
            attempt = self._train(again, scratch)
            lines = {line["step"]: line for line in iterate_metrics(scratch.metrics) if "loss" in line}
        _check_end(attempt, again, lines)
        return Replayed(
            checkpoint.step,
            checkpoint.step + 1,
            last,
            compare(logged, lines),
            tuple(explanations),
            attempt.seconds,
        )

    def _choose(self, plan: RunPlan, logged: Lines) -> IntactCheckpoint:
        store = CheckpointStore(self.run.checkpoints, key=user_key(read_environment().settings_dir))
        candidates = store.list() if self.step is None else [store.path(self.step)]
        able = [path for path in candidates if _has_steps_after(_step_of(path), self.steps, logged)]
        if not able:
            raise _nothing_to_compare(store, self.step, self.steps, logged)
        for path in reversed(able):
            try:
                return store.require(path, run_id=plan.run_id)
            except IntegrityError:
                if path == able[0]:  # the others are damaged, too
                    raise
        raise AssertionError

    def _plan_again(self, plan: RunPlan, checkpoint: IntactCheckpoint, scratch: RunDir) -> RunPlan:
        """The run's plan on this machine alone, in another directory, and up to the last step that
        is wanted.
        """
        _refuse_other_ranks(plan, checkpoint)
        environment = read_environment()
        task = PrepareRequest(plan.config, environment.cache_dir)
        prepared = run_prepare(task, show=self.show, programs=self.programs)
        _refuse_changed(plan, prepared)
        machine = read_machine(self.probes.devices)
        try:
            devices, _ = choose_devices(
                machine,
                requested=plan.device.kind,
                named=(),
                visible=environment.visible_devices,
                nproc=plan.world_size,
                torch_version=self.probes.packages().get("torch", ""),
            )
        except UsageError as error:
            raise UnfitError(*error.problems) from error
        layout = lay_out(
            [NodeOffer(0, machine.host, "127.0.0.1", devices, "the run's plan", plan.threads, "")]
        )
        data = plan.data.model_copy(update={"cache_dir": prepared.data.cache_dir, "eval": None})
        model = plan.model.model_copy(update={"directory": prepared.model.directory})
        config = plan.config.model_copy(update={"output_dir": str(scratch.root), "track": []})
        return plan.model_copy(
            update={
                "config": config,
                "output_dir": str(scratch.root),
                "epoch": 0,
                "nodes": layout.nodes,
                "ranks": layout.ranks,
                "store_host": layout.store_host,
                "device": devices[0],
                "host": machine.host,
                "data": data,
                "model": model,
                "resume": ResumePoint(step=checkpoint.step, path=str(checkpoint.path)),
                "resume_reason": "a replay",
                "last_step": checkpoint.step + self.steps,
                "faults": {},
            }
        )

    def _announce(self, plan: RunPlan, again: RunPlan) -> None:
        assert again.resume is not None
        ranks = f"{again.world_size} ranks ({again.strategy})" if again.world_size > 1 else "1 rank"
        many = len(plan.nodes)
        machines = f", all on this machine; the run had them on {many} nodes" if many > 1 else ""
        text = (
            f"running steps {again.resume.step + 1}-{again.last_step} again from step {again.resume.step}:"
            f" {ranks}{machines}"
        )
        self.show({"kind": "phase", "time": time.time(), "phase": "replay", "text": text})

    def _train(self, plan: RunPlan, scratch: RunDir) -> Attempt:
        leftovers = read_environment().leftovers
        interface = interface_name(self.probes.network.interfaces(), "127.0.0.1")
        environments = rank_environments(plan, 0, variables=leftovers, interface=interface, debug_comm=False)
        assert plan.resume is not None
        local = LocalRanks(
            plan.on_node(0),
            scratch,
            scratch.plan,
            self.programs,
            environments,
            from_step=plan.resume.step,
            has_input=plan.world_size > 1,
        )
        with Interrupts() as interrupts:
            write_decision(scratch, plan)
            attempt = run_attempt(
                plan,
                local=local,
                server=None,
                interrupts=interrupts,
                show=self._show_some,
                on_agreement=_take_agreement,
            )
        if attempt.stop_signal is not None:
            raise KeyboardInterrupt
        return attempt

    def _show_some(self, message: Message) -> None:
        if message["kind"] in ("phase", "warning"):
            self.show(message)


def changed_versions(run: RunDir, now: Mapping[str, str]) -> list[str]:
    """A line for each package that affects numbers and whose version differs from the run's last
    start.

    Args:
        now: all installed packages and their versions.
    """
    packages = read_object(run.environment).get("packages")
    if not isinstance(packages, dict):
        return ["environment.json cannot be read, so the package versions of the run are unknown"]
    before, after = decisive_versions(packages), decisive_versions(now)
    return [
        f"{name} is {one_line(after.get(name, 'not installed'), limit=60)}, and was"
        f" {one_line(str(before[name]), limit=60)}"
        for name in sorted(before)
        if before[name] != after.get(name)
    ]


def _plan_of(run: RunDir) -> RunPlan:
    try:
        return RunPlan.model_validate(read_json(run.plan))
    except (OSError, ValueError, ValidationError) as error:
        raise UsageError.of(
            "the plan of the run cannot be read, so its steps cannot be run again",
            where=str(run.plan),
            why=why_unreadable(error),
            fix="omit --replay: `checkpoint verify` needs no plan",
        ) from error


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _has_steps_after(step: int, count: int, logged: Lines) -> bool:
    return all(number in logged for number in range(step + 1, step + count + 1))


def _nothing_to_compare(store: CheckpointStore, step: int | None, steps: int, logged: Lines) -> UsageError:
    there = [_step_of(path) for path in store.list()]
    last = max(logged, default=0)
    fix = "wait until the run has made more steps, or repeat fewer: --replay 1"
    if step is not None and step not in there:
        return UsageError.of(
            f"there is no checkpoint of step {step}",
            where=str(store.root),
            fix=(
                f"there are checkpoints of step {', '.join(map(str, there))}"
                if there
                else "the run has none yet"
            ),
        )
    if step is not None:
        what = f"checkpoint step {step} has no {steps} logged steps after it"
        able = [number for number in there if _has_steps_after(number, steps, logged)]
        fix = f"without --step, step {max(able)} is used" if able else fix
    else:
        what = f"no checkpoint has {steps} logged steps after it"
    newest = f"the newest checkpoint is of step {max(there)}; " if there else "there is no checkpoint; "
    return UsageError.of(
        what,
        where=str(store.root),
        why=f"{newest}metrics.jsonl ends with step {last}, and there is nothing to compare with",
        fix=fix,
    )


def _refuse_other_ranks(plan: RunPlan, checkpoint: IntactCheckpoint) -> None:
    """The plans of earlier starts are not kept; steps that were made with other ranks cannot be
    made again.
    """
    manifest, first_step = checkpoint.manifest, plan.resume.step if plan.resume else 0
    if checkpoint.step >= first_step or (manifest.world_size, manifest.threads) == (
        plan.world_size,
        plan.threads,
    ):
        return
    raise UsageError.of(
        f"the steps after checkpoint {checkpoint.step} were made by an earlier start with a different layout",
        where=str(checkpoint.path),
        why=(
            f"it was written by {manifest.world_size} ranks with {manifest.threads} threads, and the plan"
            f" that is kept has {plan.world_size} with {plan.threads}"
        ),
        fix=f"choose a checkpoint from step {first_step} on, with --step",
    )


def _refuse_changed(plan: RunPlan, prepared: PreparedInputs) -> None:
    """Different rows or a different model give different losses, which would prove nothing about
    the checkpoint.
    """
    for name, digest, now, key in (
        ("data", plan.data.digest, prepared.data.digest, "data.train"),
        ("model", plan.model.digest, prepared.model.digest, "model.path"),
    ):
        if now != digest:
            raise UsageError.of(
                f"the {name} differ{'' if name == 'data' else 's'} from the run's",
                where=key,
                why=f"digest {digest} then, {now} now, so the steps cannot give the same results",
                fix="restore the files, or omit --replay",
            )


def _run_explanations(plan: RunPlan, checkpoint: IntactCheckpoint, *, last: int) -> list[str]:
    """Why steps of this run may come out otherwise, whatever machine they are run on."""
    lines = []
    if plan.device.kind == "cuda" and not plan.config.deterministic:
        lines.append("it was trained on accelerators without `deterministic: true`: sums have no fixed order")
    if plan.resume is not None and checkpoint.step < plan.resume.step:
        lines.append(
            f"the run has been started again from step {plan.resume.step} since, and only the plan of the"
            " last start is kept"
        )
    changed = [
        str(change.get("key"))
        for change in plan.allowed
        if isinstance(step := change.get("from_step", 0), int) and step <= last
    ]
    if changed:
        lines.append(f"settings were changed on the way, with --allow: {', '.join(sorted(set(changed)))}")
    return lines


def _machine_explanations(plan: RunPlan, again: RunPlan) -> list[str]:
    """Differences from the original run: kinds of device, and several machines that are one now."""
    before = {place.device.name for place in plan.ranks} or {plan.device.name}
    lines = []
    if before != {again.device.name}:
        lines.append(f"it was trained on {', '.join(sorted(before))}, and this is {again.device.name}")
    if again.device.kind == "cuda" and len(plan.nodes) > 1:
        lines.append("its ranks were on several machines, between which sums may have a different order")
    return lines


def _take_agreement(reports: Mapping[int, RankReport], agreement: Agreement) -> None:
    """Ranks that disagree end the replay by themselves; no agreement is kept."""


def _check_end(attempt: Attempt, plan: RunPlan, lines: Lines) -> None:
    """Raises how the replay ended, unless it did what it was to do."""
    ending = ending_of(attempt, plan)
    assert plan.last_step is not None
    if ending.error is not None:
        raise ending.error
    if ending.exit_code == 0 and plan.last_step in lines:
        return
    culprit = attempt.decision.culprit if attempt.decision else None
    tail = culprit.tail if culprit is not None else ""
    what = ending.verdict.summary if ending.verdict else "the replay ended before its last step"
    problem = {
        "what": f"the steps could not be run again: {what}",
        "where": "replay",
        "why": one_line(tail[-1500:], limit=1500),
        "fix": "; ".join(ending.verdict.fix) if ending.verdict else "",
    }
    verdict = ending.verdict.to_json() if ending.verdict else None
    raise refusal(
        {"kind": "refused", "exit_code": ending.exit_code, "problems": [problem], "verdict": verdict}
    )
