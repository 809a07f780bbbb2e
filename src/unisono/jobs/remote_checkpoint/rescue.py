"""After a rank's death: writes a checkpoint of the latest step in the ranks' shared memory, if it
is newer than the one on disk.
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.base.errors import storage_reason, storage_words
from unisono.base.messages import Message, Show, StepMessage, WarningMessage, message_of
from unisono.base.text import parse_seconds
from unisono.guard.control.channel_ends import HeadServer
from unisono.guard.control.connection import FileReceived, Left, NodeMessage
from unisono.guard.control.file_transfer import FileReceiver, FileSender, Offer, OfferRefused, TransferOutcome
from unisono.guard.rendezvous.meeting_rules import parse_stop
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import MetricsWriter, is_evaluation, truncate_after
from unisono.guard.supervise.decision import NodeLoss
from unisono.guard.supervise.interrupts import Interrupts
from unisono.guard.supervise.local_ranks import SharedMemory
from unisono.guard.supervise.node_messages import SnapshotsRequested, SnapshotsSent, Stop, decode_news, encode
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.snapshot import StepSnapshot, read_slots
from unisono.trainer.checkpoint.store import CheckpointStore, temporary_name
from unisono.trainer.checkpoint.writer import (
    STATE,
    StorageFailed,
    TensorFile,
    group_file,
    state_text,
    write_files,
)
from unisono.trainer.plan import RunPlan

_REPLICAS = 2  # a copy of rank 0 in case its memory is damaged; more would only cost memory


def snapshot_ranks(plan: RunPlan, node_rank: int) -> list[int]:
    """The ranks of a node that keep their steps in memory.

    With an adapter these are the ranks that together hold its whole state: all ranks if it is
    sharded, else the first ones of the head's node. Without an adapter the state is too large.
    """
    if not plan.keeps_steps:
        return []
    places = [place.rank for place in plan.on_node(node_rank)]
    parts = [ranks for ranks in plan.mesh.holders if ranks[0] in places]
    return [rank for ranks in parts for rank in [r for r in places if r in ranks][:_REPLICAS]]


@dataclass
class RescuedStep:
    """The snapshots that the ranks left in memory.

    Attributes:
        steps: of each rank, the intact snapshots, newest first.
        damage: of each rank, the errors of the others.
    """

    steps: dict[int, list[StepSnapshot]] = field(default_factory=dict)
    damage: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def of_node(cls, memory: SharedMemory) -> "RescuedStep":
        """The snapshots of this node's ranks, which have ended."""
        rescued = cls()
        for rank in memory.ranks:
            content = memory.content(rank)
            rescued.steps[rank], rescued.damage[rank] = (
                read_slots(content) if content is not None else ([], [])
            )
        return rescued


def choose_pieces(
    steps: Mapping[int, Sequence[StepSnapshot]], *, holders: Sequence[Sequence[int]]
) -> list[StepSnapshot]:
    """The latest complete state: one snapshot for each part. Empty if there is none.

    Args:
        steps: the snapshots of each rank.
        holders: for each part of the state, the ranks that hold it; the first one's is preferred.
    """
    of_each = [
        {snapshot.sequence: snapshot for rank in reversed(ranks) for snapshot in steps.get(rank, ())}
        for ranks in holders
    ]
    common = set.intersection(*map(set, of_each))
    return [by_sequence[max(common)] for by_sequence in of_each] if common else []


def ended_with_result(attempt: Attempt) -> bool:
    """Whether the ranks ended with a result, having saved their state themselves."""
    return attempt.last is not None and attempt.last["kind"] == "result" and attempt.decision is None


def needs_other_nodes(plan: RunPlan, attempt: Attempt) -> bool:
    """Whether other nodes hold parts of the state."""
    has_remote = any(snapshot_ranks(plan, node.node_rank) for node in plan.nodes if node.node_rank != 0)
    return has_remote and attempt.ready and not ended_with_result(attempt)


def rescue(
    run: RunDir, plan: RunPlan, attempt: Attempt, rescued: RescuedStep, *, store: CheckpointStore, show: Show
) -> bool:
    """Whether a new checkpoint was written from memory after the ranks died; it is then recorded in
    `attempt`.

    Args:
        attempt: how they ended; all of them are gone.
    """
    if ended_with_result(attempt):
        return False
    for rank, damage in rescued.damage.items():
        for what in damage:
            _warn(show, "snapshot_refused", f"the snapshot of rank {rank} in memory is not used: {what}")
    holders = plan.mesh.holders
    pieces = choose_pieces(rescued.steps, holders=holders)
    if not pieces:
        missing = [str(ranks[0]) for ranks in holders if not any(map(rescued.steps.get, ranks))]
        if missing and any(rescued.steps.values()):
            _notify(show, f"the state in memory is incomplete: nothing from rank {', '.join(missing)}")
        return False
    step, began = pieces[0].step, time.monotonic()
    try:
        on_disk = store.newest_intact(run_id=plan.run_id)
        if on_disk is not None and on_disk.step >= step:
            return False
        _complete_metrics(run, pieces[0], show)
        path = _save(plan, pieces, store=store)
    except (StorageFailed, OSError, ValueError) as error:  # ValueError: a node sent an invalid snapshot
        _warn(show, "checkpoint_failed", f"step {step} from memory cannot be saved: {_why(error)}")
        return False
    _report_checkpoint(plan, attempt, pieces[0], path, seconds=time.monotonic() - began, show=show)
    return True


def _why(error: StorageFailed | OSError | ValueError) -> str:
    if isinstance(error, StorageFailed):
        return "; ".join(text for problem in error.problems for text in (problem.what, problem.why) if text)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{storage_words(error)}{where}; {storage_reason(error)}"
    return str(error)


def _complete_metrics(run: RunDir, snapshot: StepSnapshot, show: Show) -> None:
    """Writes the metrics of the step, in place of missing or partial lines."""
    warning = truncate_after(run.metrics, snapshot.step - 1).warning()
    if warning is not None:
        show(message_of(WarningMessage, warning))
    writer = MetricsWriter(run.metrics)
    try:
        for line in snapshot.lines:
            writer.append(line)
        writer.sync()
    finally:
        writer.close()


def _save(plan: RunPlan, pieces: Sequence[StepSnapshot], *, store: CheckpointStore) -> Path:
    groups, shards = list(pieces[0].layout.groups), len(pieces)
    files = [
        TensorFile(group_file(group, number, shards), piece.parts(group))
        for group in groups
        for number, piece in enumerate(pieces)
    ]
    texts = {STATE: state_text(groups, pieces[0].values, shards=shards)}

    def write(directory: Path) -> dict[str, FileEntry]:
        written = write_files(directory, files, texts)
        return {name: entry.model_copy(update={"host": plan.host}) for name, entry in written.items()}

    return store.save(
        pieces[0].step,
        write,
        run_id=plan.run_id,
        config_digest=plan.config_digest,
        world_size=plan.world_size,
        threads=plan.threads,
        holder=plan.host,
    )


def _report_checkpoint(
    plan: RunPlan, attempt: Attempt, snapshot: StepSnapshot, path: Path, *, seconds: float, show: Show
) -> None:
    """Reports the checkpoint in a note and as messages for consumers of steps and checkpoints."""
    lost = attempt.step - snapshot.step
    messages: list[Message] = []
    if lost < 0:  # the step was finished, but its message did not arrive
        messages += [message_of(StepMessage, line) for line in snapshot.lines if not is_evaluation(line)]
    size = sum(file.stat().st_size for file in path.iterdir())
    messages.append(
        {
            "kind": "checkpoint",
            "time": time.time(),
            "step": snapshot.step,
            "path": str(path),
            "bytes": size,
            "seconds": seconds,
            "blocking_s": 0.0,
        }
    )
    for message in messages:
        attempt.note(message)
        show(message)
    lost_steps = "nothing is lost" if lost <= 0 else f"the {lost} after it are lost"
    who = _culprit_label(plan, attempt)
    _notify(
        show, f"{who}: step {snapshot.step} was saved from memory as checkpoint {path.name}; {lost_steps}"
    )


def _culprit_label(plan: RunPlan, attempt: Attempt) -> str:
    decision = attempt.decision
    if decision is not None and decision.culprit is not None:
        return f"{plan.ranks[decision.culprit.rank].label} died"
    if decision is not None and decision.loss is not None:
        return f"node {decision.loss.node_rank} ({decision.loss.host}) is lost"
    return "the ranks are gone"


def _warn(show: Show, code: str, text: str) -> None:
    show({"kind": "warning", "time": time.time(), "code": code, "text": text, "fix": ""})


def _notify(show: Show, text: str) -> None:
    show({"kind": "note", "time": time.time(), "text": text})


_KEPT = "kept"
_LIMIT_S = 60.0
"""Without a new piece for this long, the collection ends."""
_AT_LEAST_S = 2.0
_RESCUE_S = 1.0


class MemorySender:
    """Sends the head the snapshots of a member's ranks."""

    def __init__(
        self, transfers: FileSender, memory: SharedMemory, send: Callable[[SnapshotsSent], None]
    ) -> None:
        self._transfers = transfers
        self._memory = memory
        self._send = send
        self._pending: set[int] = set()

    def send_all(self) -> None:
        """Sends the snapshots on the head's request, after the ranks have ended."""
        for rank in self._memory.ranks:
            content = self._memory.content(rank)
            if content is not None:
                self._pending.add(self._transfers.send(content, {"kind": _KEPT, "rank": rank}))
        if not self._pending:
            self._send(SnapshotsSent())

    def transfer_ended(self, outcome: TransferOutcome) -> None:
        """Records the end of a transfer, successful or not; after the last one the head gets a
        message.
        """
        if outcome.transfer in self._pending:
            self._pending.discard(outcome.transfer)
            if not self._pending:
                self._send(SnapshotsSent())


def collect(
    plan: RunPlan,
    server: HeadServer,
    attempt: Attempt,
    rescued: RescuedStep,
    *,
    checkpoints: Path,
    interrupts: Interrupts,
) -> None:
    """Adds the snapshots of other nodes' ranks to `rescued`.

    A node lost in the meantime is recorded in `attempt`.

    Args:
        plan: of the ranks; all of them have ended.
        rescued: the snapshots so far; more are added.
        checkpoints: the head's directory of checkpoints, where received files stay until they are
            read.
        interrupts: records a stop signal that a node reports in the meantime.
    """
    waiting = {node.node_rank for node in plan.nodes[1:]} - {loss.node_rank for loss in attempt.lost}
    began = time.monotonic()
    with (
        _folder(checkpoints) as folder,
        FileReceiver(server, {_KEPT: lambda offer: _place(plan, folder, offer)}) as receiving,
    ):
        for node_rank in waiting:
            server.send(node_rank, encode(SnapshotsRequested()))
        while waiting and time.monotonic() < _limit(plan, interrupts, began, receiving.moved):
            for event in server.receive(0.2):
                match event:
                    case FileReceived(label={"kind": "kept", "rank": int(rank)}, path=Path() as path):
                        rescued.steps[rank], rescued.damage[rank] = read_slots(memoryview(path.read_bytes()))
                    case NodeMessage(node_rank, {"kind": SnapshotsSent.kind}):
                        waiting.discard(node_rank)
                    case NodeMessage(node_rank, {"kind": Stop.kind} as message):
                        _request_stop(interrupts, message, host=plan.node(node_rank).host)
                    case Left():
                        waiting.discard(event.node_rank)
                        attempt.lost.append(NodeLoss.at_head(event))
                    case _:
                        pass  # last messages of ranks that are gone


def _request_stop(interrupts: Interrupts, message: Mapping[str, object], *, host: str) -> None:
    news = decode_news(message)
    if isinstance(news, Stop):
        stopped = parse_stop(news.signal, host)
        interrupts.request_stop(stopped.number, where=stopped.where, again=news.again)


def _limit(plan: RunPlan, interrupts: Interrupts, began: float, moved: float) -> float:
    """When the collection ends at the latest, in monotonic seconds: a stopping job has only its
    grace time.
    """
    if interrupts.first is None:
        return moved + _LIMIT_S
    grace = 0.0 if interrupts.twice else parse_seconds(plan.config.grace)
    return min(moved + _LIMIT_S, max(began + _AT_LEAST_S, interrupts.at + grace - _RESCUE_S))


def _place(plan: RunPlan, folder: Path, offer: Offer) -> tuple[Path, str]:
    rank: Any = offer.label.get("rank")
    if rank not in [place.rank for place in plan.on_node(offer.node_rank)]:
        raise OfferRefused(f"rank {rank!r:.20} is not on node {offer.node_rank}")
    return folder, f"kept-{int(rank):05d}"


@contextlib.contextmanager
def _folder(checkpoints: Path) -> Iterator[Path]:
    """A temporary folder; the next start removes it if this front dies."""
    folder = checkpoints / temporary_name(0, secrets.token_hex(4))
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
