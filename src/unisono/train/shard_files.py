"""The files of a checkpoint, and how ranks that write shards of it wait for each other.

One rank, or rank 0 of replicas, writes all files. Each rank of a sharded run writes its part to one directory, which rank 0 creates, and
reports it; rank 0 waits for all. A slow disk, or a slow network to the head, is waited for as long as it makes progress: a rank reports
progress to rank 0 through the front (`shard_moves`), and rank 0 to the other ranks in notes.
"""

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

from unisono.causes import Verdict
from unisono.checkpoint.manifest import FileEntry
from unisono.checkpoint.writer import StorageFailed, TensorFile, group_file, write_failure, write_files
from unisono.errors import Problem
from unisono.files import make_private_dir
from unisono.train import faults
from unisono.train.run import Run
from unisono.train.saver import Files, Save

_SHARDS_EVERY_S = 1.0
_LOOK_S = 0.05
_NOTES_EVERY = 5  # looks
_DIRECTORY_S = 30.0
"""How long a rank waits for the directory without any progress of rank 0: a network file system shows new names late."""


@dataclass(frozen=True)
class Job:
    """The facts of a save that are known at its start.

    Attributes:
        step: optimizer steps done.
        temporary: the name of the directory while it is written.
        shards: number of ranks that write to it.
    """

    step: int
    temporary: str
    shards: int


def write_own_files(
    run: Run, job: Job, save: Save, files: Files, directory: Path, texts: dict[str, bytes]
) -> dict[str, FileEntry]:
    """Writes this rank's part of a checkpoint; gives its manifest entries.

    Raises:
        OSError, StorageFailed: if the storage fails.
    """
    shard = run.group.rank if job.shards > 1 else 0
    named = [TensorFile(group_file(group, shard, job.shards), parts) for group, parts in files.items()]

    def progress(_: int) -> None:
        save.advance()

    save.advance(f"writing {directory}")
    faults.pause(run.plan, run.group.rank, job.step, "save", on_slice=save.advance)
    written = write_files(directory, named, texts, on_bytes=progress)
    return {name: entry.model_copy(update={"host": run.place.host}) for name, entry in written.items()}


def write_shard(run: Run, job: Job, save: Save, files: Files) -> None:
    """Writes this rank's part next to the others, or to its own node's disk, and reports it."""
    directory = run.files.checkpoints / job.temporary
    entries: dict[str, FileEntry] = {}
    error, verdict = "", None
    save.on_stuck = lambda why: run.report.send(
        "shard_written", step=job.step, temporary=job.temporary, files={}, error=why
    )
    save.on_move = lambda: run.report.send("shard_moves", step=job.step, temporary=job.temporary)
    save.advance(f"writing {directory}")
    try:
        _enter(run, job, save, directory)
        entries = write_own_files(run, job, save, files, directory, {})
        refuse_abandoned(save, directory)
    except (OSError, StorageFailed) as failure:
        write_problem = write_failure(failure, directory, directory)
        found = write_problem or (failure if isinstance(failure, StorageFailed) else None)
        error = "; ".join(str(problem.what) for problem in found.problems) if found else str(failure)
        verdict = found.verdict.to_json() if found and found.verdict else None
    written = {name: entry.model_dump() for name, entry in entries.items()}
    run.report.send(
        "shard_written", step=job.step, temporary=job.temporary, files=written, error=error, verdict=verdict
    )


def dismiss_parts(run: Run, job: Job) -> None:
    """Releases everything that waits for rank 0's directory: the other ranks, and parts on their way to the head."""
    if job.shards > 1:
        run.group.leave_note(_gave_up(job))
        run.report.send("shards_over", step=job.step, temporary=job.temporary)


def _gave_up(job: Job) -> str:
    return f"gave up {job.temporary}"


def _moves(job: Job, number: int) -> str:
    """The note of rank 0 that makes the others wait longer; each is left once."""
    return f"moves {job.temporary} {number}"


def report_moves(run: Run, job: Job, save: Save) -> None:
    """Makes rank 0 leave notes for the other ranks while its save makes progress."""
    numbers = itertools.count()
    save.on_move = lambda: run.group.leave_note(_moves(job, next(numbers)))


def _enter(run: Run, job: Job, save: Save, directory: Path) -> None:
    """Waits until this node sees the directory that rank 0 creates. A node with its own output disk creates it itself.

    Raises:
        StorageFailed: if rank 0 has given up, or the directory does not appear.
    """
    if any(node.node_rank == run.place.node_rank and not node.shares_output for node in run.plan.nodes):
        make_private_dir(directory)
        return
    notes_seen, looks = 0, 0
    save.waits_for_main = True
    while not _exists(directory, save):
        looks += 1
        if looks % _NOTES_EVERY == 0:
            if run.group.has_note(_gave_up(job)):
                raise given_up(f"rank 0 has given up {directory.name}", directory)
            if run.group.has_note(_moves(job, notes_seen)):
                notes_seen += 1
                save.advance()
        if save.idle_s > _DIRECTORY_S:
            raise given_up(f"rank 0 has not created {directory.name}", directory)
        time.sleep(_LOOK_S)
    save.waits_for_main = False
    save.advance()


def _exists(directory: Path, save: Save) -> bool:
    """Whether rank 0's directory exists. If this look hangs, it is this rank's own storage that hangs."""
    save.looking_since = time.monotonic()
    try:
        return directory.is_dir()
    finally:
        save.looking_since = None


def refuse_abandoned(save: Save, directory: Path) -> None:
    """Refuses to publish tensors that changed while they were read.

    Raises:
        StorageFailed: if training has continued meanwhile.
    """
    if save.is_abandoned:
        raise given_up("the storage hung while the live tensors were read, and training continued", directory)


def given_up(what: str, path: Path) -> StorageFailed:
    """The error of a checkpoint that was given up."""
    return StorageFailed(Problem(what, str(path), "", "older checkpoints are unchanged"), path=path)


def shards_of_others(run: Run, job: Job, save: Save) -> dict[str, FileEntry]:
    """The manifest entries of the other ranks, once all have reported and their files are on this disk.

    Raises:
        StorageFailed: if one could not write its part.
    """
    missing = set(range(1, job.shards))
    save.waits_for_others = bool(missing)
    found: dict[str, FileEntry] = {}
    while missing:
        save.activity = "waiting for the part of " + ", ".join(
            run.plan.ranks[rank].label for rank in sorted(missing)
        )
        assert run.front_messages is not None
        message = run.front_messages.next("shard_written", timeout_s=_SHARDS_EVERY_S)
        if message is None or message.get("temporary") != job.temporary:
            continue
        save.advance()
        if message["kind"] == "shard_moves":
            continue
        rank = int(message["rank"])
        if message["error"]:
            label = run.plan.ranks[rank].label
            path = run.files.checkpoints / job.temporary
            error = given_up(f"the part of {label} could not be written: {message['error']}", path)
            error.verdict = Verdict.from_json(message["verdict"]) if message.get("verdict") else None
            raise error
        missing.discard(rank)
        found |= {name: FileEntry.model_validate(entry) for name, entry in message["files"].items()}
    save.waits_for_others = False
    return found
