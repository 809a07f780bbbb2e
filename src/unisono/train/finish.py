"""The result: final weights in the Hugging Face layout, written whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from unisono.checkpoint.model_manifest import write_model_manifest
from unisono.checkpoint.writer import free_bytes
from unisono.errors import Problem, UnfitError
from unisono.files import fsync_dir
from unisono.storage_errors import error_number, is_full, reason, remedy, storage_verdict, words
from unisono.train.run import Run
from unisono.train.saving import require_directory
from unisono.train.weights import write_weights
from unisono.units import show_bytes


def write_result(run: Run) -> Path | None:
    """Writes adapter/ or model/ of the run, with tokenizer, chat template and a list of the files; gives its path.

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
        require_directory(run)
        shutil.rmtree(temporary, ignore_errors=True)
        write_model_manifest(temporary, write_weights(run.forward.loaded, run.plan, temporary))
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
    ) as error:  # what is not the storage's is raised again; safetensors has an exception of its own
        if not isinstance(error, OSError) and error_number(error) is None:
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        why = reason(error)
        if is_full(error):
            with contextlib.suppress(OSError):
                why = f"the disk is full: {show_bytes(free_bytes(target.parent))} are free without what was begun"
        again = f"the same command resumes from the checkpoint of step {run.saved_step}"
        if run.saved_step is None:
            again = "run the same command again"
        problem = Problem(
            f"the result cannot be written to {target}: {words(error)}", str(target), why,
            f"{remedy(error, else_='fix the storage')}; {again}",
        )  # fmt: skip
        raise UnfitError(problem, verdict=storage_verdict(error, problem, phase="finish")) from error


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    fsync_dir(directory)
