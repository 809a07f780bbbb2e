"""Reads rows of Parquet and Arrow files."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from unisono.data.rows import Place, RawRow, Row, RowFile
from unisono.errors import DataError
from unisono.text import one_line

_ARROW_ROWS = 128  # at a time: few bytes on disk may unfold into long texts


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

    try:
        source = pa.memory_map(str(file.path))
        try:
            opened = pa.ipc.open_file(source)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            opened = pa.ipc.open_stream(source)
            batches = iter(opened)
        yield from _arrow_rows(file, opened.schema.names, batches)
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
    values = chain.from_iterable(_values(file, batch) for batch in batches)
    for number, value in enumerate(values, 1):
        yield RawRow(
            Place(file.name, number, by_line=False),
            {name: _without_nulls(cell) for name, cell in value.items()},
        )


def _values(file: RowFile, batch: Any) -> list[dict[str, Any]]:
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
