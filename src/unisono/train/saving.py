"""A run's state into a checkpoint, and back.

One rank, or rank 0 of replicas, writes whole tensors. Sharded ranks write their parts, each its own file in the same directory, and report
what they wrote; rank 0 makes the manifest of all of it and gives the directory its name. Reading knows both forms and gives whole tensors, so
one rank, replicas and shards go on from each other's.
"""

import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.manifest import FileEntry
from unisono.checkpoint.state import CheckpointReader, load_optimizer
from unisono.checkpoint.store import step_of, temporary_name
from unisono.checkpoint.writer import STATE, StorageFailed, state_text, write_failure
from unisono.errors import (
    IntegrityError,
    Problem,
    storage_reason,
    storage_remedy,
    storage_verdict,
    storage_words,
)
from unisono.files import read_object
from unisono.model.sharding import sharded_like
from unisono.rundir.records import MetricsWriter, best_evaluated
from unisono.train import faults
from unisono.train.rank0_work import TURN_S, CheckpointBroadcast, on_rank0
from unisono.train.run import Run, TrainState, contents_of
from unisono.train.saver import STUCK_S, Files, Save
from unisono.train.shard_files import (
    Job,
    dismiss_parts,
    refuse_abandoned,
    shards_of_others,
    tell_others_of_moves,
    write_own_files,
    write_shard,
)
from unisono.units import parse_seconds

_MADE_AGAIN_S = 4.0
_LOOK_S = 0.1


def save_checkpoint(run: Run) -> None:
    """Begins to save the state after the current step; training may go on. All ranks must call it.

    What comes of it is said when it is known. A full disk costs the new checkpoint, never an older one and never the training: it is tried
    again next time.
    """
    if run.begun_step == run.state.step:
        return
    run.beats.enter("save")
    if not _is_free(run):
        return
    run.save_is_read = False
    if not run.group.is_main and run.sharded is None:  # rank 0 has all of it, and writes it alone
        run.begun_step = run.state.step
        return
    job = _job_of(run)
    run.begun_step = run.state.step
    contents = contents_of(run)
    groups = sorted(contents.groups)
    text = state_text(groups, contents.values, shards=job.shards) if run.group.is_main else None
    run.saver.begin(run.state.step, contents.groups, partial(_write, run, job, text))


def finish_saving(run: Run) -> None:
    """Waits for the save in flight; one that the storage has failed is tried once more. All ranks must call it."""
    run.beats.enter("save")
    patience_s = max(STUCK_S, parse_seconds(run.plan.config.grace))  # nothing else is left to be done
    for again in (True, False):
        is_free = _wait_for_save(run, patience_s)
        lost = run.begun_step is not None and run.group.is_main and not _is_saved(run, run.begun_step)
        _tell_left_behind(run)
        if not run.group.any(lost) or not is_free or not again or run.begun_step != run.state.step:
            return
        run.begun_step = None
        save_checkpoint(run)


def _is_saved(run: Run, step: int) -> bool:
    """Whether the step was saved, and nobody has removed it since."""
    return run.saved_step == step and os.path.lexists(run.files.checkpoint(step))


def _tell_left_behind(run: Run) -> None:
    """A run that ends well and loses its last checkpoint says so."""
    save = run.saver.last
    if save is not None and not save.done.is_set():
        run.report.warning(
            "checkpoint_skipped",
            f"step {save.step} is not saved: its save has made no progress for {save.idle_s:.0f} s ({save.doing}), and the"
            " run does not wait for it any longer",
            fix="look at the storage of output_dir, and at the way to it from the other nodes",
        )


def wait_for_copies(run: Run) -> None:
    """Waits until what is being saved has been copied, on all ranks; to be called before the weights change. All ranks must call it.

    Without memory for copies a save reads the live tensors, and may take hours on a slow disk. The others wait for it in turns, since no
    collective may take longer than the process group's patience.
    """
    while not run.save_is_read:
        run.save_is_read = not run.group.any(run.saver.still_reads(turn_s=TURN_S))
    run.saver.before_update()


def require_checkpoint(run: Run) -> None:
    """Refuses to leave as if the state were safe, where it is not. Rank 0 knows; the others end with it.

    Raises:
        StorageFailed: if the run has no checkpoint at all.
    """
    if run.group.is_main and run.saved_step is None:
        path = run.files.checkpoints
        problem = Problem(
            f"the run was asked to stop after step {run.state.step}, and no checkpoint could be written",
            str(path),
            "the warnings before tell why",
            "mend the storage, and start it again: it begins anew",
        )
        raise StorageFailed(
            problem, path=path, verdict=run.save_failure.verdict if run.save_failure else None
        )


def restore(run: Run, path: Path, *, trust: bool = False) -> None:
    """Puts weights, optimizer and state back to what a checkpoint holds, after reading it through.

    All ranks must call it; rank 0 reads, and gives the others what it has read, tensor by tensor.

    Args:
        run: which goes on.
        path: of the checkpoint.
        trust: whether one that is not signed by this user may be read.

    Raises:
        IntegrityError: if it is damaged, or does not hold the tensors of this run.
    """
    reader = None

    def read_through() -> None:
        assert run.store is not None
        run.store.require(path, run_id=run.plan.run_id, trust=trust)

    on_rank0(run, read_through, what=f"reading checkpoint {path.name}", path=path)
    if run.group.is_main:
        reader = CheckpointReader(path)
    shared = CheckpointBroadcast(run.group, reader, device=run.device)
    trainable = run.forward.loaded.trainable
    if shared.shapes["trainable"] != {name: parameter.shape for name, parameter in trainable.items()}:
        odd = sorted(set(shared.shapes["trainable"]) ^ set(trainable)) or ["shapes differ"]
        raise IntegrityError.of(
            f"checkpoint {path.name} does not hold what this run trains",
            where=str(path),
            why=f"for example {odd[0]}",
            fix="start with --fresh, or with the config that the checkpoint was made with",
        )
    run.saver.before_update()  # a save that hangs may not have read what it saves yet
    with torch.no_grad():
        for name, tensor in shared.tensors("trainable"):
            trainable[name].copy_(sharded_like(trainable[name], tensor))
    for name, part in run.optimizers.parts.items():
        tensors = {
            label: sharded_like(trainable[label.rpartition("::")[0]], tensor)
            for label, tensor in shared.tensors(f"optimizer-{name}")
        }
        load_optimizer(part, run.optimizers.names[name], tensors, shared.values["optimizer"][name])
    run.optimizers.take_settings()
    run.state = TrainState.from_json(shared.values["train"])
    run.saved_step = run.begun_step = run.state.step


def _is_free(run: Run) -> bool:
    """Whether no save is in flight on any rank; one that moves is waited for, one that hangs is not."""
    began = time.perf_counter()
    if _wait_for_save(run):
        return True
    save = run.saver.last
    if save is not None and not save.done.is_set():
        run.report.warning(
            "checkpoint_skipped",
            f"step {run.state.step} is not saved: the save of step {save.step} has made no progress for"
            f" {save.idle_s:.0f} s ({save.doing}); training goes on ({time.perf_counter() - began:.0f} s were waited)",
            fix="look at the storage of output_dir; older checkpoints are unchanged",
        )
    return False


def _wait_for_save(run: Run, patience_s: float | None = None) -> bool:
    """Waits for the save in flight while it moves; whether there is none now, on any rank. All ranks must call it.

    The ranks wait in turns: a save may take hours, and no collective may take longer than the process group's patience.
    """
    while run.group.any(run.saver.moves(patience_s, turn_s=TURN_S)):
        pass
    return not run.group.any(not run.saver.is_free)


def _job_of(run: Run) -> Job:
    """Agrees on the directory's name where several ranks write into it. No file is touched: a path that hangs is the saver's trouble."""
    step = run.state.step
    if run.sharded is None:
        return Job(step, temporary_name(step, secrets.token_hex(4)), 1)
    number = torch.zeros((), dtype=torch.int64, device=run.device)
    if run.group.is_main:
        number.fill_(secrets.randbits(32))
    run.group.broadcast(number)
    return Job(step, temporary_name(step, f"{int(number):09x}"), run.group.world_size)


def _write(run: Run, job: Job, text: bytes | None, save: Save, files: Files) -> Path | None:
    """Writes this rank's files; rank 0 also publishes. In the saver's thread. Gives the path if there is a checkpoint."""
    if run.store is None:
        write_shard(run, job, save, files)
        return None
    assert run.metrics is not None
    assert text is not None
    plan = run.plan
    parts_are_wanted = threading.Event()
    if job.shards > 1:
        tell_others_of_moves(run, job, save)
    try:
        require_directory(run)
        _sync_metrics(run, run.metrics, save)
        save.advance(f"writing {run.files.checkpoints / job.temporary}")

        def write(directory: Path) -> Mapping[str, FileEntry]:
            parts_are_wanted.set()
            own = write_own_files(run, job, save, files, directory, {STATE: text})
            found = own | shards_of_others(run, job, save)
            refuse_abandoned(save, directory)
            return found

        path = run.store.save(
            job.step,
            write,
            run_id=plan.run_id,
            config_digest=plan.config_digest,
            world_size=plan.world_size,
            threads=plan.threads,
            holder=plan.host,
            temporary=job.temporary,
        )
    except (StorageFailed, OSError) as error:
        target = run.files.checkpoint(job.step)
        failure = error if isinstance(error, StorageFailed) else write_failure(error, target, target)
        assert failure is not None
        run.save_failure = failure
        dismiss_parts(run, job)
        _tell_failure(run, job, failure)
        return None
    if not parts_are_wanted.is_set():  # the step is there already, of an earlier start
        dismiss_parts(run, job)
    save.advance("pruning")
    if not _tell(run, job, path, save):
        return None
    run.saved_step, run.save_failure = job.step, None
    try:
        run.store.prune(run.plan.config.checkpoint.keep, protect=_best_saved(run), every=run.plan.keep_every)
    except OSError as error:  # the new one is safe; what could not go is tried again after the next save
        what = (
            f"older checkpoints cannot be deleted: {storage_words(error)} ({error.filename or path.parent})"
        )
        run.report.warning(
            "prune_failed", what, fix=storage_remedy(error, else_="delete them by hand, or fix the storage")
        )
    return path


def require_directory(run: Run) -> None:
    """Sees that what is at output_dir is this run's directory. Where it was removed in mid-run its front makes it again within moments; that is waited for.

    Raises:
        StorageFailed: if there is none, or one that is not this run's.
    """
    root, limit = run.files.root, time.monotonic() + _MADE_AGAIN_S
    while True:
        try:
            found = root.stat()
        except FileNotFoundError:
            why = "it is gone: it was removed or renamed in mid-run"
        except OSError:  # a storage that fails says so of the files themselves
            return
        else:
            identity = (found.st_dev, found.st_ino)
            if (
                run.root_id in (None, identity)
                or read_object(run.files.plan).get("run_id") == run.plan.run_id
            ):
                run.root_id = identity
                return
            why = "another directory was put in its place: it does not have this run's plan.json"
        if time.monotonic() > limit:
            problem = Problem(
                f"step {run.state.step} cannot be saved in {root}",
                str(root),
                why,
                "leave a run's directory alone while it trains",
            )
            raise StorageFailed(problem, path=root)
        time.sleep(_LOOK_S)


def _best_saved(run: Run) -> set[int]:
    """The best step that has a checkpoint. It may not be the best of all: that one's save may have failed."""
    if run.plan.config.checkpoint.best is None or run.store is None:
        return set()
    there = {step_of(path.name) for path in run.store.list()}
    found = best_evaluated(run.files.metrics, there)
    known = {run.state.best_step} if run.state.best_step is not None else set()  # its line may be damaged
    return (known & there) | ({found[0]} if found else set())


def _sync_metrics(run: Run, metrics: MetricsWriter, save: Save) -> None:
    """The lines up to this step belong to the checkpoint.

    Raises:
        StorageFailed: if they cannot be made to stay.
    """
    path = run.files.metrics
    save.advance(f"writing {path}")
    faults.pause(run.plan, run.group.rank, save.step, "sync", on_slice=save.advance)
    try:
        metrics.sync()
    except OSError as error:
        problem = Problem(
            f"step {save.step} cannot be saved: metrics.jsonl cannot be written: {storage_words(error)}",
            str(path),
            storage_reason(error),
            storage_remedy(error, else_="fix the storage; older checkpoints are unchanged"),
        )
        verdict = storage_verdict(error, problem, phase="save")
        raise StorageFailed(problem, path=path, verdict=verdict) from error


def _tell(run: Run, job: Job, path: Path, save: Save) -> bool:
    """Reports a checkpoint that was just published; False where it is not there any more.

    A network file system may fail to answer just then. What was synced and renamed counts as saved all the same.
    """
    told: dict[str, Any] = {
        "step": job.step,
        "path": str(path),
        "seconds": time.monotonic() - save.began,
        "blocking_s": save.blocking_s,
    }
    n_bytes, fix = (
        0,
        "look at the storage of output_dir; `unisono checkpoint verify` tells whether it is intact",
    )
    try:
        n_bytes = sum(file.stat().st_size for file in os.scandir(path))
    except FileNotFoundError as error:
        run.report.warning(
            "checkpoint_gone",
            f"checkpoint {path.name} was saved, and is no longer in {path.parent}: {storage_reason(error)}",
            fix="put it back if it was moved; leave the run's directory alone while it trains. The next save makes a new one",
        )
        return False
    except OSError as error:
        text = f"checkpoint {path.name} was saved, and the storage does not let it be looked at: {storage_words(error)} ({path})"
        run.report.warning("checkpoint_unread", text, fix=fix)
    run.report.send("checkpoint", bytes=n_bytes, **told)
    return True


def _tell_failure(run: Run, job: Job, error: StorageFailed) -> None:
    named = (
        error.verdict.model_copy(update={"severity": "warning", "step": job.step}) if error.verdict else None
    )
    cited = {"verdict": named.to_json()} if named else {}
    for problem in error.problems:
        what = "; ".join(part for part in (problem.what, problem.why) if part)
        run.report.send(
            "warning",
            code="checkpoint_failed",
            step=job.step,
            text=what,
            where=problem.where,
            fix=problem.fix,
            **cited,
        )
