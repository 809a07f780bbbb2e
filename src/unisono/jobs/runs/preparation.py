"""Before the ranks start: the run's directory is claimed; the contents of data and model, the
placement of ranks, and the plan are made.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unisono.base.errors import (
    IntegrityError,
    UsageError,
    require_writable,
    storage_reason,
    storage_remedy,
    storage_words,
)
from unisono.base.files import make_private_dir, read_object, read_text, write_text
from unisono.base.messages import Show
from unisono.base.user_key import KEY_FILE, user_key
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.compare import compare_nodes
from unisono.guard.facts import Environment
from unisono.guard.facts.storage import refuse_if_silent
from unisono.guard.places.placement import Layout, lay_out
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.rundir.records import iterate_metrics
from unisono.jobs.remote_checkpoint.storage import storage_tried
from unisono.jobs.remote_checkpoint.transfers import download_newest, remove_partial_download
from unisono.jobs.remote_checkpoint.verification import with_rehearsal
from unisono.jobs.runs.head_nodes import HeadNodes
from unisono.jobs.runs.node_report import report_alone
from unisono.jobs.runs.plan_changes import check_same_run, unused_allowances
from unisono.jobs.runs.planning import (
    LocalNode,
    PreparedInputs,
    make_plan,
    offer_of,
    prepare,
    refusal_alone,
    with_step_difference,
)
from unisono.jobs.runs.run_records import AgreementReports, as_warning
from unisono.jobs.runs.start_decision import StartDecision, decide_start, refuse_if_shrunk, set_aside
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.checkpoint.store import CheckpointStore, IntactCheckpoint, OnDamage
from unisono.trainer.checkpoint.verify import Damage
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.plan import ResumePoint, RunPlan
from unisono.trainer.plan.schedule import factor_at


def find_resume_point(
    run: RunDir, decision: StartDecision, environment: Environment, show: Show, *, trust: bool = False
) -> tuple[ResumePoint | None, str]:
    """The newest valid checkpoint, or None if the run has none yet, and the reason for the choice.

    Damaged newer ones are reported.

    Args:
        show: receives a warning for each finding.
        trust: `--trust`: take one that is not signed by this user, too.

    Raises:
        IntegrityError: if there are checkpoints and none can be read.
    """
    store = CheckpointStore(run.checkpoints, key=user_key(environment.settings_dir))

    def on_damage(path: Path, damage: Damage) -> None:
        if damage.kind == "foreign" and trust:  # the run resumes from it, and the resume reason states it
            return
        fix = "pass --trust to resume from it anyway" if damage.kind == "foreign" else ""
        text = f"{path.name}: {damage}"
        show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": f"checkpoint_{damage.kind}",
                "text": text,
                "fix": fix,
            }
        )

    return resume_point(store, decision, on_damage, trust=trust)


def with_changes(plan: RunPlan, run: RunDir, decision: StartDecision, request: TrainRequest) -> RunPlan:
    """The plan with a line for each thing that has changed since the start before, and with what
    was allowed.

    Raises:
        UsageError: if it would be another run, and that was not allowed.
    """
    lines: list[str] = []
    allowed = plan.allowed
    if plan.resume is not None:
        changes = check_same_run(run, plan.to_json(), request.probes.packages(), allow=request.allowed)
        lines, allowed = changes.lines + _rate_rises(plan, run, plan.resume.step), changes.allowed
    elif decision.kind == "fresh":
        lines = unused_allowances(request.allowed)
    if request.trust and (plan.resume is None or not plan.resume.trust):
        lines = [
            *lines,
            "--trust was not needed: there is no checkpoint signed by a different key to resume from",
        ]
    return plan.model_copy(update={"warnings": [*plan.warnings, *lines], "allowed": allowed})


def _rate_rises(plan: RunPlan, run: RunDir, step: int) -> list[str]:
    """A line if the learning rate rises at this start, because the schedule now spans more steps
    than at the start before.
    """
    before = read_object(run.plan).get("total_steps")
    if not isinstance(before, int) or before == plan.total_steps or step >= plan.total_steps:
        return []
    rates = (line["lr"] for line in iterate_metrics(run.metrics) if line["step"] == step and "lr" in line)
    last, optim = next(rates, None), plan.config.optim
    rate = optim.lr * factor_at(plan, step + 1)
    if not isinstance(last, float) or rate <= last:
        return []
    return [
        f"the learning rate rises from {last:.2g} in step {step:,} to {rate:.2g} in step {step + 1:,}:"
        f" optim.schedule {optim.schedule} now spans {plan.total_steps:,} steps, and spanned {before:,}; to"
        " rise less, set a lower optim.lr with --allow optim.lr"
    ]


@dataclass(frozen=True)
class PreviousStartFiles:
    """The files of the previous start that a start overwrites before its ranks train.

    The next start compares with what really ran. So a start that came to nothing puts these files
    back.
    """

    files: dict[Path, str]

    @classmethod
    def of(cls, run: RunDir) -> "PreviousStartFiles":
        """Reads them; those that are not there are left out."""
        contents = {}
        for path in (run.config, run.environment, run.data, run.plan):
            with contextlib.suppress(OSError, ValueError):
                contents[path] = read_text(path)
        return cls(contents)

    def put_back(self) -> None:
        """Writes back what has changed, the plan last."""
        for path, text in self.files.items():
            with contextlib.suppress(OSError):  # a full disk: the next start then compares with this one
                if read_text(path) != text:
                    write_text(path, text, mode=0o600)


@dataclass
class Claim:
    """A directory that is ours until the end of the start.

    Attributes:
        decision: what this start is: fresh, resume or extend.
        made: whether this start made the directory.
        earlier: what the start before has left, to be put back.
        lock: of the directory, held.
        worth_keeping: whether something came of it; otherwise a directory that was made is removed
            again.
        trained: whether ranks were ready to train; otherwise the plan of the start before is put
            back.
    """

    run: RunDir
    decision: StartDecision
    made: bool
    earlier: PreviousStartFiles
    lock: RunLock
    worth_keeping: bool = False
    trained: bool = False

    def decide_again(
        self, config: RunConfig, *, allow: frozenset[str], origins: Mapping[str, str] | None = None
    ) -> None:
        """The start decision after a run was downloaded into the directory.

        Raises:
            UsageError: if it is another run than the config means.
        """
        self.worth_keeping = True
        self.decision = decide_start(self.run, config, resume=True, fresh=False, allow=allow, origins=origins)
        self.earlier = PreviousStartFiles.of(self.run)


@contextlib.contextmanager
def claim(
    config: RunConfig,
    *,
    host: str,
    port: int = 0,
    resume: bool,
    fresh: bool,
    notify: Callable[[str], None],
    allow: frozenset[str] = frozenset(),
    origins: Mapping[str, str] | None = None,
) -> Iterator[Claim]:
    """Decides, makes the directory, locks it, and decides again under the lock.

    Args:
        config: of this start; its output_dir is what is claimed.
        port: on which the job's other nodes are met; 0 where there are none.
        resume: `--resume`.
        fresh: `--fresh`.
        allow: keys of the config that may have changed.
        origins: where keys of the config were set, for messages.

    Raises:
        UsageError: if the directory is taken, finished, another run's, or cannot be written.
        UnfitError: if its storage does not answer.
    """
    run = RunDir(Path(config.output_dir))
    refuse_if_silent(run.root)
    decide = partial(decide_start, run, config, resume=resume, allow=allow, origins=origins)
    decide(fresh=fresh)  # refuses before anything is touched
    if fresh and run.root.exists() and any(run.root.iterdir()):
        with _locked(run, host, port, notify):  # a run that is active must not be renamed
            moved = set_aside(run)
        notify(f"the earlier run is now {moved}")
    missing, made = not run.root.exists(), False
    _make(run)
    try:
        with _locked(run, host, port, notify) as lock:
            made = missing  # from here on: a start that is refused must not remove what another start has just created
            if remove_partial_download(run):
                notify(f"removed the incomplete download of a killed start from {run.root}")
            decision = decide(fresh=False)
            claimed = Claim(run, decision, made, PreviousStartFiles.of(run), lock)
            try:
                yield claimed
            finally:
                made = claimed.made and not claimed.worth_keeping
                puts_back = claimed.decision.kind != "fresh" and not claimed.trained
                if (made or puts_back) and not _is_in_place(lock):
                    made = puts_back = False  # the path holds something else now, which stays as it is
                if puts_back:
                    claimed.earlier.put_back()
    finally:
        if made:
            shutil.rmtree(run.root, ignore_errors=True)


def _make(run: RunDir) -> None:
    fix = "set output_dir to a directory that you may write"
    try:
        make_private_dir(run.root)
    except OSError as error:
        raise UsageError.of(
            f"the run's directory {run.root} cannot be made: {storage_words(error)}",
            where="output_dir",
            why=storage_reason(error),
            fix=storage_remedy(error, else_=fix),
        ) from error
    require_writable(run.root, where="output_dir", why="it is the run's directory", fix=fix)


def _is_in_place(lock: RunLock) -> bool:
    try:
        return lock.is_in_place()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(run: RunDir, host: str, port: int, notify: Callable[[str], None]) -> Iterator[RunLock]:
    lock = RunLock(run.lock)
    note = lock.acquire(host, os.getpid(), port=port)
    if note:
        notify(note)
    try:
        yield lock
    finally:
        lock.release()


# ---- the newest intact checkpoint


def require_intact(
    store: CheckpointStore,
    on_damage: OnDamage | None = None,
    *,
    run_id: str | None = None,
    trust: bool = False,
) -> IntactCheckpoint | None:
    """The newest intact checkpoint; None only if the run has not saved any.

    Args:
        on_damage: receives every finding in a newer checkpoint, with its path.
        run_id: the run that it must belong to; None: any.
        trust: accept one that is not signed by this user.

    Raises:
        IntegrityError: if there are checkpoints and none is readable, with the findings of each.
    """
    findings: dict[Path, list[Damage]] = {}

    def note(path: Path, damage: Damage) -> None:
        findings.setdefault(path, []).append(damage)
        if on_damage is not None:
            on_damage(path, damage)

    checkpoint = store.newest_intact(note, run_id=run_id, trust=trust)
    if checkpoint is None and findings:
        raise _none_intact(store.root, findings)
    return checkpoint


def resume_point(
    store: CheckpointStore,
    decision: StartDecision,
    on_damage: OnDamage | None = None,
    *,
    trust: bool = False,
) -> tuple[ResumePoint | None, str]:
    """The checkpoint that a start resumes from, or None; and the completed reason of the
    decision.

    Args:
        on_damage: receives every finding in a newer checkpoint, with its path.
        trust: accept one that is not signed by this user.

    Raises:
        IntegrityError: if there are checkpoints and none is readable, or none to extend a finished
            run from.
    """
    if decision.kind == "fresh":
        return None, decision.reason
    checkpoint = require_intact(store, on_damage, run_id=decision.run_id, trust=trust)
    if checkpoint is not None:
        reason = f"{decision.reason}; from step {checkpoint.step}"
        if checkpoint.is_foreign:
            reason += ", which is not signed with your key and is trusted (--trust)"
        return ResumePoint(
            step=checkpoint.step, path=str(checkpoint.path), trust=checkpoint.is_foreign
        ), reason
    if decision.kind == "extend":
        raise IntegrityError.of(
            "the finished run has no checkpoint to extend it from",
            where=str(store.root),
            why="they were deleted",
            fix="set a different output_dir, or start again with --fresh, which renames this run",
        )
    return None, f"{decision.reason}; it ended before its first checkpoint, so it starts at step 1"


def _none_intact(root: Path, findings: dict[Path, list[Damage]]) -> IntegrityError:
    why = "; ".join(_describe(path, of_path) for path, of_path in findings.items())
    foreign = [path for path, of_path in findings.items() if not any(f.is_fatal for f in of_path)]
    if foreign:
        which = (
            "the run's checkpoints are"
            if len(foreign) == len(findings)
            else f"{foreign[0].name} is intact, and is"
        )
        return IntegrityError.of(
            f"{which} not signed with your key",
            where=str(root),
            why=why,
            fix=(
                "if you trust their author: pass --trust to resume from them (no code in them is executed),"
                f" or copy {KEY_FILE} of that user into your settings directory (~/.config/unisono);"
                " otherwise start again with --fresh, which renames this run"
            ),
        )
    many = len(findings) > 1
    return IntegrityError.of(
        (
            f"none of the run's {len(findings)} checkpoints is intact"
            if many
            else "the run's only checkpoint is not intact"
        ),
        where=str(root),
        why=why,
        fix="restore one from a copy, or start again with --fresh, which renames this run",
    )


def _describe(path: Path, findings: list[Damage]) -> str:
    return f"{path.name}: " + ", ".join(str(finding) for finding in findings if finding.kind != "extra")


def restore_from_storage(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    others: HeadNodes | None,
    *,
    node: str,
    show: Show,
) -> bool:
    """Brings the newest checkpoint back from checkpoint.storage where nothing is left here; gives
    whether it did.

    This may take long: the other nodes are connected already, and wait. `node` is this node's label
    among others, empty for a job of one node.
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
    table: AgreementReports,
    show: Show,
) -> tuple[PreparedInputs, Layout]:
    """The facts of data and model, the same on all nodes, and which rank runs where.

    Meanwhile checkpoint.storage is tried.

    Raises:
        UnfitError, UsageError: this node alone is not fit for its ranks.
    """

    def work(show: Show) -> PreparedInputs:
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
        report = report_alone(request, loaded, local_node)
        agreement = compare_nodes([report])
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
    prepared: PreparedInputs,
    show: Show,
    layout: Layout,
    rehearse: bool = False,
) -> RunPlan:
    """Finds the checkpoint to resume from, and resolves the plan; with `rehearse` the first
    checkpoint is read back while training continues.
    """
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
    plan = with_step_difference(plan, loaded)
    plan = with_changes(plan, run, decision, request)
    refuse_if_shrunk(decision, done_steps=resume.step if resume else 0, total_steps=plan.total_steps)
    return with_rehearsal(plan, run, enabled=rehearse)


def _refuse_failed(agreement: Agreement, show: Show) -> None:
    """Raises UnfitError or UsageError with the first fatal verdict; the others are shown as
    warnings.
    """
    if agreement.fatal:
        raise refusal_alone(agreement.fatal[0])
    for verdict in agreement.warnings:
        show(as_warning(verdict))
