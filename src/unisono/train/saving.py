"""A run's state into a checkpoint, and back.

There is one form, whoever writes it: whole tensors, written by rank 0. So one rank, replicas and shards go on from each other's. What is
random in a run is a function of (seed, place in the endless stream of sequences) and is set anew before each use, so no rank has a
generator whose state would have to be kept; `streams.GlobalStateWatch` tells of code that draws from one all the same.
"""

import time
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.reader import Tensors
from unisono.checkpoint.state import load_optimizer, load_state, optimizer_tensors, save_state
from unisono.checkpoint.store import CheckpointStore, StorageFailed
from unisono.errors import IntegrityError
from unisono.model.shard import like, whole
from unisono.train.run import Run
from unisono.train.sharing import SharedState
from unisono.train.state import TrainState

Contents = tuple[dict[str, Tensors], dict[str, Any]]


def save_checkpoint(run: Run) -> None:
    """Saves the state after the current step, whole or not at all. All ranks must call it; rank 0 writes.

    A full disk costs the new checkpoint, never an older one and never the training: it is said, and tried again next time.
    """
    if run.saved_step == run.state.step:
        return
    began = time.perf_counter()
    contents = _contents(run)
    path = None if run.store is None else _publish(run, run.store, contents)
    if not run.group.any(path is not None):
        return
    run.saved_step = run.state.step
    if run.store is None or path is None:
        return
    n_bytes = sum(file.stat().st_size for file in path.iterdir())
    run.report.send(
        "checkpoint",
        step=run.state.step,
        path=str(path),
        bytes=n_bytes,
        seconds=time.perf_counter() - began,
    )
    run.store.prune(run.plan.config.checkpoint.keep, protect=_protected(run))


def restore(run: Run, path: Path) -> None:
    """Puts weights, optimizer and state back to what a checkpoint holds, after reading it through.

    All ranks must call it; rank 0 reads, and gives the others what it has read.

    Raises:
        IntegrityError: if it is damaged, or does not hold the tensors of this run.
    """
    held = None
    if run.store is not None:
        run.store.require(path, run_id=run.plan.run_id)
        held = load_state(path)
    shared = SharedState(run.group, held, device=run.device)
    trainable = run.forward.loaded.trainable
    if shared.shapes["trainable"] != {name: parameter.shape for name, parameter in trainable.items()}:
        odd = sorted(set(shared.shapes["trainable"]) ^ set(trainable)) or ["shapes differ"]
        raise IntegrityError.of(
            f"checkpoint {path.name} does not hold what this run trains", where=str(path), why=f"for example {odd[0]}",
            fix="start with --fresh, or with the config that the checkpoint was made with",
        )  # fmt: skip
    with torch.no_grad():
        for name, tensor in shared.tensors("trainable"):
            trainable[name].copy_(like(trainable[name], tensor))
    for name, part in run.optimizers.parts.items():
        tensors = {
            label: like(trainable[label.rpartition("::")[0]], tensor)
            for label, tensor in shared.tensors(f"optimizer-{name}")
        }
        load_optimizer(part, run.optimizers.names[name], tensors, shared.values["optimizer"][name])
    run.state = TrainState.from_json(shared.values["train"])
    run.saved_step = run.state.step


def _contents(run: Run) -> Contents:
    """All that is saved. Sharded tensors are gathered one by one, and only rank 0 keeps them."""
    tensors: dict[str, Tensors] = {"trainable": dict(run.forward.loaded.trainable)}
    numbers: dict[str, Any] = {}
    for name, part in run.optimizers.parts.items():
        tensors[f"optimizer-{name}"], numbers[name] = optimizer_tensors(part, run.optimizers.names[name])
    if run.sharded is not None:
        tensors = {group: gather(members, keep=run.group.is_main) for group, members in tensors.items()}
    return tensors, {"train": run.state.to_json(), "optimizer": numbers}


def gather(tensors: Tensors, *, keep: bool) -> Tensors:
    """The whole tensors in host memory, where `keep` says so. All ranks must call it."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            found[name] = full.cpu()
    return found


def _publish(run: Run, store: CheckpointStore, contents: Contents) -> Path | None:
    """Writes a checkpoint and gives its path, or None if the storage fails."""
    assert run.metrics is not None
    plan, step = run.plan, run.state.step
    tensors, state = contents
    try:
        run.metrics.sync()  # its lines up to this step belong to the checkpoint
        return store.save(
            step, lambda directory: save_state(directory, tensors=tensors, state=state), run_id=plan.run_id,
            config_digest=plan.config_digest, world_size=plan.world_size, threads=plan.threads, holder=plan.host,
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


def _protected(run: Run) -> set[int]:
    best = run.state.best_step
    return {best} if run.plan.config.checkpoint.best and best is not None else set()
