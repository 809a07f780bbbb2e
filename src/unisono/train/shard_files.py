"""The files of a checkpoint, by the ranks that write them.

One rank, or rank 0 of replicas, writes all of them. Of sharded ranks each writes its part into one directory, which rank 0 makes, and reports
it; rank 0 waits for all. A slow disk, or a slow way to the head's, is waited for as long as it shows progress: a rank tells rank 0 of it
through the front (`shard_moves`), and rank 0 tells the others in notes.
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
"""Without any progress of rank 0 until the directory is there: a network file system shows new names late."""


@dataclass(frozen=True)
class Job:
    """What is known of a save when it begins.

    Attributes:
        step: optimizer steps done.
        temporary: the name of the directory that is written.
        shards: ranks that write into it.
    """

    step: int
    temporary: str
    shards: int


def write_own_files(
    run: Run, job: Job, save: Save, files: Files, directory: Path, texts: dict[str, bytes]
) -> dict[str, FileEntry]:
    """Writes what this rank has of a checkpoint; gives what goes into the manifest.

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
    """Writes this rank's part beside the others', or on its own node's disk, and reports it."""
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
        trouble = write_failure(failure, directory, directory)
        found = trouble or (failure if isinstance(failure, StorageFailed) else None)
        error = "; ".join(str(problem.what) for problem in found.problems) if found else str(failure)
        verdict = found.verdict.to_json() if found and found.verdict else None
    told = {name: entry.model_dump() for name, entry in entries.items()}
    run.report.send(
        "shard_written", step=job.step, temporary=job.temporary, files=told, error=error, verdict=verdict
    )


def dismiss_parts(run: Run, job: Job) -> None:
    """Has nobody wait for rank 0, or for its directory: neither the other ranks, nor parts that are on their way to the head."""
    if job.shards > 1:
        run.group.leave_note(_gave_up(job))
        run.report.send("shards_over", step=job.step, temporary=job.temporary)


def _gave_up(job: Job) -> str:
    return f"gave up {job.temporary}"


def _moves(job: Job, number: int) -> str:
    """The note of rank 0 by which the others wait on; each is left once."""
    return f"moves {job.temporary} {number}"


def tell_others_of_moves(run: Run, job: Job, save: Save) -> None:
    """Has rank 0 leave a note for the others, from time to time, while its save makes progress."""
    numbers = itertools.count()
    save.on_move = lambda: run.group.leave_note(_moves(job, next(numbers)))


def _enter(run: Run, job: Job, save: Save, directory: Path) -> None:
    """Waits until rank 0 has made the directory, where this node sees it; a save that it has given up is not begun anew.

    Raises:
        StorageFailed: if it does not come.
    """
    if any(node.node_rank == run.place.node_rank and not node.shares_output for node in run.plan.nodes):
        make_private_dir(directory)
        return
    heard, looks = 0, 0
    save.waits_for_main = True
    while not _is_there(directory, save):
        looks += 1
        if looks % _NOTES_EVERY == 0:
            if run.group.has_note(_gave_up(job)):
                raise given_up(f"rank 0 has given {directory.name} up", directory)
            if run.group.has_note(_moves(job, heard)):
                heard += 1
                save.advance()
        if save.idle_s > _DIRECTORY_S:
            raise given_up(f"rank 0 has not made {directory.name}", directory)
        time.sleep(_LOOK_S)
    save.waits_for_main = False
    save.advance()


def _is_there(directory: Path, save: Save) -> bool:
    """Asks for rank 0's directory. Where there is no answer, it is this rank's own storage that hangs."""
    save.asked = time.monotonic()
    try:
        return directory.is_dir()
    finally:
        save.asked = None


def refuse_abandoned(save: Save, directory: Path) -> None:
    """What was read while training changed it must not be published.

    Raises:
        StorageFailed: if training has gone on meanwhile.
    """
    if save.is_abandoned:
        raise given_up("the storage hung while the live tensors were read, and training went on", directory)


def given_up(what: str, path: Path) -> StorageFailed:
    """The error of a checkpoint that is not made, for this reason."""
    return StorageFailed(Problem(what, str(path), "", "older checkpoints are unchanged"), path=path)


def shards_of_others(run: Run, job: Job, save: Save) -> dict[str, FileEntry]:
    """What the other ranks have written, once all have reported and it is on this disk.

    Raises:
        StorageFailed: if one could not write its part.
    """
    missing = set(range(1, job.shards))
    save.waits_for_others = bool(missing)
    found: dict[str, FileEntry] = {}
    while missing:
        save.doing = "waiting for the part of " + ", ".join(
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
