"""Which rows a loader deals out, as far as that can be told cheaply and without reading one. Pure."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_INDICES = 1000
_MOST_ROWS = 16
_DEEP = 8
_PARTS = (("num_replicas", "rank"), ("num_processes", "process_index"))  # torch's, and accelerate's
_SETTINGS = ("seed", "shuffle", "drop_last", "even_batches", "split_batches")


@dataclass(frozen=True)
class Dealt:
    """A data set that a sampler deals out over ranks.

    Attributes:
        replicas: over how many.
        facts: what is equal on all of them, if each has the same rows in the same order.
        own: this rank's part.
    """

    replicas: int
    facts: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)


def dealt_by(loader: Any) -> Dealt | None:
    """What a torch DataLoader deals out; None where no sampler of it deals, or its length is not known.

    Args:
        loader: a DataLoader, of torch or made from one.
    """
    for sampler in _samplers(loader):
        for count, which in _PARTS:
            replicas = getattr(sampler, count, None)
            if isinstance(replicas, int) and isinstance(getattr(sampler, which, None), int):
                return _dealt(loader, sampler, replicas, getattr(sampler, which))
    return None


def _dealt(loader: Any, sampler: Any, replicas: int, part: int) -> Dealt | None:
    rows, batches = _length(loader.dataset), _length(loader)
    if rows is None:
        return None
    facts: dict[str, Any] = {"rows": rows}
    if batches is not None:
        facts["batches"] = batches
    digest = digest_of(loader.dataset)
    if digest is not None:
        facts["order"] = digest
    for name in _SETTINGS:
        value = getattr(sampler, name, None)
        if isinstance(value, bool | int):
            facts[f"sampler_{name}"] = value
    return Dealt(replicas, facts, {"part": part, "data": type(loader.dataset).__name__})


def _samplers(loader: Any) -> Iterator[Any]:
    """The loader's samplers, the outer ones first; accelerate wraps one in another."""
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
    """A digest of which rows a data set has, and in which order; None where nothing in it tells.

    Known are torch's Subset, ConcatDataset and TensorDataset, data sets of the library datasets, and lists. Nothing is read from a disk
    but the indices of a selection, or three rows of a table as they lie there.
    """
    told = [repr(part) for part in _told(data, _DEEP)]
    return f"{zlib.crc32(json.dumps(told).encode()):08x}" if told else None


def _told(data: Any, deep: int) -> Iterator[Any]:
    if deep == 0:
        return
    indices = getattr(data, "indices", None)
    inner = getattr(data, "dataset", None)
    if inner is not None and indices is not None and _length(indices) is not None:
        yield [int(index) for index in indices[:_MOST_INDICES]]
        yield from _told(inner, deep - 1)
    elif isinstance(parts := getattr(data, "datasets", None), list):
        for part in parts[:_MOST_ROWS]:
            yield _length(part)
            yield from _told(part, deep - 1)
    elif isinstance(tensors := getattr(data, "tensors", None), tuple):
        yield [_rows_of(tensor) for tensor in tensors]
    elif hasattr(data, "_indices") and hasattr(data, "column_names"):
        table = data._indices  # noqa: SLF001 - of the library datasets; a test notices if it goes
        if table is not None:
            yield table.column(0).slice(0, _MOST_INDICES).to_pylist()
        # `map` after a split leaves no indices, and `filter` makes new ones, the same on all ranks: rows tell.
        if rows := _length(data):
            yield data.with_format("arrow")[[0, rows // 2, rows - 1]].to_pylist()
    elif isinstance(data, list | tuple):
        yield from _simple(data)


def _rows_of(tensor: Any) -> Any:
    """The first rows of a tensor in this machine's memory."""
    if getattr(tensor, "is_cuda", True) or not hasattr(tensor, "tolist"):
        return None
    return tensor[:_MOST_ROWS].reshape(-1)[:_MOST_INDICES].tolist()


def _simple(rows: Sequence[Any]) -> Iterator[Any]:
    """The first rows, if they are of text and numbers."""
    first = rows[:_MOST_ROWS]
    try:
        yield json.dumps(first)
    except (TypeError, ValueError):
        return
