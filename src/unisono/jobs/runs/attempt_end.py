"""After the ranks of a start have ended: the verdict and its evidence, the newest step rescued from
memory, and the run's result.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, UnisonoError
from unisono.base.files import make_private_dir, open_plain, parse_json
from unisono.base.messages import Message, Show, VerdictMessage, message_of, notify
from unisono.base.user_key import user_key
from unisono.guard.agree.agreement import majority, odd_first, partition
from unisono.guard.agree.reports import Member, culprit_hosts, culprit_ranks, name_all
from unisono.guard.facts.storage import Hung, RunsDisk, unless_stuck
from unisono.guard.places.ranks import RankPlace
from unisono.guard.rendezvous.remote_fronts import step_evidence
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.rundir.records import RunResult, complete_verdict, set_verdict, write_result
from unisono.guard.supervise.evidence import keep_evidence
from unisono.guard.supervise.interrupts import Interrupts
from unisono.guard.supervise.local_ranks import SharedMemory
from unisono.guard.supervise.rank_logs import LogEvents
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.jobs.remote_checkpoint.rescue import RescuedStep, ended_with_result, needs_other_nodes, rescue
from unisono.jobs.runs.curve_drawing import CurveDrawing
from unisono.jobs.runs.head_nodes import HeadNodes
from unisono.jobs.runs.planning import LocalNode
from unisono.jobs.runs.read_back import read_back_result
from unisono.jobs.runs.run_records import (
    AgreementReports,
    Ending,
    ending_of,
    is_about_nodes,
    write_agreement,
    write_decision,
)
from unisono.jobs.runs.train_request import LostNodeSource, TrainRequest
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.plan import RunPlan


@dataclass
class AttemptEnd:
    """The head's processing of an attempt that has ended: it is judged, shown on all nodes, and
    recorded in the run's directory.
    """

    request: TrainRequest
    local_node: LocalNode
    run: RunDir
    lock: RunLock
    disk: RunsDisk
    interrupts: Interrupts
    table: AgreementReports
    others: HeadNodes | None
    show: Show

    def settle(self, plan: RunPlan, attempt: Attempt, *, log_events: LogEvents, kept: SharedMemory) -> Ending:
        """Names how the attempt ended, and keeps the newest step of a run that died."""
        ending = with_launcher_cause(ending_of(attempt, plan), attempt, plan, self.request.lost_node_source)
        ending = self._with_step(with_cut_file(ending, attempt, plan))
        if attempt.moved_to is not None or self._is_directory_lost():
            self.disk.is_lost = True  # nothing is written at the path from here on
            ending = self._keep_beside(plan, attempt, ending, kept)
        ending = self._announce(plan, attempt, ending, log_events)
        if not self.disk.is_lost and self._rescue(self.run, self.disk, plan, attempt, kept):
            ending = replace(ending, progress=ending_of(attempt, plan).progress)
        return ending

    def _is_directory_lost(self) -> bool:
        """Whether the run's directory is no longer at its path: the lock, held here, is in it."""
        return self.disk.write("run.lock", self.lock.is_held) is False

    def _with_step(self, ending: Ending) -> Ending:
        """The ending; its verdict also cites the Slurm step that this front runs in, if any."""
        step, verdict = self.local_node.environment.slurm_step, ending.verdict
        if step is None or verdict is None:
            return ending
        cited = (*verdict.evidence, *step_evidence(step))
        return replace(ending, verdict=verdict.model_copy(update={"evidence": cited}))

    def read_back(self, plan: RunPlan, ending: Ending) -> Ending:
        """The ending of the last attempt, after its result was read back; see
        `read_back_result`.
        """
        return read_back_result(
            plan,
            ending,
            request=self.request,
            leftovers=self.local_node.leftovers,
            interrupts=self.interrupts,
            show=self.show,
        )

    def cannot_continue(self, plan: RunPlan, ending: Ending, error: UnisonoError) -> Ending:
        """The nodes do not agree any more; or the disk that killed the rank may have taken the
        checkpoints, too.
        """
        verdict = error.verdict
        if verdict is None or not is_about_nodes(error):
            return Ending(error.exit_code, ending.progress, ending.verdict, error)
        if not (isinstance(error, Disagreed) and error.already_shown):
            self._show_verdict(verdict)

        def keep() -> None:
            set_verdict(self.run, verdict)
            if plan.world_size > 1:
                write_agreement(self.run, self.table)

        self.disk.write("the verdict", keep)
        return Ending(error.exit_code, ending.progress, verdict)

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
        self.show(message_of(VerdictMessage, verdict.to_json()))

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

    def _rescue(
        self, run: RunDir, disk: RunsDisk, plan: RunPlan, attempt: Attempt, kept: SharedMemory
    ) -> bool:
        """Makes a checkpoint of the newest step in memory, on this node or others; gives whether
        there is one now.
        """
        store = checkpoints_of(run, self.local_node)
        rescued = RescuedStep.of_node(kept)
        if self.others is not None and needs_other_nodes(plan, attempt):
            collect = partial(
                self.others.collect,
                plan,
                attempt,
                rescued,
                checkpoints=run.checkpoints,
                interrupts=self.interrupts,
            )
            disk.write("what the ranks of the other nodes kept in memory", collect)
        judged = attempt.decision.verdict if attempt.decision is not None else None
        if judged is not None and judged.cause == "replicas_diverged":
            return False  # the step in memory may be the one that has drifted
        work = partial(rescue, run, plan, attempt, rescued, store=store, show=self.show)
        return disk.write("what the ranks kept in memory", work) is True

    def _keep_beside(self, plan: RunPlan, attempt: Attempt, ending: Ending, kept: SharedMemory) -> Ending:
        """Makes the directory beside the lost one a run to continue from, if there is a step to
        keep.
        """
        beside = self.run.rescued(plan.run_id)
        disk = RunsDisk(beside.root, self.show)
        is_saved = attempt.moved_to is not None
        if not is_saved and self._is_in_memory(plan, attempt, kept):
            disk.write("the directory", partial(make_private_dir, beside.root))
            is_saved = self._rescue(beside, disk, plan, attempt, kept)
        if is_saved:
            config = plan.config.model_copy(update={"output_dir": str(beside.root)})
            moved = plan.model_copy(update={"output_dir": str(beside.root), "config": config})
            disk.write("the plan", partial(write_decision, beside, moved))
        if attempt.moved_to is not None:  # an earlier checkpoint is gone
            last = attempt.last
            saved = last.get("checkpoint") if last is not None and last["kind"] == "result" else None
            return replace(ending, progress=replace(ending.progress, checkpoint=saved))
        saved = attempt.checkpoint if is_saved else None
        progress = replace(ending.progress, checkpoint=saved, weights=None)
        lost, verdict = _directory_lost(plan, attempt, beside.root if is_saved else None), ending.verdict
        if verdict is None or ending.exit_code in _GOOD_ENDS:
            return Ending(6, progress, lost)
        both = {"summary": f"{verdict.summary}; {lost.summary}", "fix": (*lost.fix, *verdict.fix)}
        return replace(ending, progress=progress, verdict=verdict.model_copy(update=both))

    def _is_in_memory(self, plan: RunPlan, attempt: Attempt, kept: SharedMemory) -> bool:
        """Whether a step may be in the memory of this node or of others."""
        if ended_with_result(attempt):
            return False
        here = any(RescuedStep.of_node(kept).steps.values())
        return here or (self.others is not None and needs_other_nodes(plan, attempt))


_GOOD_ENDS = (0, 75, 130)


def _directory_lost(plan: RunPlan, attempt: Attempt, saved_in: Path | None) -> Verdict:
    """The verdict on a directory that the ranks have not noticed to be lost themselves."""
    what = (
        f"{plan.output_dir} was removed, renamed or replaced after step {attempt.step}, while the run was"
        " active"
    )
    fix = ["end a run first (Ctrl-C), then remove or rename its directory"]
    if saved_in is not None:
        what += f"; step {attempt.saved_step} was saved from memory in {saved_in}"
        fix.insert(0, f"to continue, run the same command with output_dir={saved_in}")
    return Verdict(
        cause="output_removed",
        when="during",
        severity="fatal",
        summary=what,
        hosts=(plan.host,),
        phase="save",
        step=attempt.step or None,
        fix=tuple(fix),
    )


def checkpoints_of(run: RunDir, local_node: LocalNode) -> CheckpointStore:
    """The run's checkpoints, signed with the key of the user who runs this command."""
    return CheckpointStore(run.checkpoints, key=user_key(local_node.environment.settings_dir))


def keep_result(
    run: RunDir, attempt: Attempt, ending: Ending, result: RunResult, *, drawing: CurveDrawing
) -> None:
    """Writes result.json and the last loss curve; a start that was stopped before training keeps
    the earlier result.
    """
    stopped_before_training = ending.exit_code in (75, 130) and not attempt.ready
    if not (stopped_before_training and run.result.exists()):
        write_result(run, result)
    drawing.finish()


def with_launcher_cause(
    ending: Ending, attempt: Attempt, plan: RunPlan, lost_node_source: LostNodeSource | None
) -> Ending:
    """Adds the reason for a lost node to the ending's verdict where a witness knows it; otherwise
    returns the ending unchanged.

    The head sees a connection that closes, and a memory monitor that ends a node's front leaves no
    other trace.
    """
    loss = attempt.decision.loss if attempt.decision is not None else None
    if lost_node_source is None or loss is None or loss.lost_head or ending.verdict is None:
        return ending
    reason = lost_node_source.of_lost(loss.node_rank)
    if reason is None:
        return ending
    known, waited_s = reason
    original = ending.verdict
    ours = {
        "evidence": (*known.evidence, *original.evidence),
        "fix": tuple(dict.fromkeys((*known.fix, *original.fix))),
    }
    if known.cause == original.cause:
        return replace(ending, verdict=original.model_copy(update=ours))
    cause = find_cause(known.cause)
    verdict = known.model_copy(
        update={
            "ranks": tuple(place.rank for place in plan.on_node(loss.node_rank)),
            "hosts": original.hosts,
            "fix": known.fix,
            "evidence": ours["evidence"],
            "step": attempt.step or None,
            "named_after_s": original.named_after_s + waited_s
            if original.named_after_s is not None
            else None,
        }
    )
    return replace(ending, verdict=verdict, exit_code=cause.exit_code if cause else ending.exit_code)


_CAUSE = "storage_unfit"
_ARROW_END = b"ARROW1"
_MOST_HEADER_BYTES = 100 << 20


def with_cut_file(ending: Ending, attempt: Attempt, plan: RunPlan) -> Ending:
    """Names the storage where a file was cut; otherwise returns the ending unchanged.

    The kernel sends SIGBUS where a mapped page is gone.
    """
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
    summary = (
        f"{plan.ranks[culprit.rank].label} was killed by SIGBUS: {path} was cut while the ranks read it;"
        f" {why}"
    )
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


# ---- drift of replicas


_KEPT_STEPS = 16
"""Steps for which only some ranks have reported; ranks of one group are never that far apart."""
_SHOWN_GROUPS = 6


@dataclass(frozen=True)
class DriftReport:
    """A rank's report after a step: the digest of its weights, and what determines its rounding."""

    digest: str
    arithmetic: str


class ReplicaDrift:
    """A companion for one start of the ranks."""

    def __init__(self, plan: RunPlan, show: Show) -> None:
        """Has heard nothing yet.

        Args:
            show: receives a warning if a difference is not an error.
        """
        self._plan = plan
        self._show = show
        self._drift_reports: dict[int, dict[int, DriftReport]] = defaultdict(dict)
        self._equal_at: int | None = None
        self._verdict: Verdict | None = None
        self._warned = False

    def on_message(self, rank: int, message: Message) -> None:
        """Takes a digest; compares when all ranks have reported a step."""
        if message["kind"] != "digest" or self._verdict is not None:
            return
        step = int(message["step"])
        by_rank = self._drift_reports[step]
        by_rank[rank] = DriftReport(str(message["digest"]), str(message["arithmetic"]))
        if len(by_rank) == self._plan.world_size:
            self._compare(step, self._drift_reports.pop(step))
        while len(self._drift_reports) > _KEPT_STEPS:
            self._drift_reports.pop(min(self._drift_reports))

    def look(self) -> Verdict | None:
        """The verdict, once there is one."""
        return self._verdict

    def finish(self) -> None:
        """Nothing is held."""

    def _compare(self, step: int, reports: dict[int, DriftReport]) -> None:
        if len({report.digest for report in reports.values()}) == 1:
            self._equal_at = step
        elif len({report.arithmetic for report in reports.values()}) == 1:
            self._verdict = name_drift(self._plan.ranks, reports, step=step, equal_at=self._equal_at)
        elif not self._warned:
            self._warned = True
            self._show(_rounding_warning(reports, step))


def name_drift(
    places: Sequence[RankPlace], reports: Mapping[int, DriftReport], *, step: int, equal_at: int | None
) -> Verdict:
    """The replica whose weights differ from the rest. Without a majority no replica is blamed.

    Args:
        reports: each rank's report; at least two of them differ.
        step: after which they reported it.
        equal_at: the last step after which all were equal, if there was one in this start.
    """
    who = [Member(place.node_rank, rank, place.host) for rank, place in enumerate(places)]
    groups = partition((who[rank], report.digest) for rank, report in sorted(reports.items()))
    most = majority(groups)
    odd = [one for group in groups if most is not None and group is not most for one in group.members]
    since = f"they were equal after step {equal_at}" if equal_at is not None else "it is the first comparison"
    if odd:
        summary = (
            f"{name_all(odd)} {'holds' if len(odd) == 1 else 'hold'} different weights than the other ranks"
            f" after step {step}; {since}"
        )
    else:
        summary = (
            f"ranks hold different weights after step {step}, and most of them do not agree on any; {since}"
        )
    evidence = [
        Evidence(where=name_all(group.members), text=f"digest of the trained weights: {group.value}")
        for group in odd_first(groups, odd)[:_SHOWN_GROUPS]
    ]
    return Verdict(
        cause="replicas_diverged",
        when="during",
        summary=summary,
        ranks=culprit_ranks(odd),
        hosts=culprit_hosts(odd),
        phase="update",
        step=step,
        evidence=tuple(evidence),
        fix=_fix_of_drift(culprit_ranks(odd), equal_at),
        confidence=1.0 if odd else 0.5,
    )


def _fix_of_drift(ranks: tuple[int, ...], equal_at: int | None) -> tuple[str, ...]:
    """The catalogue's, after what is known of the checkpoints here: rank 0 writes them."""
    known = find_cause("replicas_diverged")
    general = known.remedy if known is not None else ()
    if ranks and 0 not in ranks:
        return (
            "checkpoints are written by rank 0, which agrees with the majority: they are good",
            *general[1:],
        )
    if equal_at is not None:
        return (
            (
                f"go back to a checkpoint of step {equal_at} or before: move the later folders out of"
                " checkpoints/, since they may hold weights that have drifted, and run the same command"
            ),
            *general[1:],
        )
    return general


def _rounding_warning(reports: Mapping[int, DriftReport], step: int) -> Message:
    kinds = " and ".join(sorted({report.arithmetic for report in reports.values()}))
    return {
        "kind": "warning",
        "time": time.time(),
        "code": "replicas_round_differently",
        "text": (
            f"the weights of the ranks are not bit-equal after step {step}: {kinds} round differently. Drift"
            " of a rank cannot be detected here"
        ),
        "fix": "train on devices of one kind",
    }
