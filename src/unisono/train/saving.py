"""A run's state into a checkpoint, and back."""

import time
from pathlib import Path

from unisono.checkpoint.store import StorageFull
from unisono.train.run import Run

_FORMAT = 1


def save_checkpoint(run: Run) -> Path | None:
    """Saves the state after the current step, whole or not at all; gives its path, or None if the disk is full.

    A full disk costs the new checkpoint, never an older one and never the training: it is said, and tried again next time.
    """
    step = run.state.step
    began = time.perf_counter()
    path = run.files.checkpoint(step)
    if run.saved_step == step:
        return path
    try:
        path = run.store.save(step, lambda directory: _write(run, directory), **run.manifest_fields)
    except StorageFull as error:
        for problem in error.problems:
            run.report.warning("checkpoint_failed", f"{problem.what}: {problem.why}", fix=problem.fix)
        return None
    run.saved_step = step
    n_bytes = sum(file.stat().st_size for file in path.iterdir())
    run.report.send(
        "checkpoint", step=step, path=str(path), bytes=n_bytes, seconds=time.perf_counter() - began
    )
    protect = (
        {run.state.best_step}
        if run.plan.config.checkpoint.best and run.state.best_step is not None
        else set()
    )
    run.store.prune(run.plan.config.checkpoint.keep, protect=protect)
    return path
