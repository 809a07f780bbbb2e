"""Reads files row by row: json, jsonl, csv, tsv, parquet, arrow, txt.

Problems of a row are reported with its place.
"""

import codecs
import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from unisono.base.errors import DataError
from unisono.base.files import (
    HEAD_BYTES,
    SAMPLE_BYTES,
    decode_text,
    foreign_contents,
    guess_encoding,
    not_utf8,
)
from unisono.base.text import one_line, show_bytes
from unisono.guard.facts.limits import available_memory, memory_limited
from unisono.trainer.data import BadRow, Place, RawRow, Row, RowFile

_LINE_LIMIT = 1 << 28  # bytes of a line or a value; a file without line ends would fill the memory
_TIMES_IN_MEMORY = 4  # the bytes, their text, and its rows: 4.3 measured for chats
_SMALL_DOCUMENT = 64 << 20  # read in any case
_BINARY = ("parquet", "arrow")
_NEAR = 200  # characters around an error that are looked at
_LINES_AHEAD, _BYTES_AHEAD = 10_000, 1 << 20  # of a row over several lines
_MOST_FAILURES = 20
_BIG_INTEGER = "a number with too many digits"
_ARROW_ROWS = 128  # at a time: few bytes on disk may unfold into long texts
_ARROW_BYTES = 2 << 30
"""Memory for these rows, beside the file's size: its pages may be compressed a thousandfold."""


def kind_of(name: str) -> str:
    """The suffix of a path or URL, in lower case, without the dot."""
    return Path(name.partition("?")[0] if "://" in name else name).suffix.lower().removeprefix(".")


def read_rows(file: RowFile) -> Iterator[Row]:
    """The rows of a file, in order; blank lines are skipped.

    Raises:
        DataError: if the file as a whole cannot be read.
    """
    reader = READERS.get(file.kind)
    if reader is None:
        raise _unknown_kind(file)
    try:
        if file.kind not in _BINARY:
            _refuse_foreign(file)
        yield from reader(file)
    except OSError as error:
        raise DataError.of(
            f"{file.name} cannot be read",
            where=file.name,
            why=one_line(str(error)),
            fix="check the file and its permissions",
        ) from error


def _unknown_kind(file: RowFile) -> DataError:
    why = f"its suffix is .{file.kind}" if file.kind else "it has no suffix"
    fix = f"use one of {', '.join(sorted(READERS))}"
    try:
        fault = foreign_contents(_head(file), file.name)
    except OSError:
        fault = None
    if fault is not None:
        why, fix = f"{why}; {fault.why}", fault.fix
    return DataError.of(f"{file.name} has an unsupported file type", where=file.name, why=why, fix=fix)


def _head(file: RowFile, size: int = HEAD_BYTES) -> bytes:
    with file.path.open("rb") as stream:
        return stream.read(size)


def _refuse_foreign(file: RowFile) -> None:
    """Refuses a file whose first bytes are not UTF-8 text, once instead of for every row."""
    fault = foreign_contents(_head(file), file.name)
    if fault is not None:
        raise DataError.of(fault.what, where=file.name, why=fault.why, fix=fault.fix)


def _read_lines(file: RowFile) -> Iterator[tuple[Place, bytes]]:
    """Non-blank lines, split at newlines only: JSON strings may contain other line separators."""
    with file.path.open("rb") as stream:
        for number, line in enumerate(iter(partial(stream.readline, _LINE_LIMIT + 1), b""), 1):
            if len(line) > _LINE_LIMIT:
                raise _too_long(file, number)
            # A mark is not part of a row, also in the middle of concatenated files.
            line = line.removeprefix(codecs.BOM_UTF8)  # noqa: PLW2901
            if not line.isspace() and line:
                yield Place(file.name, number), line


def _too_long(file: RowFile, number: int) -> DataError:
    return DataError.of(
        f"line {number} of {file.name} is longer than {_LINE_LIMIT >> 20} MiB",
        where=f"{file.name}:{number}",
        why="a row is read into memory at once",
        fix="write one row per line, each ended by a newline",
    )


def _read_jsonl(file: RowFile) -> Iterator[Row]:
    decoder, text = _Decoder(), _Utf8(file)
    spread, last = _SpreadRows(file), 0
    for location, line in _read_lines(file):
        if location.number <= last:
            continue
        try:
            value = decoder.decode(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield text.bad_row(location, line, error.start)
            continue
        except (ValueError, RecursionError) as error:
            _refuse_spread(file, location, line, decoder)
            last = spread.last_line(location, line)
            yield _over_lines(location) if last else _malformed(location, error, line)
            continue
        yield decoder.take_doubled(location, value) or _mapping(location, value)


class _SpreadRows:
    """Finds rows that are printed over several lines, as `json.dumps(row, indent=2)` does; each is
    one bad row, not one a line.
    """

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._failures = 0

    def last_line(self, location: Place, line: bytes) -> int:
        """The last line of the row that begins in a line; 0 if that line is not the beginning of
        one.

        It looks at some lines and characters ahead, and no more once it has failed a few times:
        reading stays linear.
        """
        begin, end = line.strip()[:1], line.strip()[-1:]
        if begin not in (b"{", b"[") or end not in (b"{", b"[", b",") or self._failures >= _MOST_FAILURES:
            return 0
        with self._file.path.open("rb") as stream:
            ahead = b"".join(islice(stream, location.number - 1, location.number - 1 + _LINES_AHEAD))[
                :_BYTES_AHEAD
            ]
        text = ahead.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace").lstrip()
        try:
            _, length = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            self._failures += 1
            return 0
        more = text.count("\n", 0, length)
        return location.number + more if more else 0


def _over_lines(location: Place) -> BadRow:
    return BadRow(
        location,
        "the row is printed over several lines, and in this type of file each line is a row",
        f"write each row on one line: jq -c . {shlex.quote(location.file)} > NEW.jsonl",
    )


class _Utf8:
    """The errors for bytes in a file that are not UTF-8."""

    def __init__(self, file: RowFile) -> None:
        self._file = file

    @cached_property
    def _guess(self) -> str | None:
        return guess_encoding(_head(self._file, SAMPLE_BYTES))

    def bad_row(self, location: Place, line: bytes, position: int) -> BadRow:
        """The bad row of a line with invalid UTF-8 at a position.

        Raises:
            DataError: if the whole file certainly has a different encoding.
        """
        column = position + 1
        if self._guess is not None:
            fault = not_utf8(self._file.name, line[position], _head(self._file, SAMPLE_BYTES))
            raise DataError.of(fault.what, where=f"{location}:{column}", why=fault.why, fix=fault.fix)
        return BadRow(location, f"not UTF-8: byte {line[position]:#04x}", "save the file as UTF-8", column)


class _Decoder:
    """Decodes JSON, and detects objects with a duplicate key whose values differ.

    Python silently keeps the last value. Equal values are harmless.
    """

    def __init__(self) -> None:
        self._doubled = False
        self._json = json.JSONDecoder(object_pairs_hook=self._object)
        self.read_any = False  # whether any line was JSON

    def decode(self, text: str) -> Any:
        """The value of a JSON text.

        Raises:
            ValueError: if it is not valid JSON.
            RecursionError: if it is nested too deeply.
        """
        value = self._json.decode(text)
        self.read_any = True
        return value

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: dict[str, object] = {}
            for key, inner in pairs:
                if seen.setdefault(key, inner) != inner:
                    self._doubled = True
                    return _Doubled(value, key)
        return value

    def take_doubled(self, location: Place, value: Any) -> BadRow | None:
        """The bad row of a value with a duplicate key; None if it has none."""
        key = _doubled_key(value) if self._doubled else None
        if key is None:
            return None
        shown = one_line(repr(key), limit=60)
        return BadRow(
            location, f"duplicate key {shown} in an object, with different values", "remove one of them"
        )


class _Doubled(dict[str, object]):
    """An object that had a duplicate key."""

    def __init__(self, value: dict[str, object], key: str) -> None:
        super().__init__(value)
        self.key = key


def _doubled_key(value: Any) -> str | None:
    if isinstance(value, _Doubled):
        return value.key
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((key for key in map(_doubled_key, inner) if key is not None), None)


def _refuse_spread(file: RowFile, location: Place, line: bytes, decoder: _Decoder) -> None:
    """Refuses a JSON document that spans several lines, once instead of for every line."""
    if decoder.read_any or line.strip()[:1] not in (b"[", b"{") or file.path.stat().st_size > _LINE_LIMIT:
        return
    decoder.read_any = True  # checked once
    try:
        json.loads(file.path.read_bytes())
    except (ValueError, RecursionError):
        return
    name = f"{file.name.removesuffix('.' + file.kind)}.json"
    raise DataError.of(
        f"{file.name} is one JSON document over several lines",
        where=str(location),
        why=f"a .{file.kind} file has one row per line",
        fix=f"rename it to {name}, or write one row per line (jq -c)",
    )


def _malformed(location: Place, error: Exception, line: bytes = b"") -> BadRow:
    if isinstance(error, json.JSONDecodeError):
        if b"\r" in line.strip():
            return BadRow(
                location,
                "malformed JSON: the lines end in CR alone",
                "convert it: tr '\\r' '\\n' < FILE > NEW",
                error.pos + 1,
            )
        comma = _comma(error)
        if comma is not None:
            return BadRow(location, f"malformed JSON: {comma[0]}", comma[1], error.pos + 1)
        return BadRow(location, f"malformed JSON: {error.msg}", "fix the line", error.pos + 1)
    why = "nested too deep" if isinstance(error, RecursionError) else _BIG_INTEGER
    return BadRow(location, f"malformed JSON: {why}", "fix the line")


def _comma(error: json.JSONDecodeError) -> tuple[str, str] | None:
    """What is wrong with a comma, and what to do about it; None: the error is another one."""
    before = error.doc[max(0, error.pos - _NEAR) : error.pos].rstrip()
    after = error.doc[error.pos : error.pos + _NEAR].strip()
    if error.msg == "Extra data" and after == ",":
        return "a comma after the row", "remove it: rows of JSON lines have no commas between them"
    closing = after.removeprefix(",").lstrip()[
        :1
    ]  # from Python 3.13 the error is at the comma, before at what follows
    is_before = after[:1] == "," or before[-1:] == ","
    if is_before and closing and closing in "]}":
        return f"a comma before {closing}", "remove it: JSON has no comma after the last element"
    return None


def _mapping(location: Place, value: Any) -> Row:
    if isinstance(value, dict):
        return RawRow(location, value)
    fix = 'write {"column": value, …}'
    if location.by_line and isinstance(value, list) and value and isinstance(value[0], dict):
        fix = "a file with one list of rows must be named .json; in this one each line is a row"
    return BadRow(location, f"the row is {_kind(value)}, not an object with named columns", fix)


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
    """A list of objects; or JSON lines in a file named .json."""
    _refuse_too_large(file)
    raw = file.path.read_bytes()
    text = decode_text(raw, file.name)
    if not isinstance(text, str):
        fault, where = text
        raise DataError.of(fault.what, where=where, why=fault.why, fix=fault.fix)
    decoder = _Decoder()
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _read_jsonl(file)
            return
        why, fix = _comma(error) or (
            error.msg,
            "fix the file; a file with one row per line must be named .jsonl",
        )
        raise DataError.of(
            f"{file.name} is malformed JSON",
            where=f"{file.name}:{error.lineno}:{error.colno}",
            why=why,
            fix=fix,
        ) from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else _BIG_INTEGER
        raise DataError.of(
            f"{file.name} is malformed JSON", where=f"{file.name}:1", why=why, fix="fix the file"
        ) from error
    if not isinstance(value, list | dict):
        raise DataError.of(
            f"{file.name} holds {_kind(value)}",
            where=f"{file.name}:1",
            why="a list of rows is expected",
            fix="write [{…}, {…}]",
        )
    _refuse_wrapped(file, value)
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        location = Place(file.name, number, by_line=False)
        yield decoder.take_doubled(location, row) or _mapping(location, row)


def _refuse_too_large(file: RowFile) -> None:
    """Refuses a document that does not fit into memory: the machine would be out of memory minutes
    later, with no word about the file.
    """
    size, free = file.path.stat().st_size, available_memory()
    if size <= _SMALL_DOCUMENT or size * _TIMES_IN_MEMORY <= free:
        return
    raise DataError.of(
        f"{file.name} is too large for a .json file",
        where=file.name,
        why=(
            f"a JSON document is read into memory as a whole: {show_bytes(size)} need about"
            f" {show_bytes(size * _TIMES_IN_MEMORY)}, and {show_bytes(free)} are available"
        ),
        fix=f"write one row per line: jq -c '.[]' {shlex.quote(file.name)} > NEW.jsonl",
    )


def _refuse_wrapped(file: RowFile, value: Any) -> None:
    """Refuses `{"data": [{…}, …]}`, which some tools write; a list of messages is a row."""
    if not isinstance(value, dict) or len(value) != 1:
        return
    key, rows = next(iter(value.items()))
    if (
        key not in ("messages", "conversations")
        and isinstance(rows, list)
        and rows
        and isinstance(rows[0], dict)
    ):
        shown = one_line(key, limit=40)
        raise DataError.of(
            f"{file.name} is an object with its rows under {shown!r}",
            where=f"{file.name}:1",
            why="a list of rows is expected",
            fix=f"write only the list: jq '.[\"{shown}\"]' {shlex.quote(file.name)} > NEW.json",
        )


def _read_csv(file: RowFile) -> Iterator[Row]:
    csv.field_size_limit(_LINE_LIMIT)  # the csv module's own limit is less than a long answer
    with file.path.open("rb") as raw:
        # Bytes that are not UTF-8 become surrogates, so that their row can be reported.
        stream = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(_csv_lines(file, stream), delimiter=_separator(file), strict=True)
        names = _next_csv(rows, file, 1)
        while names == []:  # blank lines before the header
            names = _next_csv(rows, file, rows.line_num + 1)
        if names is None:
            return
        if isinstance(names, BadRow):
            raise DataError.of(f"{file.name} has no header", where=names.where, why=names.why, fix=names.fix)
        text = _Utf8(file)
        _check_header(file, names, text)
        while True:
            number = rows.line_num + 1
            cells = _next_csv(rows, file, number)
            if cells is None:
                return
            if isinstance(cells, BadRow):
                yield cells
            elif cells:
                yield _csv_row(Place(file.name, number), names, cells, text)


def _csv_lines(file: RowFile, stream: io.TextIOWrapper) -> Iterator[str]:
    for number, line in enumerate(iter(partial(stream.readline, _LINE_LIMIT + 1), ""), 1):
        if len(line) > _LINE_LIMIT:
            raise _too_long(file, number)
        yield line


def _next_csv(rows: Any, file: RowFile, number: int) -> list[str] | BadRow | None:
    try:
        return next(rows, None)
    except csv.Error as error:
        return BadRow(
            Place(file.name, number),
            f"malformed CSV: {error}",
            "quote fields that hold commas, quotes or line ends",
        )


def _check_header(file: RowFile, names: list[str], text: _Utf8) -> None:
    """Refuses a header with duplicate names, or with the separator of a different file type."""
    where = f"{file.name}:1"
    if any(_SURROGATE.search(name) for name in names):
        bad = _not_utf8(Place(file.name, 1), names, text)
        raise DataError.of(f"the header of {file.name} is not UTF-8", where=where, why=bad.why, fix=bad.fix)
    # Spreadsheets write empty columns at the end, without a name.
    twice = next((name for name, count in Counter(names).items() if count > 1 and name), None)
    if twice is not None:
        why = f"the column {one_line(repr(twice), limit=60)} occurs {names.count(twice)} times"
        raise DataError.of(
            f"the header of {file.name} has a duplicate column",
            where=where,
            why=why,
            fix="rename or remove one of them",
        )
    other = (
        next((sign for sign in (";", "\t", ",", "|") if sign in names[0]), None) if len(names) == 1 else None
    )
    if other is not None and other != _separator(file):
        shown, ours = ("a tab" if sign == "\t" else repr(sign) for sign in (other, _separator(file)))
        raise DataError.of(
            f"{file.name} is separated by {shown}, not by {ours}",
            where=where,
            why=f"its header is {one_line(repr(names[0]), limit=80)}",
            fix="rename it to .tsv" if other == "\t" else f"save it with {ours} between the fields",
        )


def _separator(file: RowFile) -> str:
    return "\t" if file.kind == "tsv" else ","


def _not_utf8(location: Place, cells: list[str], text: _Utf8) -> BadRow:
    """The bad row of cells with bytes that are not UTF-8."""
    broken = next(match for cell in cells if (match := _SURROGATE.search(cell)))
    bad = text.bad_row(location, bytes([ord(broken[0]) - 0xDC00]), 0)
    return replace(bad, column=0)


def _csv_row(location: Place, names: list[str], cells: list[str], text: _Utf8) -> Row:
    if len(cells) != len(names):
        return BadRow(
            location,
            f"the row has {len(cells)} fields, the header {len(names)}",
            "quote fields that hold commas, quotes or line ends",
        )
    if any(_SURROGATE.search(cell) for cell in cells):
        return _not_utf8(location, cells, text)
    return RawRow(location, dict(zip(names, cells, strict=True)))


_SURROGATE = re.compile(r"[\udc80-\udcff]")


def _read_txt(file: RowFile) -> Iterator[Row]:
    encoding = _Utf8(file)
    for location, line in _read_lines(file):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield encoding.bad_row(location, line, error.start)
            continue
        yield RawRow(location, {"text": text})


def read_parquet(file: RowFile) -> Iterator[Row]:
    """The rows of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        opened = pq.ParquetFile(file.path)
        yield from _arrow_rows(file, opened.schema_arrow.names, opened.iter_batches(_ARROW_ROWS))
    except (pa.ArrowException, ValueError, MemoryError) as error:
        raise _wrong_file_type(file, error) from error
    except OSError as error:
        if error.errno is not None:  # an error of the disk
            raise
        raise _wrong_file_type(file, error) from error


def read_arrow(file: RowFile) -> Iterator[Row]:
    """An Arrow IPC file, or the stream form that `datasets` writes."""
    import pyarrow as pa

    # One of its threads that gets no memory ends the process.
    options = pa.ipc.IpcReadOptions(use_threads=False)
    try:
        source = pa.memory_map(str(file.path))
        try:
            opened = pa.ipc.open_file(source, options=options)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            opened = pa.ipc.open_stream(source, options=options)
            batches = iter(opened)
        parts = (b.slice(at, _ARROW_ROWS) for b in batches for at in range(0, b.num_rows, _ARROW_ROWS))
        yield from _arrow_rows(file, opened.schema.names, parts)
    except (pa.ArrowException, ValueError) as error:
        raise _wrong_file_type(file, error) from error


def _wrong_file_type(file: RowFile, error: Exception) -> DataError:
    with file.path.open("rb") as stream:
        is_json = stream.read(1) in (b"{", b"[")
    fix = "it looks like JSON: rename it to .jsonl or .json" if is_json else "copy or write the file again"
    return DataError.of(
        f"{file.name} cannot be read as {file.kind}",
        where=file.name,
        why=one_line(str(error)) or type(error).__name__,
        fix=fix,
    )


def _arrow_rows(file: RowFile, names: list[str], batches: Iterator[Any]) -> Iterator[Row]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError.of(
            f"{file.name} has a duplicate column",
            where=file.name,
            why=f"the column is {one_line(repr(twice[0]), limit=60)}",
            fix="rename one of them",
        )
    values = chain.from_iterable(iter(partial(_next_values, file, batches), None))
    for number, value in enumerate(values, 1):
        location = Place(file.name, number, by_line=False)
        sizes = ((name, len(c)) for name, c in value.items() if isinstance(c, str | bytes))
        long = next((name_and_size for name_and_size in sizes if name_and_size[1] > _LINE_LIMIT), None)
        if long is not None:
            size = f"{one_line(long[0], limit=60)} has {show_bytes(long[1])}"
            yield BadRow(location, f"{size}; the maximum is {show_bytes(_LINE_LIMIT)}", "remove or split it")
            continue
        yield RawRow(location, {name: _without_nulls(cell) for name, cell in value.items()})


def _next_values(file: RowFile, batches: Iterator[Any]) -> list[dict[str, object]] | None:
    """The rows of the next batch; None after the last one.

    Raises:
        DataError: if they need too much memory, or cannot be converted.
    """
    most = _ARROW_BYTES + file.path.stat().st_size
    try:
        with memory_limited(most):
            batch = next(batches, None)
            return None if batch is None else _values(file, batch)
    except MemoryError as error:
        raise DataError.of(
            f"{file.name} needs too much memory",
            where=file.name,
            why=f"{_ARROW_ROWS} of its rows need more than {show_bytes(most)}",
            fix="write it again with shorter values, or with fewer rows in a group",
        ) from error


def _values(file: RowFile, batch: Any) -> list[dict[str, object]]:
    try:
        return batch.to_pylist()
    except (OverflowError, ValueError, KeyError, TypeError) as error:  # from Python's dates, time zones, text
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist()
            except (OverflowError, ValueError, KeyError, TypeError) as cause:
                raise DataError.of(
                    f"the column {one_line(name, limit=60)} of {file.name} has values that cannot be read",
                    where=file.name,
                    why=f"{one_line(str(column.type), limit=60)}: {one_line(str(cause), limit=200)}",
                    fix="remove the column, or convert it",
                ) from error
        raise


def _without_nulls(value: Any) -> Any:
    """The value without null keys: Arrow gives every object in a column the keys of all objects."""
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
    "parquet": read_parquet,
    "arrow": read_arrow,
}
