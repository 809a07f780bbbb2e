"""Files of every kind give the same rows; whatever bytes they hold, what is wrong is said with its place.

Run: .venv/bin/python -m pytest tests/data/test_readers.py
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.data.formats import COLUMNS, FormatName, detect, to_example
from unisono.data.readers import READERS, RowFile, kind_of, read_rows
from unisono.data.rows import BadRow, RawRow, RowError
from unisono.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "a,\"b\"\nc", "completion": "d"}, {"prompt": "日本", "completion": "\u2028 e"}, {"prompt": "x", "completion": " y "},
]  # fmt: skip


def read(path: Path) -> list[RawRow | BadRow]:
    return list(read_rows(RowFile(path, path.name, kind_of(path.name))))


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    table = pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    elif kind in ("jsonl", "ndjson"):
        path.write_text(
            "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), encoding="utf-8"
        )
    else:
        import csv

        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(
                stream, ["prompt", "completion"], delimiter="\t" if kind == "tsv" else ","
            )
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "jsonl", "ndjson", "csv", "tsv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    rows = read(write(tmp_path, kind))
    assert [row.value for row in rows if isinstance(row, RawRow)] == ROWS


def test_the_stream_form_that_datasets_writes_is_read_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    assert len(read(tmp_path / "rows.arrow")) == 3


def test_keys_that_arrow_filled_with_null_are_no_keys(tmp_path: Path) -> None:
    rows = [{"tools": [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (row,) = read(tmp_path / "rows.parquet")
    assert isinstance(row, RawRow)
    assert row.value == rows[0]


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b\xe2\x80\xa8c"}\r\n{"text": "d"}')
    assert [str(row.place) for row in read(path) if isinstance(row, RawRow)] == [
        "rows.jsonl:1",
        "rows.jsonl:3",
        "rows.jsonl:4",
    ]


def test_lines_of_a_csv_are_those_where_a_row_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text\n"a\nb"\nc\nd,e\n', encoding="utf-8")
    found = read(path)
    assert [row.place.number for row in found] == [2, 4, 5]
    assert isinstance(found[2], BadRow)
    assert "2 fields" in found[2].why


@pytest.mark.parametrize(
    ("line", "where", "why"),
    [
        (b'{"text": "a" "b"}', "rows.jsonl:2:14", "Expecting ',' delimiter"),
        (b'{"text": "a\xff"}', "rows.jsonl:2:12", "not UTF-8"),
        (b'["text"]', "rows.jsonl:2", "a list"),
        (b"[" * 100_000, "rows.jsonl:2", "nested"),
        (b"1" * 10_000, "rows.jsonl:2", "digits"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_with_its_column_and_the_rest_is_read(
    tmp_path: Path, line: bytes, where: str, why: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
    first, bad, last = read(path)
    assert isinstance(first, RawRow)
    assert isinstance(last, RawRow)
    assert isinstance(bad, BadRow)
    assert (bad.where, why in bad.why) == (where, True)


def test_a_malformed_json_file_is_refused_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n {"text": "a"},\n {"text" "b"}\n]', encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.problems[0].where == "rows.json:3:10"


def test_json_lines_under_the_name_json_are_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert len(read(path)) == 2


def test_an_unknown_kind_of_file_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.docx").write_bytes(b"x")
    with pytest.raises(DataError, match="no kind of file") as caught:
        read(tmp_path / "rows.docx")
    assert "jsonl" in caught.value.problems[0].fix


# Whatever a file holds, there is an answer with a place.

_pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\n", b'"', b",", b"{", b"}", b"[", b"]", b'{"text": "a"}\n', b'{"messages": [{"role": "user"}]}\n', b"text\n", b"\x00", b"\xff\xfe", b"ARROW1\x00\x00", b"PAR1"]),
)  # fmt: skip


@pytest.mark.parametrize("kind", sorted(READERS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(_pieces, max_size=12))
def test_arbitrary_bytes_never_crash_a_reader(tmp_path: Path, kind: str, parts: list[bytes]) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"".join(parts))
    try:
        for row in read(path):
            assert str(row.place).startswith(f"rows.{kind}")
            assert isinstance(row, RawRow) or row.why
    except DataError as error:
        assert all(problem.where.startswith(f"rows.{kind}") for problem in error.problems)  # noqa: PT017 - either is right


_json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "from",
                    "value",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "type",
                    "text",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_names = st.sampled_from([
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "system", "text", "tools", "other",
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(row=st.dictionaries(_names, _json, max_size=6), name=st.sampled_from(sorted(COLUMNS)))
def test_arbitrary_json_never_crashes_a_format(row: dict[str, Any], name: FormatName) -> None:
    found = detect(row, {})
    assert found is None or found[0] in COLUMNS
    try:
        to_example(name, row, {})
    except RowError as error:
        assert error.why  # noqa: PT017 - either outcome is right
