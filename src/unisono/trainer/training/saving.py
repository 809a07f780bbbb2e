"""Saves a run's state to a checkpoint, and restores it.

One rank, or rank 0 of replicas, writes full tensors. Each rank of a sharded run writes its parts to
its own file in the same directory, and reports the file; rank 0 writes the manifest of all files
and renames the directory to its final name. Reading supports both forms and gives full tensors, so
a run on one rank, on replicas or on shards can resume from a checkpoint of any other.
"""

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.base.errors import (
    IntegrityError,
    Problem,
    storage_reason,
    storage_remedy,
    storage_verdict,
    storage_words,
)
from unisono.base.events import Reporter
from unisono.base.messages import WarningMessage, message_of
from unisono.base.text import parse_seconds
from unisono.base.user_key import user_key
from unisono.guard.facts import read_environment
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import MetricsWriter, best_evaluated, truncate_after
from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.state import CheckpointReader, load_optimizer
from unisono.trainer.checkpoint.store import CheckpointStore, step_of, temporary_name
from unisono.trainer.checkpoint.writer import STATE, StorageFailed, state_text, write_failure
from unisono.trainer.model.layers import has_kernels, why_no_kernels
from unisono.trainer.training.rank0_work import (
    TURN_S,
    CheckpointBroadcast,
    SaveJob,
    dismiss_parts,
    on_rank0,
    refuse_abandoned,
    report_moves,
    shards_of_others,
    write_own_files,
    write_shard,
)
from unisono.trainer.training.run import Run, TrainState, base_of, contents_of
from unisono.trainer.training.saver import STUCK_S, Files, Save
from unisono.trainer.training.sharding import sharded_like


def save_checkpoint(run: Run) -> None:
    """Starts to save the state after the current step, in the background.

    All ranks must call it.

    The outcome is reported when the save has ended. A full disk costs the new checkpoint only:
    older ones stay, training continues, and the next save tries again.
    """
    if run.begun_step == run.state.step:
        return
    run.beats.enter("save")
    if not _is_free(run):
        return
    run.save_is_read = False
    if run.group.rank not in run.plan.mesh.checkpoint_writers:
        run.begun_step = run.state.step
        return
    job = _job_of(run)
    run.begun_step = run.state.step
    contents = contents_of(run)
    groups = sorted(contents.groups)
    text = state_text(groups, contents.values, shards=job.shards) if run.group.is_main else None
    run.saver.begin(run.state.step, contents.groups, partial(_write, run, job, text))


def finish_saving(run: Run) -> None:
    """Waits for the save in flight, and repeats it once if the storage failed.

    All ranks must call it.
    """
    run.beats.enter("save")
    patience_s = max(STUCK_S, parse_seconds(run.plan.config.grace))  # no other work is left
    for again in (True, False):
        is_free = _wait_for_save(run, patience_s)
        lost = run.begun_step is not None and run.group.is_main and not _is_saved(run, run.begun_step)
        _warn_unfinished(run)
        if not run.group.any(lost) or not is_free or not again or run.begun_step != run.state.step:
            return
        run.begun_step = None
        save_checkpoint(run)


def _is_saved(run: Run, step: int) -> bool:
    """Whether the step was saved, and its checkpoint still exists."""
    return run.saved_step == step and os.path.lexists(run.files.checkpoint(step))


def _warn_unfinished(run: Run) -> None:
    """Warns that the run ends without its last checkpoint, because the save is stuck."""
    save = run.saver.last
    if save is not None and not save.done.is_set():
        run.report.warning(
            "checkpoint_skipped",
            f"step {save.step} is not saved: its save has made no progress for {save.idle_s:.0f} s"
            f" ({save.activity}), and the run no longer waits for it",
            fix="check the storage of output_dir, and the network to it from the other nodes",
        )


def wait_for_copies(run: Run) -> None:
    """Waits until the tensors being saved are copied on all ranks.

    Must be called before the weights change, by all ranks.

    Without memory for copies a save reads the live tensors, and may take hours on a slow disk. The
    ranks wait in turns, because no collective may take longer than the process group's timeout.
    """
    while not run.save_is_read:
        run.save_is_read = not run.group.any(run.saver.still_reads(turn_s=TURN_S))
    run.saver.before_update()


def require_checkpoint(run: Run) -> None:
    """Refuses to end the run if it has no checkpoint.

    Rank 0 raises; the front then ends the others.

    Raises:
        StorageFailed: if the run has no checkpoint at all.
    """
    if run.group.is_main and run.saved_step is None:
        path = run.files.checkpoints
        problem = Problem(
            f"the run was stopped after step {run.state.step}, and no checkpoint could be written",
            str(path),
            "see the warnings above",
            "fix the storage, and run the same command again: it starts from the beginning",
        )
        raise StorageFailed(
            problem, path=path, verdict=run.save_failure.verdict if run.save_failure else None
        )


def restore(run: Run, path: Path, *, trust: bool = False) -> None:
    """Restores weights, optimizer and state from a checkpoint, after verifying all of it.

    All ranks must call it; rank 0 reads, and broadcasts tensor by tensor.

    Args:
        run: the run that resumes.
        path: of the checkpoint.
        trust: whether a checkpoint that is not signed by this user may be read.

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
    _compare_base(run, shared.values.get("base"))
    _compare_kernels(run, shared.values.get("kernels"))
    if shared.shapes["trainable"] != {name: parameter.shape for name, parameter in trainable.items()}:
        odd = sorted(set(shared.shapes["trainable"]) ^ set(trainable)) or ["shapes differ"]
        raise IntegrityError.of(
            f"checkpoint {path.name} does not match the trainable parameters of this run",
            where=str(path),
            why=f"first difference: {odd[0]}",
            fix="start with --fresh, or with the config of the checkpoint",
        )
    run.saver.before_update()  # a stuck save may still read the live tensors
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
    run.optimizers.page_state()
    run.state = TrainState.from_json(shared.values["train"])
    run.source.restore(dict(shared.values.get("batches", {})))
    run.saved_step = run.begun_step = run.state.step


def _compare_base(run: Run, saved: Any) -> None:
    """Warns if the base is quantized to other values than those that the adapter of a checkpoint
    was trained on.

    The same files, settings and packages give the same values on one kind of device.
    """
    now = base_of(run)
    if run.group.is_main and isinstance(saved, dict) and now["weights"] and saved != now:
        run.report.warning(
            "quantized_differently",
            "the quantized base weights differ from the weights that the checkpoint was trained on: the"
            f" digest is {now['weights']}, and was {saved.get('weights')}",
            fix=(
                "losses are not bit-exact; resume on the same kind of device, with the same bitsandbytes and"
                " the same model.quantize"
            ),
        )


def _compare_kernels(run: Run, saved: Any) -> None:
    """Warns if the steps of a checkpoint were computed with the compiled functions, and the next
    ones are not, or the other way round.
    """
    now = has_kernels(run.plan.dtype, run.device)
    if run.group.is_main and saved is not None and now is not None and saved != now:
        before, after = ("with", "without") if saved else ("without", "with")
        run.report.warning(
            "computed_differently",
            f"the checkpoint was computed {before} unisono's compiled functions, and the run resumes {after}"
            " them: losses are not bit-exact",
            fix=(
                f"if it should be as before: {why_no_kernels(run.plan.dtype, run.device)}"
                if saved
                else "none is needed: it is only faster now"
            ),
        )


def _is_free(run: Run) -> bool:
    """Whether no save is in flight on any rank.

    A save that makes progress is waited for, a stuck one is not.
    """
    began = time.perf_counter()
    if _wait_for_save(run):
        return True
    save = run.saver.last
    if save is not None and not save.done.is_set():
        run.report.warning(
            "checkpoint_skipped",
            f"step {run.state.step} is not saved: the save of step {save.step} has made no progress for"
            f" {save.idle_s:.0f} s ({save.activity}); training continues (after a wait of"
            f" {time.perf_counter() - began:.0f} s)",
            fix="check the storage of output_dir; older checkpoints are unchanged",
        )
    return False


def _wait_for_save(run: Run, patience_s: float | None = None) -> bool:
    """Waits for the save in flight while it makes progress; whether it has ended on all ranks.

    All ranks must call it.

    The ranks wait in turns: a save may take hours, and no collective may take longer than the
    process group's timeout.
    """
    while run.group.any(run.saver.moves(patience_s, turn_s=TURN_S)):
        pass
    return not run.group.any(not run.saver.is_free)


def _job_of(run: Run) -> SaveJob:
    """Agrees on the directory's name if several ranks write to it.

    No file is touched, so a hanging path cannot block training here.
    """
    step = run.state.step
    if run.sharded is None:
        return SaveJob(step, temporary_name(step, secrets.token_hex(4)), 1)
    number = torch.zeros((), dtype=torch.int64, device=run.device)
    if run.group.is_main:
        number.fill_(secrets.randbits(32))
    run.group.broadcast(number)
    return SaveJob(step, temporary_name(step, f"{int(number):09x}"), run.plan.mesh.weight_shards)


def _write(run: Run, job: SaveJob, text: bytes | None, save: Save, files: Files) -> Path | None:
    """Writes this rank's files, in the saver's thread; rank 0 also publishes the checkpoint and
    gives its path.
    """
    if run.store is None:
        write_shard(run, job, save, files)
        return None
    assert run.metrics is not None
    assert text is not None
    plan = run.plan
    parts_are_needed = threading.Event()
    if job.shards > 1:
        report_moves(run, job, save)
    try:
        if run.directory_check is not None:
            run.directory_check.require(job.step)
        _sync_metrics(run, run.metrics, save)
        save.advance(f"writing {run.files.checkpoints / job.temporary}")

        def write(directory: Path) -> Mapping[str, FileEntry]:
            parts_are_needed.set()
            own = write_own_files(run, job, save, files, directory, {STATE: text})
            entries = own | shards_of_others(run, job, save)
            refuse_abandoned(save, directory)
            return entries

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
        _report_failure(run, job, failure)
        return None
    if not parts_are_needed.is_set():  # an earlier process has already saved this step
        dismiss_parts(run, job)
    save.advance("pruning")
    if not _report_saved(run, job, path, save):
        return None
    run.saved_step, run.save_failure = job.step, None
    try:
        run.store.prune(run.plan.config.checkpoint.keep, protect=_best_saved(run), every=run.plan.keep_every)
    except OSError as error:  # the new checkpoint is safe; the next save tries again to delete the old ones
        what = (
            f"older checkpoints cannot be deleted: {storage_words(error)} ({error.filename or path.parent})"
        )
        run.report.warning(
            "prune_failed", what, fix=storage_remedy(error, else_="delete them by hand, or fix the storage")
        )
    return path


def _best_saved(run: Run) -> set[int]:
    """The best step that has a checkpoint.

    It may not be the best step of all, whose save may have failed.
    """
    metric = run.plan.config.checkpoint.best
    if metric is None or run.store is None:
        return set()
    saved = {step_of(path.name) for path in run.store.list()}
    best = best_evaluated(run.files.metrics, saved, metric=metric)
    known = {run.state.best_step} if run.state.best_step is not None else set()  # its line may be damaged
    return (known & saved) | ({best[0]} if best else set())


def _sync_metrics(run: Run, metrics: MetricsWriter, save: Save) -> None:
    """Syncs metrics.jsonl: its lines up to this step belong to the checkpoint.

    Raises:
        StorageFailed: if it cannot be synced.
    """
    path = run.files.metrics
    save.advance(f"writing {path}")
    for hook in run.hooks:
        hook.work_begins("sync", save.step, save.advance)
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


def _report_saved(run: Run, job: SaveJob, path: Path, save: Save) -> bool:
    """Reports a checkpoint that was just published; False if it is already gone.

    A network file system may fail at this moment. What was synced and renamed counts as saved
    nevertheless.
    """
    seconds, n_bytes = time.monotonic() - save.began, 0
    fix = (
        "check the storage of output_dir; `unisono checkpoint verify` shows whether the checkpoint is intact"
    )
    try:
        n_bytes = sum(file.stat().st_size for file in os.scandir(path))
    except FileNotFoundError as error:
        run.report.warning(
            "checkpoint_gone",
            f"checkpoint {path.name} was saved, but is no longer in {path.parent}: {storage_reason(error)}",
            fix=(
                "restore it if it was moved; do not change a run's directory during training. The next save"
                " writes a new checkpoint"
            ),
        )
        return False
    except OSError as error:
        text = f"checkpoint {path.name} was saved, but cannot be listed: {storage_words(error)} ({path})"
        run.report.warning("checkpoint_unread", text, fix=fix)
    run.report.send(
        {
            "kind": "checkpoint",
            "bytes": n_bytes,
            "step": job.step,
            "path": str(path),
            "seconds": seconds,
            "blocking_s": save.blocking_s,
        }
    )
    return True


def _report_failure(run: Run, job: SaveJob, error: StorageFailed) -> None:
    named = (
        error.verdict.model_copy(update={"severity": "warning", "step": job.step}) if error.verdict else None
    )
    for problem in error.problems:
        what = "; ".join(part for part in (problem.what, problem.why) if part)
        warning: WarningMessage = {
            "kind": "warning",
            "code": "checkpoint_failed",
            "step": job.step,
            "text": what,
            "where": problem.where,
            "fix": problem.fix,
        }
        if named is not None:
            warning["verdict"] = named.to_json()
        run.report.send(warning)


def open_store(files: RunDir) -> CheckpointStore:
    """The run's checkpoints, signed with the user's key."""
    return CheckpointStore(files.checkpoints, key=user_key(read_environment().settings_dir))


def open_metrics(files: RunDir, state: TrainState, report: Reporter) -> MetricsWriter:
    """Opens metrics.jsonl, and removes the lines after the state that the run resumes from: later
    steps, an evaluation still due.
    """
    warning = truncate_after(files.metrics, state.step, evaluated=not state.evaluation_due).warning()
    if warning is not None:
        report.send(message_of(WarningMessage, warning))
    return MetricsWriter(files.metrics)


@contextmanager
def averaged(run: Run) -> Iterator[None]:
    """Within it, the model has the weights to use; see `Optimizers.averaged`.

    All ranks must enter it.
    """
    wait_for_copies(run)
    with run.optimizers.averaged():
        yield
