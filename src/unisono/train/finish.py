"""The result: final weights in the Hugging Face layout, written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from unisono.checkpoint.trouble import disk_full, free_bytes, is_full
from unisono.errors import Problem, UnfitError
from unisono.files import fsync_dir
from unisono.train.run import Run
from unisono.train.weights import write_weights
from unisono.units import show_bytes


def write_result(run: Run) -> Path | None:
    """Writes adapter/ or model/ of the run, with tokenizer and chat template; gives its path.

    All ranks must call it; rank 0 writes, and the others get None.

    Raises:
        UnfitError: if the storage fails; what was there before is untouched.
    """
    if not run.group.is_main:
        if run.sharded is not None:
            write_weights(run.forward.loaded, run.plan, Path(), writes=False)
        return None
    target = run.files.adapter if run.plan.config.adapter is not None else run.files.model
    temporary = target.with_name(f".{target.name}.tmp")
    with _storage_trouble_told(run, temporary, target):
        shutil.rmtree(temporary, ignore_errors=True)
        write_weights(run.forward.loaded, run.plan, temporary)
        _sync(temporary)
        _put_in_place(temporary, target)
    return target


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.exists():  # of an earlier, shorter run that this one has prolonged
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    fsync_dir(target.parent)


@contextlib.contextmanager
def _storage_trouble_told(run: Run, temporary: Path, target: Path) -> Iterator[None]:
    """A full disk at the very end costs no training: the last checkpoint is there, and is said to be."""
    try:
        yield
    except (
        Exception
    ) as error:  # safetensors raises one of its own for a full disk; what is neither is raised again
        if not (isinstance(error, OSError) or is_full(error)):
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        free = show_bytes(free_bytes(target.parent))
        why = f"the disk is full: {free} are free without what was begun" if is_full(error) else str(error)
        problem = Problem(
            f"the result cannot be written to {target}", str(target), why,
            f"mend or free the storage, and run the same command again: it goes on from the checkpoint of step {run.saved_step}",
        )  # fmt: skip
        raise UnfitError(
            problem, verdict=disk_full(problem, phase="finish") if is_full(error) else None
        ) from error


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    fsync_dir(directory)
