"""Work of rank 0 for all ranks: reading files for as long as they make progress, and broadcasting
what was read; and the files of a checkpoint, and how ranks that write shards of it wait for each
other.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from unisono.base.causes import Verdict
from unisono.base.errors import Problem
from unisono.base.files import make_private_dir
from unisono.guard.facts.processes import ThreadCounters, read_thread
from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.state import CheckpointReader, Outline, RunValues
from unisono.trainer.checkpoint.writer import (
    StorageFailed,
    TensorFile,
    decode_values,
    encode_values,
    group_file,
    write_failure,
    write_files,
)
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.run import Run
from unisono.trainer.training.saver import Files, Save

TURN_S = 10.0
_LOOK_S = 0.2
_REPORTED_AFTER_S = 5.0
_GIVEN_UP_AFTER_S = 60.0
_FIX = "check that file system (frozen? network mount with an unreachable server?), and run the same command again"

Result = TypeVar("Result")


def on_rank0(run: Run, work: Callable[[], Result], *, what: str, path: Path) -> Result | None:
    """Runs some work on files on rank 0, and gives it the result; the other ranks get None.

    All ranks must call it.

    The work may take hours, e.g. to read a large checkpoint from a slow disk. The other ranks wait
    in turns, because a collective that waits longer than the process group's timeout would end the
    run. The total time is not limited; the time without progress is.

    Args:
        run: of the rank.
        work: only reads and computes. Its exception is raised on rank 0.
        what: description for messages, e.g. "reading checkpoint step-00000100".
        path: the path that is read.

    Raises:
        StorageFailed: on rank 0, if the work makes no progress.
    """
    own = _Rank0Work(run, work, what, path) if run.group.is_main else None
    while run.group.any(own is not None and own.is_running_after_turn()):
        pass
    return own.result() if own is not None else None


class _Rank0Work(Generic[Result]):
    """Work in a background thread."""

    def __init__(self, run: Run, work: Callable[[], Result], what: str, path: Path) -> None:
        self._run = run
        self._what, self._path = what, path
        self._found: list[Result] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._moves: ThreadCounters | None = None
        self._moved = time.monotonic()
        self._is_reported = False
        self._thread = threading.Thread(target=self._do, args=(work,), name="by-main", daemon=True)
        self._thread.start()

    def is_running_after_turn(self) -> bool:
        """Waits one turn for the end of the work; whether it is still running then.

        Raises:
            StorageFailed: if it has made no progress for too long.
        """
        until = time.monotonic() + TURN_S
        while not self._done.wait(_LOOK_S) and time.monotonic() < until:
            self._look()
        return not self._done.is_set()

    def result(self) -> Result:
        """The result of the work, or its exception."""
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _do(self, work: Callable[[], Result]) -> None:
        try:
            self._found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by `result`, in the main thread
            self._error = error
        finally:
            self._done.set()

    def _look(self) -> None:
        look = read_thread(os.getpid(), self._thread.native_id or 0)
        if look is None or look.moves != self._moves:
            self._moves, self._moved = look.moves if look else None, time.monotonic()
            self._run.beats.progress(sum(self._moves or (0,)))
            return
        idle_s = time.monotonic() - self._moved
        text = f"{self._what} has made no progress for {idle_s:.0f} s: {look}"
        if idle_s > _REPORTED_AFTER_S and not self._is_reported:
            self._is_reported = True
            self._run.report.send(
                {
                    "kind": "warning",
                    "code": "storage_blocked",
                    "text": text,
                    "where": str(self._path),
                    "fix": _FIX,
                }
            )
        if idle_s > _GIVEN_UP_AFTER_S:
            problem = Problem(text, str(self._path), "the storage does not answer", _FIX)
            raise StorageFailed(problem, path=self._path)


# ---- Broadcast of what was read


def broadcast_json(group: Group, value: Any, *, device: torch.device) -> Any:
    """Rank 0's `value` on all ranks: dicts, lists, tuples, str, int, float, bool, None.

    All ranks must call it.

    It is JSON in a tensor of bytes: nothing is pickled.
    """
    if group.world_size == 1:
        return value
    text = json.dumps(encode_values(value, "value")).encode() if group.is_main else b""
    size = torch.tensor([len(text)], device=device)
    group.broadcast(size)
    if group.is_main:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    else:
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
    group.broadcast(content)
    return decode_values(json.loads(content.cpu().numpy().tobytes()))


class CheckpointBroadcast:
    """A checkpoint that rank 0 reads and broadcasts, so that only rank 0 needs the disk: values at
    once, tensors one by one.

    Attributes:
        values: everything but tensors.
        shapes: shapes of the tensors, by group and name.
    """

    def __init__(self, group: Group, reader: CheckpointReader | None, *, device: torch.device) -> None:
        """Broadcasts the values and the tensors' outlines.

        All ranks must call it; rank 0 with its reader.
        """
        self._group, self._device = group, device
        self._reader = reader
        message: dict[str, object] | None = None
        if reader is not None:
            message = {
                "values": reader.values,
                "tensors": {name: _outline(of) for name, of in reader.groups.items()},
            }
        received = broadcast_json(group, message, device=device)
        self.values: RunValues = received["values"]
        self._outlines: dict[str, list[list[Any]]] = received["tensors"]
        self.shapes = {
            group: {name: torch.Size(shape) for name, shape, _ in outline}
            for group, outline in self._outlines.items()
        }

    def tensors(self, group: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of one group, in order. All ranks must iterate over all of them."""
        for name, shape, dtype in self._outlines[group]:
            if self._reader is not None:
                tensor = self._reader.tensor(group, name)
                if self._group.world_size > 1:
                    tensor = tensor.to(self._device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast(tensor)
            yield name, tensor


def _outline(tensors: dict[str, Outline]) -> list[list[Any]]:
    return [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]


_SHARDS_EVERY_S = 1.0
_SHARDS_LOOK_S = 0.05
_NOTES_EVERY = 5  # looks
_DIRECTORY_S = 30.0
"""How long a rank waits for the directory without any progress of rank 0: a network file system
shows new names late.
"""


@dataclass(frozen=True)
class SaveJob:
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
    run: Run, job: SaveJob, save: Save, files: Files, directory: Path, texts: dict[str, bytes]
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
    for hook in run.hooks:
        hook.work_begins("save", job.step, save.advance)
    written = write_files(directory, named, texts, on_bytes=progress)
    return {name: entry.model_copy(update={"host": run.place.host}) for name, entry in written.items()}


def write_shard(run: Run, job: SaveJob, save: Save, files: Files) -> None:
    """Writes this rank's part next to the others, or to its own node's disk, and reports it."""
    directory = run.files.checkpoints / job.temporary
    entries: dict[str, FileEntry] = {}
    error, verdict = "", None
    save.on_stuck = lambda why: run.report.send(
        {
            "kind": "shard_written",
            "step": job.step,
            "temporary": job.temporary,
            "directory": str(directory),
            "files": {},
            "error": why,
        }
    )
    save.on_move = lambda: run.report.send(
        {"kind": "shard_moves", "step": job.step, "temporary": job.temporary}
    )
    save.advance(f"writing {directory}")
    try:
        _enter(run, job, save, directory)
        entries = write_own_files(run, job, save, files, directory, {})
        refuse_abandoned(save, directory)
    except (OSError, StorageFailed) as failure:
        write_problem = write_failure(failure, directory, directory)
        cause = write_problem or (failure if isinstance(failure, StorageFailed) else None)
        error = "; ".join(str(problem.what) for problem in cause.problems) if cause else str(failure)
        verdict = cause.verdict.to_json() if cause and cause.verdict else None
    written = {name: entry.model_dump() for name, entry in entries.items()}
    run.report.send(
        {
            "kind": "shard_written",
            "step": job.step,
            "temporary": job.temporary,
            "directory": str(directory),
            "files": written,
            "error": error,
            "verdict": verdict,
        }
    )


def dismiss_parts(run: Run, job: SaveJob) -> None:
    """Releases everything that waits for rank 0's directory: the other ranks, and parts on their
    way to the head.
    """
    if job.shards > 1:
        run.group.leave_note(_gave_up(job))
        run.report.send({"kind": "shards_over", "step": job.step, "temporary": job.temporary})


def _gave_up(job: SaveJob) -> str:
    return f"gave up {job.temporary}"


def _moves(job: SaveJob, number: int) -> str:
    """The note of rank 0 that makes the others wait longer; each is left once."""
    return f"moves {job.temporary} {number}"


def report_moves(run: Run, job: SaveJob, save: Save) -> None:
    """Makes rank 0 leave notes for the other ranks while its save makes progress."""
    numbers = itertools.count()
    save.on_move = lambda: run.group.leave_note(_moves(job, next(numbers)))


def _enter(run: Run, job: SaveJob, save: Save, directory: Path) -> None:
    """Waits until this node sees the directory that rank 0 creates.

    A node with its own output disk creates it itself.

    Raises:
        StorageFailed: if rank 0 has given up, or the directory does not appear.
    """
    if run.plan.has_own_output(run.place.node_rank):
        if run.directory_check is not None:
            run.directory_check.require(job.step)
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
        time.sleep(_SHARDS_LOOK_S)
    save.waits_for_main = False
    save.advance()


def _exists(directory: Path, save: Save) -> bool:
    """Whether rank 0's directory exists.

    If this look hangs, it is this rank's own storage that hangs.
    """
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


def shards_of_others(run: Run, job: SaveJob, save: Save) -> dict[str, FileEntry]:
    """The manifest entries of the other ranks, once all have reported and their files are on this
    disk.

    Raises:
        StorageFailed: if one could not write its part.
    """
    missing = set(range(1, job.shards))
    save.waits_for_others = bool(missing)
    entries: dict[str, FileEntry] = {}
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
            error.verdict = Verdict.from_json(verdict) if (verdict := message.get("verdict")) else None
            raise error
        missing.discard(rank)
        entries |= {name: FileEntry.model_validate(entry) for name, entry in message["files"].items()}
    save.waits_for_others = False
    return entries
