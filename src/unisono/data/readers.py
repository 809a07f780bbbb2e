"""Reads files row by row: json, jsonl, csv, tsv, parquet, arrow, txt. What is wrong with a row is said with its place."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from unisono.data.rows import BadRow, Place, RawRow
from unisono.errors import DataError
from unisono.text import one_line

Row = RawRow | BadRow

_FIELD_LIMIT = 1 << 30  # characters of one csv field; the csv module's own limit is less than a long answer
_BIG_INTEGER = "a number with too many digits"


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows.

    Attributes:
        path: on this machine.
        name: as the config spells it; what messages and the ledger show.
        kind: the suffix that decides how it is read, without the dot.
    """

    path: Path
    name: str
    kind: str

    @property
    def by_line(self) -> bool:
        """Whether places in it are lines."""
        return self.kind in ("jsonl", "ndjson", "csv", "tsv", "txt")


def kind_of(name: str) -> str:
    """The suffix of a path or URL, in small letters, without the dot."""
    return Path(name.partition("?")[0] if "://" in name else name).suffix.lower().removeprefix(".")


def read_rows(file: RowFile) -> Iterator[Row]:
    """The rows of a file, in order; blank lines are no rows.

    Raises:
        DataError: if the file as a whole cannot be read.
    """
    reader = READERS.get(file.kind)
    if reader is None:
        raise DataError.of(
            f"{file.name} is no kind of file that is read", where=file.name,
            why=f"its name ends in {'.' + file.kind if file.kind else 'no suffix'}", fix=f"use one of {', '.join(sorted(READERS))}",
        )  # fmt: skip
    try:
        yield from reader(file)
    except OSError as error:
        raise DataError.of(
            f"{file.name} cannot be read",
            where=file.name,
            why=one_line(str(error)),
            fix="check the file and its permissions",
        ) from error


def _read_lines(file: RowFile) -> Iterator[tuple[Place, bytes]]:
    """Non-blank lines, ended by newlines alone: JSON strings may hold other separators."""
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901 - a byte order mark is no part of the row
            if not line.isspace() and line:
                yield Place(file.name, number), line


def _read_jsonl(file: RowFile) -> Iterator[Row]:
    for place, line in _read_lines(file):
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            yield _malformed(place, error)
            continue
        yield _mapping(place, value)


def _malformed(place: Place, error: Exception) -> BadRow:
    if isinstance(error, json.JSONDecodeError):
        return BadRow(place, f"malformed JSON: {error.msg}", "mend the line", error.pos + 1)
    if isinstance(error, UnicodeDecodeError):
        return BadRow(
            place,
            f"not UTF-8: byte {error.object[error.start]:#04x}",
            "save the file as UTF-8",
            error.start + 1,
        )
    why = "nested too deep" if isinstance(error, RecursionError) else _BIG_INTEGER
    return BadRow(place, f"malformed JSON: {why}", "mend the line")


def _mapping(place: Place, value: Any) -> Row:
    if isinstance(value, dict):
        return RawRow(place, value)
    return BadRow(
        place, f"the row is {_kind(value)}, not an object with named columns", 'write {"column": value, …}'
    )


def _kind(value: Any) -> str:
    names = {
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)


def _read_json(file: RowFile) -> Iterator[Row]:
    """A list of objects; or a file of JSON lines under another name."""
    raw = file.path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError.of(
            f"{file.name} is not UTF-8", where=f"{file.name}:{line}", why=f"byte {raw[error.start]:#04x}", fix="save it as UTF-8"
        ) from error  # fmt: skip
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _read_jsonl(file)
            return
        raise DataError.of(
            f"{file.name} is malformed JSON", where=f"{file.name}:{error.lineno}:{error.colno}",
            why=error.msg, fix="mend the file; rows of one line each belong into a .jsonl file",
        ) from error  # fmt: skip
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else _BIG_INTEGER
        raise DataError.of(
            f"{file.name} is malformed JSON", where=f"{file.name}:1", why=why, fix="mend the file"
        ) from error
    if not isinstance(value, list | dict):
        raise DataError.of(
            f"{file.name} holds {_kind(value)}", where=f"{file.name}:1", why="a list of rows is read", fix="write [{…}, {…}]"
        )  # fmt: skip
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield _mapping(Place(file.name, number, by_line=False), row)


def _read_csv(file: RowFile) -> Iterator[Row]:
    csv.field_size_limit(_FIELD_LIMIT)
    with file.path.open("rb") as raw:
        # Bytes that are no UTF-8 become surrogates, so that the row that has them can be named.
        stream = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(stream, delimiter="\t" if file.kind == "tsv" else ",", strict=True)
        names = _next_csv(rows, file, 1)
        if names is None:
            return
        if isinstance(names, BadRow):
            raise DataError.of(f"{file.name} has no header", where=names.where, why=names.why, fix=names.fix)
        while True:
            number = rows.line_num + 1
            cells = _next_csv(rows, file, number)
            if cells is None:
                return
            if isinstance(cells, BadRow):
                yield cells
            elif cells:
                yield _csv_row(Place(file.name, number), names, cells)


def _next_csv(rows: Any, file: RowFile, number: int) -> list[str] | BadRow | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        return BadRow(
            Place(file.name, number),
            f"malformed CSV: {error}",
            "quote fields that hold commas, quotes or line ends",
        )


def _csv_row(place: Place, names: list[str], cells: list[str]) -> Row:
    if len(cells) != len(names):
        return BadRow(
            place,
            f"the row has {len(cells)} fields, the header {len(names)}",
            "quote fields that hold commas, quotes or line ends",
        )
    if any(_SURROGATE.search(cell) for cell in cells):
        return BadRow(place, "not UTF-8", "save the file as UTF-8")
    return RawRow(place, dict(zip(names, cells, strict=True)))


_SURROGATE = re.compile(r"[\udc80-\udcff]")


def _read_txt(file: RowFile) -> Iterator[Row]:
    for place, line in _read_lines(file):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield _malformed(place, error)
            continue
        yield RawRow(place, {"text": text})


def _read_parquet(file: RowFile) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from _arrow_rows(file, pq.ParquetFile(file.path).iter_batches(1024))
    except (pa.ArrowException, ValueError) as error:
        raise _not_what_it_says(file, error) from error


def _read_arrow(file: RowFile) -> Iterator[Row]:
    """An Arrow IPC file, or the stream form that `datasets` writes."""
    import pyarrow as pa

    try:
        source = pa.memory_map(str(file.path))
        try:
            opened = pa.ipc.open_file(source)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        yield from _arrow_rows(file, batches)
    except (pa.ArrowException, ValueError) as error:
        raise _not_what_it_says(file, error) from error


def _not_what_it_says(file: RowFile, error: Exception) -> DataError:
    return DataError.of(
        f"{file.name} cannot be read as {file.kind}", where=file.name, why=one_line(str(error)), fix="copy or write the file again"
    )  # fmt: skip


def _arrow_rows(file: RowFile, batches: Iterator[Any]) -> Iterator[Row]:
    values = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, value in enumerate(values, 1):
        yield RawRow(
            Place(file.name, number, by_line=False),
            {name: _without_nulls(cell) for name, cell in value.items()},
        )


def _without_nulls(value: Any) -> Any:
    """The value without keys that are null: Arrow gives every object of a column the keys of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


READERS: dict[str, Callable[[RowFile], Iterator[Row]]] = {
    "json": _read_json,
    "jsonl": _read_jsonl,
    "ndjson": _read_jsonl,
    "csv": _read_csv,
    "tsv": _read_csv,
    "txt": _read_txt,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
