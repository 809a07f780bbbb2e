"""Batches and steps of a foreign loop: each rank's rows are compared before the first batch where
all must have the same, and optimizer steps are counted.

They must where the program has a sampler that shards one dataset over all ranks: then each rank
must hold all of it, in one order. An unseeded split gives each rank different rows without an
error. If ranks read different files, nothing is compared.
"""

import functools
import json
import os
import sys
import weakref
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from unisono.guard.integrations.border import own_registration
from unisono.guard.integrations.inside.guarded_process import GuardedProcess, this_process

_MOST_INDICES = 1000
_MOST_ROWS = 16
_DEEP = 8
_PARTS = (("num_replicas", "rank"), ("num_processes", "process_index"))  # torch's, and accelerate's
_SETTINGS = ("seed", "shuffle", "drop_last", "even_batches", "split_batches")


@dataclass(frozen=True)
class ShardedRows:
    """Rows of a dataset that a sampler shards over ranks.

    Attributes:
        replicas: number of shards.
        facts: values that are equal on all ranks, if each has the same rows in the same order.
    """

    replicas: int
    facts: dict[str, object]
    details: dict[str, object] = field(default_factory=dict)


def sharded_rows_of(loader: Any) -> ShardedRows | None:
    """The rows that a torch DataLoader shards; None if no sampler of it shards, or the length is
    unknown.

    Args:
        loader: a DataLoader, of torch or made from one.
    """
    for sampler in _samplers(loader):
        for count, which in _PARTS:
            replicas = getattr(sampler, count, None)
            if isinstance(replicas, int) and isinstance(getattr(sampler, which, None), int):
                return _sharded_rows(loader, sampler, replicas, getattr(sampler, which))
    return None


def _sharded_rows(loader: Any, sampler: Any, replicas: int, part: int) -> ShardedRows | None:
    rows, batches = _length(loader.dataset), _length(loader)
    if rows is None:
        return None
    facts: dict[str, object] = {"rows": rows}
    if batches is not None:
        facts["batches"] = batches
    digest = digest_of(loader.dataset)
    if digest is not None:
        facts["order"] = digest
    for name in _SETTINGS:
        value = getattr(sampler, name, None)
        if isinstance(value, bool | int):
            facts[f"sampler_{name}"] = value
    return ShardedRows(replicas, facts, {"part": part, "data": type(loader.dataset).__name__})


def _samplers(loader: Any) -> Iterator[Any]:
    """The loader's samplers, the outer ones first; accelerate wraps samplers."""
    todo = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    for _ in range(_DEEP):
        if not todo:
            return
        sampler = todo.pop(0)
        if sampler is not None:
            yield sampler
            todo += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:  # of an iterable data set
        return None


def digest_of(data: Any) -> str | None:
    """A digest of the rows of a dataset and their order; None if unknown.

    Supported are torch's Subset, ConcatDataset and TensorDataset, datasets of the library datasets,
    and lists. Only the indices of a selection, or three rows of a table, are read from disk.
    """
    parts = [repr(part) for part in _row_identity(data, _DEEP)]
    return f"{zlib.crc32(json.dumps(parts).encode()):08x}" if parts else None


def _row_identity(data: Any, deep: int) -> Iterator[Any]:
    if deep == 0:
        return
    indices = getattr(data, "indices", None)
    inner = getattr(data, "dataset", None)
    if inner is not None and indices is not None and _length(indices) is not None:
        yield [int(index) for index in indices[:_MOST_INDICES]]
        yield from _row_identity(inner, deep - 1)
    elif isinstance(parts := getattr(data, "datasets", None), list):
        for part in parts[:_MOST_ROWS]:
            yield _length(part)
            yield from _row_identity(part, deep - 1)
    elif isinstance(tensors := getattr(data, "tensors", None), tuple):
        yield [_rows_of(tensor) for tensor in tensors]
    elif hasattr(data, "_indices") and hasattr(data, "column_names"):
        table = data._indices  # noqa: SLF001 - of datasets 5.2; a test notices if it goes
        if table is not None:
            yield table.column(0).slice(0, _MOST_INDICES).to_pylist()
        # `map` after a split leaves no indices, and `filter` makes new ones, the same on all ranks:
        # rows tell.
        if rows := _length(data):
            yield data.with_format("arrow")[[0, rows // 2, rows - 1]].to_pylist()
    elif isinstance(data, list | tuple):
        yield from _simple(data)


def _rows_of(tensor: Any) -> Any:
    """The first rows of a tensor in host memory."""
    if getattr(tensor, "is_cuda", True) or not hasattr(tensor, "tolist"):
        return None
    return tensor[:_MOST_ROWS].reshape(-1)[:_MOST_INDICES].tolist()


def _simple(rows: Sequence[Any]) -> Iterator[Any]:
    """The first rows, if they consist of text and numbers."""
    first = rows[:_MOST_ROWS]
    try:
        yield json.dumps(first)
    except (TypeError, ValueError):
        return


_NAMES = ("split", "split_b", "split_c", "split_d")
"""Names of the agreements on the first, second … loader: for training, for evaluation."""
_LIMIT_S = 10.0  # others may start to read later; a late difference still stops the run


def hook_loaders(module: ModuleType) -> None:
    """Hooks torch.utils.data.dataloader."""
    at = this_process()
    if at is None:
        return
    loader = module.DataLoader
    original = loader.__iter__
    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    names = iter(_NAMES)

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        if self not in seen and at.registration is not None and at.is_main_thread():
            seen.add(self)
            sharded = sharded_rows_of(self)
            if sharded is not None:
                _compare(sharded, at, names)
        return original(self)

    loader.__iter__ = iterate
    # The iterator of all torch loaders; it has no public name in torch 2.13, and a test
    # fails if it changes.
    of_batches = getattr(module, "_BaseDataLoaderIter", None)
    if of_batches is not None:
        of_batches.__next__ = _reading(of_batches.__next__, at)


def _reading(original: Callable[[Any], Any], at: GuardedProcess) -> Callable[[Any], Any]:
    """A heartbeat before and after a batch is read."""

    @functools.wraps(original)
    def read(self: Any) -> Any:
        if at.inside or not at.is_main_thread():
            return original(self)
        at.inside = True
        beats = at.beats
        before = beats.phase
        beats.enter("data")
        try:
            batch = original(self)
            if at.step_starts.batch(getattr(self, "_dataset", None)):
                beats.take_batch()
            return batch
        finally:
            at.inside = False
            beats.enter(before)

    return read


def _compare(sharded: ShardedRows, at: GuardedProcess, names: Any) -> None:
    who = at.registration
    if who is None or not who.grouped or who.world_size < 2 or sharded.replicas != who.world_size:
        return
    name = next(names, None)
    if name is None:
        return
    before = at.beats.phase
    at.phase("agree.ranks")
    answer = at.presence.report_facts(
        name,
        sharded.facts,
        rank=who.rank,
        world_size=who.world_size,
        details=sharded.details,
        limit_s=_LIMIT_S,
    )
    at.phase(before)
    if answer is not None and not answer.agreed:
        at.presence.emit("refused", text=answer.text, exit_code=answer.exit_code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(answer.exit_code)  # the program must not continue, nor overwrite its files


_ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
_FRAMEWORKS = {
    "llamafactory": "llamafactory.train",
    "axolotl": "axolotl.train",
    "torchtune": "torchtune.training",
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch_lightning": "pytorch_lightning.trainer.trainer",
    "trl": "trl.trainer.utils",
    "transformers": "transformers.trainer",
}
"""For each framework a module that is imported only for training; first those that use others."""


def hook_optimizers(module: ModuleType) -> None:
    """Hooks torch.optim.optimizer."""
    at = this_process()
    if at is not None:
        module.register_optimizer_step_post_hook(StepCounter(at))


class StepCounter:
    """Counts the steps of the first optimizer that makes one.

    A process without a rank is the only one of its program once it trains: launchers import torch,
    too, but never make a step.
    """

    def __init__(self, at: GuardedProcess) -> None:
        self._at = at
        self._first: weakref.ref[Any] | None = None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has made a step."""
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
            if not self._at.is_rank:
                self._at.become(own_registration(_ALONE))
            if framework := framework_in(sys.modules):
                self._at.emit("framework", name=framework)
        if self._first() is optimizer:
            self._at.stepped()


def framework_in(modules: Container[str]) -> str:
    """The framework of the loop, with the names of diagnose.gather; empty for the program's own
    loop, or if unknown.
    """
    framework = next((name for name, module in _FRAMEWORKS.items() if module in modules), "")
    return "lightning" if framework == "pytorch_lightning" else framework
