"""After the ranks of a start have ended: the verdict and its evidence, the newest step rescued from memory, and the run's result."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.causes import Evidence, Verdict, find_cause
from unisono.checkpoint.manifest import user_key
from unisono.checkpoint.store import CheckpointStore
from unisono.errors import Disagreed, UnisonoError
from unisono.events import Show, notify
from unisono.facts.storage import Hung, RunsDisk, unless_stuck
from unisono.files import open_plain, parse_json
from unisono.launch.curve_drawing import Drawing
from unisono.launch.head_nodes import HeadNodes
from unisono.launch.output_watch import CAUSE as OUTPUT_REMOVED
from unisono.launch.output_watch import OutputWatch
from unisono.launch.planning import LocalNode
from unisono.launch.run_records import Ending, Table, ending_of, is_about_nodes, write_agreement
from unisono.launch.train_request import LostNodeSource, TrainRequest
from unisono.plan import RunPlan
from unisono.remote_checkpoint.rescue import RescuedStep, needs_other_nodes, rescue
from unisono.rendezvous.remote_fronts import step_evidence
from unisono.rundir import RunDir
from unisono.rundir.records import RunResult, complete_verdict, set_verdict, write_result
from unisono.supervise.evidence import keep_evidence
from unisono.supervise.interrupts import Interrupts
from unisono.supervise.local_ranks import SharedMemory
from unisono.supervise.rank_logs import LogEvents
from unisono.supervise.rank_supervisor import Attempt


@dataclass
class AttemptEnd:
    """The head's processing of an attempt that has ended: it is judged, shown on all nodes, and recorded in the run's directory."""

    request: TrainRequest
    local_node: LocalNode
    run: RunDir
    disk: RunsDisk
    interrupts: Interrupts
    table: Table
    others: HeadNodes | None
    show: Show

    def settle(
        self,
        plan: RunPlan,
        attempt: Attempt,
        *,
        watch: OutputWatch,
        log_events: LogEvents,
        kept: SharedMemory,
    ) -> Ending:
        """Names how the attempt ended, and keeps the newest step of a run that died."""
        watch.settle(attempt)
        ending = with_launcher_cause(ending_of(attempt, plan), attempt, plan, self.request.lost_node_source)
        ending = with_cut_file(ending, attempt, plan)
        ending = self._with_step(watch.judged(ending, attempt))
        ending = self._announce(plan, attempt, ending, log_events)
        if self.disk.is_lost:
            self._rescue_elsewhere(plan, attempt, kept, watch.now_at)
        elif self._rescue(plan, attempt, kept):
            ending = replace(ending, fields=ending_of(attempt, plan).fields)
        return ending

    def _with_step(self, ending: Ending) -> Ending:
        """The ending; its verdict also cites the Slurm step that this front runs in, if any."""
        step, verdict = self.local_node.environment.slurm_step, ending.verdict
        if step is None or verdict is None:
            return ending
        cited = (*verdict.evidence, *step_evidence(step))
        return replace(ending, verdict=verdict.model_copy(update={"evidence": cited}))

    def cannot_continue(self, plan: RunPlan, ending: Ending, error: UnisonoError) -> Ending:
        """The nodes do not agree any more; or the disk that killed the rank may have taken the checkpoints, too."""
        verdict = error.verdict
        if verdict is None or not is_about_nodes(error):
            return Ending(error.exit_code, ending.fields, ending.verdict, error)
        if not (isinstance(error, Disagreed) and error.already_shown):
            self._show_verdict(verdict)

        def keep() -> None:
            set_verdict(self.run, verdict)
            if plan.world_size > 1:
                write_agreement(self.run, self.table)

        self.disk.write("the verdict", keep)
        return Ending(error.exit_code, ending.fields, verdict)

    def _announce(self, plan: RunPlan, attempt: Attempt, ending: Ending, log_events: LogEvents) -> Ending:
        """Shows a verdict on all nodes, and keeps its evidence, which it cites from then on."""
        if ending.verdict is None:
            return ending
        verdict = log_events.cited(ending.verdict)
        if self.others is not None:
            self.others.send_verdict(verdict)
        self._show_verdict(verdict)
        cited = self.disk.write("the verdict", lambda: self._keep_evidence(plan, attempt, verdict))
        return replace(ending, verdict=cited or verdict)

    def _show_verdict(self, verdict: Verdict) -> None:
        self.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})

    def _keep_evidence(self, plan: RunPlan, attempt: Attempt, verdict: Verdict) -> Verdict:
        set_verdict(self.run, verdict)  # at once: collecting its evidence takes seconds
        files = keep_evidence(
            self.run,
            verdict,
            table=Path(plan.data.cache_dir),
            raw=attempt.raw,
            programs=self.request.programs,
            looks=attempt.run_view.looks if attempt.run_view is not None else {},
        )
        cited = verdict.model_copy(update={"evidence": (*verdict.evidence, *files)})
        complete_verdict(self.run, cited)
        if files:
            notify(self.show, f"stacks, recordings and logs that it cites: {self.run.evidence}")
        return cited

    def _rescue(self, plan: RunPlan, attempt: Attempt, kept: SharedMemory) -> bool:
        """Makes a checkpoint of the newest step in memory, on this node or others; gives whether there is one now."""
        store = checkpoints_of(self.run, self.local_node)
        found = RescuedStep.of_node(kept)
        if self.others is not None and needs_other_nodes(plan, attempt):
            collect = partial(
                self.others.collect,
                plan,
                attempt,
                found,
                checkpoints=self.run.checkpoints,
                interrupts=self.interrupts,
            )
            self.disk.write("what the ranks of the other nodes kept in memory", collect)
        judged = attempt.decision.verdict if attempt.decision is not None else None
        if judged is not None and judged.cause == "replicas_diverged":
            return False  # the step in memory may be the one that has drifted
        work = partial(rescue, self.run, plan, attempt, found, store=store, show=self.show)
        return self.disk.write("what the ranks kept in memory", work) is True

    def _rescue_elsewhere(
        self, plan: RunPlan, attempt: Attempt, kept: SharedMemory, now_at: Path | None
    ) -> None:
        """Makes that checkpoint where the run's directory is now; if that is not known, says what is lost. The result promises nothing."""
        found = RescuedStep.of_node(kept)
        steps = [snapshot.step for snapshots in found.steps.values() for snapshot in snapshots]
        if not steps:
            return
        if now_at is not None and not (self.others is not None and needs_other_nodes(plan, attempt)):
            run = RunDir(now_at)
            work = partial(
                rescue, run, plan, attempt, found, store=checkpoints_of(run, self.local_node), show=self.show
            )
            if RunsDisk(now_at, self.show).write("what the ranks kept in memory", work) is True:
                text = f"the newest step of this run, {attempt.saved_step}, is in {now_at}"
                self._warn(text, f"to continue from it, run the same command with output_dir={now_at}")
                return
        text = f"step {max(steps)}, which the ranks kept in memory, is lost with the run's directory"
        self._warn(text, "")

    def _warn(self, text: str, fix: str) -> None:
        self.show({"kind": "warning", "time": time.time(), "code": OUTPUT_REMOVED, "text": text, "fix": fix})


def checkpoints_of(run: RunDir, local_node: LocalNode) -> CheckpointStore:
    """The run's checkpoints, signed with the key of the user who runs this command."""
    return CheckpointStore(run.checkpoints, key=user_key(local_node.environment.settings_dir))


def keep_result(
    run: RunDir, attempt: Attempt, ending: Ending, result: dict[str, Any], *, drawing: Drawing
) -> None:
    """Writes result.json and the last loss curve; a start that was stopped before training keeps the earlier result."""
    stopped_before_training = ending.exit_code in (75, 130) and not attempt.ready
    if not (stopped_before_training and run.result.exists()):
        write_result(run, RunResult.from_json(result))
    drawing.finish()


def with_launcher_cause(
    ending: Ending, attempt: Attempt, plan: RunPlan, lost_node_source: LostNodeSource | None
) -> Ending:
    """Adds the reason for a lost node to the ending's verdict where a witness knows it; otherwise returns the ending unchanged.

    The head sees a connection that closes, and a memory monitor that ends a node's front leaves no other trace.
    """
    loss = attempt.decision.loss if attempt.decision is not None else None
    if lost_node_source is None or loss is None or loss.lost_head or ending.verdict is None:
        return ending
    reason = lost_node_source.of_lost(loss.node_rank)
    if reason is None:
        return ending
    known, waited_s = reason
    own = ending.verdict
    ours = {"evidence": (*known.evidence, *own.evidence), "fix": tuple(dict.fromkeys((*known.fix, *own.fix)))}
    if known.cause == own.cause:
        return replace(ending, verdict=own.model_copy(update=ours))
    cause = find_cause(known.cause)
    verdict = known.model_copy(
        update={
            "ranks": tuple(place.rank for place in plan.on_node(loss.node_rank)),
            "hosts": own.hosts,
            "fix": known.fix,
            "evidence": ours["evidence"],
            "step": attempt.step or None,
            "named_after_s": own.named_after_s + waited_s if own.named_after_s is not None else None,
        }
    )
    return replace(ending, verdict=verdict, exit_code=cause.exit_code if cause else ending.exit_code)


_CAUSE = "storage_unfit"
_ARROW_END = b"ARROW1"
_MOST_HEADER_BYTES = 100 << 20


def with_cut_file(ending: Ending, attempt: Attempt, plan: RunPlan) -> Ending:
    """Names the storage where a file was cut; otherwise returns the ending unchanged. The kernel sends SIGBUS where a mapped page is gone."""
    culprit = attempt.decision.culprit if attempt.decision is not None else None
    known, verdict = find_cause(_CAUSE), ending.verdict
    if culprit is None or culprit.returncode != -signal.SIGBUS or verdict is None or known is None:
        return ending
    if plan.ranks[culprit.rank].node_rank != 0:
        return ending
    try:
        cut = unless_stuck(lambda: list(_cut_files(plan)))
    except (Hung, OSError):
        return ending
    if not cut:
        return ending
    path, why = cut[0]
    evidence = [Evidence(where=str(where), text=text) for where, text in cut]
    summary = f"{plan.ranks[culprit.rank].label} was killed by SIGBUS: {path} was cut while the ranks read it; {why}"
    fixes = (
        f"restore {path}, and keep other programs from writing to it while a run uses it",
        *known.remedy,
    )
    update = {"cause": _CAUSE, "summary": summary, "fix": fixes, "evidence": (*evidence, *verdict.evidence)}
    return replace(ending, verdict=verdict.model_copy(update=update), exit_code=known.exit_code)


def _cut_files(plan: RunPlan) -> Iterator[tuple[Path, str]]:
    """Files that ranks map, and what is missing of each that is shorter than it must be."""
    for path in sorted(Path(plan.model.directory).glob("*.safetensors")):
        least, size = _least_bytes(path), path.stat().st_size
        if size < least:
            yield path, f"it has {size:,} bytes, and its header requires {least:,}"
    for path in sorted(Path(plan.data.cache_dir).glob("*.arrow")):
        with open_plain(path) as file:
            file.seek(-min(len(_ARROW_END), os.fstat(file.fileno()).st_size), os.SEEK_END)
            if file.read() != _ARROW_END:
                yield path, f"it has {path.stat().st_size:,} bytes, and its end is missing"


def _least_bytes(path: Path) -> int:
    """The size of a safetensors file by its header."""
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            return 0
        try:
            header = parse_json(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):  # the header itself is cut
            return 8 + length
    return 8 + length + max(ends, default=0)
