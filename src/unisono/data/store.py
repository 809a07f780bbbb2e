"""Writes a token table: rows as they come, then the splits, then the figures."""

import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from unisono.data.encode import Encoded
from unisono.data.table import ROWS_PER_BATCH, Split

Ints = npt.NDArray[np.int64]
_SCHEMA = pa.schema([("ids", pa.large_list(pa.int32())), ("targets", pa.large_list(pa.uint8()))])


class TokenWriter:
    """Writes tokens.arrow, a record batch at a time, and keeps one number of each kind a row.

    Attributes:
        lengths: tokens of each row.
        loss: loss tokens of each row.
        digest: of all rows, in order.
        highest: the highest token id so far, -1 before the first row.
    """

    def __init__(self, path: Path) -> None:
        self.lengths = array("q")
        self.loss = array("q")
        self.digest = xxhash.xxh3_128()
        self.highest = -1
        self._waiting: list[Encoded] = []
        self._sink = pa.OSFile(str(path), "wb")
        self._file = pa.ipc.new_file(self._sink, _SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._waiting:
            self._write()
        self._file.close()
        self._sink.close()

    def add(self, row: Encoded) -> None:
        """Takes the next row."""
        self.lengths.append(len(row.ids))
        self.loss.append(int(np.count_nonzero(row.targets)))
        self._waiting.append(row)
        if len(self._waiting) == ROWS_PER_BATCH:
            self._write()

    def _write(self) -> None:
        ids = np.concatenate([row.ids for row in self._waiting])
        targets = np.concatenate([row.targets for row in self._waiting]).view(np.uint8)
        ends = np.cumsum([0, *(len(row.ids) for row in self._waiting)], dtype=np.int64)
        self.highest = max(self.highest, int(ids.max()))
        for part in (ends, ids, targets):
            self.digest.update(np.ascontiguousarray(part).data)
        columns = [
            pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values)) for values in (ids, targets)
        ]
        self._file.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
        self._waiting.clear()


def write_split(
    directory: Path, split: Split, rows: dict[str, Ints], sequences: Sequence[Sequence[int]]
) -> None:
    """Writes the rows and sequences of one split.

    Args:
        directory: of the table.
        split: train or eval.
        rows: `stored`, `length`, `loss`, `file`, `number`, one entry a row.
        sequences: rows of each sequence.
    """
    _write(directory / f"{split}-rows.arrow", {name: pa.array(values) for name, values in rows.items()})
    flat = np.fromiter((row for sequence in sequences for row in sequence), dtype=np.int64)
    ends = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    _write(
        directory / f"{split}-sequences.arrow",
        {
            "rows": pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat)),
            "tokens": pa.array(_sums(rows["length"][flat], ends)),
            "loss_tokens": pa.array(_sums(rows["loss"][flat], ends)),
        },
    )


def _sums(values: Ints, ends: Ints) -> Ints:
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return running[ends[1:]] - running[ends[:-1]]


def _write(path: Path, columns: dict[str, Any]) -> None:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)


def write_meta(directory: Path, meta: dict[str, Any], *, files: Iterable[tuple[str, bool]]) -> None:
    """Writes meta.json."""
    body = {"schema": 1, "files": list(files), **meta}
    (directory / "meta.json").write_text(json.dumps(body, ensure_ascii=True, indent=1), encoding="utf-8")
