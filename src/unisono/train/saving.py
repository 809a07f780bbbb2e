"""A run's state into a checkpoint, and back."""

import time
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.state import load_optimizer, load_state, optimizer_tensors, save_state
from unisono.checkpoint.store import StorageFailed
from unisono.errors import IntegrityError
from unisono.train.run import Run
from unisono.train.state import TrainState


def save_checkpoint(run: Run) -> Path | None:
    """Saves the state after the current step, whole or not at all; gives its path, or None if the storage fails.

    A full disk costs the new checkpoint, never an older one and never the training: it is said, and tried again next time.
    """
    step = run.state.step
    if run.saved_step == step:
        return run.store.path(step)
    began = time.perf_counter()
    plan = run.plan
    try:
        run.metrics.sync()  # its lines up to this step belong to the checkpoint
        path = run.store.save(
            step, lambda directory: _write(run, directory), run_id=plan.run_id, config_digest=plan.config_digest,
            world_size=plan.world_size, threads=plan.threads, holder=plan.host,
        )  # fmt: skip
    except StorageFailed as error:
        for problem in error.problems:
            what = "; ".join(part for part in (problem.what, problem.why) if part)
            run.report.send(
                "warning",
                code="checkpoint_failed",
                step=step,
                text=what,
                where=problem.where,
                fix=problem.fix,
            )
        return None
    run.saved_step = step
    n_bytes = sum(file.stat().st_size for file in path.iterdir())
    run.report.send(
        "checkpoint", step=step, path=str(path), bytes=n_bytes, seconds=time.perf_counter() - began
    )
    run.store.prune(plan.config.checkpoint.keep, protect=_protected(run))
    return path


def restore(run: Run, path: Path) -> None:
    """Puts weights, optimizer and state back to what a checkpoint holds, after reading it through.

    Raises:
        IntegrityError: if it is damaged, or does not hold the tensors of this run.
    """
    run.store.require(path, run_id=run.plan.run_id)
    tensors, state = load_state(path)
    trainable = run.forward.loaded.trainable
    saved = tensors["trainable"]
    if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in trainable.items()}:
        odd = sorted(set(saved) ^ set(trainable)) or ["shapes differ"]
        raise IntegrityError.of(
            f"checkpoint {path.name} does not hold what this run trains", where=str(path), why=f"for example {odd[0]}",
            fix="start with --fresh, or with the config that the checkpoint was made with",
        )  # fmt: skip
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(saved[name])
    for name, part in run.optimizers.parts.items():
        load_optimizer(
            part, run.optimizers.names[name], tensors[f"optimizer-{name}"], state["optimizer"][name]
        )
    run.state = TrainState.from_json(state["train"])
    run.saved_step = run.state.step


def _write(run: Run, directory: Path) -> None:
    tensors: dict[str, dict[str, torch.Tensor]] = {"trainable": dict(run.forward.loaded.trainable)}
    numbers: dict[str, Any] = {}
    for name, part in run.optimizers.parts.items():
        tensors[f"optimizer-{name}"], numbers[name] = optimizer_tensors(part, run.optimizers.names[name])
    save_state(directory, tensors=tensors, state={"train": run.state.to_json(), "optimizer": numbers})


def _protected(run: Run) -> set[int]:
    best = run.state.best_step
    return {best} if run.plan.config.checkpoint.best and best is not None else set()
