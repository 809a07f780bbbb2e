"""The token table: rows of token ids, memory-mapped. Needs only numpy and pyarrow.

A table is a directory:

    tokens.arrow            all rows in the order of their sources: `ids` lists of int32, `targets`
                            lists of uint8: 1 where the token is predicted, 2 where the end of
                            sequence is predicted in its place, 2 + n where the token is predicted
                            and counts n/200 in the loss, else 0. Every record batch but the last
                            has ROWS_PER_BATCH rows
    train-rows.arrow        one entry per row of the split: `stored` (row in tokens.arrow),
                            `length`, `loss`, `file`, `number`; of rated answers also `label`, 1 for
                            a desirable one, and of rows to classify the number of their set in
                            `labels` of meta.json; of pictures `picture` and `group`, a number
                            for each size, and `number` is 0. With two sides, a pair or a rated
                            answer with a mismatched one, these are the rows `stored` and
                            `stored` + 1 of tokens.arrow, and `length` and `loss` are sums over both
    records.arrow           with prompts that have no answer: `json`, what rewards get of each row
                            of tokens.arrow; the same record batches
    train-sequences.arrow   one entry per sequence: `rows` lists of int64 (entries of train-rows),
                            `tokens`, `loss_tokens`
    eval-rows.arrow, eval-sequences.arrow   the same for the evaluation, if there is one
    pictures.arrow          with pictures in rows: `pictures` lists of int32 for each row of
                            tokens.arrow, their numbers in pictures.json (data.pictures.store)
    meta.json               file names, figures, sides (1 if absent), stop tokens, end of sequence,
                            whether any token counts in part, `labels`: names, multi_label, and for
                            each set the numbers of its labels
    ledger.json             data.json of a run
"""

import contextlib
import errno
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from unisono.base.text import one_line

ROWS_PER_BATCH = 1024
_CLOSES = 2  # in `targets`; above it are the shares
SHARES = 200
"""Weights of tokens in the loss are multiples of 1/SHARES."""

Split = Literal["train", "eval"]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """ROWS_PER_BATCH rows of tokens.arrow.

    Attributes:
        ends: (rows + 1,) int64, where each row begins.
        ids: tokens of all its rows, int32.
        targets: uint8, parallel to ids.
    """

    ends: Ints
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TokenTable:
    """The rows and sequences of one split, as views of mapped memory.

    Attributes:
        split: train or eval.
        blocks: the record batches of tokens.arrow.
        columns: (rows,) int64 each; see train-rows.arrow above.
        sequence_rows: rows of all sequences, one after the other, int64.
        sequence_ends: (sequences + 1,) int64, where each begins in sequence_rows.
        sequence_columns: `tokens` and `loss_tokens`, (sequences,) int64 each.
        files: the name of each file, and whether its rows are lines.
        eos: the end of sequence; None if the tokenizer has none.
        sides: rows of tokens of each row of the table: 2 for a pair (chosen, rejected), and for a
            rated answer with a mismatched one.
        has_shares: whether a token of the table counts in part, in either split.
        records: the record batches of records.arrow; empty without it.
        stop_ids: the tokens that end an answer.
        label_sets: (sets, labels) bool, which labels are in each set; None unless rows are
            classified. The last token of such a row counts in the loss, also if it is its first.
    """

    split: Split
    blocks: list[TokenBlock]
    columns: dict[str, Ints]
    sequence_rows: Ints
    sequence_ends: Ints
    sequence_columns: dict[str, Ints]
    files: list[tuple[str, bool]]
    eos: int | None = None
    sides: int = 1
    has_shares: bool = False
    records: Sequence[Any] = ()
    stop_ids: frozenset[int] = frozenset()
    label_sets: npt.NDArray[np.bool_] | None = None

    @classmethod
    def open(cls, directory: Path, split: Split) -> Self:
        """Maps a split of a table.

        Raises:
            OSError: if a file is missing or damaged; with its path, as the storage is at fault.
        """
        with _damage_with_path(Path(directory)):
            return cls._read(Path(directory), split)

    @classmethod
    def _read(cls, directory: Path, split: Split) -> Self:
        meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        tokens = _open(directory / "tokens.arrow")
        rows = _open(directory / f"{split}-rows.arrow").get_batch(0)
        sequences = _open(directory / f"{split}-sequences.arrow").get_batch(0)
        lists = sequences.column("rows")
        records = _open(directory / _RECORDS) if (directory / _RECORDS).is_file() else None
        return cls(
            split=split,
            blocks=[_block(tokens.get_batch(i)) for i in range(tokens.num_record_batches)],
            columns={name: _ints(rows.column(name)) for name in rows.schema.names},
            sequence_rows=_ints(lists.values),
            sequence_ends=_ints(lists.offsets),
            sequence_columns={name: _ints(sequences.column(name)) for name in ("tokens", "loss_tokens")},
            files=[(name, by_line) for name, by_line in meta["files"]],
            eos=meta.get("eos"),
            sides=meta.get("sides", 1),
            has_shares=meta.get("has_shares", False),
            stop_ids=frozenset(meta.get("stop_ids", ())),
            label_sets=_label_sets(meta["labels"]) if meta.get("labels") else None,
            records=[records.get_batch(i) for i in range(records.num_record_batches)] if records else (),
        )

    @property
    def rows(self) -> int:
        """The number of rows of the split.

        With a source's weight above 1 a row may be in several sequences.
        """
        return len(self.columns["stored"])

    @property
    def sequences(self) -> int:
        """The number of sequences of one epoch."""
        return len(self.sequence_ends) - 1

    def row(self, i: int, side: int = 0) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """The tokens of a side of a row, and which of them are predicted and count in the loss.

        Returns:
            ids (L,) int32 and targets (L,) bool; targets[0] is False, as it has no context.
        """
        ids, targets = self._stored(i, side)
        return ids, targets != 0

    def labels(self, i: int, side: int = 0) -> npt.NDArray[np.int32]:
        """What is to be predicted at the targets of a side, (N,) int32: its tokens, or the end of
        sequence where it closes an answer.
        """
        ids, targets = self._stored(i, side)
        target_codes = targets[targets != 0]
        return np.where(target_codes == _CLOSES, self.eos or 0, ids[targets != 0])

    def weights(self, i: int, side: int = 0) -> npt.NDArray[np.float32]:
        """The weight in the loss of each target of a side, (N,) float32, above 0 and up to 1."""
        kinds = self._stored(i, side)[1]
        kinds = kinds[kinds != 0].astype(np.float32)
        return np.where(kinds > _CLOSES, (kinds - _CLOSES) / SHARES, 1).astype(np.float32)

    def record(self, i: int) -> dict[str, object]:
        """What rewards get of a row: `prompt`, text or messages, and `columns`."""
        number, offset = divmod(int(self.columns["stored"][i]), ROWS_PER_BATCH)
        record: dict[str, object] = json.loads(self.records[number].column(0)[offset].as_py())
        return record

    def _stored(self, i: int, side: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        assert side < self.sides
        number, offset = divmod(int(self.columns["stored"][i]) + side, ROWS_PER_BATCH)
        block = self.blocks[number]
        first, end = block.ends[offset], block.ends[offset + 1]
        return block.ids[first:end], block.targets[first:end]

    def rows_of(self, s: int) -> Ints:
        """The rows of a sequence, int64."""
        return self.sequence_rows[self.sequence_ends[s] : self.sequence_ends[s + 1]]

    def sequence_tokens(self) -> Ints:
        """(S,) int64: tokens of each sequence."""
        return self.sequence_columns["tokens"]

    def sequence_loss_tokens(self) -> Ints:
        """(S,) int64: tokens of each sequence that count in the loss."""
        return self.sequence_columns["loss_tokens"]

    def rows_of_labels(self) -> Ints:
        """(labels,) int64: how many rows of an epoch have each label."""
        assert self.label_sets is not None
        sets = self.columns["label"][self.sequence_rows]
        counts: Ints = np.bincount(sets, minlength=len(self.label_sets)) @ self.label_sets.astype(np.int64)
        return counts

    def row_lengths(self) -> Ints:
        """(rows,) int64: tokens of each row, over all sides."""
        return self.columns["length"]

    def side_lengths(self, side: int) -> Ints:
        """(rows,) int64: tokens of one side of each row."""
        assert side < self.sides
        stored = np.concatenate([np.diff(block.ends) for block in self.blocks])
        return stored[self.columns["stored"] + side]

    def row_id(self, i: int) -> str:
        """The origin of a row: `train.jsonl:17`, `train.parquet#17` for a file without lines, or
        the file of a picture.
        """
        name, by_line = self.files[int(self.columns["file"][i])]
        number = int(self.columns["number"][i])
        return f"{name}{':' if by_line else '#'}{number}" if number else name


def _label_sets(labels: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    sets = np.zeros((len(labels["sets"]), len(labels["names"])), np.bool_)
    for number, members in enumerate(labels["sets"]):
        sets[number, members] = True
    return sets


def _open(path: Path) -> Any:
    with _damage_with_path(path):
        return pa.ipc.open_file(pa.memory_map(str(path)))


@contextlib.contextmanager
def _damage_with_path(path: Path) -> Iterator[None]:
    """Turns pyarrow's errors into OSErrors with a path: its file errors have none, and damaged
    contents give a ValueError.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number) if error.errno else str(error), str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise OSError(
            errno.EIO, f"the prepared data are damaged: {one_line(str(error), limit=200)}", str(path)
        ) from error


def _block(batch: Any) -> TokenBlock:
    ids, targets = batch.column("ids"), batch.column("targets")
    return TokenBlock(
        ends=_values(ids.offsets),
        ids=_values(ids.values),
        targets=_values(targets.values),
    )


def _values(column: Any) -> Any:
    """A numpy array over the same memory; see `_column`."""
    return np.from_dlpack(column)


def _ints(column: Any) -> Ints:
    values: Ints = _values(column)
    return values if values.dtype == np.int64 else values.astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """Rows concatenated without padding (T tokens, N loss tokens); attention never crosses rows.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, from 0 in every row.
        lengths: tokens of each row, in order; they sum to T.
        label_index: (N,) int64, the positions whose hidden state predicts a loss token.
        labels: (N,) int64, the token to predict at each.
        loss_counts: loss tokens of each row; they sum to N.
        common: for each row, how many of its first tokens are those of the side before it; 0 for a
            first side.
        units: rows of the table, in order; each gives a row here for each side that was requested.
        row_ids: the origin of each row of tokens.
        weights: (N,) float32, the weight of each loss token, up to 1; None if all tokens of the
            table count in full.
    """

    input_ids: Ints
    position_ids: Ints
    lengths: list[int]
    label_index: Ints
    labels: Ints
    loss_counts: list[int]
    common: list[int]
    units: list[int]
    row_ids: list[str]
    weights: npt.NDArray[np.float32] | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def loss_tokens(self) -> int:
        """N."""
        return len(self.labels)


def collate(table: TokenTable, sequences: Sequence[int], sides: Sequence[int] = (0,)) -> Batch:
    """The batch of some sequences of a table; of each unit only some sides."""
    return collate_units(
        table, [int(row) for sequence in sequences for row in table.rows_of(sequence)], sides
    )


def collate_units(table: TokenTable, units: Sequence[int], sides: Sequence[int] = (0,)) -> Batch:
    """The batch of some rows of a table, those of a unit one after the other."""
    rows = [(unit, side) for unit in units for side in sides]
    parts = [table.row(*row) for row in rows]
    lengths = [len(ids) for ids, _ in parts]
    input_ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in parts)])
    targets = np.concatenate([np.zeros(0, np.bool_), *(row_targets for _, row_targets in parts)])
    starts = np.cumsum([0, *lengths])[:-1]
    predicted = np.flatnonzero(targets)
    return Batch(
        input_ids=input_ids,
        position_ids=np.arange(len(input_ids), dtype=np.int64) - np.repeat(starts, lengths),
        lengths=lengths,
        label_index=predicted - 1,  # the state before a token predicts it
        labels=np.concatenate([np.zeros(0, np.int64), *(table.labels(*row) for row in rows)]),
        loss_counts=[int(np.count_nonzero(row_targets)) for _, row_targets in parts],
        common=[
            0 if number % len(sides) == 0 else _common(parts[number - 1][0], ids)
            for number, (ids, _) in enumerate(parts)
        ],
        units=list(units),
        row_ids=[table.row_id(unit) for unit, _ in rows],
        weights=(
            np.concatenate([np.zeros(0, np.float32), *(table.weights(*row) for row in rows)])
            if table.has_shares
            else None
        ),
    )


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """The number of first tokens that are equal."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


PICTURE_NUMBERS = "pictures.arrow"
_RECORDS = "records.arrow"
_RECORD_SCHEMA = pa.schema([("json", pa.large_utf8())])
_SCHEMA = pa.schema([("ids", pa.large_list(pa.int32())), ("targets", pa.large_list(pa.uint8()))])


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded row.

    Attributes:
        ids: (L,) int32.
        targets: (L,) bool, True where the token is predicted and counts in the loss; targets[0] is
            False.
        cut: tokens of the row that the encoder has left out.
        closings: (L,) bool, True where the end of sequence is predicted instead of the token: it
            closes the answer before it. None: nowhere.
        not_rendered: parts of the row that are in no token, in words.
        has_control_tokens: whether texts of the row have control tokens of the tokenizer.
        shares: (L,) uint8, where a target counts in part its weight in the loss, times SHARES; else
            0. None: nowhere.
        pictures: the numbers of its pictures, in order.
        pictures_end: the place after the last token of a picture.
    """

    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    cut: int = 0
    closings: npt.NDArray[np.bool_] | None = None
    not_rendered: tuple[str, ...] = ()
    has_control_tokens: bool = False
    shares: npt.NDArray[np.uint8] | None = None
    pictures: tuple[int, ...] = ()
    pictures_end: int = 0

    def part(self, places: slice | list[int]) -> "Encoded":
        """A new row of some of its tokens."""
        closings = None if self.closings is None else self.closings[places]
        shares = None if self.shares is None else self.shares[places]
        return replace(
            self,
            ids=self.ids[places],
            targets=self.targets[places].copy(),
            cut=0,
            closings=closings,
            shares=shares,
        )


def share_of(weight: float) -> int:
    """A weight between 0 and 1 in the form of `Encoded.shares`; 0 for any other."""
    return 0 if not 0 < weight < 1 else min(max(round(weight * SHARES), 1), SHARES - 1)


@dataclass(frozen=True, slots=True)
class EncodedUnit:
    """An encoded unit of an objective.

    Attributes:
        sides: one row; or those of a pair, chosen and rejected; or a rated answer and a mismatched
            one, both after the same prompt.
        label: whether a rated answer is desirable; None for other units.
        record: of a prompt without an answer what rewards get, as JSON; None for other units.
        labels: of a row to classify its labels; None for other units.
        is_whole: whether the state of its last token, or of all tokens, is that of a side.
    """

    sides: tuple[Encoded, ...]
    label: bool | None = None
    record: str | None = None
    labels: tuple[str, ...] | None = None
    is_whole: bool = False


class TokenWriter:
    """Writes tokens.arrow, one record batch at a time, and keeps two numbers per row.

    Attributes:
        lengths: tokens of each row.
        loss: loss tokens of each row.
        digest: of all rows, in order.
        highest: the highest token id so far, -1 before the first row.
        has_shares: whether a token counts in part.
        pictures: of each row the numbers of its pictures.
    """

    def __init__(self, path: Path) -> None:
        self.lengths = array("q")
        self.loss = array("q")
        self.digest = xxhash.xxh3_128()
        self.highest = -1
        self.has_shares = False
        self.pictures: list[tuple[int, ...]] = []
        self._waiting: list[Encoded] = []
        self._sink = pa.OSFile(str(path), "wb")
        self._file = pa.ipc.new_file(self._sink, _SCHEMA)
        self._records: list[str] = []
        self._record_file: Any = None
        self._directory = path.parent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._waiting:
            self._write()
        for file in (self._file, self._sink, *(self._record_file or ())):
            file.close()
        if kind is None and any(self.pictures):
            ends = np.cumsum([0, *map(len, self.pictures)], dtype=np.int64)
            flat = np.fromiter((number for row in self.pictures for number in row), dtype=np.int32)
            lists = pa.LargeListArray.from_arrays(_column(ends), _column(flat))
            _write(self._directory / PICTURE_NUMBERS, {"pictures": lists})

    def add(self, row: Encoded, record: str | None = None) -> None:
        """Adds the next row, with its record if rows have one."""
        if record is not None:
            self._records.append(record)
        self.lengths.append(len(row.ids))
        self.pictures.append(row.pictures)
        self.loss.append(int(np.count_nonzero(row.targets)))
        self.has_shares |= row.shares is not None
        self._waiting.append(row)
        if len(self._waiting) == ROWS_PER_BATCH:
            self._write()

    def _write(self) -> None:
        ids = np.concatenate([row.ids for row in self._waiting])
        targets = np.concatenate([_kinds(row) for row in self._waiting])
        ends = np.cumsum([0, *(len(row.ids) for row in self._waiting)], dtype=np.int64)
        self.highest = max(self.highest, int(ids.max()))
        for part in (ends, ids, targets):
            self.digest.update(np.ascontiguousarray(part).data)
        columns = [pa.LargeListArray.from_arrays(_column(ends), _column(values)) for values in (ids, targets)]
        self._file.write_batch(pa.RecordBatch.from_arrays(columns, schema=_SCHEMA))
        self._waiting.clear()
        if self._records:
            self._write_records()

    def _write_records(self) -> None:
        if self._record_file is None:
            sink = pa.OSFile(str(self._directory / _RECORDS), "wb")
            self._record_file = pa.ipc.new_file(sink, _RECORD_SCHEMA), sink
        batch = pa.RecordBatch.from_arrays([pa.array(self._records, pa.large_utf8())], schema=_RECORD_SCHEMA)
        self.digest.update("\0".join(self._records).encode())
        self._record_file[0].write_batch(batch)
        self._records.clear()


def read_picture_numbers(directory: Path) -> list[list[int]]:
    """The numbers of the pictures of each row of tokens.arrow; empty if no row has any.

    Raises:
        OSError: if the file is damaged.
    """
    file = directory / PICTURE_NUMBERS
    if not file.is_file():
        return []
    with _damage_with_path(file):
        numbers: list[list[int]] = _open(file).get_batch(0).column("pictures").to_pylist()
    return numbers


def _kinds(row: Encoded) -> npt.NDArray[np.uint8]:
    kinds = row.targets.astype(np.uint8)
    if row.closings is not None:
        kinds[row.targets & row.closings] = _CLOSES
    if row.shares is not None:
        in_part = row.targets & (row.shares > 0)
        kinds[in_part] = row.shares[in_part] + _CLOSES
    return kinds


def write_split(
    directory: Path, split: Split, rows: dict[str, Ints], sequences: Sequence[Sequence[int]]
) -> None:
    """Writes the rows and sequences of one split.

    Args:
        directory: of the table.
        split: train or eval.
        rows: `stored`, `length`, `loss`, `file`, `number`, and `label` of rated answers, `group` if
            a step has rows of one group (`plan.order_by_group`), one entry per row.
        sequences: rows of each sequence.
    """
    _write(directory / f"{split}-rows.arrow", {name: _column(values) for name, values in rows.items()})
    flat = np.fromiter((row for sequence in sequences for row in sequence), dtype=np.int64)
    ends = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    _write(
        directory / f"{split}-sequences.arrow",
        {
            "rows": pa.LargeListArray.from_arrays(_column(ends), _column(flat)),
            "tokens": _column(_sums(rows["length"][flat], ends)),
            "loss_tokens": _column(_sums(rows["loss"][flat], ends)),
        },
    )


def _column(values: npt.NDArray[Any]) -> Any:
    """An Arrow array over the same memory.

    `pa.array` and `to_numpy` of pyarrow import pandas, which would take longer than all other
    imports of a forked rank or task.
    """
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _sums(values: Ints, ends: Ints) -> Ints:
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return running[ends[1:]] - running[ends[:-1]]


def _write(path: Path, columns: Mapping[str, object]) -> None:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)


def write_meta(directory: Path, meta: Mapping[str, object], *, files: Iterable[tuple[str, bool]]) -> None:
    """Writes meta.json."""
    body = {"schema": 1, "files": list(files), **meta}
    (directory / "meta.json").write_text(json.dumps(body, ensure_ascii=True, indent=1), encoding="utf-8")
